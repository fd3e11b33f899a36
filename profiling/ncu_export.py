"""Read what Nsight Compute leaves: a report (.ncu-rep), its raw CSV or its details CSV, into tidy rows.

The CSV is that of ncu 2022 to 2026, plain or .gz, as `ncu --import FILE --page raw --csv` writes it or as ncu printed
it among the program's own output. Units differ by file and column, and so do separators of numbers; what can be read
in two ways is refused.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import math
import re
import subprocess
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from profiling import schema, tools
from profiling.metrics import METRICS, Metric
from profiling.ranges import DOMAIN
from profiling.tools import BadExport

PLACES = (
    "/usr/local/cuda*/bin",
    "/opt/nvidia/nsight-compute/*",
    "/opt/nvidia/hpc_sdk/Linux_x86_64/*/compilers/bin",
)

# Units as (what it counts, factor to the base unit). ncu 2022 to 2024 write "usecond" and "cycle/nsecond" where newer
# ones write "us" and "Ghz"; ncu-report says "ns" and "hz".
_UNITS = {
    "%": ("ratio", 1e-2),
    **{
        f"{prefix}{name}": ("second", scale)
        for prefix, scale in (("n", 1e-9), ("u", 1e-6), ("m", 1e-3), ("", 1.0))
        for name in ("s", "second")
    },
    **{
        f"{prefix}{name}": (kind, scale)
        for prefix, scale in (("", 1.0), ("K", 1e3), ("M", 1e6), ("G", 1e9), ("T", 1e12))
        for name, kind in (("byte", "byte"), ("hz", "count/second"))
    },
    **dict.fromkeys(("", "inst", "cycle", "warp", "register", "thread", "sector", "block"), ("count", 1.0)),
}
_ABSENT = ("", "n/a", "no data", "nan", "-nan", "inf", "-inf")  # the last four divide by zero
_PRIVATE = ("Process ID", "Process Name", "Host Name")  # columns that say where a profile was made
_DETAILS = {metric.details: name for name, metric in METRICS.items() if metric.details}
_AGAIN = "export it again with `ncu --import REPORT --page raw --csv`"


@dataclass
class Launch:
    """One profiled kernel: the NVTX ranges of our domain around it, outermost first, and its metrics in our units."""

    kernel: str
    ranges: list[str]
    gpu: str
    values: dict[str, float] = field(default_factory=dict)  # by the short name of profiling.metrics


def read(path: Path, run_id: str) -> list[dict]:
    """Tidy rows of a report, raw CSV or details CSV (.csv or .csv.gz), one launch after the other.

    The second launch of a kernel in a range is named `<kernel> #2`, and so on.

    Raises:
        BadExport: see `launches`; no NVTX range around a kernel, a foreign kernel in a range, several GPUs, a range
            whose launches repeat, or a kernel without its duration.
        ToolMissing: see `launches`.
    """
    found = launches(path)
    gpus = sorted({launch.gpu for launch in found})
    if len(gpus) > 1:
        raise BadExport(
            f"{path}: kernels of one GPU were expected, found {', '.join(gpus)}: profile each GPU into its own file"
        )
    rows, in_range = [], defaultdict(list)
    for launch in found:
        if not launch.ranges:
            raise BadExport(
                f"{path}: every kernel was expected inside an NVTX range of the domain {DOMAIN}, found {launch.kernel} "
                "outside of any: profile with `make ncu`, which records NVTX"
            )
        where, before = tools.attribute(launch.kernel, launch.ranges[-1], str(path)), in_range[launch.ranges[-1]]
        before.append(launch.kernel)
        times = before.count(launch.kernel)
        kernel = launch.kernel if times == 1 else f"{launch.kernel} #{times}"
        if "duration" not in launch.values:
            raise BadExport(
                f"{path}: {METRICS['duration'].counter} was expected of every kernel, found none of {launch.kernel}: "
                "profile again with `make ncu`, whose every SET holds it"
            )
        for name, value in launch.values.items():
            unit = METRICS[name].unit
            rows.append(schema.row(run_id, launch.gpu, "ncu", *where, name, unit, value, kernel=kernel))
    for name, kernels in in_range.items():
        # A repeat would be counted twice wherever kernels are added up, and says that something ran again.
        if repeated := _repeated(kernels):
            raise BadExport(
                f"{path}: a range was expected to run its kernels once, found {', '.join(repeated)} again in {name}: "
                "tune and warm up outside the range, and profile again into a new file"
            )
    return rows


def _repeated(kernels: list[str]) -> list[str]:
    """What a list holds again at once, or is made of several times; nothing for a, b, a."""
    n = len(kernels)
    again = [[kernel] for kernel, following in pairwise(kernels) if kernel == following]
    again += [
        kernels[:period] for period in range(1, n) if n % period == 0 and kernels == kernels[:period] * (n // period)
    ]
    return again[0] if again else []


def launches(path: Path) -> list[Launch]:
    """The kernels in an export, in its order, whatever ranges they ran in; there is at least one.

    A report is read through the package ncu-report where that is installed, else by `ncu --import`.

    Raises:
        BadExport: no such file; an empty or truncated one; no kernel in it; an unknown unit; a number that can be
            read in two ways.
        ToolMissing: a report, and neither ncu-report nor ncu is here.
    """
    if not path.is_file():
        raise BadExport(f"{path}: no such file: make one with `make ncu`, or correct the path")
    return _of_report(path) if path.suffix == ".ncu-rep" else _of_csv(_text(path), str(path))


def _of_report(path: Path) -> list[Launch]:
    # ncu-report takes an empty file for a report without kernels, and a truncated one for one with nameless kernels.
    try:
        import ncu_report
    except ImportError:
        return _of_csv(_imported_here(path), str(path))
    kernels = [kernel for part in ncu_report.load_report(str(path)) for kernel in part]
    if not kernels or any(kernel.name() is None for kernel in kernels):
        raise BadExport(
            f"{path}: a report of Nsight Compute with at least one kernel was expected, found "
            f"{'kernels without a name' if kernels else 'no kernel'}: it is empty, truncated or no report; copy it "
            "again, or profile again with `make ncu`"
        )
    return [_of_kernel(kernel, str(path)) for kernel in kernels]


def _of_kernel(kernel, source: str) -> Launch:
    """A launch from an ncu_report.IAction."""

    def attribute(name: str):
        metric = kernel.metric_by_name(f"device__attribute_{name}")
        return metric.value() if metric and metric.has_value() else None

    names = {"device__attribute_display_name": attribute("display_name")}
    if (major := attribute("compute_capability_major")) is not None:
        names["CC"] = f"{major}.{attribute('compute_capability_minor')}"
    state = kernel.nvtx_state()
    domains = [state.domain_by_id(number) for number in state.domains()] if state else []
    ranges = [name for domain in domains if domain.name() == DOMAIN for name in domain.push_pop_ranges()]
    launch = Launch(kernel.name(kernel.NameBase_DEMANGLED), ranges, _gpu(names))
    for name, metric in METRICS.items():
        found = kernel.metric_by_name(metric.counter)
        if found and found.has_value() and math.isfinite(found.as_double()):
            launch.values[name] = found.as_double() * _factor(metric, found.unit(), source)
    return launch


def _imported_here(path: Path) -> str:
    try:
        ncu = tools.find("ncu", "Nsight Compute", *PLACES)
    except tools.ToolMissing:
        raise tools.ToolMissing(
            f"{path}: a report of Nsight Compute is read by the Python package ncu-report or by Nsight Compute's ncu, "
            "and neither was found: `pip install ncu-report`, or add the folder of ncu to PATH, or give the CSV beside "
            "the report"
        ) from None
    return imported(ncu, path)


def imported(ncu: str, report: Path) -> str:
    """The raw CSV of a report.

    Raises:
        BadExport: ncu can't read it.
    """
    done = subprocess.run(
        [ncu, "--import", str(report), "--page", "raw", "--csv"],
        capture_output=True,
        text=True,
        errors="replace",
        env=tools.environment(),
    )
    if done.returncode:
        raise BadExport(
            f"{report}: a report of Nsight Compute was expected, and ncu says {' '.join(done.stdout.split())!r}: it is "
            "empty, truncated or of a newer ncu; copy it again, profile again, or `pip install ncu-report`"
        )
    return done.stdout


def without_private(text: str, source: str) -> str:
    """A CSV without the columns that name process and host, and without what was printed around it.

    Raises:
        BadExport: it holds no kernel, or is truncated.
    """
    lines = _table(text, source)
    keep = [i for i, name in enumerate(lines[0]) if name not in _PRIVATE]
    out = io.StringIO()
    csv.writer(out, quoting=csv.QUOTE_ALL, lineterminator="\n").writerows([[line[i] for i in keep] for line in lines])
    return out.getvalue()


def _text(path: Path) -> str:
    try:
        data = path.read_bytes()
        if path.suffix == ".gz":
            data = gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        raise BadExport(f"{path}: a whole and readable file was expected, found {error}: copy it again") from None
    utf16 = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))  # as PowerShell redirects
    # The program's own output may be in any encoding; a replaced character in a cell that counts is refused below.
    return data.decode("utf-16" if utf16 else "utf-8-sig", errors="replace")


def _table(text: str, source: str) -> list[list[str]]:
    """The CSV in a text: the header, then rows as wide as that, at least one of which is a kernel's.

    ncu quotes every cell and begins a row with the kernel's number. Lines that begin otherwise are what ncu or the
    program printed. On the details page a row may end behind the metric; it is filled up.

    Raises:
        BadExport: no table, no kernel, several tables, or a row that is cut off or interrupted.
    """
    start = text.find('"ID",')
    rows, widths, pending = [], (), ""
    for number, line in enumerate(io.StringIO(text[start:], newline=None) if start >= 0 else (), 1):
        if not pending and not line.startswith('"'):
            if rows and line.count('","') + 2 >= len(rows[0]):
                raise _broken(source, number, "a row behind other output")
            continue
        pending += line  # a cell may hold a line break
        if pending.count('"') % 2:
            continue
        try:
            (row,) = csv.reader([pending], strict=True)
        except (csv.Error, ValueError):
            raise _broken(source, number, "a row that is no CSV") from None
        pending = ""
        if not rows:
            rows.append(row)
            widths = (len(row), *(row.index(name) + 1 for name in row if name == "Rule Name"))
        elif row[0] == "ID":
            raise _broken(source, number, "a second table")
        elif len(row) in widths and (row[0].isdecimal() or (row[0] == "" and len(rows) == 1)):  # the units begin empty
            rows.append(row + [""] * (widths[0] - len(row)))
        elif len(row) >= min(widths) or row[0].isdecimal() or row[0] == "":
            raise _broken(source, number, f"a row of {len(row)} cells that is no kernel's")
    if pending:
        raise _broken(source, number, "a row that does not end")
    if not any(row[0] for row in rows[1:]):
        found = "no kernel" if rows else "no table"
        raise BadExport(
            f"{source}: a CSV of Nsight Compute with at least one kernel was expected, found {found}: the filter "
            "matched nothing or the file is empty; profile again with `make ncu`"
        )
    return rows


def _broken(source: str, number: int, found: str) -> BadExport:
    return BadExport(
        f"{source}: one whole table of Nsight Compute was expected, found {found} in line {number} counted from its "
        f"header: the file is truncated or was edited; {_AGAIN}"
    )


def _of_csv(text: str, source: str) -> list[Launch]:
    header, *rows = _table(text, source)
    column = {name: i for i, name in enumerate(header)}
    if len(column) < len(header):
        twice = next(name for i, name in enumerate(header) if column[name] != i)
        raise BadExport(f"{source}: every column was expected once, found {twice!r} twice: {_AGAIN}")
    is_details = "Metric Name" in column
    needed = ("Kernel Name", *(("Section Name", "Metric Unit", "Metric Value") if is_details else ()))
    if missing := [name for name in needed if name not in column]:
        raise BadExport(
            f"{source}: the columns {', '.join(needed)} were expected, found no {', '.join(missing)}: {_AGAIN}"
        )
    if not is_details and rows[0][0]:
        raise BadExport(f"{source}: a row of units was expected below the header, found a kernel: {_AGAIN}")
    return (_of_details if is_details else _of_raw)(column, rows, source)


def _of_raw(column: dict[str, int], rows: list[list[str]], source: str) -> list[Launch]:
    units, *kernels = rows
    counters = [i for name, i in column.items() if "__" in name]
    marks = _marks(row[i] for row in kernels for i in counters)
    found = []
    for row in kernels:
        launch = _launch(column, row)
        for name, metric in METRICS.items():
            i = column.get(metric.counter)
            if i is not None and not _is_absent(row[i]):
                launch.values[name] = _number(row[i], marks, source) * _factor(metric, units[i], source)
        found.append(launch)
    return found


def _of_details(column: dict[str, int], rows: list[list[str]], source: str) -> list[Launch]:
    """A row per metric, or per rule, which has no metric; only some of our metrics are on this page."""
    section, name, unit, value = (column[of] for of in ("Section Name", "Metric Name", "Metric Unit", "Metric Value"))
    marks = _marks(row[value] for row in rows)
    found: dict[tuple[str, str], Launch] = {}
    for row in rows:
        kernel = row[column["Kernel Name"]]
        launch = found.setdefault((row[column["ID"]], kernel), _launch(column, row))
        short = _DETAILS.get((row[section], row[name]))
        if short is None or _is_absent(row[value]):
            continue
        if short in launch.values:
            raise BadExport(f"{source}: one {row[name]} of {kernel} was expected, found a second: {_AGAIN}")
        launch.values[short] = _number(row[value], marks, source) * _factor(METRICS[short], row[unit], source)
    return list(found.values())


def _launch(column: dict[str, int], row: list[str]) -> Launch:
    """A launch without its metrics."""
    nvtx = " ".join(row[i] for name, i in column.items() if "Push/Pop_Range" in name)
    cells = {name: row[column[name]] for name in ("device__attribute_display_name", "CC") if name in column}
    return Launch(row[column["Kernel Name"]], re.findall(rf'"{DOMAIN}:([^:"]+):', nvtx), _gpu(cells))


def _gpu(names: Mapping[str, str | None]) -> str:
    """The GPU's name. The details page knows no more than its compute capability, and not even that in ncu 2022."""
    if name := names.get("device__attribute_display_name"):
        return name
    capability = names.get("CC")
    return f"GPU of compute capability {capability}" if capability else "unknown GPU"


