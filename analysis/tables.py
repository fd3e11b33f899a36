"""Numbers of a run as tidy frames: the ladder, its geometric mean, Nsight's counters and timeline.

Everything is in base units: seconds, bytes, ratios. `analysis.present` prints them.

Two notions of spread, both relative to the median so that they read as "± this share":
- of a time: half the interquartile range of its samples;
- of a speed-up: half the interquartile range of the ratios sample by sample. Samples with one number were
  taken in the same round, one right after the other, so what slows a whole round cancels.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pandas as pd

from analysis.load import Run
from kernels import work
from kernels.problem import CASES
from profiling import schema
from profiling.metrics import LIMITS, METRICS, STALLS
from profiling.run import BadRun

GEOMEAN = "geomean"  # stands for a case
ALL_KERNELS = "all kernels"  # stands for a kernel

SUMMARY = ["time_s", "spread", "eager_s", "light_share", "error_output", "error_final_state"]
LONGEST = ("registers", "shared_memory", "occupancy", "waves", *LIMITS)  # taken from a rung's longest kernel
_PHASES = ("preprocess", "cumsum", "A", "core", "full")  # as they run
COUNTERS = ["duration", "sm_throughput", "dram_throughput", "tensor_pipe", "occupancy", "registers", "shared_memory"]


def rungs(run: Run) -> list[str]:
    """The rungs that the core was timed with, in ladder order."""
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
            f"{schema.stored(run.folder)}: a benchmark was expected, found rows of "
            f"{', '.join(run.frame['tool'].unique())} only: add it with `make bench`, or name another run"
        )
    found, rows, timed = samples(run, "core", run.variants), [], rungs(run)
    for case in run.ladder_cases:
        floor = work.speed_of_light(work.core(CASES[case]), run.ceilings)
        by_variant = found.get(case, {})
        ran = [variant for variant in timed if variant in by_variant]
        graph = {variant: by_variant[variant]["latency_graph"] for variant in ran}
        for variant, before in zip(ran, [None, *ran], strict=False):
            speedup, speedup_spread = ratio(graph.get(timed[0]), graph[variant])
            step, step_spread = ratio(graph.get(before), graph[variant])
            rows.append(
                {
                    "case": case,
                    "variant": variant,
                    **summary(by_variant[variant], floor),
                    "speedup": speedup,
                    "speedup_spread": speedup_spread,
                    "step": step,
                    "step_spread": step_spread,
                }
            )
    times, gains = SUMMARY[:3], ["speedup", "speedup_spread", "step", "step_spread"]
    return pd.DataFrame(rows, columns=["case", "variant", *times, *gains, *SUMMARY[3:]])


def samples(run: Run, phase: str, names: Iterable[str]) -> dict[str, dict[str, dict[str, pd.Series]]]:
    """The benchmark's samples of these implementations by case, implementation and metric; an index is the round."""
    bench = run.rows("bench", phase)
    chosen = bench[bench["variant"].isin(list(names)) & bench["metric"].isin(schema.BENCH_METRICS)]
    found: dict[str, dict[str, dict[str, pd.Series]]] = {}
    for (case, name, metric), part in chosen.groupby(["case", "variant", "metric"], sort=False):
        values = pd.Series(part["value"].to_numpy(), part["sample"])
        found.setdefault(case, {}).setdefault(name, {})[metric] = values
    return found


def summary(metrics: dict[str, pd.Series], floor: float) -> dict[str, float]:
    """SUMMARY of one implementation on one case, from its samples by metric; `floor` is the speed-of-light time."""
    time = metrics["latency_graph"].median()
    errors = (metrics[name].median() for name in ("error_output", "error_final_state"))
    found = (time, spread(metrics["latency_graph"]), metrics["latency_eager"].median(), floor / time, *errors)
    return dict(zip(SUMMARY, found, strict=True))


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
        means = {name: mean(part[name]) for name in ("time_s", "eager_s", "speedup", "step", "light_share")}
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


def profile(run: Run, variant: str, case: str) -> dict[str, float]:
    """Nsight Compute's metrics of a rung on a case by short name, its kernels taken together; empty if not profiled.

    Durations, bytes and counts are summed; shares, waits and the clock are averaged with the kernels' durations as
    weights; registers, shared memory, occupancy and its limits are those of the longest kernel.
    """
    ncu = run.rows("ncu", "core")
    ncu = ncu[(ncu["variant"] == variant) & (ncu["case"] == case)]
    if ncu.empty:
        return {}
    wide = ncu.pivot_table(index="kernel", columns="metric", values="value", aggfunc="sum")
    longest, weights = wide.loc[wide["duration"].idxmax()], wide["duration"] / wide["duration"].sum()
    together = {}
    for name in wide.columns:
        if name in LONGEST:
            together[name] = longest[name]
        elif METRICS[name].unit == "ratio" or name in STALLS or name == "sm_clock":
            together[name] = (wide[name] * weights).sum()
        else:
            together[name] = wide[name].sum()
    return together


def profiles(run: Run, case: str | None) -> pd.DataFrame:
    """`profile` of every rung that was profiled on this case: a row per rung in ladder order, a column per metric."""
    found = {name: profile(run, name, case) for name in run.variants}
    return pd.DataFrame({name: values for name, values in found.items() if values}).T.rename_axis("variant")


def most_work(run: Run) -> str | None:
    """The profiled case with most arithmetic: the one to look at where one has to do; None where none was profiled."""
    return max(profiled_cases(run), key=lambda case: work.core(CASES[case]).flops, default=None)


