"""Nsight Systems: trace variants, keep the report and its sqlite, read kernel times per NVTX range.

    python -m profiling.nsys [--variant all] [--case lab] [--out FOLDER]

Leaves nsys/trace.nsys-rep and nsys/trace.sqlite beside run.json and measurements.csv.

A kernel belongs to a range when the runtime call that launched it (same correlation id and process) lies inside
the range on the range's thread. A range's projected span is from its first kernel's start to its last one's end.
"""

from __future__ import annotations

import argparse
import gzip
import shutil
import sqlite3
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pandas as pd

import variants
from kernels import problem
from kernels.errors import command
from profiling import run, schema, tools
from profiling.target import DOMAIN, PHASES, range_name
from profiling.tools import BadExport, ProfileFailed

PLACES = (
    "/usr/local/cuda*/bin",
    "/opt/nvidia/nsight-systems/*/bin",
    "/opt/nvidia/nsight-systems/*/target-linux-x64",
    "/opt/nvidia/nsight-compute/*/host/target-linux-x64",
)
_PUSH_POP = 59  # NVTX_EVENTS.eventType
_DOMAIN_CREATED = 75
_NEEDED = ("CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME", "NVTX_EVENTS", "StringIds", "TARGET_INFO_GPU")

# Ranges of our domain: their names, spans and threads.
_RANGES = f"""
    SELECT coalesce(s.value, e.text) AS name, e.start, e.end, e.globalTid AS thread
    FROM NVTX_EVENTS e LEFT JOIN StringIds s ON s.id = e.textId
    WHERE e.eventType = {_PUSH_POP} AND e.end IS NOT NULL AND e.domainId IN (
        SELECT d.domainId FROM NVTX_EVENTS d LEFT JOIN StringIds n ON n.id = d.textId
        WHERE d.eventType = {_DOMAIN_CREATED} AND coalesce(n.value, d.text) = ?)
    ORDER BY e.start"""
# Kernels launched by runtime calls inside one range; the low 24 bits of a thread's id number it in its process.
_KERNELS = """
    SELECT k.start, k.end, s.value AS kernel
    FROM CUPTI_ACTIVITY_KIND_KERNEL k
    JOIN CUPTI_ACTIVITY_KIND_RUNTIME r
        ON r.correlationId = k.correlationId AND k.globalPid = (r.globalTid & ~0xFFFFFF)
    JOIN StringIds s ON s.id = k.shortName
    WHERE r.globalTid = :thread AND r.start >= :start AND r.end <= :end
    ORDER BY k.start"""


def preflight() -> str:
    """The path of nsys, once tool and GPU are there.

    Raises:
        ToolMissing, NoGPU: what is missing and what to do.
    """
    nsys = tools.find("nsys", "Nsight Systems", *PLACES)
    run.require_gpu()
    return nsys


def collect(nsys: str, names: tuple[str, ...], cases: tuple[problem.Case, ...], folder: Path) -> Path:
    """Trace `names` on `cases`; return the path of the sqlite export.

    Raises:
        ProfileFailed: nsys ended with an error or could not make a report.
    """
    report = folder / "nsys" / "trace.nsys-rep"
    report.parent.mkdir(parents=True, exist_ok=True)
    tracer = [nsys, "profile", "--trace=cuda,nvtx", "--sample=none", "--cpuctxsw=none", f"--output={report.resolve()}"]
    tools.profile(tracer, names, ",".join(case.name for case in cases))
    if not report.exists():
        left = ", ".join(path.name for path in report.parent.iterdir()) or "nothing"
        raise ProfileFailed(
            f"nsys was expected to leave {report} and left {left}: a .qdstrm means that its importer failed, most "
            "often for lack of libdw.so.1; install the package libdw1 and run again"
        )
    database = report.with_suffix(".sqlite")
    done = subprocess.run(
        [nsys, "export", "--type=sqlite", f"--output={database}", str(report)],
        capture_output=True,
        text=True,
        env=tools.environment(),
    )
    if done.returncode or not database.exists():
        raise ProfileFailed(f"nsys export of {report} failed: {(done.stdout + done.stderr).strip()[-300:]}")
    return database


