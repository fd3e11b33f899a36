"""The last rung beside the public libraries: how fast, how exact, how frugal and how soon each of them is.

Core is compared with core and full with full, never one with the other. The best library is the fastest one on a case;
the token loop is no library and stands beside them for scale. What a full forward does before its core is shown by
phases, of those that can be taken apart.
"""

from __future__ import annotations

import math

import pandas as pd

from analysis import tables
from analysis.load import Run
from analysis.present import (
    NONE,
    Table,
    count,
    digits,
    microseconds,
    times,
    with_spread,
)
from kernels import work
from kernels.problem import CASES, SUITES
from profiling import schema

NO_LIBRARY = "token_loop"
PARTS = ("cumsum", "A", "core", "full")  # the phases of those that can be taken apart, as they run


def ours(run: Run) -> str:
    """The rung that stands beside the libraries: the last one."""
    return run.variants[-1]


def phases(run: Run) -> list[str]:
    """The phases in which the rung and a library were timed; none in a run without libraries."""
    found = []
    for phase in work.WORK:
        timed = set(run.rows("bench", phase)["variant"])
        if ours(run) in timed and timed & set(run.peers) - {NO_LIBRARY}:
            found.append(phase)
    return found


def measured(run: Run, phase: str) -> pd.DataFrame:
    """One row per case and implementation, the rung first, then the libraries; empty where none was timed.

    Columns:
        time_s, spread: median of the graph clock, and its spread
        eager_s: median of the eager clock
        light_share: speed-of-light time of this phase at this run's measured ceilings, over time_s
        over_best: time_s over that of the best library on this case
        error_output, error_final_state: relative L2 error against the FP64 recurrence
    """
    rows = []
    for case, by_name in _samples(run, phase).items():
        floor = work.speed_of_light(work.WORK[phase](CASES[case]), run.ceilings)
        best = _best(run, by_name)
        for name, metrics in by_name.items():
            row = {"case": case, "variant": name, **tables.summary(metrics, floor)}
            row["over_best"] = row["time_s"] / by_name[best]["latency_graph"].median() if best else math.nan
            rows.append(row)
    columns = ["case", "variant", *tables.SUMMARY[:4], "over_best", *tables.SUMMARY[4:]]
    return tables.in_order(run, pd.DataFrame(rows, columns=columns), columns[:2])


def against(run: Run, phase: str) -> pd.DataFrame:
    """One row per case that the rung and a library ran in this phase.

    Columns: time_s of the rung; best, the best library, and best_s; ratio, how many times as fast the rung is, and its
    spread round by round.
    """
    rows, rung = [], ours(run)
    for case, by_name in _samples(run, phase).items():
        best = _best(run, by_name)
        if rung not in by_name or best is None:
            continue
        mine, theirs = by_name[rung]["latency_graph"], by_name[best]["latency_graph"]
        ratio, spread = tables.ratio(theirs, mine)
        rows.append((case, mine.median(), best, theirs.median(), ratio, spread))
    frame = pd.DataFrame(rows, columns=["case", "time_s", "best", "best_s", "ratio", "spread"])
    return tables.in_order(run, frame, ["case"])


def parts(run: Run) -> pd.DataFrame:
    """One row per case, implementation and phase of PARTS, of those whose phases were timed; empty in earlier runs.

    Columns: time_s, median of the graph clock, and its spread.
    """
    timed = set(run.rows("bench", "A")["variant"])
    names = [name for name in (ours(run), *run.peers) if name in timed]
    rows = [
        (case, name, phase, metrics["latency_graph"].median(), tables.spread(metrics["latency_graph"]))
        for phase in PARTS
        for case, by_name in tables.samples(run, phase, names).items()
        for name, metrics in by_name.items()
    ]
    columns = ["case", "variant", "phase"]
    return tables.in_order(run, pd.DataFrame(rows, columns=[*columns, "time_s", "spread"]), columns)


def memory(run: Run) -> pd.DataFrame:
    """One row per case and implementation whose full forward's memory was measured; empty in earlier runs.

    Columns: peak_bytes, at the peak beyond inputs and outputs; intermediates_bytes, those of A and g_cumsum.
    """
    bench = run.rows("bench", "full")
    frame = bench.loc[bench["metric"] == "peak_memory", ["case", "variant", "value"]]
    frame = frame.rename(columns={"value": "peak_bytes"})
    frame["intermediates_bytes"] = [work.intermediates(CASES[case]) for case in frame["case"]]
    return tables.in_order(run, frame, ["case", "variant"])


