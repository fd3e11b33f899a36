"""Nsight Compute: profile the core of variants, keep the report and its raw CSV, read it into tidy rows.

    python -m profiling.ncu [--variant all] [--case wide_gva_state] [--set full] [--out FOLDER]

Leaves ncu/<case>.ncu-rep and ncu/<case>.csv beside run.json and measurements.csv.
"""

from __future__ import annotations

import argparse
import functools
import re
import subprocess
import sys
from pathlib import Path

import pandas as pd

import variants
from kernels import problem
from kernels.errors import UserError, command
from profiling import ncu_export, run, tools
from profiling.metrics import METRICS, STALLS
from profiling.ranges import DOMAIN, range_name
from profiling.tools import ProfileFailed

# What is collected: all that ncu has, or the sections of one question, which need a fraction of the replays.
_BASIC = ("SpeedOfLight", "LaunchStats", "Occupancy")
SETS: dict[str, tuple[str, ...]] = {
    "full": (),
    "speed": _BASIC,
    "stalls": (*_BASIC, "WarpStateStats", "SchedulerStats"),
    "roofline": (*_BASIC, "SpeedOfLight_RooflineChart", "MemoryWorkloadAnalysis", "ComputeWorkloadAnalysis"),
}
# Beside the sections, which lack some: time, and what our roofline and tables of kernels are made of.
_ALWAYS = ("duration", "sm_clock", "tensor_pipe", "tensor_flops", "dram_read", "dram_write")
_PROBE = "import torch; torch.zeros(1, device='cuda')"  # launches one kernel
_CAP_SYS_ADMIN = 21


class NoPermission(UserError):
    """The driver lets only administrators read the counters."""


class CountersBusy(UserError):
    """Another program holds the counters."""


@functools.cache
def preflight() -> str:
    """The path of ncu, once tool, GPU and permission are there and one small kernel was profiled; asked once.

    Raises:
        ToolMissing, NoGPU, NoPermission, CountersBusy: what is missing or in the way and what to do.
    """
    ncu = tools.find("ncu", "Nsight Compute", *ncu_export.PLACES)
    run.require_gpu()
    if _counters_restricted(_read("/proc/driver/nvidia/params"), _read("/proc/self/status")):
        raise NoPermission(_PERMISSION)
    gpu, driver = run.smi("name"), run.smi("driver_version")
    print(f"Nsight Compute {tools.version(ncu)} ({ncu}) on {gpu}, driver {driver}", flush=True)
    # A container may not show the driver's settings, and nothing but a profile tells whether DCGM has the counters.
    words = [ncu, "--metrics", "sm__cycles_active.avg", "--clock-control", "none", sys.executable, "-c", _PROBE]
    done = subprocess.run(words, capture_output=True, text=True, errors="replace", env=tools.environment())
    if refused := _refusal(done.stdout + done.stderr):
        raise refused
    return ncu


_PERMISSION = (
    "access to the GPU's performance counters was expected, and the driver gives it to administrators only "
    "(RmProfilingAdminOnly is 1; ncu says ERR_NVGPUCTRPERM): run as root, start the container with "
    "--cap-add=SYS_ADMIN, or have an administrator load the driver with NVreg_RestrictProfilingToAdminUsers=0"
)
_BUSY = (
    "free performance counters were expected, and ncu says that a driver resource was unavailable: another profiler or "
    "DCGM holds them; end that profiler, or pause DCGM with `dcgmi profile --pause` (afterwards `--resume`), and run "
    "again; if nothing holds them, run as root"
)


def _refusal(printed: str) -> UserError | None:
    """The error behind ncu's own words, where they say that it was refused the counters."""
    if "driver resource was unavailable" in printed:  # may name ERR_NVGPUCTRPERM as another possibility
        return CountersBusy(_BUSY)
    return NoPermission(_PERMISSION) if "ERR_NVGPUCTRPERM" in printed else None


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


def collected(counters: str) -> list[str]:
    """ncu's words for one of SETS."""
    if counters == "full":
        return ["--set", "full"]
    sections = [word for section in SETS[counters] for word in ("--section", section)]
    return [*sections, "--metrics", ",".join(METRICS[name].counter for name in _ALWAYS)]


