"""Figures of Nsight Systems' timeline: kernels under their NVTX ranges, and the shares of host and preprocessing."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis import style, tables
from analysis.load import Run
from analysis.present import absent, microseconds, percent

_LANE = 0.34  # inches: a rung with its two lines, host and GPU
_HOST, _GPU = -0.2, 0.2  # where the lines lie, a rung being 1 apart from the next
_PREPROCESS = "white"  # in every figure that shows both phases


def timeline_figure(run: Run, case: str | None) -> Figure:
    """Kernels on a time axis under the NVTX ranges of the host: preprocessing, then the core, a lane per rung.

    A range begins where the one before it and all its kernels have ended; the synchronization between them is left
    out.
    """
    found = tables.launches(run, case)
    if found.empty:
        return style.message(absent("Nsight Systems", "nsys"))
    lanes = list(found["variant"].unique())
    idle = {name: _idle(found[(found["variant"] == name) & (found["phase"] == "core")]) for name in lanes}
    worst = max(idle, key=idle.get)
    title = (
        f"On {case} the GPU idles {microseconds(idle[worst])} µs between the launches of {worst}'s core"
        if idle[worst]
        else f"On {case} no rung's core leaves a gap between launches"
    )
    with style.look():
        figure = style.headed(0.95 + _LANE * len(lanes), title)
        axes = figure.subplots()
        end = max(_lane(axes, y, found[found["variant"] == name]) for y, name in enumerate(lanes))
        axes.set_xlim(0, 1.02 * end)
        axes.set_yticks(
            [y + line for y in range(len(lanes)) for line in (_HOST, _GPU)],
            [text for name in lanes for text in (f"{name}   host", "GPU")],
        )
        axes.set_ylim(len(lanes) - 0.4, -0.6)
        axes.set_xlabel("µs, from where the range of the preprocessing opens. White: preprocessing; colour: core")
    return figure


def shares_figure(run: Run) -> Figure:
    """By case, for the first rung, the fastest and the last: preprocessing's share in full; host against GPU time."""
    share = tables.preprocessing(run).set_index(["case", "variant"])
    if share.empty or tables.shortest(run) is None:
        return style.message(absent("Nsight Systems", "nsys"))
    core = tables.timeline(run).query("phase == 'core'").set_index(["case", "variant"])
    totals = core.groupby("variant", sort=False)["kernel_s"].sum().reindex(run.variants).dropna()
    shown = list(dict.fromkeys((totals.index[0], totals.idxmin(), totals.index[-1])))
    cases = [case for case in run.cases if case in share.index.get_level_values("case")]
    most = share.xs(totals.idxmin(), level="variant")["share"]
    title = f"With {totals.idxmin()}, preprocessing is {percent(most.min())} to {percent(most.max())} of a full forward"
    with style.look():
        figure = style.headed(1.0 + (0.05 + 0.13 * len(shown)) * len(cases), title)
        left, right = figure.subplots(1, 2, sharey=True)
        height = 0.8 / len(shown)
        for y, case in enumerate(cases):
            for i, name in enumerate(name for name in shown if (case, name) in share.index):
                place = y + (i - (len(shown) - 1) / 2) * height
                row = core.loc[(case, name)]
                for axes, ratio in (
                    (left, share.loc[(case, name), "share"]),
                    (right, row["host_s"] / row["projected_s"]),
                ):
                    axes.barh(place, 100 * ratio, height, **style.fill(name))
                    style.label(axes, 100 * ratio, place, f"{100 * ratio:.0f} {name}", fontsize=6)
        left.set_yticks(range(len(cases)), cases)
        left.set_ylim(len(cases) - 0.4, -0.6)
        left.set_xlim(0, 130 * share["share"].max())
        left.set_xlabel("Preprocessing, % of the kernel time in full")
        right.axvline(100, color=style.INK, lw=0.8, ls="--")
        right.set_xlim(0, 1.3 * right.get_xlim()[1])
        right.set_xlabel("Host's time to launch the core, % of the GPU's to run it")
    return figure


def _idle(found: pd.DataFrame) -> float:
    """Seconds between kernels in which none runs; `found` is in order of start."""
    ends = found["end_s"].cummax()
    return float((found["start_s"] - ends.shift()).clip(lower=0).sum())


def _lane(axes: Axes, y: float, found: pd.DataFrame) -> float:
    """Draw a rung's ranges and kernels; return where they end, in µs."""
    begin = 0.0
    for phase, part in found.groupby("phase", sort=False):
        host = part["host_s"].iloc[0] * 1e6
        colour = _PREPROCESS if phase == "preprocess" else style.colour(part["variant"].iloc[0])
        axes.barh(y + _HOST, host, 0.3, left=begin, color="white", edgecolor=style.FAINT, lw=0.6, hatch="......")
        for kernel in part.itertuples():
            start, time = begin + kernel.start_s * 1e6, (kernel.end_s - kernel.start_s) * 1e6
            axes.barh(y + _GPU, time, 0.36, left=start, color=colour, edgecolor=style.INK, lw=0.5)
        begin += max(host, part["end_s"].max() * 1e6)
    return begin
