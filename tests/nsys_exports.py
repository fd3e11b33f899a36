"""Exports of Nsight Systems to test the reader on, in the schemas of its versions; a large one, and how it is read.

    python tests/nsys_exports.py

writes an export of over 200 MB, reads it, and prints its size, the seconds that took and the peak memory.
"""

from __future__ import annotations

import multiprocessing
import resource
import sqlite3
import tempfile
import time
from pathlib import Path

from profiling import nsys_export

DATA = Path(__file__).resolve().parent / "data"
VERSIONS = ("2022.4", "2023.4", "2025.3")
THREAD = 0x1_2345_6000_0AAA
PROCESS = THREAD & ~0xFFFFFF
OURS = 1  # the number of our domain in PROCESS
PUSH_POP, START_END, DOMAIN_CREATED, DOMAIN_DESTROYED = 59, 60, 75, 76


class Export:
    """An export that is being written, from a version's empty tables on; times are in ns."""

    def __init__(self, path: Path, version: str = "2025.3"):
        self.connection = sqlite3.connect(path)
        self.connection.executescript((DATA / f"nsys-{version}.sql").read_text(encoding="utf-8"))
        self.strings: dict[str, int] = {}
        self.required: dict[str, list[str]] = {}
        for (table,) in self.connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
            columns = self.connection.execute(f"PRAGMA table_info({table})").fetchall()
            self.required[table] = [name for _, name, _, filled, _, key in columns if filled and not key]

    def add(self, table: str, **values) -> None:
        """A row; columns that must have a value and are not given get 0."""
        row = dict.fromkeys(self.required[table], 0) | values
        marks = ", ".join("?" * len(row))
        self.connection.execute(f"INSERT INTO {table} ({', '.join(row)}) VALUES ({marks})", tuple(row.values()))

    def string(self, text: str) -> int:
        """The id of a string, which is added when it is new."""
        if text not in self.strings:
            self.strings[text] = 100 + len(self.strings)
            self.add("StringIds", id=self.strings[text], value=text)
        return self.strings[text]

    def domain(self, name: str, number: int = OURS, thread: int = THREAD) -> None:
        self.add("NVTX_EVENTS", start=0, eventType=DOMAIN_CREATED, text=name, globalTid=thread, domainId=number)

    def range(self, name: str, start: int, end: int | None, inline: bool = False, **values) -> None:
        """A range: of our domain, pushed and popped on THREAD, its name a string of its own; unless asked for else."""
        called = {"text": name} if inline else {"textId": self.string(name)}
        row = {"eventType": PUSH_POP, "globalTid": THREAD, "domainId": OURS, **called, **values}
        self.add("NVTX_EVENTS", start=start, end=end, **row)

    def call(self, correlation: int, start: int, end: int, thread: int = THREAD) -> None:
        name = self.string("cuLaunchKernel")
        row = {"correlationId": correlation, "globalTid": thread, "nameId": name}
        self.add("CUPTI_ACTIVITY_KIND_RUNTIME", start=start, end=end, **row)

    def kernel(self, name: str, correlation: int, start: int, end: int, process: int = PROCESS, **values) -> None:
        text = self.string(name)
        row = {"shortName": text, "demangledName": text, "mangledName": text, **values}
        self.operation("KERNEL", correlation, start, end, process, **row)

    def operation(self, kind: str, correlation: int, start: int, end: int, process: int = PROCESS, **values) -> None:
        """A row of CUPTI_ACTIVITY_KIND_<kind>."""
        row = {"correlationId": correlation, "globalPid": process, **values}
        self.add(f"CUPTI_ACTIVITY_KIND_{kind}", start=start, end=end, **row)

    def gpu(self, name: str = "NVIDIA H200") -> None:
        self.add("TARGET_INFO_GPU", name=name, uuid="uuid-1", busLocation="0000:00:06.0")

    def close(self) -> None:
        self.connection.commit()
        self.connection.close()


def large(path: Path, launches: int, ranges: int) -> tuple[str, ...]:
    """Write an export of `launches` kernels, each in a range of another domain, with `ranges` of ours around some.

    Returns the names of our ranges; each has four kernels of 300 ns, started 1000 ns apart.
    """
    export = Export(path)
    export.gpu()
    export.domain("gdn")
    export.domain("other", number=2)
    kernel, call, other = (export.string(text) for text in ("naive_kernel", "cuLaunchKernel", "an iteration of theirs"))
    rows = {"launches": launches, "thread": THREAD, "process": PROCESS, "kernel": kernel, "call": call, "other": other}
    count = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < :launches) INSERT INTO "
    for insert in (
        "CUPTI_ACTIVITY_KIND_RUNTIME (start, end, eventClass, globalTid, correlationId, nameId, returnValue) "
        "SELECT 1000 * i, 1000 * i + 200, 1, :thread, i, :call, 0 FROM n",
        "NVTX_EVENTS (start, end, eventType, color, globalTid, textId, domainId) "
        "SELECT 1000 * i - 100, 1000 * i + 300, 59, 255, :thread, :other, 2 FROM n",
        "CUPTI_ACTIVITY_KIND_KERNEL SELECT 1000 * i + 400, 1000 * i + 700, 0, 1, 0, 7, i, :process, :kernel, :kernel, "
        ":kernel, 1, 1, 128, 1056, 64, 1, 384, 1, 1, 0, 232448, 0, 250871808, i, 233472, NULL, NULL FROM n",
    ):
        export.connection.execute(count + insert, rows)
    names = tuple(f"naive/{number}/core" for number in range(ranges))
    for number, name in enumerate(names):
        first = 1000 * (1 + number * (launches // ranges))
        export.range(name, first - 200, first + 3500)
    export.close()
    return names


def main() -> None:
    """Write, read and print."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "large.sqlite")
        # Written in a process of its own, so that this one's peak memory is the reader's.
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            names = pool.apply(large, (path, 1_250_000, 2_000))
        before = _peak()
        begin = time.perf_counter()
        rows = nsys_export.read(path, "r", names)
        seconds = time.perf_counter() - begin
        assert len(rows) == 5 * len(names)
        size = path.stat().st_size
    print(f"{size / 1e6:.0f} MB with {len(names)} ranges of ours are read in {seconds:.1f} s")
    print(f"peak memory {_peak() / 1e6:.0f} MB, of which {before / 1e6:.0f} MB before reading (mostly PyTorch)")


def _peak() -> int:
    """The most memory that this process has had, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
