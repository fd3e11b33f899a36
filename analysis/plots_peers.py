"""Figures of the last rung beside the public libraries, drawn from the frames of analysis.peers."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from analysis import peers, style
from analysis.load import Run
from analysis.plots import BAR, COLUMNS, FOOT, HEAD, panel
from analysis.present import digits, percent, times
from kernels import work
from kernels.problem import CASES, SUITES

_ROW = 0.135  # inches: a case in the heat map
_ABSENT = "This run has no rows of the libraries for this: on a machine with a GPU, make peers times them."
_TOO_FEW = "Single sequences of several lengths and head counts were expected: make peers SUITE=qwen times them."
_LIMIT = 4.0  # the heat map's colours end at this ratio, its numbers do not


def bars_figure(run: Run, phase: str) -> Figure:
    """Time of every implementation on each case of the first suite that was measured; dashed: speed of light."""
    if phase not in peers.phases(run):
        return style.message(_ABSENT)
    frame = _compared(run, phase)
    cases = next(
        part for suite in SUITES.values() if (part := [case.name for case in suite if case.name in set(frame["case"])])
    )
    names = _names(frame)
    lines = math.ceil(len(cases) / COLUMNS)
    with style.look():
        figure = style.headed(0.6 + lines * (HEAD + BAR * len(names) + FOOT), peers.headline(run, phase))
        panels = figure.subplots(lines, COLUMNS, sharey=True, squeeze=False).ravel()
        for axes, case in zip(panels, cases, strict=False):
            part = frame[frame["case"] == case].set_index("variant")
            labels = {
                name: f"{digits(1e6 * part['time_s'].get(name, 0), 3)} · {percent(part['light_share'].get(name, 0))}"
                for name in names
            }
            floor = work.speed_of_light(work.WORK[phase](CASES[case]), run.ceilings)
            panel(axes, part, CASES[case], floor, labels, absent="not timed", room=1.65, size=6)
        for axes in panels[len(cases) :]:
            axes.set_axis_off()
        figure.supxlabel("µs per call, graph clock, and share of speed of light (dashed)", fontsize=7.5)
    return figure


def heat_figure(run: Run) -> Figure:
    """Time over the best library's, case by case: a map per phase, the rung and every library as columns."""
    shown = peers.phases(run)
    if not shown:
        return style.message(_ABSENT)
    maps = [_compared(run, phase).pivot(index="case", columns="variant", values="over_best") for phase in shown]
    cases = [case for case in run.cases if any(case in part.index for part in maps)]
    maps = [
        part.reindex(index=cases, columns=_names(_compared(run, phase)))
        for part, phase in zip(maps, shown, strict=True)
    ]
    title = "Time over that of the best library: below 1 is faster"
    with style.look():
        figure = style.headed(0.9 + _ROW * len(cases), title)
        panels = figure.subplots(
            1, len(maps), sharey=True, width_ratios=[len(part.columns) for part in maps], squeeze=False
        )
        for axes, part, phase in zip(panels[0], maps, shown, strict=True):
            _heat(axes, part, phase)
        panels[0][0].set_yticks(range(len(cases)), cases, fontsize=6)
    return figure


def scaling_figure(run: Run) -> Figure:
    """Time as the sequence grows at the fewest heads, and as heads grow at one length, for every phase."""
    if not can_scale(run):
        return style.message(_TOO_FEW)
    shown, (by_tokens, by_heads) = peers.phases(run), _grids(run)
    with style.look():
        figure = style.headed(2.5 * len(shown) + 0.3, _growth(run, shown[-1], by_tokens[-1].name))
        grid = figure.subplots(len(shown), 2, squeeze=False)
        for (left, right), phase in zip(grid, shown, strict=True):
            frame = _compared(run, phase)
            _lines(
                left, frame, by_tokens, lambda case: case.T, "T", f"{phase}, Hq={by_tokens[0].Hq} Hv={by_tokens[0].Hv}"
            )
            _lines(right, frame, by_heads, lambda case: case.Hv, "Hv", f"{phase}, T={by_heads[0].T}")
    return figure


def can_scale(run: Run) -> bool:
    """Whether enough cases were measured for lines over lengths and over heads."""
    return all(len(grid) > 1 for grid in _grids(run))


