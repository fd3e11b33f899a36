"""Figures of a run, drawn from the frames of analysis.tables."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis import style, tables
from analysis.load import Run
from analysis.present import count, headline, percent, times, with_spread
from kernels import work
from kernels.problem import CASES, Case

_MEAN = "geometric mean"
COLUMNS = 4  # of the small panels
BAR, HEAD, FOOT = 0.14, 0.42, 0.30  # inches: a bar in a panel, a panel's title, a panel's axis
_MEAN_BAR = 0.2  # inches: a rung in the upper panel
_BESIDE = {1.13: "vs previous", 1.32: "of speed of light"}  # columns beside the upper panel, by their right edge


def ladder_figure(run: Run) -> Figure:
    """Above, what each rung gains over all shared cases; below, the time on each case against speed of light.

    Both read from top to bottom as the ladder; bars begin at zero, whiskers are the
    times' spread.

    Raises:
        BadRun: see analysis.tables.ladder and geomean.
    """
    ladder = tables.ladder(run)
    mean = tables.geomean(ladder)
    cases = list(ladder["case"].unique())
    rungs = tables.rungs(run)
    lines = math.ceil(len(cases) / COLUMNS)
    upper = HEAD + _MEAN_BAR * len(rungs) + FOOT
    lower = HEAD + BAR * len(rungs) + FOOT
    with style.look():
        figure = style.headed(0.6 + upper + lines * lower, headline(run))
        above, below = figure.subfigures(2, 1, height_ratios=[upper, lines * lower], hspace=0)
        _means(above.subplots(), mean)
        panels = below.subplots(lines, COLUMNS, sharey=True, squeeze=False).ravel()
        for axes, case in zip(panels, cases, strict=False):
            part = ladder[ladder["case"] == case].set_index("variant")
            labels = {name: f"{1e6 * part['time_s'].get(name, 0):.0f}" for name in rungs}
            floor = work.speed_of_light(work.core(CASES[case]), run.ceilings)
            panel(axes, part, CASES[case], floor, labels)
        for axes in panels[len(cases) :]:
            axes.set_axis_off()
        below.supxlabel(
            "Time per call, µs: median of CUDA-graph replays, with its spread. Dashed: speed of light", fontsize=7.5
        )
        # The columns beside the upper axes move as it shrinks, so the layout settles in the second pass only.
        for _ in range(2):
            figure.draw_without_rendering()
        figure.set_layout_engine("none")
    return figure


def steps_figure(run: Run) -> Figure:
    """Speed-up over the first rung, rung by rung: a grey line of steps per case, a black one for the mean.

    Raises:
        BadRun: see analysis.tables.ladder and geomean.
    """
    ladder = tables.ladder(run)
    mean = tables.geomean(ladder)
    rungs = tables.rungs(run)
    gains = ladder.pivot(index="variant", columns="case", values="speedup").reindex(rungs)
    gains = gains[[case for case in run.cases if case in gains and gains[case].notna().any()]]
    gains[_MEAN] = mean.set_index("variant")["speedup"]
    largest = mean.iloc[mean["step"].fillna(1).argmax()]
    title = f"The largest step is {largest['variant']}, {times(largest['step'])} as fast as the rung before it"
    with style.look():
        figure = style.headed(3.0, title if len(rungs) > 1 else headline(run))
        axes = figure.subplots()
        for name, gain in gains.items():
            line = {"color": style.INK, "lw": 1.8, "zorder": 3} if name == _MEAN else {"color": style.FAINT, "lw": 0.7}
            axes.stairs(gain, np.arange(len(rungs) + 1) - 0.5, baseline=None, **line)
        axes.set_yscale("log")
        axes.set_yticks([1, 2, 5, 10, 20, 50], [f"{gain}×" for gain in (1, 2, 5, 10, 20, 50)])
        axes.minorticks_off()
        axes.set_ylim(0.9 * gains.min().min(), 1.1 * gains.max().max())
        axes.set_xticks(range(len(rungs)), rungs)
        axes.set_xlim(-0.5, 1.3 * len(rungs) - 0.5)  # room for the labels
        axes.set_ylabel(f"Speed-up over {rungs[0]}")
        figure.draw_without_rendering()  # labels are set apart in inches, which needs the axes' final size
        _ends(axes, gains.ffill().iloc[-1], len(rungs) - 0.5)
    return figure


def _ends(axes: Axes, last: pd.Series, x: float) -> None:
    """Name the lines where they end."""
    inches = axes.get_window_extent().height / axes.get_figure().dpi
    decades = np.diff(np.log10(axes.get_ylim()))[0]
    places = style.apart(list(np.log10(last)), 0.13 * decades / inches)
    for (name, gain), place in zip(last.items(), places, strict=True):
        weight = "bold" if name == _MEAN else None
        style.leader(axes, (x, gain), (x + 0.25, 10**place), f"{times(gain)} {name}", fontweight=weight)


def _means(axes: Axes, mean: pd.DataFrame) -> None:
    first, beside = mean["variant"].iloc[0], axes.get_yaxis_transform()  # x as a share of the axes, y as a rung
    for x, head in _BESIDE.items():
        axes.text(x, -0.9, head, transform=beside, ha="right", color=style.FAINT)
    for y, row in enumerate(mean.itertuples()):
        axes.barh(y, row.speedup, **style.fill(row.variant))
        label = with_spread(times(row.speedup), row.speedup_spread) if y else "1×"
        style.label(axes, row.speedup, y, label)
        for x, value in zip(_BESIDE, (times(row.step), percent(row.light_share)), strict=True):
            axes.text(x, y, value, transform=beside, ha="right", va="center")
    axes.axvline(1, color=style.INK, lw=0.6, ls=":")
    axes.set_xlim(0, 1.25 * mean["speedup"].max())  # room for the label of the longest bar
    axes.set_yticks(range(len(mean)), mean["variant"])
    axes.set_ylim(len(mean) - 0.4, -0.6)
    axes.set_xlabel(f"Speed-up over {first}, geometric mean over {count(mean['cases'].iloc[0], 'case')}")


def panel(
    axes: Axes,
    part: pd.DataFrame,
    case: Case,
    floor: float,
    labels: dict[str, str],
    absent: str = "skipped",
    room: float = 1.3,
    size: float = 6.5,
) -> None:
    """One case: a bar for each of the `labels`, by variant, with its time and spread; dashed, `floor` in seconds.

    `part` has time_s and spread by variant; `absent` stands where it has none. The axis ends at `room` times the
    longest bar, which leaves place for labels of `size` points.
    """
    for y, (variant, label) in enumerate(labels.items()):
        if variant not in part.index:
            axes.text(0, y, f" {absent}", va="center", color=style.FAINT, fontsize=6.5)
            continue
        time = part.loc[variant, "time_s"] * 1e6
        whisker = time * part.loc[variant, "spread"]
        axes.barh(y, time, xerr=whisker, error_kw={"lw": 0.8}, **style.fill(variant))
        style.label(axes, time + whisker, y, label, fontsize=size)
    axes.axvline(floor * 1e6, color=style.INK, lw=0.8, ls="--")
    axes.set_xlim(0, room * part["time_s"].max() * 1e6)
    axes.locator_params(axis="x", nbins=3)
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.set_title(f"{case.name}\n{case.shape}", fontsize=6.5)
