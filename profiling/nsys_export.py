"""Nsight Systems' sqlite exports of 2022 to 2026: kernel times per NVTX range, and a copy that can be shared.

A GPU operation (a kernel, copy or fill) belongs to a range when the runtime call that launched it (same correlation
id and process) lies inside the range on the range's thread. A range's projected span is from its first operation's
start to its last one's end. nsys's own nvtx_gpu_proj_sum and nvtx_kern_sum follow the same rule; a test compares.

An export may be large, has no index and may lie on a read-only disk: a large table is passed over as a whole, never
once per range, and what is found goes into temporary tables.
"""

from __future__ import annotations

import gzip
import shutil
import sqlite3
import tempfile
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from itertools import pairwise
from pathlib import Path

from profiling import schema, tools
from profiling.ranges import DOMAIN
from profiling.tools import BadExport

IMPORTER_FAILED = (
    "a .qdstrm means that its importer failed, most often for lack of libdw.so.1; install the package libdw1 and run "
    "again"
)
_MAGIC = b"SQLite format 3\0"

_CALLS = "CUPTI_ACTIVITY_KIND_RUNTIME"
_KERNELS = "CUPTI_ACTIVITY_KIND_KERNEL"
_GRAPHS = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"  # CUDA graphs that were traced as one operation each
_OPERATION = ("start", "end", "correlationId", "globalPid", "deviceId")
# What must be there, and the columns that are read. nsys leaves out tables without rows.
_NEEDED = {
    _CALLS: ("start", "end", "correlationId", "globalTid"),
    _KERNELS: (*_OPERATION, "shortName"),
    "NVTX_EVENTS": ("start", "end", "eventType", "globalTid", "endGlobalTid", "domainId", "text", "textId"),
    "StringIds": ("id", "value"),
    "TARGET_INFO_GPU": ("name",),
}
_OPTIONAL = {table: _OPERATION for table in ("CUPTI_ACTIVITY_KIND_MEMCPY", "CUPTI_ACTIVITY_KIND_MEMSET", _GRAPHS)}
_NAMES = {"shortName", "demangledName", "mangledName", "nameId", "textId"}  # what refers to StringIds in all of them
# A call or kernel without one of these would drop out of the joins unseen.
_KEYS = {_CALLS: _NEEDED[_CALLS], _KERNELS: ("correlationId", "globalPid")}

# Event types: 59 push/pop range, 60 start/end range, 75 domain created, 76 domain destroyed. A domain's number is its
# process's own, and a thread's id without the low 24 bits is its process's. A range that never ended has no end, or
# gets the end of the process (nsys 2022 and 2023), which comes after its domain's.
# CROSS JOIN, here and below, fixes the order: one pass over the large table, a look-up in the small one for each row.
_FIND_RANGES = f"""
    CREATE TEMP TABLE domains AS
        SELECT e.domainId AS number, e.globalTid & ~0xFFFFFF AS process,
            max(CASE e.eventType WHEN 76 THEN e.start END) AS destroyed
        FROM NVTX_EVENTS e LEFT JOIN StringIds s ON s.id = e.textId
        WHERE e.eventType IN (75, 76)
        GROUP BY number, process
        HAVING max(CASE e.eventType WHEN 75 THEN coalesce(s.value, e.text) END) = '{DOMAIN}';
    CREATE TEMP TABLE ranges AS
        SELECT e.rowid AS id, coalesce(s.value, e.text) AS name, e.globalTid AS thread, e.start, e.end,
            typeof(e.start) = 'integer' AND typeof(e.end) = 'integer' AND typeof(e.globalTid) = 'integer'
                AND e.end BETWEEN e.start AND coalesce(d.destroyed, e.end)
                AND coalesce(e.endGlobalTid, e.globalTid) = e.globalTid AS whole
        FROM NVTX_EVENTS e CROSS JOIN domains d ON d.number = e.domainId AND d.process = e.globalTid & ~0xFFFFFF
        LEFT JOIN StringIds s ON s.id = e.textId
        WHERE e.eventType IN (59, 60);
    CREATE INDEX temp.opened ON ranges (thread, start)"""
