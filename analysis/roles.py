"""What a trace says: cycles a chunk against the tensor floor, who waits for whom, and the path that sets the pace.

Cycles are the SM's clock. A window of chunks is given by its first chunk and the one after its last.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pandas as pd

from analysis.present import NONE, Table, absent, microseconds, percent
from kernels import work
from kernels.problem import CASES
from profiling import spans
from profiling.schema import BadTable


@dataclass(frozen=True)
class Trace:
    """One trace: what run.json knows of it (profiling.trace.record), and its rows (profiling.spans)."""

    info: dict
    frame: pd.DataFrame

    @property
    def variant(self) -> str:
        """The rung."""
        return self.info["variant"]

    @property
    def case(self) -> str:
        """The case."""
        return self.info["case"]

    @property
    def floor(self) -> float:
        """Cycles that a chunk takes on the tensor cores at least (kernels.work.chunk_cycles)."""
        return work.chunk_cycles(self.info["dv_tile"])

    @cached_property
    def spans(self) -> pd.DataFrame:
        """The rows of spans, with who ended a wait: released_by, a role, and released, the clock of its arrival.

        Of the arrivals at a wait's barrier that are about the same chunk, the last one ends it. There is none where a
        barrier is arrived at without a marker, or before the loop.

        Raises:
            BadTable: a wait ends before that arrival, so a marker names the wrong chunk.
        """
        named = self.frame.assign(barrier=self.frame["span"].str.partition(" ")[2])
        arrivals = named[named["kind"] == "arrive"].sort_values("start", kind="stable")
        last = arrivals.drop_duplicates(["barrier", "about"], keep="last")[["barrier", "about", "role", "start"]]
        last = last.rename(columns={"role": "released_by", "start": "released"}).assign(kind="wait")
        joined = named[named["kind"] != "arrive"].merge(last, "left", ["kind", "barrier", "about"])
        early = joined[joined["released"] > joined["start"] + joined["cycles"]]
        if not early.empty:
            row = early.iloc[0]
            raise BadTable(
                f"the trace of {self.variant} on {self.case}: a wait that ends after the arrival it waits for was "
                f"expected, found {row['span']} of {row['role']} in chunk {row['chunk']}, which ends before "
                f"{row['released_by']} arrives for chunk {row['about']}: correct the `ahead` of one of the two markers"
            )
        return joined

    def window(self, first: int, last: int) -> pd.DataFrame:
        """The spans of chunks `first` to `last - 1`."""
        return self.spans[self.spans["chunk"].between(first, last - 1)]


def read(folder: Path, info: dict, case: str | None = None) -> list[Trace]:
    """The traces of a run, of one case or of all, in the order of its ladder; none where it has none.

    Raises:
        BadTable: a trace that run.json lists is missing or refused by profiling.spans.
    """
    known = [each for each in info.get("trace", []) if case in (None, each["case"])]
    known.sort(key=lambda each: list(info["variants"]).index(each["variant"]))
    return [Trace(each, spans.read(spans.stored(folder, each["variant"], each["case"]))) for each in known]


def most_work(traces: list[Trace]) -> list[Trace]:
    """Those of the traced case with most arithmetic."""
    case = max((trace.case for trace in traces), key=lambda name: work.core(CASES[name]).flops, default=None)
    return [trace for trace in traces if trace.case == case]


def roles(trace: Trace, first: int, last: int) -> pd.DataFrame:
    """A row per role: cycles a chunk, and of these the share of every kind of span.

    Columns: role, cycles, wait, tensor, elementwise, copy. The spans of a role tile its loop, so its cycles are the
    time from one turn of the loop to the next, averaged over the window.
    """
    window = trace.window(first, last)
    total = window.groupby("role", sort=False)["cycles"].sum()
    kinds = window.pivot_table(index="role", columns="kind", values="cycles", aggfunc="sum", fill_value=0, sort=False)
    shares = kinds.reindex(columns=[kind for kind in spans.KINDS if kind != "arrive"], fill_value=0).div(total, axis=0)
    return shares.assign(cycles=total / (last - first)).rename_axis(columns=None).reset_index()


def pace(trace: Trace, first: int, last: int) -> tuple[str, float]:
    """The role that waits least, for which others wait in turn, and its cycles a chunk."""
    least = roles(trace, first, last).set_index("role").sort_values("wait", kind="stable").iloc[0]
    return str(least.name), float(least["cycles"])


def waits(trace: Trace, first: int, last: int) -> pd.DataFrame:
    """A row per role and barrier that it waits at, by share: role, barrier, cycles a chunk, share of the role's time.

    released_by is the role for whose arrival most of that time passed; empty where no marked one ended it.
    """
    window = trace.window(first, last)
    total = window.groupby("role", sort=False)["cycles"].sum()
    window = window[window["kind"] == "wait"].fillna({"released_by": ""})
    by = window.groupby(["role", "barrier", "released_by"], sort=False)["cycles"].sum().reset_index()
    by = by.sort_values("cycles", ascending=False, kind="stable").groupby(["role", "barrier"], sort=False)
    found = by.agg(cycles=("cycles", "sum"), released_by=("released_by", "first")).reset_index()
    found["share"] = found["cycles"] / found["role"].map(total)
    found["cycles"] /= last - first
    found = found.sort_values("share", ascending=False, kind="stable")
    order = {role: i for i, role in enumerate(total.index)}
    return found.sort_values("role", key=lambda names: names.map(order), kind="stable", ignore_index=True)


def path(trace: Trace, first: int, last: int) -> pd.DataFrame:
    """The longest dependent path through the window, in order of time: role, span, chunk, kind, start, cycles.

    It is walked backwards from where the role that waits least (`pace`) begins chunk `last`. What a step depends on is
    the role's own step before it; where that is a wait which another role ended, on that role at its arrival: of the
    wait only what passed after the arrival is on the path. It ends where the role began chunk `first`, so its length
    is the window's. Walking back from the end is how Yang and Miller find critical paths of parallel programs
    ("Critical path analysis for the execution of parallel and distributed programs", ICDCS 1988).
    """
    lead, _ = pace(trace, first, last)
    by_role = {role: part.reset_index(drop=True) for role, part in trace.spans.groupby("role", sort=False)}
    own = trace.window(first, last).query("role == @lead")
    begin, time = int(own["start"].iloc[0]), int((own["start"] + own["cycles"]).iloc[-1])
    role, steps = lead, []
    while time > begin:
        found = by_role[role]
        at = int(found["start"].searchsorted(time)) - 1
        if at < 0:
            break  # this role had not begun
        span = found.iloc[at]
        jumps = pd.notna(span["released"]) and span["start"] < span["released"] < time
        start = max(int(span["released"] if jumps else span["start"]), begin)
        steps.append((role, span["span"], span["chunk"], span["kind"], start, time - start))
        role, time = (span["released_by"] if jumps else role), start
    return pd.DataFrame(steps[::-1], columns=["role", "span", "chunk", "kind", "start", "cycles"])


def steps(trace: Trace, first: int, last: int) -> pd.DataFrame:
    """`path` by role and span, in the order in which they come first: role, span, kind, cycles a chunk."""
    found = path(trace, first, last).groupby(["role", "span", "kind"], sort=False)["cycles"].sum() / (last - first)
    return found.reset_index()


def frame(traces: list[Trace], window: str = spans.WINDOW) -> pd.DataFrame:
    """The steps of every trace's path, one below the other, with variant and case before them."""
    found = [
        steps(trace, *spans.window(window, trace.info["recorded"])).assign(variant=trace.variant, case=trace.case)
        for trace in traces
    ]
    return pd.concat([pd.DataFrame(), *found])