def _is_absent(cell: str) -> bool:
    return cell.removeprefix("(!)").strip().lower() in _ABSENT


# Digits, grouped in threes or as in India, then a decimal mark; by that mark.
_READINGS = {
    mark: re.compile(
        rf"-?(?:[0-9]+|[1-9][0-9]{{0,2}}(?P<group>[{group}'’ \u00a0\u202f])(?:[0-9]{{2,3}}(?P=group))*[0-9]{{3}})"
        rf"(?:[{mark}][0-9]+)?"
    )
    for mark, group in ((".", ","), (",", "."))
}
_WITHOUT_LOCALE = re.compile(r"-?[0-9]+\.[0-9]{6}")  # how ncu prints hardware counters in every locale


def _readings(cell: str) -> dict[str, float]:
    """The value of a cell by decimal mark, "." and ",": two for "1.234", one for "1.234,5", none for "a"."""
    return {
        mark: float(re.sub(rf"[^-0-9{mark}]", "", cell).replace(mark, "."))
        for mark, pattern in _READINGS.items()
        if pattern.fullmatch(cell)
    }


def _marks(cells: Iterable[str]) -> set[str]:
    """The decimal marks with which every number of a file can be read; both where the numbers contradict each other."""
    marks = set(_READINGS)
    for cell in cells:
        if not _WITHOUT_LOCALE.fullmatch(cell) and (readings := _readings(cell)):
            marks &= readings.keys()
    return marks or set(_READINGS)