# Ranges of a thread do not overlap, so a call can only lie in the last one that was opened before it.
_FIND_CALLS = f"""
    CREATE TEMP TABLE calls AS
        SELECT c.rowid AS id, c.correlationId AS correlation, c.globalTid & ~0xFFFFFF AS process, r.name AS range
        FROM {_CALLS} c CROSS JOIN ranges r ON r.rowid = (
            SELECT rowid FROM ranges WHERE thread = c.globalTid AND start <= c.start ORDER BY start DESC LIMIT 1)
        WHERE c.end <= r.end;
    CREATE INDEX temp.launched ON calls (correlation, process)"""
_FIND_OPERATIONS = """
    SELECT c.range, o.rowid, o.deviceId,
        typeof(o.start) = 'integer' AND typeof(o.end) = 'integer' AND o.start <= o.end AND typeof({kernel}) = 'text',
        o.start, o.end, {kernel}
    FROM {table} o CROSS JOIN calls c ON c.correlation = o.correlationId AND c.process = o.globalPid {names}"""


def read(path: Path, run_id: str, expected: tuple[str, ...]) -> list[dict]:
    """Tidy rows of a .sqlite or .sqlite.gz, in seconds.

    Of each kernel its `duration` and its `start`, counted from where its range was opened; of each range its
    `projected` span and `host`, the time that the thread spent in it. `expected` are the names of the ranges that
    must be there.

    Raises:
        BadExport: the file is no export, or damaged; tables, columns or ranges are missing; a range is not one phase
            of its own, launched no kernel, a foreign one or an opaque graph; or several GPUs were used.
    """
    with _opened(path) as export:
        gpu = _gpu(export, path)
        ranges = _ranges(export, path, expected)
        operations = _operations(export, path)
    rows = []
    for name, (opened, closed) in ranges.items():
        kernels = [operation for operation in operations[name] if operation[2]]
        if not kernels:
            raise BadExport(f"{path}: the range {name} launched no kernel: trace again")
        starts, ends, _ = zip(*operations[name], strict=True)
        origin = min(opened, *starts)  # the GPU's clock and the host's are matched to within some µs only
        for sample, (start, end, kernel) in enumerate(kernels):
            where = (run_id, gpu, "nsys", *tools.attribute(kernel, name, str(path)))
            for metric, time in (("duration", end - start), ("start", start - origin)):
                rows.append(schema.row(*where, metric, "second", time * 1e-9, kernel=kernel, sample=sample))
        for metric, time in (("projected", max(ends) - min(starts)), ("host", closed - opened)):
            rows.append(schema.row(*where, metric, "second", time * 1e-9))
    return rows


def strip(source: Path, destination: Path) -> None:
    """Write a .sqlite.gz that can be shared: our ranges, the calls in them, what those launched, and their names.

    nsys stores environment, host, user and paths in several tables and among the strings; so the copy is built from
    what is needed rather than by deleting what is known.

    Raises:
        BadExport: `source` is no export, or damaged.
    """
    with _opened(source) as old, tempfile.TemporaryDirectory() as scratch:
        old.executescript(_FIND_RANGES)
        old.executescript(_FIND_CALLS)
        launched = "(correlationId, globalPid) IN (SELECT correlation, process FROM calls)"
        domain = "(domainId, globalTid & ~0xFFFFFF) IN (SELECT number, process FROM domains)"
        kept = {
            _CALLS: "rowid IN (SELECT id FROM calls)",
            _KERNELS: launched,
            "NVTX_EVENTS": f"rowid IN (SELECT id FROM ranges) OR eventType IN (75, 76) AND {domain}",
            "TARGET_INFO_GPU": "1",
        }
        kept |= {table: launched for table in _OPTIONAL if _columns(old, table)}
        strings = " UNION ".join(
            f"SELECT {name} FROM {table} WHERE {where}"
            for table, where in kept.items()
            for name in sorted(_NAMES & _columns(old, table))
        )
        packed = Path(scratch, "stripped.sqlite")
        with closing(sqlite3.connect(packed)) as new:
            for table, where in (kept | {"StringIds": f"id IN ({strings})"}).items():
                _copy(old, new, table, where)
            new.commit()
        destination.write_bytes(gzip.compress(packed.read_bytes(), mtime=0))


