"""The table of a trace: one row per span of a role, and per arrival at a barrier. Columns and what makes one refused.

| column  | meaning |
| ------- | ------- |
| run, gpu, tool, variant, case | as in profiling.schema; tool is trace |
| role    | who: a warpgroup, or a warp |
| chunk   | the iteration of the role's loop over chunks |
| span    | the marker's text: a verb, then a barrier or a formula (kernels.markers) |
| kind    | wait, tensor, elementwise, copy or arrive |
| about   | the chunk that the step is about: a wait ends after the arrivals at its barrier about the same one |
| start   | SM clock cycles since the first event of the trace |
| cycles  | how long; 0 for an arrival |

A table of its own, stored as trace/<variant>-<case>.csv.gz in a run's folder: cycles are no unit of the tidy table,
since they become seconds only with a clock that was not measured, and a span is two numbers that mean nothing apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from kernels.errors import UserError
from kernels.markers import Marker
from profiling.schema import UNREADABLE, BadTable

KINDS = ("wait", "tensor", "elementwise", "copy", "arrive")
EVENT = ["role", "chunk", "span", "kind", "about", "start", "cycles"]
COLUMNS = ["run", "gpu", "tool", "variant", "case", *EVENT]
WINDOW = "16:20"  # of chunks: far enough from the start that every buffer was in use


class BadChunks(UserError):
    """A window of chunks that can't be read or was not recorded."""


def decode(markers: Sequence[Marker], clocks: np.ndarray) -> pd.DataFrame:
    """The rows of a trace, columns EVENT, by role and in order of time.

    `clocks` is the buffer of kernels.markers.build_traced. A span ends where the role's next one begins, so the last
    chunk that was recorded has no end, and is left out.

    Raises:
        BadTable: fewer than two chunks were recorded.
    """
    chunk, column = np.nonzero(clocks[:, : len(markers)])  # row by row: in the order of each role's program
    if not chunk.size or chunk.max() == 0:
        raise BadTable("the trace: at least two chunks in its buffer were expected, found fewer: trace a longer case")
    events = pd.DataFrame(
        {
            "role": [markers[i].role for i in column],
            "chunk": chunk,
            "span": [markers[i].text for i in column],
            "kind": [markers[i].kind for i in column],
            "about": chunk + [markers[i].ahead for i in column],
            "start": clocks[chunk, column] - clocks[chunk, column].min(),
            "cycles": 0,
        }
    )
    spans = events["kind"] != "arrive"
    ends = events[spans].groupby("role")["start"].shift(-1)
    events.loc[spans, "cycles"] = (ends - events["start"]).fillna(0).astype("int64")
    order = {role: i for i, role in enumerate(dict.fromkeys(marker.role for marker in markers))}
    events = events[events["chunk"] < chunk.max()].sort_values(
        "role", key=lambda roles: roles.map(order), kind="stable", ignore_index=True
    )
    return events.astype({name: "int64" for name in ("chunk", "about", "start", "cycles")})


def validate(frame: pd.DataFrame, source: str) -> None:
    """Refuse a table with missing columns, unknown words, spans that overlap or leave gaps, or two traces in one.

    Raises:
        BadTable: naming `source` and what was found.
    """
    if list(frame.columns) != COLUMNS or frame.empty:
        raise BadTable(
            f"{source}: rows with the columns {', '.join(COLUMNS)} were expected, found {len(frame)} with "
            f"{', '.join(map(str, frame.columns))}: record it with `make trace`"
        )
    several = [name for name in ("run", "gpu", "tool", "variant", "case") if frame[name].nunique() > 1]
    if several or frame["tool"].iloc[0] != "trace" or not frame["kind"].isin(KINDS).all():
        found = ", ".join(several) or f"tool {frame['tool'].iloc[0]}, kinds {', '.join(frame['kind'].unique())}"
        raise BadTable(
            f"{source}: one trace, of the kinds {', '.join(KINDS)}, was expected, found several or others of {found}: "
            "record it with `make trace`"
        )
    for role, spans in frame[frame["kind"] != "arrive"].groupby("role", sort=False):
        gaps = spans["start"].to_numpy()[1:] != (spans["start"] + spans["cycles"]).to_numpy()[:-1]
        if gaps.any() or (spans["cycles"] <= 0).any():
            where = spans.iloc[int(gaps.argmax())]
            raise BadTable(
                f"{source}: spans of {role} that follow one another were expected, found others after {where['span']} "
                f"of chunk {where['chunk']}: record it again with `make trace`"
            )


def stored(folder: Path, variant: str, case: str) -> Path:
    """Where a trace lies in a run's folder."""
    return Path(folder) / "trace" / f"{variant}-{case}.csv.gz"


def write(frame: pd.DataFrame, path: Path) -> None:
    """Validate and write a trace, packed; the same table is the same file."""
    validate(frame, str(path))
    path.parent.mkdir(exist_ok=True)
    frame.to_csv(path, index=False, compression={"method": "gzip", "mtime": 0})


def read(path: Path) -> pd.DataFrame:
    """Read and validate a trace.

    Raises:
        BadTable: the file is missing, no packed CSV, or refused by `validate`.
    """
    try:
        frame = pd.read_csv(path, keep_default_na=False)
    except FileNotFoundError:
        raise BadTable(f"{path}: a trace was expected, found no such file: record it with `make trace`") from None
    except UNREADABLE as error:
        raise BadTable(f"{path}: a packed CSV was expected, found {error}: record it with `make trace`") from None
    validate(frame, str(path))
    return frame


def window(text: str, chunks: int) -> tuple[int, int]:
    """First chunk and the one after the last, from text such as 16:20, within a trace that holds so many chunks.

    Raises:
        BadChunks: it is no such text, or the trace does not hold these chunks.
    """
    first, colon, last = text.partition(":")
    if not (colon and first.isdigit() and last.isdigit() and int(first) < int(last)):
        raise BadChunks(
            f"CHUNKS: a first chunk and a later end, such as {WINDOW}, were expected, found {text!r}: name chunks so"
        )
    if int(last) > chunks:
        raise BadChunks(
            f"CHUNKS={text}: chunks of those that this trace can hold, 0:{chunks}, were expected: name some of them, "
            "or trace a longer case"
        )
    return int(first), int(last)
