"""Numbers of a run as tidy frames: the ladder, its geometric mean, Nsight's counters and timeline.

Everything is in base units: seconds, bytes, ratios. `analysis.present` prints them.

Two notions of spread, both relative to the median so that they read as "± this share":
- of a time: half the interquartile range of its samples;
- of a speed-up: half the interquartile range of the ratios sample by sample. Samples with one number were
  taken in the same round, one right after the other, so what slows a whole round cancels.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from analysis.load import Run
from kernels import work
from kernels.problem import CASES
from profiling.metrics import METRICS, STALLS
from profiling.run import BadRun

GEOMEAN = "geomean"  # stands for a case
ALL_KERNELS = "all kernels"  # stands for a kernel

COUNTERS = ["duration", "sm_throughput", "dram_throughput", "tensor_pipe", "occupancy", "registers", "shared_memory"]


def rungs(run: Run) -> list[str]:
    """The variants that the core was timed with, in ladder order."""
    timed = set(run.rows("bench", "core")["variant"])
    return [name for name in run.variants if name in timed]


def ladder(run: Run) -> pd.DataFrame:
    """One row per case and variant that ran on it, cases in suite order and variants in ladder order.

    Columns:
        time_s, spread: median of the graph clock, and its spread
        eager_s: median of the eager clock
        speedup, speedup_spread: over the first rung; missing on a case that the first rung skips
        step, step_spread: over the previous rung that ran on this case; missing for the first of them
        light_share: speed-of-light time at this run's measured ceilings, over time_s
        error_output, error_final_state: relative L2 error against the FP64 recurrence

    Raises:
        BadRun: the run holds no benchmark of the core.
    """
    bench = run.rows("bench", "core")
    if bench.empty:
        raise BadRun(
            f"{run.folder / 'measurements.csv'}: a benchmark was expected, found rows of "
            f"{', '.join(run.frame['tool'].unique())} only: add it with `make bench`, or name another run"
        )
    samples = {key: rows.set_index("sample")["value"] for key, rows in bench.groupby(["metric", "case", "variant"])}
    rows = []
    for case in run.ladder_cases:
        floor = work.speed_of_light(work.core(CASES[case]), run.ceilings)
        ran = [variant for variant in rungs(run) if ("latency_graph", case, variant) in samples]
        graph = {variant: samples["latency_graph", case, variant] for variant in ran}
        for variant, before in zip(ran, [None, *ran], strict=False):
            time = graph[variant].median()
            speedup, speedup_spread = _ratio(graph.get(rungs(run)[0]), graph[variant])
            step, step_spread = _ratio(graph.get(before), graph[variant])
            rows.append(
                {
                    "case": case,
                    "variant": variant,
                    "time_s": time,
                    "spread": _spread(graph[variant]),
                    "eager_s": samples["latency_eager", case, variant].median(),
                    "speedup": speedup,
                    "speedup_spread": speedup_spread,
                    "step": step,
                    "step_spread": step_spread,
                    "light_share": floor / time,
                    "error_output": samples["error_output", case, variant].median(),
                    "error_final_state": samples["error_final_state", case, variant].median(),
                }
            )
    return pd.DataFrame(rows)


def shared_cases(table: pd.DataFrame) -> list[str]:
    """The cases of a ladder on which all of its variants ran."""
    ran = table.groupby("case", sort=False)["variant"].nunique()
    return list(ran.index[ran == table["variant"].nunique()])


def geomean(table: pd.DataFrame) -> pd.DataFrame:
    """One row per variant of a ladder: geometric means over its shared cases, in the ladder's columns.

    `cases` is their number, speedup_min and speedup_max the speed-up's range over them. A spread is that of a
    mean of independent values, the root of their summed squares over their number.

    Raises:
        BadRun: no case is shared.
    """
    shared = shared_cases(table)
    if not shared:
        raise BadRun(
            f"a case that all of {', '.join(table['variant'].unique())} run was expected, found none, so they can't be "
            "compared: measure with other variants or cases"
        )
    rows = []
    for variant, part in table[table["case"].isin(shared)].groupby("variant", sort=False):
        means = {name: _geomean(part[name]) for name in ("time_s", "eager_s", "speedup", "step", "light_share")}
        spreads = {
            name: np.sqrt((part[name] ** 2).sum(skipna=False)) / len(part)
            for name in ("spread", "speedup_spread", "step_spread")
        }
        limits = {"speedup_min": part["speedup"].min(), "speedup_max": part["speedup"].max()}
        rows.append({"case": GEOMEAN, "variant": variant, "cases": len(part), **means, **spreads, **limits})
    return pd.DataFrame(rows)


def profiled_cases(run: Run) -> list[str]:
    """The cases that Nsight Compute saw, in suite order."""
    return [case for case in run.cases if case in set(run.rows("ncu")["case"])]


def counters(run: Run, case: str) -> pd.DataFrame:
    """Nsight Compute's counters on one case: a row per variant and kernel, empty where it was not profiled.

    Columns: those of COUNTERS; dram_bytes, read and written; dram_over_minimum, that over the least the whole
    core can move (kernels.work); stalls, the three reasons for which most warps wait, as [(label, warps per
    issued instruction)]. A variant of several kernels ends with a row ALL_KERNELS that sums duration and bytes.
    """
    minimum = work.core(CASES[case]).bytes
    ncu = run.rows("ncu", "core")
    ncu = ncu[ncu["case"] == case]
    rows = []
    for variant in run.variants:
        own = []
        for kernel, part in ncu[ncu["variant"] == variant].groupby("kernel", sort=False):
            value = part.set_index("metric")["value"]
            stalls = value[value.index.isin(STALLS)].nlargest(3)
            own.append(
                {
                    "variant": variant,
                    "kernel": kernel,
                    **{name: value.get(name, np.nan) for name in COUNTERS},
                    "dram_bytes": value.get("dram_read", np.nan) + value.get("dram_write", np.nan),
                    "stalls": [(METRICS[name].label, warps) for name, warps in stalls.items()],
                }
            )
        if len(own) > 1:
            sums = {name: sum(row[name] for row in own) for name in ("duration", "dram_bytes")}
            own.append({"variant": variant, "kernel": ALL_KERNELS, **sums, "stalls": []})
        rows += own
    frame = pd.DataFrame(rows, columns=["variant", "kernel", *COUNTERS, "dram_bytes", "stalls"])
    frame.insert(frame.columns.get_loc("stalls"), "dram_over_minimum", frame["dram_bytes"] / minimum)
    return frame


def timeline(run: Run) -> pd.DataFrame:
    """Nsight Systems' view: one row per NVTX range (case, variant, phase), empty where it did not run.

    Columns: launches; kernel_s, the sum of their durations; projected_s, from the first operation's start to
    the last one's end. Launches that overlap can make kernel_s the larger one.
    """
    nsys = run.rows("nsys")
    rows = []
    for (case, variant, phase), part in nsys.groupby(["case", "variant", "phase"]):
        launches = part.loc[part["metric"] == "duration", "value"]
        projected = part.loc[part["metric"] == "projected", "value"].sum()
        rows.append((case, variant, phase, len(launches), launches.sum(), projected))
    frame = pd.DataFrame(rows, columns=["case", "variant", "phase", "launches", "kernel_s", "projected_s"])
    order = {name: i for i, name in enumerate([*run.cases, *run.variants, "preprocess", "core", "full"])}
    by = ["case", "variant", "phase"]
    return frame.sort_values(by, key=lambda names: names.map(order), ignore_index=True)


def _spread(samples: pd.Series) -> float:
    """Half the interquartile range over the median."""
    return (samples.quantile(0.75) - samples.quantile(0.25)) / 2 / samples.median()


def _ratio(base: pd.Series | None, samples: pd.Series) -> tuple[float, float]:
    """How much faster `samples` are than `base`: the ratio of the medians, and its spread round by round."""
    if base is None:
        return np.nan, np.nan
    return base.median() / samples.median(), _spread((base / samples).dropna())


def _geomean(values: pd.Series) -> float:
    return float(np.exp(np.log(values).mean(skipna=False)))
