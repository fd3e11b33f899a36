"""Two runs side by side, such as two GPUs or two commits: how much faster each rung is in one than in the other.

Their samples were not taken in the same rounds, so a ratio's spread is that of a quotient of independent values: the
root of the summed squares of both relative spreads.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from analysis import diff, present, publish, style, tables
from analysis.load import Run
from analysis.present import Table, count, microseconds, percent, times, with_spread
from kernels.errors import UserError
from kernels.problem import CASES
from profiling.metrics import METRICS

TEMPLATE = Path(__file__).with_name("compare.typ")
COUNTERS = (
    "duration", "tensor_pipe", "issue_active", "l2_throughput", "dram_throughput", "dram_read", "dram_write",
    "registers", "shared_memory", "occupancy",
)  # fmt: skip


class NoComparison(UserError):
    """Runs that can't be compared."""


def check(runs: list[Run]) -> None:
    """Refuse what would compare unlike things.

    Raises:
        NoComparison: not two runs, one run twice, times that were taken differently, or no case of a rung in common.
        BadRun: a run without a benchmark.
    """
    names = ", ".join(str(run.folder) for run in runs)
    if len(runs) != 2:
        raise NoComparison(f"one run or two were expected, found {len(runs)} ({names}): compare them two by two")
    a, b = runs
    if a.info["run"] == b.info["run"]:
        raise NoComparison(f"two runs were expected, found {a.info['run']} twice ({names}): name another one")
    said = [run.info["protocol"].get("graph", "nothing") for run in runs]
    if said[0] != said[1]:
        raise NoComparison(
            f"times of the graph clock taken in one way were expected, found {said[0]!r} in {a.folder} and {said[1]!r} "
            f"in {b.folder}: measure one of them again, with the same commands"
        )
    if _joined(a, b).empty:
        raise NoComparison(
            f"rungs timed on the same cases were expected in {a.folder} and {b.folder}, found "
            f"{', '.join(tables.rungs(a))} on {', '.join(a.cases)}, and {', '.join(tables.rungs(b))} on "
            f"{', '.join(b.cases)}: measure them with the same VARIANT and CASE"
        )


def names(a: Run, b: Run) -> tuple[str, str]:
    """Short names of both runs: the GPUs where those differ, else the commits, else the whole names."""
    for short in (lambda run: run.info["gpu"]["slug"], lambda run: run.info["commit"], lambda run: run.info["run"]):
        if short(a) != short(b):
            return short(a), short(b)
    raise AssertionError("`check` lets no run be compared with itself")


def table(a: Run, b: Run) -> pd.DataFrame:
    """One row per case and rung that both runs timed, then the geometric means over cases that all these rungs share.

    Columns: case, variant; time_s, spread, light_share and their like with _b for the second run; ratio, how much
    faster the second is, and ratio_spread. The means have the case "geomean", the number of cases, and ratio_min
    and ratio_max over them.
    """
    joined = _joined(a, b)
    joined["ratio"] = joined["time_s"] / joined["time_s_b"]
    joined["ratio_spread"] = np.hypot(joined["spread"], joined["spread_b"])
    shared = joined[joined["case"].isin(tables.shared_cases(joined))]
    rows = []
    for variant, part in shared.groupby("variant", sort=False):
        logs = np.log(part[["time_s", "light_share", "time_s_b", "light_share_b", "ratio"]])
        spreads = np.sqrt((part[["spread", "spread_b", "ratio_spread"]] ** 2).sum()) / len(part)
        limits = {"ratio_min": part["ratio"].min(), "ratio_max": part["ratio"].max()}
        head = {"case": tables.GEOMEAN, "variant": variant, "cases": len(part)}
        rows.append({**head, **np.exp(logs.mean()), **spreads, **limits})
    return pd.concat([joined, pd.DataFrame(rows)], ignore_index=True)


def headline(a: Run, b: Run) -> str:
    """The comparison in one sentence, by the rung that is fastest in the second run."""
    frame, (one, other) = table(a, b), names(a, b)
    mean = frame[frame["case"] == tables.GEOMEAN]
    if mean.empty:
        return f"{one} and {other} share no case that all their rungs ran; compare case by case."
    best = mean.loc[mean["time_s_b"].idxmin()]
    verdict = present.compared(best["ratio"], best["ratio_spread"], f"on {one}")
    return (
        f"On {other}, {best['variant']} {verdict} (geometric mean over {count(int(best['cases']), 'case')}; "
        f"{times(best['ratio_min'])} to {times(best['ratio_max'])})."
    )


def times_table(a: Run, b: Run) -> Table:
    """`table` as it is printed."""
    one, other = names(a, b)
    rows, last = [], None
    for row in table(a, b).itertuples():
        name = "geometric mean" if row.case == tables.GEOMEAN else row.case
        rows.append(
            [
                name if name != last else "",
                row.variant,
                with_spread(microseconds(row.time_s), row.spread),
                with_spread(microseconds(row.time_s_b), row.spread_b),
                with_spread(times(row.ratio), row.ratio_spread),
                percent(row.light_share),
                percent(row.light_share_b),
            ]
        )
        last = name
    return Table(
        title=f"{one} and {other}",
        head=["Case", "Rung", f"{one}, µs", f"{other}, µs", f"{other} vs {one}"]
        + [f"{name}, of speed of light" for name in (one, other)],
        rows=rows,
        note="Time is the median of CUDA-graph replays; ± is half the interquartile range. Each run's speed of light "
        "is of its own measured ceilings.",
        text_columns=2,
    )