def cases(run: Run) -> pd.DataFrame:
    """What the core asks of the device on each case, at least (kernels.work.core), a row each.

    Columns: case; flops; bytes; flops_s and bytes_s, what either takes at this run's ceilings; light_s, the longer.
    """
    ceilings, rows = run.ceilings, []
    for case in run.cases:
        least = work.core(CASES[case])
        times = least.flops / ceilings.flops_per_second, least.bytes / ceilings.bytes_per_second
        rows.append((case, least.flops, least.bytes, *times, work.speed_of_light(least, ceilings)))
    return pd.DataFrame(rows, columns=["case", "flops", "bytes", "flops_s", "bytes_s", "light_s"])


def formulations(run: Run) -> pd.DataFrame:
    """What each way to write the core asks for on the ladder's case with most arithmetic (kernels.work), a row each.

    Columns: case; formulation; flops; bytes; intensity, FLOPs per byte; light_s, the time below which it can't run at
    this run's ceilings.
    """
    case = max(run.ladder_cases, key=lambda name: work.core(CASES[name]).flops)
    rows = [
        (case, name, asked.flops, asked.bytes, asked.flops / asked.bytes, work.speed_of_light(asked, run.ceilings))
        for name, asked in work.formulations(CASES[case]).items()
    ]
    return pd.DataFrame(rows, columns=["case", "formulation", "flops", "bytes", "intensity", "light_s"])


def launches(run: Run, case: str | None) -> pd.DataFrame:
    """Every kernel of a case as Nsight Systems saw it, in order; empty where the trace says no starts.

    Columns: variant, phase, kernel; start_s and end_s, counted from where the range of the phase was opened; host_s,
    the time that the host spent in that range.
    """
    nsys = run.rows("nsys")
    nsys = nsys[nsys["case"] == case]
    by = ["variant", "phase"]
    wide = nsys[nsys["kernel"] != ""].pivot(index=[*by, "kernel", "sample"], columns="metric", values="value")
    wide = wide.reindex(columns=["start", "duration"]).dropna().reset_index()
    host = nsys[nsys["metric"] == "host"].set_index(by)["value"].rename("host_s")
    frame = wide.join(host, on=by).assign(start_s=wide["start"], end_s=wide["start"] + wide["duration"])
    frame = in_order(run, frame, [*by, "start_s"])
    return frame[["variant", "phase", "kernel", "start_s", "end_s", "host_s"]]


def shortest(run: Run) -> str | None:
    """The traced case that the GPU is done with first, so that launches weigh most; None where none was traced."""
    spans = _spans(run)
    return None if spans.empty else spans.idxmin()


def longest(run: Run) -> str | None:
    """The traced case that keeps the GPU busy for longest; None where none was traced."""
    spans = _spans(run)
    return None if spans.empty else spans.idxmax()


def _spans(run: Run) -> pd.Series:
    """By traced case, the projected time of all its ranges together."""
    frame = timeline(run)
    placed = [case for case in frame["case"].unique() if not launches(run, case).empty]
    return frame[frame["case"].isin(placed)].groupby("case")["projected_s"].sum()


def timeline(run: Run) -> pd.DataFrame:
    """Nsight Systems' view: one row per NVTX range (case, variant, phase), empty where it did not run.

    Columns: launches; kernel_s, the sum of their durations; projected_s, from the first operation's start to
    the last one's end; host_s, what the host spent in the range. Launches that overlap can make kernel_s the larger
    one of the first two.
    """
    nsys, rows = run.rows("nsys"), []
    for where, part in nsys.groupby(["case", "variant", "phase"]):
        kernels = part.loc[part["metric"] == "duration", "value"]
        projected, host = (part.loc[part["metric"] == name, "value"].sum(min_count=1) for name in ("projected", "host"))
        rows.append((*where, len(kernels), kernels.sum(), projected, host))
    columns = ["case", "variant", "phase", "launches", "kernel_s", "projected_s", "host_s"]
    return in_order(run, pd.DataFrame(rows, columns=columns), ["case", "variant", "phase"])


def preprocessing(run: Run) -> pd.DataFrame:
    """How much of a full forward its preprocessing is: a row per case and variant that were traced in both phases.

    Columns: preprocess_s and core_s, kernel times of Nsight Systems; share, of the first in their sum.
    """
    wide = timeline(run).pivot(index=["case", "variant"], columns="phase", values="kernel_s")
    wide = wide.reindex(columns=["preprocess", "core"]).dropna().add_suffix("_s").reset_index()
    wide["share"] = wide["preprocess_s"] / (wide["preprocess_s"] + wide["core_s"])
    return in_order(run, wide, ["case", "variant"])


def in_order(run: Run, frame: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """Rows sorted by these columns: cases as in kernels.problem, variants as on the ladder, phases as they run."""
    order = {name: i for i, name in enumerate([*run.cases, *run.variants, *run.peers, *_PHASES])}
    return frame.sort_values(
        by, key=lambda column: column.map(lambda entry: order.get(entry, entry)), ignore_index=True
    )


def spread(samples: pd.Series) -> float:
    """Half the interquartile range over the median."""
    return (samples.quantile(0.75) - samples.quantile(0.25)) / 2 / samples.median()


def ratio(base: pd.Series | None, samples: pd.Series) -> tuple[float, float]:
    """How much faster `samples` are than `base`: the ratio of the medians, and its spread round by round."""
    if base is None:
        return np.nan, np.nan
    return base.median() / samples.median(), spread((base / samples).dropna())


def mean(values: pd.Series) -> float:
    """The geometric mean; missing where a value is."""
    return float(np.exp(np.log(values).mean(skipna=False)))
