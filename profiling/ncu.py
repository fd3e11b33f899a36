"""Nsight Compute: profile the core of variants, keep the report and its raw CSV, read it into tidy rows.

    python -m profiling.ncu [--variant all] [--case wide_gva_state] [--out FOLDER]

Leaves ncu/<case>.ncu-rep and ncu/<case>.csv beside run.json and measurements.csv.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import io
import re
import subprocess
from pathlib import Path

import pandas as pd

import variants
from kernels import problem
from kernels.errors import UserError, command
from profiling import run, schema, tools
from profiling.metrics import METRICS, STALLS
from profiling.target import DOMAIN, range_name
from profiling.tools import BadExport, ProfileFailed

PLACES = ("/usr/local/cuda*/bin", "/opt/nvidia/nsight-compute/*")

# Units of `--page raw`, as factors to seconds, bytes, ratios and counts. ncu 2022 to 2024 write "usecond" where
# newer ones write "us"; what follows a slash ("Kbyte/block") says per what.
_UNITS = {
    "": 1.0,
    "%": 1e-2,
    **{
        f"{prefix}{name}": scale
        for prefix, scale in (("n", 1e-9), ("u", 1e-6), ("m", 1e-3), ("", 1.0))
        for name in ("s", "second")
    },
    **{f"{prefix}byte": scale for prefix, scale in (("", 1.0), ("K", 1e3), ("M", 1e6), ("G", 1e9), ("T", 1e12))},
    **{f"{prefix}hz": scale for prefix, scale in (("", 1.0), ("K", 1e3), ("M", 1e6), ("G", 1e9))},
    **dict.fromkeys(("inst", "cycle", "warp", "register", "sector", "block"), 1.0),
}
_PRIVATE = ("Process ID", "Process Name", "Host Name")  # columns that say where a profile was made
_CAP_SYS_ADMIN = 21


class NoPermission(UserError):
    """The driver lets only administrators read the counters."""


def preflight() -> str:
    """The path of ncu, once tool, GPU and permission are there.

    Raises:
        ToolMissing, NoGPU, NoPermission: what is missing and what to do.
    """
    ncu = tools.find("ncu", "Nsight Compute", *PLACES)
    run.require_gpu()
    if _counters_restricted(_read("/proc/driver/nvidia/params"), _read("/proc/self/status")):
        raise NoPermission(_PERMISSION)
    return ncu


_PERMISSION = (
    "access to the GPU's performance counters was expected, and the driver gives it to administrators only "
    "(RmProfilingAdminOnly is 1; ncu says ERR_NVGPUCTRPERM): run as root, start the container with "
    "--cap-add=SYS_ADMIN, or have an administrator load the driver with NVreg_RestrictProfilingToAdminUsers=0"
)


def _counters_restricted(driver_params: str, status: str) -> bool:
    """Whether the driver keeps the counters for administrators and this process has no such capability."""
    capabilities = re.search(r"^CapEff:\s*([0-9a-f]+)", status, re.MULTILINE)
    admin = bool(capabilities and int(capabilities[1], 16) >> _CAP_SYS_ADMIN & 1)
    return bool(re.search(r"RmProfilingAdminOnly:\s*1", driver_params)) and not admin


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def collect(ncu: str, names: tuple[str, ...], case: str, folder: Path) -> Path:
    """Profile the core ranges of `names` on one case; return the path of the raw CSV.

    Raises:
        ProfileFailed: ncu ended with an error, or profiled nothing.
        NoPermission: it was refused the counters.
    """
    report = folder / "ncu" / f"{case}.ncu-rep"
    report.parent.mkdir(parents=True, exist_ok=True)
    # ncu takes a slash as the next range of the stack unless it is escaped; the last one marks a push/pop range.
    ranges = [f"{DOMAIN}@{range_name(name, case, 'core')}".replace("/", "\\/") + "/" for name in names]
    includes = [word for pattern in ranges for word in ("--nvtx-include", pattern)]
    profiler = [ncu, "--set", "full", "--clock-control", "none", "--target-processes", "all", "--nvtx", *includes]
    try:
        printed = tools.profile([*profiler, "--export", str(report.resolve())], names, case)
    except ProfileFailed as error:
        raise (NoPermission(_PERMISSION) if "ERR_NVGPUCTRPERM" in str(error) else error) from None
    if not report.exists():
        raise (
            NoPermission(_PERMISSION)
            if "ERR_NVGPUCTRPERM" in printed
            else ProfileFailed(
                f"ncu was expected to profile the ranges {', '.join(ranges)} and profiled no kernel: does the variant "
                "launch its kernels inside gdn_prefill_forward?"
            )
        )
    done = subprocess.run(
        [ncu, "--import", str(report), "--page", "raw", "--csv"],
        capture_output=True,
        text=True,
        env=tools.environment(),
    )
    raw = report.with_suffix(".csv")
    raw.write_text(_without_private(done.stdout, str(report)), encoding="utf-8")
    return raw


def _without_private(text: str, source: str) -> str:
    """The CSV without the columns that name process and host, and without what was printed before it."""
    table = _table(text, source)
    keep = [i for i, name in enumerate(table[0]) if name not in _PRIVATE]
    out = io.StringIO()
    csv.writer(out, quoting=csv.QUOTE_ALL, lineterminator="\n").writerows([[line[i] for i in keep] for line in table])
    return out.getvalue()


def _table(text: str, source: str) -> list[list[str]]:
    start = text.find('"ID",')
    lines = list(csv.reader(io.StringIO(text[start:]))) if start >= 0 else []
    if len(lines) < 3:
        raise BadExport(
            f"{source}: a raw CSV of Nsight Compute with at least one kernel was expected, found "
            f"{'no table' if start < 0 else 'no kernel'}: profile again, and export with "
            "`ncu --import FILE --page raw --csv`"
        )
    width = len(lines[0])
    ragged = next((number for number, line in enumerate(lines, 1) if len(line) != width), None)
    if ragged:
        raise BadExport(
            f"{source}: line {ragged} has {len(lines[ragged - 1])} cells where {width} were expected: the file is "
            "truncated; export it again"
        )
    return lines


def read(path: Path, run_id: str) -> list[dict]:
    """Tidy rows of a raw CSV (.csv or .csv.gz), one launch after the other.

    Raises:
        BadExport: no kernel, no NVTX range around one, a foreign kernel in a range, an unknown unit.
    """
    with _opened(path) as stream:
        header, units, *launches = _table(stream.read(), str(path))
    column = {name: i for i, name in enumerate(header)}
    nvtx = [i for name, i in column.items() if "Push/Pop_Range" in name]
    rows, seen = [], {}
    for launch in launches:
        kernel = launch[column["Kernel Name"]]
        names = re.findall(rf'"{DOMAIN}:([^:"]+):', " ".join(launch[i] for i in nvtx))
        if not names:
            raise BadExport(
                f"{path}: every kernel was expected inside an NVTX range of the domain {DOMAIN}, found {kernel} "
                "outside of any: profile with `make ncu`, which records NVTX"
            )
        variant, case, phase = tools.attribute(kernel, names[-1], str(path))
        sample = seen[variant, case, phase, kernel] = seen.get((variant, case, phase, kernel), -1) + 1
        gpu = launch[column["device__attribute_display_name"]]
        for name, metric in METRICS.items():
            cell = launch[column[metric.counter]] if metric.counter in column else ""
            if cell in ("", "n/a"):
                continue
            value = _number(cell, path) * _factor(units[column[metric.counter]], metric.counter, path)
            where = (run_id, gpu, "ncu", variant, case, phase)
            rows.append(schema.row(*where, name, metric.unit, value, kernel=kernel, sample=sample))
    return rows


def _opened(path: Path):
    return gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8")


def _number(cell: str, path: Path) -> float:
    try:
        return float(cell.replace(",", ""))
    except ValueError:
        raise BadExport(f"{path}: a number was expected, found {cell!r}: export it again under LC_ALL=C") from None


def _factor(unit: str, counter: str, path: Path) -> float:
    try:
        return _UNITS[unit.split("/")[0]]
    except KeyError:
        raise BadExport(
            f"{path}: {counter} has the unit {unit!r}, which is not known here: add it to profiling/ncu.py"
        ) from None


def summary(rows: list[dict]) -> str:
    """A table of the launches in tidy rows: where time goes, what limits it, the three longest waits."""
    heads = f"{'time':>11}{'SM':>7}{'DRAM':>7}{'tensor':>8}{'occup.':>8}{'regs':>6}{'shared':>10}  waits per issue"
    lines = [f"{'kernel':<24}{heads}"]
    frame = pd.DataFrame(rows)
    for (variant, case), group in frame.groupby(["variant", "case"], sort=False):
        lines.append(f"{variant}, {case}")
        for (kernel, _), launch in group.groupby(["kernel", "sample"], sort=False):
            m = dict(zip(launch["metric"], launch["value"], strict=True))
            stalls = sorted((name for name in STALLS if name in m), key=m.get, reverse=True)[:3]
            waits = ", ".join(f"{METRICS[name].label} {m[name]:.2f}" for name in stalls)
            lines.append(
                f"  {kernel:<22}{m['duration'] * 1e6:>8.1f} µs{m['sm_throughput']:>7.1%}{m['dram_throughput']:>7.1%}"
                f"{m['tensor_pipe']:>8.1%}{m['occupancy']:>8.1%}{m['registers']:>6.0f}"
                f"{m['shared_memory'] / 1024:>6.1f} KiB  {waits}"
            )
    return "\n".join(lines)


def profile(names: tuple[str, ...], cases: tuple[problem.Case, ...], folder: Path, info: dict) -> list[dict]:
    """Profile `names` on `cases` into `folder`; return and record the rows.

    Raises:
        ToolMissing, NoGPU, NoPermission, ProfileFailed, BadExport.
    """
    tool = preflight()
    info["versions"]["ncu"] = tools.version(tool)
    info["protocol"]["ncu"] = "--set full --clock-control none, caches flushed before every replay; core ranges only"
    rows = []
    for number, case in enumerate(cases, 1):
        print(f"[{number}/{len(cases)}] ncu: {', '.join(names)} on {case.name}", flush=True)
        found = read(collect(tool, names, case.name, folder), info["run"])
        missing = set(names) - {row["variant"] for row in found}
        if missing:
            raise ProfileFailed(
                f"ncu found no kernel of {', '.join(sorted(missing))} on {case.name}: does it support it?"
            )
        rows += found
    run.add_rows(folder, rows)
    run.write_info(folder, info)
    return rows


@command
def main() -> None:
    """Run the command line that the module describes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--variant", default="all", help="all, or names separated by commas")
    parser.add_argument("--case", default="wide_gva_state", help="suites and cases separated by commas")
    parser.add_argument("--out", help="a new folder; results/<time>-ncu if left out")
    options = parser.parse_args()
    names, cases = variants.select(options.variant), problem.select(options.case)
    preflight()
    folder = run.new_folder("ncu", options.out)
    info = run.describe({name: variants.label(name) for name in names})
    print(summary(profile(names, cases, folder, info)))
    print(f"\nreports, CSV and rows: {folder}")


if __name__ == "__main__":
    main()