def counters(a: Run, b: Run) -> pd.DataFrame:
    """Nsight Compute's COUNTERS of every rung and case that both runs profiled: case, variant, metric, a, b, change."""
    rows = []
    for case in tables.profiled_cases(a):
        of_a, of_b = tables.profiles(a, case), tables.profiles(b, case)
        for variant in [name for name in of_a.index if name in of_b.index]:
            before, after = of_a.loc[variant], of_b.loc[variant]
            rows += [
                (case, variant, name, before[name], after[name], after[name] / before[name] if before[name] else np.nan)
                for name in COUNTERS
                if name in before and name in after
            ]
    return pd.DataFrame(rows, columns=["case", "variant", "metric", "a", "b", "change"])


def counters_tables(a: Run, b: Run) -> list[Table]:
    """`counters` as they are printed, a table per case."""
    return [
        Table(
            title=f"Nsight Compute: {case} ({CASES[case].shape})",
            head=["Rung", "Metric", *names(a, b), "Change"],
            rows=[
                [
                    row.variant if row.metric == COUNTERS[0] else "",
                    METRICS[row.metric].label,
                    _printed(row.metric, row.a),
                    _printed(row.metric, row.b),
                    times(row.change),
                ]
                for row in part.itertuples()
            ],
            text_columns=2,
        )
        for case, part in counters(a, b).groupby("case", sort=False)
    ]


def environment(a: Run, b: Run) -> Table:
    """Where the numbers of both runs come from, side by side."""
    both = [dict(present.environment(run).rows) for run in (a, b)]
    return Table(
        "Where the numbers come from",
        ["What", *names(a, b)],
        [[what, *(one.get(what, present.NONE) for one in both)] for what in dict.fromkeys([*both[0], *both[1]])],
        text_columns=3,
    )


def figure(a: Run, b: Run) -> Figure:
    """Geometric means of both runs, the second's bars hatched; beside them the ratio, and its range over the cases."""
    frame, (one, other) = table(a, b), names(a, b)
    mean = frame[frame["case"] == tables.GEOMEAN].reset_index(drop=True)
    if mean.empty:
        return style.message(headline(a, b))
    with style.look():
        result = style.headed(1.1 + 0.36 * len(mean), headline(a, b))
        left, right = result.subplots(1, 2, sharey=True, width_ratios=[3, 2])
        for y, row in enumerate(mean.itertuples()):
            bars = (
                (-0.2, row.time_s, row.spread, one, {}),
                (0.2, row.time_s_b, row.spread_b, other, {"hatch": "////"}),
            )
            for place, time, spread, name, hatch in bars:
                whisker = {"xerr": 1e6 * time * spread, "error_kw": {"lw": 0.8}}
                left.barh(y + place, 1e6 * time, 0.38, **{**style.fill(row.variant), **hatch}, **whisker)
                style.label(left, 1e6 * time * (1 + spread), y + place, f"{microseconds(time)} {name}", fontsize=6)
            right.plot([row.ratio_min, row.ratio_max], [y, y], color=style.FAINT, lw=0.8)
            right.plot(row.ratio, y, "o", ms=5, mfc=style.colour(row.variant), mec=style.INK, mew=0.5)
            right.text(row.ratio, y - 0.18, times(row.ratio), ha="center", va="bottom", fontsize=6.5)
        left.set_xlim(0, 1.35 * 1e6 * mean[["time_s", "time_s_b"]].max().max())
        left.set_yticks(range(len(mean)), mean["variant"])
        left.set_ylim(len(mean) - 0.4, -0.7)
        left.set_xlabel("Time, µs, geometric mean, with its spread")
        right.axvline(1, color=style.INK, lw=0.8, ls="--")
        right.set_xlim(0.9 * min(1, mean["ratio_min"].min()), 1.1 * max(1, mean["ratio_max"].max()))
        right.set_xlabel(f"How much faster {other} is, ×;\nline: lowest to highest case")
    return result


def write(runs: list[Run], out: Path) -> list[Path]:
    """Write the comparison's PDF, tables and figure into `out` and return their paths; nothing where a step fails.

    Raises:
        NoComparison, BadRun: see `check`.
    """
    check(runs)
    return publish.staged(out, lambda stage: _write(*runs, stage))


def _write(a: Run, b: Run, stage: Path) -> None:
    compared = {
        "comparison": publish.Part(table(a, b), [times_table(a, b)]),
        "compared_counters": publish.Part(counters(a, b), counters_tables(a, b)),
    }
    publish.write_tables(compared, stage / "tables")
    svgs = publish.write_figures({"comparison": figure(a, b)}, stage / "figures")
    content = {
        "title": "Gated DeltaNet prefill: {} and {}".format(*names(a, b)),
        "origins": [present.origin(run) for run in (a, b)],
        "times": publish.for_typst(times_table(a, b)),
        "counters": [publish.for_typst(printed) for printed in counters_tables(a, b)],
        "environment": publish.for_typst(environment(a, b), [0, 1, 1]),
    }
    publish.write_pdf(TEMPLATE, content, svgs, stage / "comparison.pdf")


def _joined(a: Run, b: Run) -> pd.DataFrame:
    """The rows of both ladders that have case and variant in common, in the order of the first."""
    columns = ["case", "variant", "time_s", "spread", "light_share"]
    one, other = (tables.ladder(run)[columns] for run in (a, b))
    return one.merge(other, on=columns[:2], suffixes=("", "_b"))


def _printed(metric: str, value: float) -> str:
    return f"{microseconds(value)} µs" if METRICS[metric].unit == "second" else diff.value(metric, value)