def _copy(old: sqlite3.Connection, new: sqlite3.Connection, table: str, where: str) -> None:
    """Copy rows of a table, and text in the columns that are read only: elsewhere it may name a device or a path."""
    new.execute(*old.execute("SELECT sql FROM main.sqlite_master WHERE name = ?", (table,)).fetchone())
    names = [name for _, name, *_ in old.execute(f"PRAGMA main.table_info({table})")]
    read = _NEEDED.get(table, ())
    blank = "CASE WHEN typeof({0}) IN ('text', 'blob') THEN '' ELSE {0} END"
    values = [name if name in read else blank.format(f'"{name}"') for name in names]
    rows = old.execute(f"SELECT {', '.join(values)} FROM {table} WHERE {where}")
    new.executemany(f"INSERT INTO {table} VALUES ({', '.join('?' * len(names))})", rows)


@contextmanager
def _opened(path: Path) -> Iterator[sqlite3.Connection]:
    """A read-only connection to an export with all that is needed; what sqlite raises meanwhile becomes BadExport.

    Raises:
        BadExport: it is no export, lacks something, or is damaged.
    """
    with tempfile.TemporaryDirectory() as scratch:
        database = _database(path, Path(scratch))
        try:
            with closing(sqlite3.connect(f"{database.resolve().as_uri()}?mode=ro", uri=True)) as export:
                _check_tables(export, path)
                yield export
        except (sqlite3.Error, UnicodeDecodeError) as error:  # the latter from a damaged column's name
            said = " ".join(str(error).split())[:200]  # may quote a table's definition, lines and all
            raise BadExport(
                f"{path}: a whole sqlite export of Nsight Systems was expected, found {said}: export it again with "
                "`nsys export --type sqlite`"
            ) from None


def _database(path: Path, scratch: Path) -> Path:
    """The sqlite file: `path`, or what it holds, unpacked into `scratch`.

    Raises:
        BadExport: it can't be read or is another kind of file.
    """
    expected = f"{path}: an sqlite export of Nsight Systems was expected"
    database = path
    try:
        if path.suffix == ".gz":
            database = scratch / "export.sqlite"
            with gzip.open(path) as packed, database.open("wb") as plain:
                shutil.copyfileobj(packed, plain)
        with database.open("rb") as file:
            head = file.read(32)
        size = database.stat().st_size
    except (OSError, EOFError, zlib.error) as error:
        raise BadExport(f"{expected}, found {error}: name the trace.sqlite that `make nsys` left") from None
    if head.startswith(_MAGIC):
        # The header's page size and number of pages. sqlite itself takes a last page that was cut off for zeros.
        whole = int.from_bytes(head[16:18], "big") * int.from_bytes(head[28:32], "big")
        if size < whole:
            raise BadExport(f"{expected}, found {size} of its {whole} bytes: export or copy it again")
        return database
    if path.suffix == ".qdstrm":
        raise BadExport(f"{expected}, found nsys's raw trace: {IMPORTER_FAILED}")
    if path.suffix == ".nsys-rep":
        raise BadExport(f"{expected}, found a report: make one with `nsys export --type sqlite {path}`")
    found = "another kind of file" if head else "an empty file"
    raise BadExport(f"{expected}, found {found}: export it again with `nsys export --type sqlite`")


def _check_tables(export: sqlite3.Connection, path: Path) -> None:
    """Refuse an export that lacks a table, a column, or a key by which rows are joined.

    Raises:
        BadExport: naming it.
    """
    found = {table: _columns(export, table) for table in _NEEDED | _OPTIONAL}
    absent = [table for table in _NEEDED if not found[table]]
    if absent:
        raise BadExport(
            f"{path}: lacks {', '.join(absent)}; nsys leaves out what it did not record: trace with --trace=cuda,nvtx, "
            "check that a kernel ran, and trace again"
        )
    for table, columns in (_NEEDED | _OPTIONAL).items():
        missing = [name for name in columns if found[table] and name not in found[table]]
        if missing:
            raise BadExport(
                f"{path}: the columns that nsys exports since 2022 were expected in {table}, found none named "
                f"{', '.join(missing)}: trace and export with such a version"
            )
    for table, columns in _KEYS.items():
        keyed = " AND ".join(f"typeof({name}) = 'integer'" for name in columns)
        if export.execute(f"SELECT 1 FROM {table} WHERE NOT ({keyed}) LIMIT 1").fetchone():
            raise BadExport(
                f"{path}: whole numbers were expected for {', '.join(columns)} in {table}, found a row without, whose "
                "range can't be known: trace again"
            )


def _columns(export: sqlite3.Connection, table: str) -> set[str]:
    """The names of a table's columns; none where there is no such table."""
    return {name for _, name, *_ in export.execute(f"PRAGMA main.table_info({table})")}


