"""The roofline: what each rung computes per byte and per second, under the ceilings of the same run.

After Williams, Waterman and Patterson, "Roofline: an insightful visual performance model", CACM 52(4), 2009: at an
intensity of I FLOP/byte no kernel passes min(arithmetic ceiling, I x memory ceiling). FLOPs, bytes and time of a rung
are Nsight Compute's, so its redundant arithmetic and its cache misses count; the ceilings are the benchmark's.
"""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis import style, tables
from analysis.load import Run
from analysis.present import absent
from kernels.problem import CASES
from kernels.work import Ceilings

_PANELS = 3  # side by side
_NEEDED = ["tensor_flops", "dram_read", "dram_write", "duration"]


def points(run: Run, case: str | None) -> pd.DataFrame:
    """One row per rung that was profiled on this case with all that a roofline needs; empty where none was.

    Columns: variant; flops, of the tensor cores; bytes, through device memory; seconds, of Nsight Compute; intensity
    in FLOP/byte; rate in FLOP/s; roof, the highest rate at this intensity; roof_share, rate over roof.
    """
    found = tables.profiles(run, case).reindex(columns=_NEEDED).dropna()
    frame = pd.DataFrame({"flops": found["tensor_flops"], "bytes": found["dram_read"] + found["dram_write"]})
    frame["seconds"] = found["duration"]
    frame["intensity"], frame["rate"] = frame["flops"] / frame["bytes"], frame["flops"] / frame["seconds"]
    frame["roof"] = roof(frame["intensity"], run.ceilings)
    frame["roof_share"] = frame["rate"] / frame["roof"]
    return frame.rename_axis("variant").reset_index()


def roof(intensity, ceilings: Ceilings):
    """FLOP/s that can be reached at an intensity in FLOP/byte."""
    return np.minimum(ceilings.flops_per_second, intensity * ceilings.bytes_per_second)


def figure(run: Run) -> Figure:
    """A roofline per profiled case, rungs joined in ladder order.

    Raises:
        BadRun: the run has no ceilings.
    """
    found = {case: points(run, case) for case in tables.profiled_cases(run)}
    found = {case: frame for case, frame in found.items() if not frame.empty}
    if not found:
        return style.message(absent("Nsight Compute", "ncu"))
    cases, case = list(found), max(found, key=lambda case: found[case]["flops"].max())
    main = found[case].iloc[-1]
    everything = pd.concat(found.values())
    lines = math.ceil(len(cases) / _PANELS)
    title = (
        f"On {case} {main['variant']} computes {main['rate'] / 1e12:.0f} TFLOP/s, "
        f"{main['roof_share']:.0%} of the roof above it"
    )
    with style.look():
        result = style.headed(0.5 + 2.5 * lines, title)
        grid = result.subplots(lines, _PANELS, sharex=True, sharey=True, squeeze=False).ravel()
        ridge = run.ceilings.flops_per_second / run.ceilings.bytes_per_second
        x = (min(ridge / 5, everything["intensity"].min()) / 3, max(ridge, everything["intensity"].max()) * 12)
        y = (everything["rate"].min() / 2, run.ceilings.flops_per_second * 2.5)
        for axes, case in zip(grid, cases, strict=False):
            axes.set(xscale="log", yscale="log", xlim=x, ylim=y)
            axes.set_title(f"{case}\n{CASES[case].shape}", fontsize=6.5)
            _roofs(axes, run.ceilings)
        for axes in grid[len(cases) :]:
            axes.set_axis_off()
        result.supxlabel(
            "FLOPs of the tensor cores per byte of device memory. %: of the roof above the point", fontsize=7.5
        )
        result.supylabel("FLOP/s", fontsize=7.5)
        result.draw_without_rendering()  # labels are set apart in inches, which needs the axes' final size
        for axes, case in zip(grid, cases, strict=False):
            _points(axes, found[case])
    return result


def _roofs(axes: Axes, ceilings: Ceilings) -> None:
    x = np.geomspace(*axes.get_xlim(), 200)
    axes.plot(x, roof(x, ceilings), color=style.INK, lw=1)
    ridge = ceilings.flops_per_second / ceilings.bytes_per_second
    axes.axvline(ridge, color=style.FAINT, lw=0.5, ls=":")
    left, low = axes.get_xlim()[0] * 1.15, axes.get_ylim()[0] * 1.15
    arithmetic = f"{ceilings.flops_per_second / 1e12:.0f} TFLOP/s"
    axes.text(left, ceilings.flops_per_second * 1.15, arithmetic, fontsize=6, va="bottom")
    memory = f"{ceilings.bytes_per_second / 1e12:.2f} TB/s"
    middle = math.sqrt(left * ridge)
    axes.text(middle / 1.1, roof(middle, ceilings) * 1.1, memory, fontsize=6, ha="right")
    axes.text(ridge * 1.1, low, "ridge", fontsize=6, color=style.FAINT)


def _points(axes: Axes, found: pd.DataFrame) -> None:
    axes.plot(found["intensity"], found["rate"], color=style.FAINT, lw=0.6, zorder=1)
    inches = axes.get_window_extent().height / axes.get_figure(root=True).dpi
    decades = np.diff(np.log10(axes.get_ylim()))[0]
    places = style.apart(list(np.log10(found["rate"])), 0.11 * decades / inches)
    for row, place in zip(found.itertuples(), places, strict=True):
        axes.plot(row.intensity, row.rate, "o", ms=5, mfc=style.colour(row.variant), mec=style.INK, mew=0.5)
        point, text = (row.intensity, row.rate), f"{row.variant} {row.roof_share:.0%}"
        style.leader(axes, point, (row.intensity * 1.6, 10**place), text, gap=3, bbox=style.BLANK)
