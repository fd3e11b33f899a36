"""Explains the traces of a run: tables, a figure, and the events for Perfetto.

    python -m analysis.trace [--run FOLDER] [--variant multibuf,ws] [--case CASE] [--chunks 16:20] [--out FOLDER]

Needs no GPU. Writes trace.svg, .pdf and .png, and for each variant a <variant>-<case>.json that https://ui.perfetto.dev
opens.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pandas as pd

from analysis import plots_trace, style
from analysis.load import DEFAULT
from analysis.present import markdown
from analysis.roles import Trace, most_work, read, tables
from kernels.errors import UserError, command
from profiling import spans
from profiling.run import ROOT, read_info


class NoTrace(UserError):
    """A run without the trace that was asked for."""


def chrome(trace: Trace, first: int, last: int) -> dict:
    """The window as Chrome's trace events: a track per role, an arrow from each arrival to the wait that it ended.

    Times are in µs there: 1000 cycles are 1 µs. The format is Google's "Trace Event Format".
    """
    window = trace.window(first, last)
    tracks = {role: i for i, role in enumerate(dict.fromkeys(trace.spans["role"]))}
    events = [
        {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": f"{trace.variant} on {trace.case}, CTA 0"}},
        *({"ph": "M", "name": "thread_name", "pid": 0, "tid": i, "args": {"name": name}} for name, i in tracks.items()),
    ]
    for i, row in enumerate(window.itertuples()):
        where = {"pid": 0, "tid": tracks[row.role]}
        args = {"chunk": row.chunk, "about": row.about, "cycles": row.cycles}
        times = {"ts": row.start / 1e3, "dur": row.cycles / 1e3}
        events.append({"ph": "X", "name": row.span, "cat": row.kind, **times, **where, "args": args})
        if pd.notna(row.released) and row.released > row.start:
            arrow = {"name": row.barrier, "cat": "arrive", "id": i, "pid": 0}
            events.append({"ph": "s", "ts": row.released / 1e3, "tid": tracks[row.released_by], **arrow})
            end = (row.start + row.cycles - 1) / 1e3  # inside the wait, to which the arrow is bound
            events.append({"ph": "f", "bp": "e", "ts": end, "tid": tracks[row.role], **arrow})
    return {"displayTimeUnit": "ns", "traceEvents": events}


@command
def main() -> None:
    """Run the command line that the module describes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", type=Path, default=DEFAULT, help="a run folder; the recorded H200 run if left out")
    parser.add_argument("--variant", help="names separated by commas; all that were traced if left out")
    parser.add_argument("--case", help="one case; that with most arithmetic if left out")
    parser.add_argument("--chunks", default=spans.WINDOW, help="the chunks to look at, first:end")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "trace")
    options = parser.parse_args()
    found = read(options.run, read_info(options.run))
    chosen = [
        trace
        for trace in (most_work(found) if options.case is None else found)
        if options.case in (None, trace.case) and (not options.variant or trace.variant in options.variant.split(","))
    ]
    if not chosen:
        have = ", ".join(f"{trace.variant} on {trace.case}" for trace in found) or "none"
        raise NoTrace(
            f"{options.run}: a trace of {options.variant or 'a variant'} on {options.case or 'a case'} was expected, "
            f"found {have}: name one of these, or record it with `make trace` on a GPU"
        )
    print(markdown(*tables(chosen, options.chunks)))
    options.out.mkdir(parents=True, exist_ok=True)
    paths = style.save(plots_trace.figure(chosen, options.chunks), options.out, "trace")
    for trace in chosen:
        paths.append(options.out / f"{trace.variant}-{trace.case}.json")
        events = chrome(trace, *spans.window(options.chunks, trace.info["recorded"]))
        paths[-1].write_text(json.dumps(events), encoding="utf-8")
    print("\n".join(map(str, ["", *paths])))


if __name__ == "__main__":
    main()
