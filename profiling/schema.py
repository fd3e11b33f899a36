"""The tidy table: one row per measured value. Columns, units, and what makes a table refused.

| column  | meaning |
| ------- | ------- |
| run     | the run the row belongs to, as in run.json |
| gpu     | the device's name |
| tool    | bench, ncu or nsys |
| variant | a rung of the ladder, or a peer library |
| case    | a case of kernels.problem |
| phase   | core, preprocess, cumsum, A or full |
| kernel  | the device function; of ncu with #2 where its range launches it again; empty for whole-operator rows |
| metric  | short name: the benchmark's below, Nsight's in profiling.metrics |
| unit    | second, byte, ratio (0 to 1) or count |
| sample  | number of the repeat; aggregation happens in analysis/ only |
| value   | a finite number in that unit |
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pandas as pd

from kernels.errors import UserError

COLUMNS = ["run", "gpu", "tool", "variant", "case", "phase", "kernel", "metric", "unit", "sample", "value"]
KEY = [*COLUMNS[:8], "sample"]  # at most one row each
TOOLS = ("bench", "ncu", "nsys")
PHASES = ("core", "preprocess", "cumsum", "A", "full")
UNITS = ("second", "byte", "ratio", "count")
# What pandas raises at a file that is no CSV, or no packed one.
UNREADABLE = (pd.errors.EmptyDataError, pd.errors.ParserError, EOFError, OSError, ValueError, zlib.error)
RATIO_SLACK = 1e-3  # hardware counters are read in different passes, so a full pipe may show 100.01 %

# The phases that the benchmark times, and the tensors of each that it compares with the FP64 reference.
CHECKED = {
    "core": ("output", "final_state"),
    "cumsum": ("g_cumsum",),  # of the libraries
    "A": ("A",),  # ours sums the gates in the same kernel
    "full": ("output", "final_state"),
}
LATENCIES = ("latency_graph", "latency_eager")
# The benchmark's metrics and their units.
BENCH_METRICS = {
    **dict.fromkeys(LATENCIES, "second"),
    **{f"error_{tensor}": "ratio" for tensors in CHECKED.values() for tensor in tensors},  # relative L2 error
    "peak_memory": "byte",  # of a full forward, beyond its inputs and outputs; absent in earlier runs
}
# How an implementation starts where nothing is compiled yet, and where its kernels are; see profiling.coldstart.
COLD_METRICS = {"cold_start": "second", "cached_start": "second", "kernels_compiled": "count"}


class BadTable(UserError):
    """A table that can't be trusted: which file and row, what was found, what to do."""


def required(phase: str) -> tuple[str, ...]:
    """The metrics that the benchmark leaves of whatever it timed in a phase."""
    return (*LATENCIES, *(f"error_{tensor}" for tensor in CHECKED[phase]))


def row(
    run: str,
    gpu: str,
    tool: str,
    variant: str,
    case: str,
    phase: str,
    metric: str,
    unit: str,
    value: float,
    kernel: str = "",
    sample: int = 0,
) -> dict:
    """One row as a dict, columns in order."""
    values = (run, gpu, tool, variant, case, phase, kernel, metric, unit, sample, value)
    return dict(zip(COLUMNS, values, strict=True))


def table(rows: Iterable[dict], source: str = "the rows in memory") -> pd.DataFrame:
    """Rows as a validated frame.

    Raises:
        BadTable: see `validate`.
    """
    frame = pd.DataFrame(list(rows), columns=COLUMNS)
    validate(frame, source)
    return frame


def validate(frame: pd.DataFrame, source: str) -> None:
    """Refuse a table with missing columns, unknown words, values that can't be, duplicates or mixed GPUs.

    Raises:
        BadTable: naming `source` and the first offending row.
    """
    if list(frame.columns) != COLUMNS:
        raise BadTable(
            f"{source}: the columns {', '.join(COLUMNS)} were expected, found {', '.join(map(str, frame.columns))}: "
            "use a table written by this project's commands"
        )
    for column, allowed in (("tool", TOOLS), ("phase", PHASES), ("unit", UNITS)):
        unknown = ~frame[column].isin(allowed)
        _refuse(frame, unknown, source, f"{column} must be one of {', '.join(allowed)}")
    value = pd.to_numeric(frame["value"], errors="coerce").to_numpy(dtype=float)
    _refuse(frame, ~np.isfinite(value) | (value < 0), source, "value must be a finite number of at least 0")
    ratio = (frame["unit"] == "ratio").to_numpy()
    _refuse(frame, ratio & (value > 1 + RATIO_SLACK), source, "a ratio lies between 0 and 1")
    _refuse(frame, frame.duplicated(KEY), source, "this value stands in the table already; there must be one")
    if frame["gpu"].nunique() > 1 or frame["run"].nunique() > 1:
        raise BadTable(
            f"{source}: one run on one GPU was expected, found runs {', '.join(frame['run'].unique())} on "
            f"{', '.join(frame['gpu'].unique())}: keep each run in a folder of its own"
        )


def stored(folder: Path) -> Path:
    """Where a run's table lies: measurements.csv, or measurements.csv.gz, as recorded runs carry it."""
    packed = Path(folder, "measurements.csv.gz")
    return packed if packed.exists() else Path(folder, "measurements.csv")


def read(path: Path) -> pd.DataFrame:
    """Read and validate a measurements.csv, or one packed with gzip.

    Raises:
        BadTable: the file is missing, empty, not a CSV, or refused by `validate`.
    """
    try:
        # "kernel" is empty on purpose in many rows: nothing is read as missing.
        frame = pd.read_csv(path, keep_default_na=False, dtype={"value": float, "sample": int})
    except FileNotFoundError:
        raise BadTable(f"{path}: no such file; make one with `make bench` or `make record` on a GPU") from None
    except UNREADABLE as error:
        raise BadTable(f"{path}: a CSV in the tidy layout was expected, found {error}: measure again") from None
    if frame.empty:
        raise BadTable(f"{path}: holds no measurement: measure again")
    validate(frame, str(path))
    return frame


def write(frame: pd.DataFrame, path: Path) -> None:
    """Validate and write a measurements.csv, packed where its name ends in .gz; values keep nine significant digits."""
    validate(frame, str(path))
    # Without the time in its header, so that the same table is the same file.
    packing = {"method": "gzip", "mtime": 0} if path.suffix == ".gz" else None
    frame.to_csv(path, index=False, float_format="%.9g", compression=packing)


def _refuse(frame: pd.DataFrame, bad, source: str, rule: str) -> None:
    bad = np.asarray(bad)
    if bad.any():
        first = int(bad.argmax())
        content = ", ".join(f"{name}={value}" for name, value in frame.iloc[first].items() if name in COLUMNS)
        raise BadTable(f"{source}, row {first + 2}: {rule}; found {content}: measure again or correct the file")
