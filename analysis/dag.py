"""The chunk DAG: what depends on what in the chunk-wise form, and what of it is a chain from chunk to chunk."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from analysis import style

_CHUNKS = ("c", "c + 1")
_PITCH = 3.0  # from chunk to chunk; a box is 1.3 wide
# By name: where a box's centre lies in its chunk, and the formula in it.
_BOXES = {
    "W": ((0.0, 2.0), "W = A B Γ K"),
    "U": ((1.5, 2.0), "U = A B V"),
    "Vnew": ((0.0, 1.0), "Vnew = U − W S"),
    "S": ((1.5, 1.0), "S = γ S + Kᵀ Vnew"),
    "O": ((0.0, 0.0), "O = Γ Q S + P Vnew"),
    "P": ((1.5, 0.0), "P = Lower(Q Kᵀ)"),
}
_ARROWS = (("W", "Vnew"), ("U", "Vnew"), ("Vnew", "S"), ("Vnew", "O"), ("P", "O"))
_CHAIN = ("Vnew", "S")
_ROWS = {2.0: "ahead:\nneeds no S", 1.0: "the chain,\nfrom S of c − 1", 0.0: "behind"}


def figure() -> Figure:
    """Two chunks side by side; the chain through the state is dark."""
    title = "Only Vnew and S form a chain from chunk to chunk; the rest runs ahead or behind"
    with style.look():
        result = style.headed(2.5, title)
        axes = result.subplots()
        axes.set_axis_off()
        for y, text in _ROWS.items():
            axes.text(-2.0, y, text, va="center", ha="center", color=style.FAINT)
        for i, name in enumerate(_CHUNKS):
            _chunk(axes, i * _PITCH, name)
        end = len(_CHUNKS) * _PITCH
        _arrow(axes, (end - _PITCH + 1.5, 1.0), (end, 1.0), dark=True)
        axes.set_xlim(-2.5, end + 0.1)
        axes.set_ylim(-0.4, 2.75)
    return result


def _chunk(axes: Axes, left: float, name: str) -> None:
    axes.text(left + 0.75, 2.55, f"chunk {name}", ha="center", fontweight="bold")
    centres = {box: (left + x, y) for box, ((x, y), _) in _BOXES.items()}
    before = (left + _BOXES["S"][0][0] - _PITCH, 1.0)
    for target in ("Vnew", "O"):
        _arrow(axes, before, centres[target], dark=target in _CHAIN)
    for source, target in _ARROWS:
        _arrow(axes, centres[source], centres[target], dark={source, target} == set(_CHAIN))
    for box, (_, formula) in _BOXES.items():
        x, y = centres[box]
        chain = box in _CHAIN
        axes.add_patch(
            FancyBboxPatch(
                (x - 0.65, y - 0.2),
                1.3,
                0.4,
                boxstyle="round,pad=0,rounding_size=0.08",
                facecolor=style.INK if chain else "#eef0f3",
                edgecolor=style.INK,
                lw=0.6,
            )
        )
        axes.text(x, y, formula, ha="center", va="center", fontsize=7, color="white" if chain else style.INK)


def _arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], dark: bool) -> None:
    """From box to box; boxes are drawn over its ends."""
    (x0, y0), (x1, y1) = start, end
    # The head ends where the line meets the box: at its side, or at its top or bottom.
    dx, dy = x1 - x0, y1 - y0
    inside = min(0.65 / abs(dx) if dx else 1, 0.2 / abs(dy) if dy else 1)
    head = (x1 - dx * inside, y1 - dy * inside)
    axes.annotate(
        "",
        head,
        start,
        arrowprops={
            "arrowstyle": "-|>,head_width=0.18,head_length=0.35",
            "lw": 1.6 if dark else 0.6,
            "color": style.INK if dark else style.FAINT,
            "shrinkA": 0,
            "shrinkB": 0,
        },
        zorder=0,
    )
