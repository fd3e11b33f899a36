"""One look for every figure: fonts, sizes, a colour per rung, and files that come out the same byte for byte."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

WIDTH = 7.2  # inches: the text width of an A4 page

# By position in the ladder. Each is darker than the one before, so the order survives a black-and-white print
# and every kind of colour blindness; hues alternate so that neighbours differ. A test holds them to this.
COLOURS = ("#d3d6db", "#e9bd4b", "#7db8e2", "#e58a4e", "#3a9f86", "#c04a35", "#3557a5", "#2a1f4a")
INK, FAINT = "#1c1c1c", "#6b6b6b"

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
    "figure.dpi": 150,
    "savefig.dpi": 150,
    "svg.hashsalt": "gdn",  # the ids inside an SVG would be random otherwise
}


def look() -> AbstractContextManager:
    """The context in which figures are drawn and saved."""
    return matplotlib.rc_context(_RC)


def colour(position: int) -> str:
    """The colour of the rung at this position of the ladder; peers beyond the last colour share it."""
    return COLOURS[min(position, len(COLOURS) - 1)]


def save(figure: Figure, folder: Path, stem: str) -> list[Path]:
    """Write stem.svg, stem.pdf and stem.png without a date, and return their paths."""
    metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": {}}
    paths = [folder / f"{stem}.{kind}" for kind in metadata]
    with look():
        for path, entries in zip(paths, metadata.values(), strict=True):
            figure.savefig(path, metadata=entries)
    return paths
