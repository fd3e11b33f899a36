"""One look for every figure: fonts, sizes, a colour per variant, and files that come out the same byte for byte."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from statistics import fmean

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

WIDTH = 7.2  # inches: the text width of an A4 page

# The rungs. Each is darker than the one before, so the order survives a black-and-white print and every kind of colour
# blindness; hues alternate so that neighbours differ. A test holds them to this.
RUNGS = {
    "naive": "#d3d6db",
    "fused": "#e9bd4b",
    "smem": "#7db8e2",
    "multibuf": "#e58a4e",
    "ws": "#3a9f86",
    "rs": "#c04a35",
    "split": "#3557a5",
}
OTHER = "#2a1f4a"  # a variant of the user's own
# The libraries: a colour each, hatched, and hatched the other way without sequence parallelism.
_LIBRARIES = {"flashqla": "#b9a5d6", "fla": "#b5cc8e", "flashinfer": "#e6a5bd", "token_loop": "#e4e0d4"}
_HATCHES = {"": "////", "_nocp": "...."}
INK, FAINT = "#1c1c1c", "#6b6b6b"
BLANK = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}  # behind a label that a line would cross

_RC = {
    "font.size": 7.5,
    "axes.titlesize": 7.5,
    "axes.titlelocation": "left",
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": FAINT,
    "xtick.major.width": 0.6,
    "ytick.major.size": 0,
    "text.color": INK,
    "hatch.linewidth": 0.4,
    "figure.dpi": 150,
    "savefig.dpi": 150,
    "svg.hashsalt": "gdn",  # the ids inside an SVG would be random otherwise
}


def look() -> AbstractContextManager:
    """The context in which figures are drawn and saved."""
    return matplotlib.rc_context(_RC)


def colour(variant: str) -> str:
    """The colour of a variant, the same in every figure."""
    return RUNGS.get(variant) or _LIBRARIES.get(variant.removesuffix("_nocp"), OTHER)


def fill(variant: str) -> dict:
    """How a bar of this variant is drawn: keywords for matplotlib's bars."""
    library = variant.removesuffix("_nocp")
    hatch = _HATCHES[variant.removeprefix(library)] if library in _LIBRARIES else None
    return {"facecolor": colour(variant), "edgecolor": INK, "lw": 0.4, "hatch": hatch}


def headed(height: float, title: str) -> Figure:
    """An empty figure of the text's width, its message above it. To be called inside `look`."""
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    figure.suptitle(textwrap.fill(title, 90), x=0.01, ha="left", fontsize=9, fontweight="bold")
    return figure


def message(text: str) -> Figure:
    """A figure that says why there is none."""
    with look():
        figure = Figure(figsize=(WIDTH, 0.5))
        figure.add_axes((0, 0, 1, 1)).set_axis_off()  # without axes a notebook shows no figure
        figure.text(0.01, 0.5, textwrap.fill(text, 110), va="center", color=FAINT)
    return figure


def label(axes: Axes, x: float, y: float, text: str, **how) -> None:
    """Write `text` beside the end of a bar, legible where a line passes behind it."""
    axes.annotate(text, (x, y), (2.5, 0), textcoords="offset points", va="center", bbox=BLANK, **how)


def leader(
    axes: Axes, point: tuple[float, float], place: tuple[float, float], text: str, gap: float = 0, **how
) -> None:
    """Write `text` at a place beside a point, with a thin line from there to `gap` points before the point."""
    line = {"arrowstyle": "-", "lw": 0.4, "color": FAINT, "shrinkA": 0, "shrinkB": gap, "relpos": (0, 0.5)}
    axes.annotate(text, point, place, va="center", fontsize=6.5, arrowprops=line, **how)


def apart(wanted: Sequence[float], gap: float) -> list[float]:
    """Places for labels, at least `gap` apart and as near to the wanted ones as that allows (least squares).

    Less i times the gap, the i-th place in order must not fall: an isotonic regression, by pooling neighbours.
    """
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    pools: list[list[float]] = []
    for place, i in enumerate(order):
        pools.append([wanted[i] - place * gap])
        while len(pools) > 1 and fmean(pools[-2]) > fmean(pools[-1]):
            last = pools.pop()
            pools[-1] += last
    level = [fmean(pool) for pool in pools for _ in pool]
    places = {i: level[place] + place * gap for place, i in enumerate(order)}
    return [places[i] for i in range(len(wanted))]


def save(figure: Figure, folder: Path, stem: str) -> list[Path]:
    """Write stem.svg, stem.pdf and stem.png without a date, and return their paths."""
    metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": {}}
    paths = [folder / f"{stem}.{kind}" for kind in metadata]
    with look():
        for path, entries in zip(paths, metadata.values(), strict=True):
            figure.savefig(path, metadata=entries)
    return paths
