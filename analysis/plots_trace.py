"""The figure of a trace: a lane per role, its spans coloured by kind, the dependent path under them."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.textpath import TextPath

from analysis import roles, style
from analysis.present import absent
from analysis.roles import Trace
from profiling import spans

# Print apart in black and white too; a wait is the lack of work, so it is pale.
KINDS = {"wait": "#eceae4", "tensor": "#6aa6d8", "elementwise": "#e9bd4b", "copy": "#b5cc8e"}
_LANE = 0.46  # inches: a lane, high enough for an upright name
_FLOOR = 0.14  # inches: the line of the tensor floor above a variant's lanes
_BESIDE = 0.75  # inches beside the axes
_SIZE = 5  # points, of names in spans
_PATH = "#c04a35"


def figure(traces: list[Trace], window: str = spans.WINDOW) -> Figure:
    """Two traces, or one, from the first chunk of `window` on, for as long as the slowest of them needs for a chunk.

    Both are on one axis of cycles. Underlined is the dependent path (analysis.roles.path), whose jumps from role to
    role are its vertical lines.

    Raises:
        BadChunks: a trace does not hold the window.
    """
    if not traces:
        return style.message(absent("a trace", "trace"))
    chunks = [spans.window(window, trace.info["recorded"]) for trace in traces]
    paces = [roles.pace(trace, *each) for trace, each in zip(traces, chunks, strict=True)]
    shown = max(cycles for _, cycles in paces)
    heights = [_FLOOR + _LANE * trace.frame["role"].nunique() for trace in traces]
    with style.look():
        drawn = style.headed(1.35 + sum(heights) + 0.3 * len(traces), _title(traces, paces))
        panels = drawn.subplots(len(traces), sharex=True, squeeze=False, height_ratios=heights)[:, 0]
        for axes, trace, each, (lead, _) in zip(panels, traces, chunks, paces, strict=True):
            axes.set_xlim(0, shown)
            _lanes(axes, trace, each, lead)
        axes.set_xlabel(f"SM clock cycles since chunk {chunks[0][0]} began")
        handles = [Patch(facecolor=colour, edgecolor=style.INK, lw=0.3, label=kind) for kind, colour in KINDS.items()]
        handles += [Patch(facecolor=_PATH, label="dependent path"), Patch(facecolor=style.INK, label="tensor floor")]
        drawn.legend(handles=handles, loc="outside lower left", ncols=6, frameon=False, fontsize=6.5, handlelength=1.2)
    return drawn


def _title(traces: list[Trace], paces: list[tuple[str, float]]) -> str:
    """What the figure shows, in one sentence."""
    said = [f"{trace.variant} {cycles:.0f} cycles" for trace, (_, cycles) in zip(traces, paces, strict=True)]
    floors = " and ".join(dict.fromkeys(f"{trace.floor:.0f}" for trace in traces))
    return f"On {traces[0].case} a chunk takes {' and '.join(said)}; the tensor cores would be done in {floors}"


def _lanes(axes: Axes, trace: Trace, chunks: tuple[int, int], lead: str) -> None:
    """Draw a variant: the floor on top, a lane per role, the path."""
    names = list(dict.fromkeys(trace.frame["role"]))
    origin = int(trace.window(*chunks).query("role == @lead")["start"].iloc[0])
    end = axes.get_xlim()[1]
    found = trace.spans
    found = found[(found["start"] < origin + end) & (found["start"] + found["cycles"] > origin)]
    for row in found.itertuples():
        left, right = max(row.start - origin, 0), min(row.start + row.cycles - origin, end)
        y = names.index(row.role)
        axes.barh(y, right - left, 0.8, left=left, color=KINDS[row.kind], edgecolor=style.INK, lw=0.25)
        _name(axes, row, left, right, y)
    for start in found[(found["role"] == lead)].groupby("chunk")["start"].min() - origin:
        if 0 <= start < end:
            axes.barh(-0.68, min(trace.floor, end - start), 0.16, left=start, color=style.INK)
            axes.plot([start, start], [-0.8, len(names) - 0.5], color=style.FAINT, lw=0.5, ls=":", zorder=0)
    for one, other in _path(trace, chunks, origin, end):
        axes.plot([one[0], other[0]], [names.index(one[1]) + 0.42, names.index(other[1]) + 0.42], color=_PATH, lw=1.3)
    axes.set_ylim(len(names) - 0.45, -0.55 - _FLOOR / _LANE)
    axes.set_yticks(range(len(names)), names)
    axes.set_title(f"{trace.variant}, CTA 0", fontsize=7.5)


def _name(axes: Axes, row, left: float, right: float, y: int) -> None:
    """Write a span's name into it: in one line or more, upright where it is narrow, not at all where it fits no way."""
    name = row.span if row.span.startswith("drain") else row.span.partition(" ")[2]
    wide = (right - left) / axes.get_xlim()[1] * (style.WIDTH - _BESIDE) * 72 - 2
    high = 0.8 * _LANE * 72 - 3
    for rotation, (room, across) in ((0, (wide, high)), (90, (high, wide))):
        for text in (name, name.replace(" ", "\n", 1), name.replace(" ", "\n")):
            lines = text.split("\n")
            length = max(TextPath((0, 0), line, size=_SIZE).get_extents().width for line in lines)
            if length <= room and 1.2 * _SIZE * len(lines) <= across:
                how = {"rotation": rotation, "ha": "center", "va": "center", "linespacing": 1.0}
                axes.text((left + right) / 2, y, text, fontsize=_SIZE, **how)
                return


def _path(
    trace: Trace, chunks: tuple[int, int], origin: int, end: float
) -> Iterator[tuple[tuple[float, str], tuple[float, str]]]:
    """The lines of the path: from (cycles, role) to (cycles, role)."""
    before: pd.Series | None = None
    for _, step in roles.path(trace, *chunks).iterrows():
        left, right = step["start"] - origin, min(step["start"] + step["cycles"] - origin, end)
        if left >= end:
            return
        if before is not None and before["role"] != step["role"]:
            yield (left, before["role"]), (left, step["role"])
        yield (left, step["role"]), (right, step["role"])
        before = step