def cold_starts(run: Run) -> pd.DataFrame:
    """One row per implementation and case: cold_start and cached_start in seconds, and kernels_compiled; empty if not
    measured, and of an older run without cached_start."""
    bench = run.rows("bench", "full")
    cold = bench[bench["metric"].isin(schema.COLD_METRICS)]
    wide = cold.pivot(index=["variant", "case"], columns="metric", values="value").reset_index()
    return tables.in_order(run, wide.reindex(columns=["variant", "case", *schema.COLD_METRICS]), ["case", "variant"])


def headline(run: Run, phase: str) -> str:
    """How the rung stands against the best library per case, in one sentence."""
    frame, rung = against(run, phase), ours(run)
    ahead = int((frame["ratio"] > 1 + frame["spread"]).sum())
    means = [f"{times(tables.mean(part['ratio']))} as fast over {suite}" for suite, part in _by_suite(frame)]
    listed = " and ".join(", ".join(means).rsplit(", ", 1))
    return (
        f"{phase.capitalize()}: {rung} is ahead of the best library on {ahead} of {count(len(frame), 'case')}, "
        f"and {listed} (geometric mean)."
    )


def standing(run: Run) -> list[Table]:
    """The rung against the best library on each case, losses included: a table per phase."""
    return [_standing(run, phase) for phase in phases(run)]


def _standing(run: Run, phase: str) -> Table:
    rung, rows, bold = ours(run), [], []
    for suite, part in _by_suite(against(run, phase)):
        for row in part.itertuples():
            if row.ratio > 1 + row.spread:
                bold.append((len(rows), 4))
            best = [row.best, microseconds(row.best_s)]
            rows.append([row.case, microseconds(row.time_s), *best, with_spread(times(row.ratio), row.spread)])
        rows.append([f"geometric mean, {suite}", *[NONE] * 3, times(tables.mean(part["ratio"]))])
    return Table(
        title=f"{phase.capitalize()}: {rung} against the best library",
        head=["Case", f"{rung}, µs", "Best library", "its µs", f"{rung} is"],
        rows=rows,
        note=f"Graph clock. Below 1× the library is faster; in bold where {rung} is, by more than the spread."
        + "".join(
            f" Not timed: {name} on {case}, {reason.split(':')[0]}." for name, case, reason in _failed(run, phase)
        ),
        bold=bold,
    )


def _failed(run: Run, phase: str) -> list[tuple[str, str, str]]:
    """Libraries that were not timed on a case: name, case, reason."""
    skipped = run.skipped_in(phase).items()
    return [(name, case, why) for (name, case), why in skipped if name in run.peers and name != NO_LIBRARY]


def everybody(run: Run) -> list[Table]:
    """Every implementation on every case: a table per phase, the fastest in bold."""
    return [_everybody(run, phase) for phase in phases(run)]


def _everybody(run: Run, phase: str) -> Table:
    frame = measured(run, phase)
    wide = frame.pivot(index="case", columns="variant", values="time_s")
    names = [name for name in (ours(run), *run.peers) if name in wide]
    rows, bold = [], []
    for case in frame["case"].unique():
        fastest = wide.loc[case].idxmin()
        bold.append((len(rows), 1 + names.index(fastest)))
        rows.append([case, *(microseconds(wide.loc[case, name]) for name in names)])
    left_out = [f" {name}: {reason}." for name, reason in run.info.get("missing", {}).items()]
    failed = [f" {name} on {case}: {reason}." for name, case, reason in _failed(run, phase)]
    return Table(
        title=f"{phase.capitalize()}, µs",
        head=["Case", *names],
        rows=rows,
        note="Graph clock, all in one process, interleaved round by round." + "".join([*left_out, *failed]),
        bold=bold,
    )


def parts_table(run: Run) -> Table | None:
    """The phases of a full forward, geometric means over the cases of a suite; None where they were not timed."""
    frame, rows = parts(run), []
    entries = len(frame.drop_duplicates(["variant", "phase"]))
    for suite, part in _by_suite(frame):
        ran = part.groupby("case").size()
        shared = part[part["case"].isin(ran.index[ran == entries])]
        if shared.empty:
            continue
        title = f"{suite}, {count(shared['case'].nunique(), 'case')}"
        means = shared.groupby(["variant", "phase"], sort=False)["time_s"].agg(tables.mean)
        for name in shared["variant"].unique():
            cells = [microseconds(means.get((name, phase), math.nan)) for phase in PARTS]
            rows.append([title, name, *cells])
            title = ""
    if not rows:
        return None
    return Table(
        title="Where the time of the full forward goes",
        head=["Geometric mean over", "Name", *(f"{phase}, µs" for phase in PARTS)],
        rows=rows,
        note="Graph clock, over cases that all of these run. Phases are timed one by one, so they need not add up. "
        f"{ours(run)} sums the gates in the kernel that makes A: its A includes the cumsum.",
        text_columns=2,
    )


