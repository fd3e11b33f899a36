"""Nsight Systems: trace variants, keep the report and its sqlite, read kernel times per NVTX range.

    python -m profiling.nsys [--variant all] [--case lab] [--out FOLDER]

Leaves nsys/trace.nsys-rep and nsys/trace.sqlite beside run.json and measurements.csv; profiling.nsys_export says how
a kernel is given to a range.
"""

from __future__ import annotations

import argparse
import subprocess
from pathlib import Path

import pandas as pd

import variants
from kernels import problem
from kernels.errors import command
from profiling import nsys_export, run, tools
from profiling.ranges import PHASES, range_name
from profiling.tools import ProfileFailed

PLACES = (
    "/usr/local/cuda*/bin",
    "/opt/nvidia/nsight-systems/*/bin",
    "/opt/nvidia/nsight-systems/*/target-linux-x64",
    "/opt/nvidia/nsight-compute/*/host/target-linux-x64",
)


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
    # Without =node, a CUDA graph is traced as one operation and its kernels are not listed.
    options = ("--trace=cuda,nvtx", "--cuda-graph-trace=node", "--sample=none", "--cpuctxsw=none")
    tracer = [nsys, "profile", *options, f"--output={report.resolve()}"]
    tools.profile(tracer, names, ",".join(case.name for case in cases))
    if not report.exists():
        left = ", ".join(path.name for path in report.parent.iterdir()) or "nothing"
        raise ProfileFailed(f"nsys was expected to leave {report} and left {left}: {nsys_export.IMPORTER_FAILED}")
    database = report.with_suffix(".sqlite")
    done = subprocess.run(
        [nsys, "export", "--type=sqlite", f"--output={database}", str(report)],
        capture_output=True,
        text=True,
        env=tools.environment(),
    )
    if done.returncode or not database.exists():
        said = " ".join((done.stdout + done.stderr).split())[-300:]
        raise ProfileFailed(
            f"nsys export was expected to write {database}, and said {said or 'nothing'}: correct what it names and "
            "run again, or export the report beside it with an nsys as new as the one that traced"
        )
    return database


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
    info["protocol"]["nsys"] = (
        "--trace=cuda,nvtx --cuda-graph-trace=node, no sampling; one call of each phase after warm-ups"
    )
    database = collect(tool, names, cases, folder)
    rows = nsys_export.read(database, info["run"], expected_ranges(names, cases))
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