def _gpu(export: sqlite3.Connection, path: Path) -> str:
    """The GPU's name.

    Raises:
        BadExport: it is not known, or there are several kinds.
    """
    names = [name for (name,) in export.execute("SELECT DISTINCT name FROM TARGET_INFO_GPU ORDER BY name")]
    if len(names) != 1 or not names[0] or not isinstance(names[0], str):
        raise BadExport(f"{path}: one kind of GPU was expected, found {_listed(names)}: trace where there is one kind")
    return names[0]


def _ranges(export: sqlite3.Connection, path: Path, expected: tuple[str, ...]) -> dict[str, tuple[int, int]]:
    """Where our domain's ranges begin and end on the host, in ns, by name and as they were opened.

    Raises:
        BadExport: they are not the phases that were expected, each once, and one after another on a thread.
    """
    export.executescript(_FIND_RANGES)
    found = export.execute("SELECT name, thread, start, end, whole FROM ranges ORDER BY start, name").fetchall()
    times = Counter(name for name, *_ in found)
    missing = [name for name in expected if name not in times]
    if missing:
        raise BadExport(
            f"{path}: the NVTX ranges {_listed(missing)} were expected, found {_listed(times)}: trace again; nsys 2023 "
            "records no ranges of the nvtx package from 0.2.12 on, so use the pinned one with it"
        )
    odd = [name for name in times if not isinstance(name, str) or name.count("/") != 2]
    if odd:
        raise BadExport(
            f"{path}: NVTX ranges named variant/case/phase were expected in the domain {DOMAIN}, found {_listed(odd)}: "
            "trace with `make nsys`"
        )
    twice = [name for name in times if times[name] > 1]
    if twice:
        raise BadExport(f"{path}: each range was expected once, found {_listed(twice)} more than once: trace again")
    open_ended = [name for name, *_, whole in found if not whole]
    if open_ended:
        raise BadExport(
            f"{path}: ranges were expected to end on the thread that opened them, found that {_listed(open_ended)} did "
            "not: let the traced program run to its end, and trace again"
        )
    in_turn = sorted(found, key=lambda one: one[1:3])
    for (first, thread, _, end, _), (second, same, start, *_) in pairwise(in_turn):
        if thread == same and start < end:
            raise BadExport(
                f"{path}: one range after another was expected, found {second} opened inside {first}, so that kernels "
                "would count twice: trace with `make nsys`"
            )
    return {name: (start, end) for name, _, start, end, _ in found}


def _operations(export: sqlite3.Connection, path: Path) -> dict[str, list[tuple[int, int, str]]]:
    """By range, the (start, end, kernel) of what it launched, times in ns, in order; copies and fills have no kernel.

    Raises:
        BadExport: an operation lacks time, name or a call of its own; a graph hides its kernels; several GPUs ran.
    """
    export.executescript(_FIND_CALLS)
    operations, seen, devices = defaultdict(list), set(), set()
    for table in (_KERNELS, *(other for other in _OPTIONAL if _columns(export, other))):
        kernel, names = "''", ""
        if table == _KERNELS:
            kernel, names = "nullif(s.value, '')", "LEFT JOIN StringIds s ON s.id = o.shortName"
        for name, row, device, whole, *operation in export.execute(
            _FIND_OPERATIONS.format(table=table, kernel=kernel, names=names)
        ):
            if table == _GRAPHS:
                raise BadExport(
                    f"{path}: kernels were expected in the range {name}, found a CUDA graph traced as one operation: "
                    "trace again with --cuda-graph-trace=node"
                )
            if not whole or (table, row) in seen:
                raise BadExport(
                    f"{path}: operations with times, a name and one call each were expected in the range {name}, found "
                    f"row {row} of {table}: trace again"
                )
            seen.add((table, row))
            devices.add(device)
            operations[name].append(tuple(operation))
    if len(devices) > 1:
        raise BadExport(
            f"{path}: one GPU was expected, found devices {_listed(devices)}: set CUDA_VISIBLE_DEVICES to one"
        )
    for found in operations.values():
        found.sort()
    return operations


def _listed(names: Iterable) -> str:
    """Some of the names, as an error says them."""
    some = [str(name) for name in names]
    return ", ".join(some[:6]) + (f" and {len(some) - 6} more" if len(some) > 6 else "") or "none"
