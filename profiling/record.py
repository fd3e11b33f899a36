"""The recorded run: all that is measured into profiling/recorded/<gpu>/, small and free of private data.

    python -m profiling.record [--part bench|cold|ncu|nsys|trace|rows] [--replace] [--out FOLDER]

--out records into a folder of one's own instead. `bench` starts a run: every rung on `lab`, the last one on `qwen` and
`varlen`, the public libraries on all. `cold` (the cold start), `ncu` and `nsys` add to it; without --part all run in
turn. Each ends within ten minutes on an H200, but for `bench` on a machine where the libraries have not compiled their
kernels yet. A recorded run is replaced only with --replace. `rows` reads the recorded exports anew, once more is read
from them; it needs no GPU.

`trace` may be added at another commit than the run's: a trace is read by itself, and carries its commit and the time
of the untraced kernel beside it, which shows whether that is still the one that was benchmarked.
"""

from __future__ import annotations

import argparse
import gzip
import shutil
import tempfile
from pathlib import Path

import pandas as pd

import variants
from kernels import problem
from kernels.errors import command
from profiling import bench, coldstart, ncu, ncu_export, nsys, nsys_export, run, schema, trace
from profiling.ranges import range_name

# Counters are recorded for a case whose chunk loop is a chain, the smallest one, and one that fills the GPU; in the
# order of their files, in which their rows are read again.
NCU_CASES = "chain_equal,short_tail_state,wide_gva_state"
COLD_CASE = "wide_gva_state"
# A timeline of the rung whose work is one after the other, of the first whose roles overlap, and of the one whose state
# stays in registers. `split` works as that one does, in segments that end before the tables' window on chain_equal.
TRACED, TRACE_CASES = ("multibuf", "ws", "rs"), "wide_gva_state,chain_equal"


