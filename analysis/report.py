"""Turns a run into a report: one PDF, its tables and figures as files, and README.md's results.

    python -m analysis.report [--run FOLDER] [--out build/report]

All of it is made in a temporary folder first and moved into place at the end, README.md last, so a failure
leaves what was there. The same run gives the same files, byte for byte, with one set of package versions.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import pandas as pd
import typst
from matplotlib.figure import Figure

from analysis import dag, diff, plots, plots_ncu, plots_nsys, present, prose, roofline, style, tables
from analysis.load import DEFAULT, Run, load
from kernels.errors import UserError, command
from kernels.problem import SUITES
from profiling.run import ROOT

README = ROOT / "README.md"
BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
LAYOUT = Path(__file__).with_name("layout.typ")
TEMPLATE = Path(__file__).with_name("report.typ")


@dataclass(frozen=True)
class Part:
    """Tables that belong together: the numbers in base units, and what is printed of them."""

    frame: pd.DataFrame
    printed: list[present.Table]


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


def parts(run: Run) -> dict[str, Part]:
    """Every table of the report by the name of its file.

    Raises:
        BadRun: the run holds no benchmark that can be compared.
        BadProse: see analysis.prose.attempts.
    """
    ladder, case = tables.ladder(run), tables.most_work(run)
    counters = [tables.counters(run, name).assign(case=name) for name in tables.profiled_cases(run)]
    tried = prose.attempts(prose.ATTEMPTS)
    return {
        "rungs": Part(tables.geomean(ladder), [present.rungs(run)]),
        "ladder": Part(ladder, [present.ladder(run)]),
        "cases": Part(tables.cases(run), [present.cases(run)]),
        "formulations": Part(tables.formulations(run), [present.formulations(run)]),
        "counters": Part(pd.concat([pd.DataFrame(), *counters]), present.counters(run)),
        "changes": Part(diff.changes(run, case), diff.neighbours(run, case)),
        "timeline": Part(tables.timeline(run), [present.timeline(run)]),
        "preprocessing": Part(tables.preprocessing(run), [present.preprocessing(run)]),
        "libraries": Part(tables.libraries(run), present.libraries(run)),
        "attempts": Part(tried, [present.attempts(tried)]),
    }


def figures(run: Run) -> dict[str, Figure]:
    """Every figure of the report by the name of its file; those of a profiler only where it saw the run."""
    found = {"ladder": plots.ladder_figure(run), "steps": plots.steps_figure(run), "dag": dag.figure()}
    if case := tables.most_work(run):
        found |= {
            "roofline": roofline.figure(run),
            "stalls": plots_ncu.stalls_figure(run, case),
            "utilisation": plots_ncu.utilisation_figure(run, case),
            "resources": plots_ncu.resources_figure(run, case),
        }
    if case := tables.shortest(run):
        found |= {"timeline": plots_nsys.timeline_figure(run, case), "shares": plots_nsys.shares_figure(run)}
    return found


def content(run: Run) -> dict:
    """What the PDF says but for its figures, as the template takes it.

    Raises:
        BadRun, BadProse: see `parts` and analysis.prose.
    """
    found = parts(run)
    wide = {"rungs": [0, 1, 0, 0, 0, 0], "formulations": [1, 0, 0, 0, 0], "attempts": [0, 1, 1, 1]}
    one = {name: for_typst(found[name].printed[0], wide.get(name)) for name in (*wide, "ladder", "cases", "timeline")}
    return {
        "title": f"Gated DeltaNet prefill on {run.info['gpu']['name']}",
        "origin": present.origin(run),
        **one,
        "stages": _stages(run, found["changes"].printed),
        "counters": [for_typst(table, [0, 0, 1] + [0] * 9, size=7) for table in found["counters"].printed],
        "peers": [for_typst(table) for table in found["libraries"].printed],
        "environment": for_typst(present.environment(run), [0, 1]),
        "commands": commands(run),
    }


def _stages(run: Run, changes: list[present.Table]) -> list[dict]:
    """A stage per rung that was timed, with what its file, the benchmark, the counters and the user say of it."""
    remarks, case = prose.remarks(prose.REMARKS, run.variants), tables.most_work(run)
    moved = {table.head[4]: for_typst(table, [0, 0, 1, 0, 0, 0], size=7.5) for table in changes}
    return [
        {
            "name": name,
            "label": run.info["variants"][name],
            "docstring": prose.docstring(name),
            "effect": present.effect(run, name),
            "bottleneck": present.bottleneck(run, name, case) if case else "",
            "moved": moved.get(name),
            "remarks": remarks.get(name, []),
        }
        for name in tables.rungs(run)
    ]


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
        BadProse: remarks or attempts can't be read.
    """
    return staged(out, lambda stage: _write(run, stage))


def _write(run: Run, stage: Path) -> None:
    write_tables(parts(run), stage / "tables")
    svgs = write_figures(figures(run), stage / "figures")
    write_pdf(TEMPLATE, content(run), svgs, stage / "report.pdf")


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


@command
def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Turn a run into a PDF, tables and figures.")
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


def for_typst(table: present.Table, widths: list[int] | None = None, size: float = 8) -> dict:
    """A table as the template takes it; `widths` are shares of the line, 0 for as wide as the content."""
    return {**asdict(table), "blocks": table.blocks, "widths": widths or [0] * len(table.head), "size": size}


if __name__ == "__main__":
    main()