def memory_table(run: Run) -> Table | None:
    """What a full forward takes at its peak; None where it was not measured."""
    frame = memory(run)
    if frame.empty:
        return None
    wide = frame.pivot(index="case", columns="variant", values="peak_bytes")
    bound = frame.groupby("case")["intermediates_bytes"].first()
    names = [name for name in (ours(run), *run.peers) if name in wide]
    return Table(
        title="Peak memory beyond inputs and outputs, MiB",
        head=["Case", *names, "A and g_cumsum"],
        rows=[
            [case, *(_mebibytes(wide.loc[case, name]) for name in names), _mebibytes(bound[case])]
            for case in frame["case"].unique()
        ],
        note="Of one full forward after the first. On the right what A and g_cumsum take, which a full forward in two "
        "steps keeps between them.",
    )


def accuracy(run: Run) -> Table:
    """The largest relative L2 error of each implementation over the cases that it ran."""
    found = pd.concat([measured(run, phase).assign(phase=phase) for phase in phases(run)])
    worst = found.groupby(["phase", "variant"])[["error_output", "error_final_state"]].max()
    rows = []
    for name in [name for name in (ours(run), *run.peers) if name in set(found["variant"])]:
        errors = [worst.loc[key] if (key := (phase, name)) in worst.index else None for phase in phases(run)]
        cells = [NONE if e is None else f"{e[which]:.1e}" for e in errors for which in worst.columns]
        rows.append([name, _label(run, name), *cells])
    head = [f"{phase}: {which}" for phase in phases(run) for which in ("output", "state")]
    return Table(
        title="Largest relative L2 error against the FP64 recurrence",
        head=["Name", "Implementation", *head],
        rows=rows,
        note="Over all cases. Nothing is timed that is off by more than 5.0e-03.",
        text_columns=2,
    )


def cold(run: Run) -> Table | None:
    """How long the first result takes on a fresh machine; None where it was not measured."""
    frame = cold_starts(run)
    if frame.empty:
        return None
    return Table(
        title=f"Cold start: {', '.join(frame['case'].unique())}",
        head=["Name", "Implementation", "First call, s", "With a filled cache, s", "Kernels compiled"],
        rows=[
            [
                row.variant,
                _label(run, row.variant),
                digits(row.cold_start, 3),
                NONE if math.isnan(row.cached_start) else digits(row.cached_start, 3),
                f"{row.kernels_compiled:.0f}",
            ]
            for row in frame.itertuples()
        ],
        note=f"Measured as {run.info['protocol']['cold start']}. FLA compiles candidates and keeps the fastest.",
        text_columns=2,
    )


def printed(run: Run) -> list[Table]:
    """All tables on the libraries; none where no library was timed."""
    if not phases(run):
        return []
    found = [*standing(run), *everybody(run), accuracy(run), parts_table(run), memory_table(run), cold(run)]
    return [table for table in found if table is not None]


def _samples(run: Run, phase: str) -> dict[str, dict[str, dict[str, pd.Series]]]:
    """Samples of the rung and the libraries, see analysis.tables.samples."""
    return tables.samples(run, phase, [ours(run), *run.peers])


def _best(run: Run, by_name: dict[str, dict[str, pd.Series]]) -> str | None:
    """The fastest library of a case."""
    timed = {name: metrics["latency_graph"].median() for name, metrics in by_name.items()}
    return min((name for name in run.peers if name in timed and name != NO_LIBRARY), key=timed.get, default=None)


def _by_suite(frame: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """The rows of each suite that has any, under its name."""
    parts = [(name, frame[frame["case"].isin([case.name for case in cases])]) for name, cases in SUITES.items()]
    return [(name, part) for name, part in parts if not part.empty]


def _mebibytes(value: float) -> str:
    return NONE if math.isnan(value) else digits(value / 2**20, 3)


def _label(run: Run, name: str) -> str:
    return run.peers.get(name) or run.info["variants"][name]
