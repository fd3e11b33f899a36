"""Turns a run into a report: one PDF, its tables and figures as files, and README.md's results.

    python -m analysis.report [--run FOLDER[,FOLDER]] [--out build/report]

Two folders are compared instead, see analysis.compare. All of it is made in a temporary folder first and moved into
place at the end, README.md last, so a failure leaves what was there. The same run gives the same files, byte for byte,
with one set of package versions.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from analysis import (
    compare,
    dag,
    diff,
    peers,
    plots,
    plots_ncu,
    plots_nsys,
    plots_peers,
    plots_trace,
    present,
    prose,
    publish,
    roles,
    roofline,
    tables,
)
from analysis.load import DEFAULT, Run, load
from kernels.errors import UserError, command
from kernels.problem import SUITES
from profiling.run import ROOT

README = ROOT / "README.md"
BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
TEMPLATE = Path(__file__).with_name("report.typ")
_LIBRARIES = ("standing", "libraries", "phases", "memory", "coldstart")  # the tables on the libraries


class BadReadme(UserError):
    """README.md has no place for the results."""


def results(run: Run) -> str:
    """What README.md quotes, in Markdown: the result in a sentence, the ladder, the libraries, where it comes from."""
    said = [present.headline(run), present.markdown(present.rungs(run))]
    if shown := peers.phases(run):
        said += [" ".join(peers.headline(run, phase) for phase in shown), present.markdown(*peers.standing(run))]
    return "\n\n".join([*said, present.markdown(present.ladder(run)), present.origin(run)]) + "\n"


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


def parts(run: Run) -> dict[str, publish.Part]:
    """Every table of the report by the name of its file.

    Raises:
        BadRun: the run holds no benchmark that can be compared.
        BadProse: see analysis.prose.attempts.
    """
    ladder, case = tables.ladder(run), tables.most_work(run)
    counters = [tables.counters(run, name).assign(case=name) for name in tables.profiled_cases(run)]
    tried = prose.attempts(prose.ATTEMPTS)
    return {
        "rungs": publish.Part(tables.geomean(ladder), [present.rungs(run)]),
        "ladder": publish.Part(ladder, [present.ladder(run)]),
        "cases": publish.Part(tables.cases(run), [present.cases(run)]),
        "formulations": publish.Part(tables.formulations(run), [present.formulations(run)]),
        "counters": publish.Part(pd.concat([pd.DataFrame(), *counters]), present.counters(run)),
        "changes": publish.Part(diff.changes(run, case), diff.neighbours(run, case)),
        "trace": publish.Part(roles.frame(_traced(run)), roles.tables(_traced(run))),
        "timeline": publish.Part(tables.timeline(run), [present.timeline(run)]),
        "preprocessing": publish.Part(tables.preprocessing(run), [present.preprocessing(run)]),
        **_libraries(run),
        "attempts": publish.Part(tried, [present.attempts(tried)]),
    }


def _libraries(run: Run) -> dict[str, publish.Part]:
    """The tables on the libraries, where a run has them."""
    shown = peers.phases(run)
    if not shown:
        return {}
    frames = {
        name: pd.concat([each(run, phase).assign(phase=phase) for phase in shown])
        for name, each in (("standing", peers.against), ("libraries", peers.measured))
    }
    others = {
        "phases": (peers.parts(run), peers.parts_table(run)),
        "memory": (peers.memory(run), peers.memory_table(run)),
        "coldstart": (peers.cold_starts(run), peers.cold(run)),
    }
    return {
        "standing": publish.Part(frames["standing"], peers.standing(run)),
        "libraries": publish.Part(frames["libraries"], [*peers.everybody(run), peers.accuracy(run)]),
        **{name: publish.Part(frame, [table] if table else []) for name, (frame, table) in others.items()},
    }


def figures(run: Run) -> dict[str, Figure]:
    """Every figure of the report by the name of its file; of a profiler or of libraries only where a run has them."""
    found = {"ladder": plots.ladder_figure(run), "steps": plots.steps_figure(run), "dag": dag.figure()}
    if case := tables.most_work(run):
        found |= {
            "roofline": roofline.figure(run),
            "stalls": plots_ncu.stalls_figure(run, case),
            "utilisation": plots_ncu.utilisation_figure(run, case),
            "resources": plots_ncu.resources_figure(run, case),
        }
    if traces := _traced(run):
        found["trace"] = plots_trace.figure(traces)
    if case := tables.shortest(run):
        found |= {"timeline": plots_nsys.timeline_figure(run, case), "shares": plots_nsys.shares_figure(run)}
    if shown := peers.phases(run):
        found |= {f"libraries_{phase}": plots_peers.bars_figure(run, phase) for phase in shown}
        found["heat"] = plots_peers.heat_figure(run)
        if plots_peers.can_scale(run):
            found["scaling"] = plots_peers.scaling_figure(run)
    return found


def content(run: Run, found: Mapping[str, publish.Part]) -> dict:
    """What the PDF says but for its figures, as the template takes it; `found` are the run's `parts`.

    Raises:
        BadProse: see analysis.prose.remarks.
    """
    wide = {"rungs": [0, 1, 0, 0, 0, 0], "formulations": [1, 0, 0, 0, 0], "attempts": [0, 1, 1, 1]}
    one = {name: publish.for_typst(found[name].printed[0], wide.get(name)) for name in (*wide, "ladder", "cases")}
    return {
        "title": f"Gated DeltaNet prefill on {run.info['gpu']['name']}",
        "origin": present.origin(run),
        **one,
        "stages": _stages(run, found["changes"].printed),
        "counters": [publish.for_typst(table, [0, 0, 1] + [0] * 9, size=7) for table in found["counters"].printed],
        "trace": [publish.for_typst(table) for table in found["trace"].printed],
        "timeline": publish.for_typst(found["timeline"].printed[0], size=7),
        "peers": [
            publish.for_typst(table, size=7) for name in _LIBRARIES if name in found for table in found[name].printed
        ],
        "environment": publish.for_typst(present.environment(run), [0, 1]),
        "commands": commands(run),
    }


def _traced(run: Run) -> list[roles.Trace]:
    """The traces of the case with most arithmetic."""
    return roles.most_work(roles.read(run.folder, run.info))


def _stages(run: Run, changes: list[present.Table]) -> list[dict]:
    """A stage per rung that was timed, with what its file, the benchmark, the counters and the user say of it."""
    remarks, case = prose.remarks(prose.REMARKS, run.variants), tables.most_work(run)
    moved = {table.head[4]: publish.for_typst(table, [0, 0, 1, 0, 0, 0], size=7.5) for table in changes}
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


def commands(run: Run) -> list[tuple[str, str]]:
    """The commands behind such a report, and what each does."""
    suites = [name for name, cases in SUITES.items() if [case.name for case in cases] == run.ladder_cases]
    chosen = f"VARIANT={','.join(run.variants)} CASE={','.join(suites or run.ladder_cases)}"
    return [
        (f"make bench {chosen}", "checks, then times; on the GPU, like the next four"),
        (f"make ncu {chosen}", "Nsight Compute's counters"),
        (f"make nsys {chosen}", "Nsight Systems' timeline"),
        ("make peers", "the last rung beside the public libraries, on lab; SUITE=qwen or varlen on the other cases"),
        (f"make trace VARIANT={run.variants[-1]}", "inside the kernel: a timeline of every role"),
        ("make record", "all of it, as the recorded run that the repository carries"),
        ("make report RUN=<folder>", "writes this report of a run; needs no GPU"),
    ]


def write(run: Run, out: Path) -> list[Path]:
    """Write every file of the report into `out` and return their paths; nothing is written where a step fails.

    Raises:
        BadRun: the run holds no benchmark that can be compared.
        BadProse: remarks or attempts can't be read.
    """
    return publish.staged(out, lambda stage: _write(run, stage))


def _write(run: Run, stage: Path) -> None:
    found = parts(run)
    publish.write_tables(found, stage / "tables")
    svgs = publish.write_figures(figures(run), stage / "figures")
    publish.write_pdf(TEMPLATE, content(run, found), svgs, stage / "report.pdf")


@command
def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Turn a run, or two to compare, into a PDF, tables and figures.")
    parser.add_argument("--run", default=str(DEFAULT), help="a run folder, or two with a comma between them")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "report")
    options = parser.parse_args()
    runs = [load(folder) for folder in options.run.split(",")]
    if len(runs) > 1:
        paths = compare.write(runs, options.out)
        print(compare.headline(*runs))
    else:
        paths = _report(runs[0], options.out)
    print("\n".join(map(str, paths)))


def _report(run: Run, out: Path) -> list[Path]:
    """Write a run's report, print its results, and quote them in README.md where it is the recorded run."""
    quoted = run.folder.resolve() == DEFAULT.resolve()
    readme = with_results(README.read_text(encoding="utf-8"), results(run)) if quoted else None
    paths = write(run, out)
    if quoted:
        draft = README.with_suffix(".md.new")
        draft.write_text(readme, encoding="utf-8")
        draft.replace(README)
        paths.append(README)
    print(results(run))
    return paths


if __name__ == "__main__":
    main()