def _grids(run: Run):
    """Single sequences with one number of heads, the smallest; and with one length, the middle one."""
    timed = {case for phase in peers.phases(run) for case in peers.against(run, phase)["case"]}
    plain = [case for case in SUITES["qwen"] if case.name in timed and case.B == 1]
    if not plain:
        return [], []
    few = min((case.Hq, case.Hv) for case in plain)
    lengths = sorted({case.T for case in plain})
    middle = lengths[len(lengths) // 2]
    return [case for case in plain if (case.Hq, case.Hv) == few], [case for case in plain if middle == case.T]


def _growth(run: Run, phase: str, case: str) -> str:
    """What the longest sequence at the fewest heads says, in words."""
    row = peers.against(run, phase).set_index("case").loc[case]
    rung, faster = peers.ours(run), row["ratio"] > 1
    first, second = (rung, row["best"]) if faster else (row["best"], rung)
    ratio = times(row["ratio"] if faster else 1 / row["ratio"])
    return f"On {CASES[case].shape}, {phase}, {first} is {ratio} as fast as {second}: few heads leave SMs to be filled"


def _lines(axes: Axes, frame: pd.DataFrame, cases, x_of, label: str, title: str) -> None:
    wide = frame.pivot(index="case", columns="variant", values="time_s").reindex([case.name for case in cases]) * 1e6
    x = [x_of(case) for case in cases]
    for name in _names(frame):
        dashes = (0, (1, 1)) if name.endswith("_nocp") else "-"
        dark = {"color": style.colour(name), "lw": 2.2 if name == _names(frame)[0] else 1.4, "ls": dashes}
        axes.plot(x, wide[name], marker="o", ms=2.5, **dark)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(x, [str(each) for each in x])
    axes.minorticks_off()
    axes.set_xlabel(label)
    axes.set_ylabel("µs")
    axes.set_title(title)
    low, high = wide.min().min(), wide.max().max()
    ticks = [
        tick
        for decade in range(6)
        for tick in (10**decade, 2 * 10**decade, 5 * 10**decade)
        if low / 1.5 < tick < high * 1.5
    ]
    axes.set_yticks(ticks, [str(tick) for tick in ticks])
    axes.set_ylim(low / 1.4, high * 1.4)
    axes.set_xlim(x[0] / 1.15, x[-1] * (x[-1] / x[0]) ** 0.5)  # room for the names
    last = wide.iloc[-1].dropna()
    decades = np.log10(high * 1.4) - np.log10(low / 1.4)
    places = style.apart(list(np.log10(last)), 0.075 * decades)
    for (name, value), place in zip(last.items(), places, strict=True):
        style.leader(axes, (x[-1], value), (x[-1] * (x[-1] / x[0]) ** 0.06, 10**place), name)


def _heat(axes: Axes, part: pd.DataFrame, phase: str) -> None:
    norm = LogNorm(1 / _LIMIT, _LIMIT)
    axes.imshow(np.clip(part, 1 / _LIMIT, _LIMIT), cmap="PuOr_r", norm=norm, aspect="auto")
    for y, case in enumerate(part.index):
        for x, name in enumerate(part.columns):
            value = part.loc[case, name]
            text = "–" if math.isnan(value) else times(value)[:-1]
            far = not math.isnan(value) and abs(math.log(value)) > 0.62 * math.log(_LIMIT)
            weight = "bold" if value <= 1 else None
            axes.text(
                x, y, text, ha="center", va="center", fontsize=6, color="white" if far else style.INK, weight=weight
            )
    axes.set_xticks(range(len(part.columns)), [name.replace("_", "\n") for name in part.columns], fontsize=6)
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.set_title(phase)
    axes.spines[:].set_visible(False)


def _compared(run: Run, phase: str) -> pd.DataFrame:
    """What was measured, without the token loop: it would hide all others."""
    frame = peers.measured(run, phase)
    return frame[frame["variant"] != peers.NO_LIBRARY]


def _names(frame: pd.DataFrame) -> list[str]:
    """The rung, then the libraries."""
    return list(dict.fromkeys(frame.sort_values("case", kind="stable")["variant"]))
