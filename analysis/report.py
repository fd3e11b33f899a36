"""Turns a run into a report: tables, figure, executed notebook, one PDF, and README.md's results.

    python -m analysis.report [--run FOLDER] [--out build/report]

All of it is made in a temporary folder first and moved into place at the end, README.md last, so a failure
leaves what was there. The same run gives the same files, byte for byte, with one set of package versions.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path

import pandas as pd
import typst

from analysis import notebooks, plots, present, style, tables
from analysis.load import DEFAULT, Run, load
from kernels.errors import UserError, command
from kernels.problem import SUITES
from profiling.run import ROOT

README = ROOT / "README.md"
BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
NOTEBOOK = notebooks.FOLDER / "1_speedup.ipynb"
TEMPLATE = Path(__file__).with_name("report.typ")


class BadReadme(UserError):
    """README.md has no place for the results."""


def results(run: Run) -> str:
    """What README.md quotes, in Markdown: the result in one sentence, both ladder tables, their origin."""
    printed = present.markdown(present.rungs(run), present.ladder(run))
    return f"{present.headline(run)}\n\n{printed}\n\n{present.origin(run)}\n"


def with_results(readme: str, block: str) -> str:
    """The README's text with `block` between the markers.

    Raises:
        BadReadme: there is not exactly one pair of markers, in order.
    """
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end or readme.count(BEGIN) + readme.count(END) != 2:
        raise BadReadme(
            f"{README}: one line {BEGIN} and after it one line {END} were expected, found {readme.count(BEGIN)} and "
            f"{readme.count(END)}, or the other way round: put them where the results belong"
        )
    return f"{before}{BEGIN}\n\n{block}\n{END}{after}"


def ladder_csv(run: Run) -> str:
    """The frames of analysis.tables.ladder and geomean as one CSV; the mean's rows have the case "geomean"."""
    ladder = tables.ladder(run)
    return pd.concat([ladder, tables.geomean(ladder)]).to_csv(index=False, float_format="%.6g")


def write_pdf(run: Run, figure: Path, path: Path) -> None:
    """Lay the report out with Typst; `figure` is the ladder figure as SVG."""
    data = {
        "title": f"Gated DeltaNet prefill on {run.info['gpu']['name']}",
        "headline": present.headline(run),
        "rungs": _for_typst(present.rungs(run), [0, 1, 0, 0, 0, 0]),
        "figure": figure.name,
        "ladder": _for_typst(present.ladder(run)),
        "cases": _for_typst(present.cases(run)),
        "counters": [_for_typst(table, [0, 0, 1] + [0] * 9, size=7) for table in present.counters(run)],
        "timeline": _for_typst(present.timeline(run)),
        "environment": _for_typst(present.environment(run), [0, 1]),
        "commands": commands(run),
    }
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "data.json").write_text(json.dumps(data), encoding="utf-8")
        for source in (TEMPLATE, figure):
            shutil.copy(source, root)
        typst.compile(root / TEMPLATE.name, output=path, root=root, ignore_system_fonts=True)


def commands(run: Run) -> list[tuple[str, str]]:
    """The commands behind such a report, and what each does."""
    suites = [name for name, cases in SUITES.items() if [case.name for case in cases] == run.cases]
    chosen = f"VARIANT={','.join(run.variants)} CASE={','.join(suites or run.cases)}"
    return [
        (f"make bench {chosen}", "checks, then times; on the GPU, like the next three"),
        (f"make ncu {chosen}", "Nsight Compute's counters"),
        (f"make nsys {chosen}", "Nsight Systems' timeline"),
        ("make record", "all three, as the recorded run that the repository carries"),
        ("make report RUN=<folder>", "writes this report of a run; needs no GPU"),
    ]


def write(run: Run, out: Path) -> list[Path]:
    """Write every file of the report into `out` and return their paths; nothing is written where a step fails.

    Raises:
        BadRun: the run holds no benchmark that can be compared.
        NotebookFailed: a cell of the notebook raised.
    """
    out.mkdir(parents=True, exist_ok=True)
    # Beside the files it replaces, so that moving them is a rename.
    with tempfile.TemporaryDirectory(dir=out, prefix=".") as folder:
        stage = Path(folder)
        printed = (present.rungs(run), present.ladder(run))
        (stage / "ladder.md").write_text(results(run), encoding="utf-8")
        (stage / "ladder.csv").write_text(ladder_csv(run), encoding="utf-8")
        (stage / "ladder.tex").write_text(present.latex(*printed), encoding="utf-8")
        svg, *_ = style.save(plots.ladder_figure(run), stage, "ladder_figure")
        write_pdf(run, svg, stage / "report.pdf")
        notebooks.execute(NOTEBOOK, run.folder, stage)
        return [path.replace(out / path.name) for path in sorted(stage.iterdir())]


@command
def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Turn a run into tables, a figure, a notebook page and a PDF.")
    parser.add_argument("--run", type=Path, default=DEFAULT, help="a run folder; the recorded H200 run if left out")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "report")
    options = parser.parse_args()
    run = load(options.run)
    quoted = run.folder.resolve() == DEFAULT.resolve()  # README.md quotes the recorded run and no other
    readme = with_results(README.read_text(encoding="utf-8"), results(run)) if quoted else None
    paths = write(run, options.out)
    if quoted:
        draft = README.with_suffix(".md.new")
        draft.write_text(readme, encoding="utf-8")
        draft.replace(README)
        paths.append(README)
    print(results(run))
    print("\n".join(map(str, paths)))


def _for_typst(table: present.Table, widths: list[int] | None = None, size: float = 8) -> dict:
    """A table as the template takes it; `widths` are shares of the line, 0 for as wide as the content."""
    return {**asdict(table), "blocks": table.blocks, "widths": widths or [0] * len(table.head), "size": size}


if __name__ == "__main__":
    main()