@command
def main() -> None:
    """Run the command line that the module describes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parts = ("bench", "cold", "ncu", "nsys", "trace", "rows")
    parser.add_argument("--part", choices=parts, help="one part; all if left out")
    parser.add_argument("--replace", action="store_true", help="replace the recorded run of this GPU")
    parser.add_argument("--out", type=Path, help="a run folder of your own; the recorded run of this GPU if left out")
    options = parser.parse_args()
    if options.replace and options.out:
        parser.error("--replace is for the recorded run of this GPU; with --out, name a new folder")
    if options.part == "rows":
        for recorded in [options.out] if options.out else sorted(run.RECORDED.iterdir()):
            read_again(recorded)
            print(f"read again: {recorded}")
        return
    names = variants.LADDER
    now = run.describe({name: variants.label(name) for name in names})
    folder = options.out or run.RECORDED / now["gpu"]["slug"]
    if options.part in (None, "bench"):
        _bench(names, folder, now, options.replace)
    if options.part in (None, "cold"):
        _cold(folder, now)
    if options.part in (None, "ncu"):
        _add(folder, now, "ncu", lambda scratch, info: ncu.profile(names, problem.select(NCU_CASES), scratch, info))
    if options.part in (None, "nsys"):
        _add(folder, now, "nsys", lambda scratch, info: nsys.profile(names, problem.SUITES["lab"], scratch, info))
    if options.part in (None, "trace"):
        _trace(folder, now)
    print(f"\nrecorded: {folder}")


def read_again(folder: Path) -> None:
    """Replace the profilers' rows of a recorded run by what its exports say now; the benchmark's rows stay.

    Raises:
        BadRun, BadTable, BadExport: the run or one of its exports can't be trusted; nothing is changed.
    """
    run_id, old = run.read_info(folder)["run"], schema.read(schema.stored(folder))
    rows = [row for path in sorted((folder / "ncu").iterdir()) for row in ncu_export.read(path, run_id)]
    ranges = old[old["tool"] == "nsys"].drop_duplicates(["variant", "case", "phase"])
    expected = tuple(map(range_name, ranges["variant"], ranges["case"], ranges["phase"]))
    for path in sorted((folder / "nsys").iterdir()):
        rows += nsys_export.read(path, run_id, expected)
    new = pd.concat([old[old["tool"] == "bench"], schema.table(rows, str(folder))], ignore_index=True)
    schema.write(new, schema.stored(folder))


def _bench(names: tuple[str, ...], folder: Path, info: dict, replace: bool) -> None:
    """Measure in a scratch folder; the recorded run gives way only once that is complete.

    Raises:
        BadRun: a run is recorded already and `replace` is not set.
    """
    if folder.exists() and not replace:
        raise run.BadRun(f"{folder}: a run is recorded already; replace it with REPLACE=1, or name a new OUT")
    with tempfile.TemporaryDirectory() as scratch:
        bench.bench(names, problem.SUITES["lab"], Path(scratch), info, with_peers=True)
        for suite in ("qwen", "varlen"):
            bench.bench(names[-1:], problem.SUITES[suite], Path(scratch), info, with_peers=True)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        schema.write(schema.read(schema.stored(Path(scratch))), folder / "measurements.csv.gz")
        run.write_info(folder, info)


def _cold(folder: Path, now: dict) -> None:
    """Add the cold start to the recorded run.

    Raises:
        BadRun: no run of this commit and GPU was started.
        ColdStartFailed, BadTable: the last rung fails; or a cold start is recorded already.
    """
    info = _started(folder, now)
    coldstart.measure(problem.CASES[COLD_CASE], folder, info)


def _trace(folder: Path, now: dict) -> None:
    """Trace TRACED on TRACE_CASES in a scratch folder, then add them to the recorded run.

    Raises:
        BadRun: no run on such a GPU was started, or it has traces already.
    """
    info = run.read_info(folder)
    if info["gpu"]["name"] != now["gpu"]["name"]:
        found = info["gpu"]["name"]
        raise run.BadRun(f"{folder}: a run on {now['gpu']['name']} was expected, found {found}: name another OUT")
    if (folder / "trace").exists():
        raise run.BadRun(f"{folder / 'trace'}: is recorded already; remove that folder to record it anew")
    info["trace"] = []
    with tempfile.TemporaryDirectory() as scratch:
        for case in problem.select(TRACE_CASES):
            for name in TRACED:
                known = trace.record(name, case, Path(scratch), info, now)
                print(f"  {name:<16}{case.name:<20}{known['recorded']} of {known['chunks']} chunks")
        shutil.copytree(Path(scratch, "trace"), folder / "trace")
    run.write_info(folder, info)


def _started(folder: Path, now: dict) -> dict:
    """run.json of the run that `bench` started.

    Raises:
        BadRun: there is none of this commit and GPU.
    """
    info = run.read_info(folder)
    for key in ("commit", "gpu"):
        if info[key] != now[key]:
            raise run.BadRun(
                f"{folder}: parts of one run were expected; its {key} is {info[key]}, here it is {now[key]}: "
                "start anew with PART=bench REPLACE=1"
            )
    return info


def _add(folder: Path, now: dict, tool: str, profile) -> None:
    """Profile in a scratch folder, then add rows and exports, stripped and compressed, to the recorded run.

    Raises:
        BadRun: no run of this commit and GPU was started, or this tool's part is there already.
    """
    info = _started(folder, now)
    if (folder / tool).exists():
        raise run.BadRun(f"{folder / tool}: is recorded already; start anew with PART=bench REPLACE=1")
    with tempfile.TemporaryDirectory() as scratch:
        rows = profile(Path(scratch), info)
        (folder / tool).mkdir()
        for export in Path(scratch, tool).iterdir():
            if export.suffix == ".csv":
                packed = gzip.compress(export.read_bytes(), mtime=0)
                (folder / tool / f"{export.name}.gz").write_bytes(packed)
            elif export.suffix == ".sqlite":
                nsys_export.strip(export, folder / tool / f"{export.name}.gz")
    run.add_rows(folder, rows)
    run.write_info(folder, info)
    print({"ncu": ncu, "nsys": nsys}[tool].summary(rows))


if __name__ == "__main__":
    main()