@contextmanager
def _opened(path: Path) -> Iterator[sqlite3.Connection]:
    """A read-only connection to a .sqlite or .sqlite.gz with the tables that are needed.

    Raises:
        BadExport: it is no sqlite database or lacks one of the tables.
    """
    with tempfile.TemporaryDirectory() as scratch:
        database = path
        if path.suffix == ".gz":
            database = Path(scratch, "export.sqlite")
            with gzip.open(path) as packed, database.open("wb") as plain:
                shutil.copyfileobj(packed, plain)
        with closing(sqlite3.connect(f"file:{database.resolve()}?mode=ro", uri=True)) as connection:
            try:
                found = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            except sqlite3.DatabaseError as error:
                raise BadExport(
                    f"{path}: an sqlite export of Nsight Systems was expected, found {error}: export it again with "
                    "`nsys export --type sqlite`"
                ) from None
            missing = [name for name in _NEEDED if name not in found]
            if missing:
                raise BadExport(
                    f"{path}: lacks {', '.join(missing)}; nsys leaves out what it did not record: trace with "
                    "--trace=cuda,nvtx, check that a kernel ran, and trace again"
                )
            yield connection


def read(path: Path, run_id: str, expected: tuple[str, ...]) -> list[dict]:
    """Tidy rows of an sqlite export: `duration` of every kernel and `projected` of every range, in seconds.

    `expected` are the names of the ranges that must be there.

    Raises:
        BadExport: tables or ranges are missing, a range launched nothing, or a foreign kernel is in one.
    """
    rows = []
    with _opened(path) as connection:
        connection.row_factory = sqlite3.Row
        gpus = [name for (name,) in connection.execute("SELECT DISTINCT name FROM TARGET_INFO_GPU")]
        ranges = connection.execute(_RANGES, (DOMAIN,)).fetchall()
        _check_ranges([r["name"] for r in ranges], expected, path)
        if len(gpus) != 1:
            raise BadExport(f"{path}: one kind of GPU was expected, found {', '.join(gpus) or 'none'}: use one GPU")
        for r in ranges:
            kernels = connection.execute(_KERNELS, {key: r[key] for key in ("thread", "start", "end")}).fetchall()
            if not kernels:
                raise BadExport(f"{path}: the range {r['name']} launched no kernel: trace again")
            for sample, kernel in enumerate(kernels):
                where = (run_id, gpus[0], "nsys", *tools.attribute(kernel["kernel"], r["name"], str(path)))
                seconds = (kernel["end"] - kernel["start"]) * 1e-9
                rows.append(schema.row(*where, "duration", "second", seconds, kernel=kernel["kernel"], sample=sample))
            span = (max(k["end"] for k in kernels) - min(k["start"] for k in kernels)) * 1e-9
            rows.append(schema.row(*where, "projected", "second", span))
    return rows


def _check_ranges(found: list[str], expected: tuple[str, ...], path: Path) -> None:
    missing = [name for name in expected if name not in found]
    if missing:
        raise BadExport(
            f"{path}: the NVTX ranges {', '.join(missing)} were expected, found {', '.join(found) or 'none'}: trace "
            "again; nsys 2023 records no ranges of the nvtx package from 0.2.12 on, so use the pinned one with it"
        )
    twice = sorted({name for name in found if found.count(name) > 1})
    if twice:
        raise BadExport(f"{path}: each range was expected once, found {', '.join(twice)} more than once: trace again")