def sentence(trace: Trace, first: int, last: int) -> str:
    """The trace in words: cycles a chunk against the floor, the longest step of the path, what tracing costs."""
    lead, cycles = pace(trace, first, last)
    longest = steps(trace, first, last).sort_values("cycles", kind="stable").iloc[-1]
    info = trace.info
    cost = info["traced_s"] / info["untraced_s"] - 1
    text = (
        f"On {trace.case}, chunks {first} to {last - 1} take CTA 0 of {trace.variant} {cycles:.0f} cycles each; the "
        f"tensor cores would be done with one in {trace.floor:.0f}, {percent(trace.floor / cycles)} of that. The role "
        f"that waits least is {lead}; the longest step of its dependent path is {longest['span']} of "
        f"{longest['role']}, {longest['cycles']:.0f} cycles a chunk. With tracing the call takes "
        f"{microseconds(info['traced_s'])} µs, without it {microseconds(info['untraced_s'])} µs: {cost:+.1%}."
    )
    if info["recorded"] < info["chunks"] - 1:
        held = f"chunks 0 to {info['recorded'] - 1} of {info['chunks']}"
        text += f" The trace holds {held}: those that CTA 0 runs through, as far as its buffer reaches."
    return text


def tables(traces: list[Trace], window: str = spans.WINDOW) -> list[Table]:
    """Of every trace: the roles' time by kind, their waits by barrier, the path; how to record one where none is.

    Raises:
        BadChunks: a trace does not hold the window.
    """
    if not traces:
        return [Table("Inside the kernel", [], [], absent("a trace", "trace"))]
    printed = []
    for trace in traces:
        chunks = spans.window(window, trace.info["recorded"])
        printed += [_roles(trace, *chunks), _waits(trace, *chunks), _path(trace, *chunks)]
    return printed


def _roles(trace: Trace, first: int, last: int) -> Table:
    rows = [
        [row.role, f"{row.cycles:.0f}", *map(percent, (row.wait, row.tensor, row.elementwise, row.copy))]
        for row in roles(trace, first, last).itertuples()
    ]
    return Table(
        title=f"Inside {trace.variant}: what its roles do on {trace.case}",
        head=["Role", "Cycles a chunk", "Waiting", "Tensor", "Elementwise", "Copying"],
        rows=rows,
        note=sentence(trace, first, last),
    )


def _waits(trace: Trace, first: int, last: int) -> Table:
    rows, before = [], None
    for row in waits(trace, first, last).itertuples():
        shown = [row.barrier, row.released_by or NONE, f"{row.cycles:.0f}", percent(row.share)]
        rows.append([row.role if row.role != before else "", *shown])
        before = row.role
    return Table(
        title=f"Inside {trace.variant}: who waits for whom",
        head=["Role", "At", "For", "Cycles a chunk", "Of its time"],
        rows=rows,
        note="For: the role whose arrival ended most of that time. A wait for a copy lasts until the data are there.",
        text_columns=3,
    )


def _path(trace: Trace, first: int, last: int) -> Table:
    found, rows, before = steps(trace, first, last), [], None
    for row in found.itertuples():
        share = percent(row.cycles / found["cycles"].sum())
        rows.append([row.role if row.role != before else "", row.span, f"{row.cycles:.0f}", share])
        before = row.role
    return Table(
        title=f"Inside {trace.variant}: the longest dependent path through a chunk",
        head=["Role", "Step", "Cycles a chunk", "Of the path"],
        rows=rows,
        note="What is on it sets the pace: to be faster, shorten a step. Of a wait, what passed after the arrival.",
        text_columns=2,
        bold=[(int(found["cycles"].argmax()), column) for column in (1, 2)],
    )