def _number(cell: str, marks: set[str], source: str) -> float:
    readings = _readings(cell)
    if not readings:
        raise BadExport(f"{source}: a number was expected, found {cell!r}: {_AGAIN} under LC_ALL=C")
    values = {readings[mark] for mark in readings.keys() & marks} or set(readings.values())
    if len(values) > 1:
        raise BadExport(
            f"{source}: a number that can be read in one way was expected, found {cell!r}, and the file's other "
            f"numbers don't tell its decimal mark: {_AGAIN} under LC_ALL=C"
        )
    return values.pop()


def _factor(metric: Metric, unit: str, source: str) -> float:
    """What a value in `unit` is multiplied by to be in the metric's base unit.

    Raises:
        BadExport: the unit is not known here, or is of another kind.
    """
    what, _, per = unit.partition("/")
    kind, factor = _UNITS.get(what, ("", 0.0))
    per_kind, per_factor = _UNITS.get(per, ("", 0.0))
    if per_kind == "second":  # "byte/block" says per what, and changes nothing
        kind, factor = f"{kind}/second", factor / per_factor
    expected = metric.unit + ("/second" if metric.counter.endswith(".per_second") else "")
    if kind != expected or per_kind not in ("count", "second"):
        raise BadExport(
            f"{source}: {metric.counter} was expected in a unit of {expected}, found the unit {unit!r}, which is not "
            "known here as one: if it is, add it to profiling/ncu_export.py"
        )
    return factor