def strip(source: Path, destination: Path) -> None:
    """Write a copy that can be shared: our ranges, the runtime calls and kernels in them, the strings they name.

    nsys stores environment, host, user and paths in several tables; so the copy is built from what is needed
    rather than by deleting what is known.
    """
    with _opened(source) as old, tempfile.TemporaryDirectory() as scratch:
        packed = Path(scratch, "stripped.sqlite")
        with closing(sqlite3.connect(packed)) as new:
            for name in _NEEDED:
                new.execute(old.execute("SELECT sql FROM sqlite_master WHERE name = ?", (name,)).fetchone()[0])
            old.execute("CREATE TEMP TABLE spans (name, opened, closed, thread)")
            old.execute(f"INSERT INTO spans {_RANGES}", (DOMAIN,))
            inside = "EXISTS (SELECT 1 FROM spans WHERE thread = globalTid AND start >= opened AND end <= closed)"
            ours = f"eventType = {_DOMAIN_CREATED} OR ({inside})"
            launched = f"correlationId IN (SELECT correlationId FROM CUPTI_ACTIVITY_KIND_RUNTIME WHERE {inside})"
            named = [
                f"SELECT {name} FROM CUPTI_ACTIVITY_KIND_KERNEL WHERE {launched}"
                for name in ("shortName", "demangledName", "mangledName")
            ]
            named.append(f"SELECT nameId FROM CUPTI_ACTIVITY_KIND_RUNTIME WHERE {inside}")
            named.append(f"SELECT textId FROM NVTX_EVENTS WHERE {ours}")
            _copy(old, new, "NVTX_EVENTS", ours)
            _copy(old, new, "CUPTI_ACTIVITY_KIND_RUNTIME", inside)
            _copy(old, new, "CUPTI_ACTIVITY_KIND_KERNEL", launched)
            _copy(old, new, "StringIds", f"id IN ({' UNION '.join(named)})")
            _copy(old, new, "TARGET_INFO_GPU", "1")
            for column in ("uuid", "busLocation"):
                new.execute(f"UPDATE TARGET_INFO_GPU SET {column} = ''")
            new.commit()
            new.execute("VACUUM")
        destination.write_bytes(gzip.compress(packed.read_bytes(), mtime=0))


def _copy(old: sqlite3.Connection, new: sqlite3.Connection, table: str, where: str) -> None:
    rows = old.execute(f"SELECT * FROM {table} WHERE {where}").fetchall()
    if rows:
        new.executemany(f"INSERT INTO {table} VALUES ({', '.join('?' * len(rows[0]))})", rows)


def expected_ranges(names: tuple[str, ...], cases: tuple[problem.Case, ...]) -> tuple[str, ...]:
    """The ranges that profiling.target opens for these variants and cases."""
    return tuple(range_name(name, case.name, phase) for case in cases for name in names for phase in PHASES)


def summary(rows: list[dict]) -> str:
    """A table of the ranges in tidy rows: launches, kernel time, and the span from first start to last end."""
    lines = [f"{'range':<40}{'launches':>9}{'kernels':>13}{'span':>13}"]
    for where, group in pd.DataFrame(rows).groupby(["variant", "case", "phase"], sort=False):
        kernels = group[group["metric"] == "duration"]["value"]
        span = group[group["metric"] == "projected"]["value"].iloc[0]
        lines.append(f"{range_name(*where):<40}{len(kernels):>9}{kernels.sum() * 1e6:>10.1f} µs{span * 1e6:>10.1f} µs")
    return "\n".join(lines)


def profile(names: tuple[str, ...], cases: tuple[problem.Case, ...], folder: Path, info: dict) -> list[dict]:
    """Trace `names` on `cases` into `folder`; return and record the rows.

    Raises:
        ToolMissing, NoGPU, ProfileFailed, BadExport.
    """
    tool = preflight()
    info["versions"]["nsys"] = tools.version(tool)
    info["protocol"]["nsys"] = "--trace=cuda,nvtx, no sampling; one call of each phase after warm-ups"
    database = collect(tool, names, cases, folder)
    rows = read(database, info["run"], expected_ranges(names, cases))
    run.add_rows(folder, rows)
    run.write_info(folder, info)
    return rows


@command
def main() -> None:
    """Run the command line that the module describes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--variant", default="all", help="all, or names separated by commas")
    parser.add_argument("--case", default="lab", help="suites and cases separated by commas")
    parser.add_argument("--out", help="a new folder; results/<time>-nsys if left out")
    options = parser.parse_args()
    names, cases = variants.select(options.variant), problem.select(options.case)
    preflight()
    folder = run.new_folder("nsys", options.out)
    info = run.describe({name: variants.label(name) for name in names})
    print(summary(profile(names, cases, folder, info)))
    print(f"\ntrace, sqlite and rows: {folder}")


if __name__ == "__main__":
    main()
