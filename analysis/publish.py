"""Writes what analysis.report and analysis.compare have to say: tables, figures and a PDF, all of them or none."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import pandas as pd
import typst
from matplotlib.figure import Figure

from analysis import present, style

LAYOUT = Path(__file__).with_name("layout.typ")


@dataclass(frozen=True)
class Part:
    """Tables that belong together: the numbers in base units, and what is printed of them."""

    frame: pd.DataFrame
    printed: list[present.Table]


def staged(out: Path, write: Callable[[Path], None]) -> list[Path]:
    """Let `write` fill a folder beside `out`'s files, then move each file into its place; return their paths."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out, prefix=".") as folder:
        stage = Path(folder)
        write(stage)
        moved = []
        for path in sorted(path for path in stage.rglob("*") if path.is_file()):
            target = out / path.relative_to(stage)
            target.parent.mkdir(exist_ok=True)
            moved.append(path.replace(target))
        return moved


def write_pdf(template: Path, content: Mapping, figures: Mapping[str, Path], path: Path) -> None:
    """Lay a report out with Typst: `content` and the SVGs `figures`, by the names that the template has for them."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        data = {**content, "figures": {name: figure.name for name, figure in figures.items()}}
        (root / "data.json").write_text(json.dumps(data), encoding="utf-8")
        for source in (LAYOUT, template, *figures.values()):
            shutil.copy(source, root)
        typst.compile(root / template.name, output=path, root=root, ignore_system_fonts=True)


def write_tables(found: Mapping[str, Part], folder: Path) -> None:
    """Each part as name.md and name.tex, as it is printed, and name.csv, its numbers in base units; none if empty."""
    folder.mkdir()
    for name, part in found.items():
        if part.frame.empty:
            continue
        (folder / f"{name}.md").write_text(present.markdown(*part.printed) + "\n", encoding="utf-8")
        (folder / f"{name}.tex").write_text(present.latex(*part.printed), encoding="utf-8")
        part.frame.to_csv(folder / f"{name}.csv", index=False, float_format="%.6g")


def write_figures(found: Mapping[str, Figure], folder: Path) -> dict[str, Path]:
    """Each figure as SVG, PDF and PNG; the paths of the SVGs by name."""
    folder.mkdir()
    return {name: style.save(figure, folder, name)[0] for name, figure in found.items()}


def for_typst(table: present.Table, widths: list[int] | None = None, size: float = 8) -> dict:
    """A table as the template takes it; `widths` are shares of the line, 0 for as wide as the content."""
    return {**asdict(table), "blocks": table.blocks, "widths": widths or [0] * len(table.head), "size": size}