def collect(ncu: str, names: tuple[str, ...], case: str, folder: Path, counters: str = "full") -> Path:
    """Profile the core ranges of `names` on one case; return the path of the raw CSV.

    Raises:
        ProfileFailed: ncu ended with an error, or profiled nothing.
        NoPermission, CountersBusy: it was refused the counters.
        BadExport: it can't read its own report.
    """
    report = folder / "ncu" / f"{case}.ncu-rep"
    report.parent.mkdir(parents=True, exist_ok=True)
    # ncu takes a slash as the next range of the stack unless it is escaped; the last one marks a push/pop range.
    ranges = [f"{DOMAIN}@{range_name(name, case, 'core')}".replace("/", "\\/") + "/" for name in names]
    includes = [word for pattern in ranges for word in ("--nvtx-include", pattern)]
    how = [*collected(counters), "--clock-control", "none", "--target-processes", "all", "--nvtx", *includes]
    try:
        printed = tools.profile([ncu, *how, "--export", str(report.resolve())], names, case)
    except ProfileFailed as error:
        raise (_refusal(str(error)) or error) from None
    if not report.exists():
        raise _refusal(printed) or ProfileFailed(
            f"ncu was expected to profile the ranges {', '.join(ranges)} and profiled no kernel: does the variant "
            "launch its kernels inside gdn_prefill_forward?"
        )
    raw = report.with_suffix(".csv")
    text = ncu_export.imported(ncu, report)
    raw.write_text(ncu_export.without_private(text, str(report)), encoding="utf-8")
    return raw


# Of the summary: head, metric, format, factor to what is shown, width.
_COLUMNS = (
    ("time", "duration", "{:.1f} µs", 1e6, 11),
    ("SM", "sm_throughput", "{:.1%}", 1, 7),
    ("DRAM", "dram_throughput", "{:.1%}", 1, 7),
    ("tensor", "tensor_pipe", "{:.1%}", 1, 8),
    ("occup.", "occupancy", "{:.1%}", 1, 8),
    ("regs", "registers", "{:.0f}", 1, 6),
    ("shared", "shared_memory", "{:.1f} KiB", 2**-10, 10),
)


def summary(rows: list[dict]) -> str:
    """A table of the launches in tidy rows: where time goes, what limits it, the three longest waits."""
    lines = [f"{'kernel':<24}{''.join(f'{head:>{width}}' for head, *_, width in _COLUMNS)}  waits per issue"]
    frame = pd.DataFrame(rows)
    for (variant, case), group in frame.groupby(["variant", "case"], sort=False):
        lines.append(f"{variant}, {case}")
        for kernel, launch in group.groupby("kernel", sort=False):
            m = dict(zip(launch["metric"], launch["value"], strict=True))
            cells = (
                (form.format(m[name] * factor) if name in m else "–").rjust(width)
                for _, name, form, factor, width in _COLUMNS
            )
            stalls = sorted((name for name in STALLS if name in m), key=m.get, reverse=True)[:3]
            waits = ", ".join(f"{METRICS[name].label} {m[name]:.2f}" for name in stalls)
            lines.append(f"  {kernel:<22}{''.join(cells)}  {waits}".rstrip())
    return "\n".join(lines)


def profile(
    names: tuple[str, ...], cases: tuple[problem.Case, ...], folder: Path, info: dict, counters: str = "full"
) -> list[dict]:
    """Profile `names` on `cases` into `folder`, collecting one of SETS; return and record the rows.

    Raises:
        ToolMissing, NoGPU, NoPermission, CountersBusy, ProfileFailed, BadExport.
    """
    tool = preflight()
    info["versions"]["ncu"] = tools.version(tool)
    info["protocol"]["ncu"] = (
        f"{' '.join(collected(counters))} --clock-control none, caches flushed before every replay; core ranges only"
    )
    if "MIG" in info["gpu"]["name"].split():
        info["protocol"]["ncu"] += "; the GPU is a MIG slice, and counters are those of the slice"
    rows = []
    for number, case in enumerate(cases, 1):
        print(f"[{number}/{len(cases)}] ncu: {', '.join(names)} on {case.name}", flush=True)
        found = ncu_export.read(collect(tool, names, case.name, folder, counters), info["run"])
        missing = set(names) - {row["variant"] for row in found}
        if missing:
            raise ProfileFailed(
                f"ncu was expected to profile every variant, and found no kernel of {', '.join(sorted(missing))} on "
                f"{case.name}: look for ==ERROR== above, or leave them out"
            )
        rows += found
        info["clocks"]["seen"].append({"case": case.name, "tool": "ncu", **run.clocks()})
    run.add_rows(folder, rows)
    run.write_info(folder, info)
    return rows


@command
def main() -> None:
    """Run the command line that the module describes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--variant", default="all", help="all, or names separated by commas")
    parser.add_argument("--case", default="wide_gva_state", help="suites and cases separated by commas")
    parser.add_argument("--set", choices=SETS, default="full", help="what to collect")
    parser.add_argument("--out", help="a new folder; results/<time>-ncu if left out")
    options = parser.parse_args()
    names, cases = variants.select(options.variant), problem.select(options.case)
    preflight()
    folder = run.new_folder("ncu", options.out)
    info = run.describe({name: variants.label(name) for name in names})
    print(summary(profile(names, cases, folder, info, options.set)))
    print(f"\nreports, CSV and rows: {folder}")


if __name__ == "__main__":
    main()
