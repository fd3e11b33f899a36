"""Mangled exports: the reader gives the right rows or its error, never another exception and never other numbers."""

import gzip
import random
import sqlite3
import tempfile
from contextlib import closing, contextmanager
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from nsys_exports import OURS, PROCESS, START_END, THREAD, VERSIONS, Export

from kernels.errors import UserError
from profiling import nsys_export, schema

EXPECTED = ("naive/a/preprocess", "naive/a/core", "fused/a/core")
NEIGHBOUR = THREAD + (1 << 24)
# Not another whole number or name: nobody could tell those from the right ones. In a column of text, sqlite makes text
# of a number.
WRONG_TEXT = [None, "", b"\xff\xfe"]
WRONG_NUMBERS = [*WRONG_TEXT, "text", 0.5, -1.5, float("inf")]
# A copy may have no call: unified memory moves pages on its own. So those that lose theirs can't be told.
OPTIONAL = {f"CUPTI_ACTIVITY_KIND_{kind}": {"correlationId", "globalPid"} for kind in ("MEMCPY", "MEMSET")}
BOUND = settings(max_examples=100, deadline=None, derandomize=True, database=None)


def valid(path, version):
    """Write an export with three ranges of ours, of both kinds and ways to be named, and others' around them."""
    export = Export(path, version)
    export.gpu()
    export.domain("gdn")
    export.domain("theirs", number=2)
    for number, (name, kernel) in enumerate(zip(EXPECTED, ("kkt_kernel", "naive_kernel", "fused_kernel"), strict=True)):
        start = 10_000 * (number + 1)
        export.range(name, start, start + 1000, inline=number == 1, **({"eventType": START_END} if number == 2 else {}))
        export.range(name, start, start + 1000, domainId=2)
        for launch in range(3):
            correlation = 10 * number + launch
            export.call(correlation, start + 100 * launch, start + 100 * launch + 50)
            export.kernel(kernel, correlation, start + 3000 + 500 * launch, start + 3400 + 500 * launch)
        if "CUPTI_ACTIVITY_KIND_MEMSET" in export.required:
            export.call(10 * number + 5, start + 500, start + 510)
            export.operation("MEMSET", 10 * number + 5, start + 2000, start + 2100)
            export.call(10 * number + 6, start + 520, start + 530)
            export.operation("MEMCPY", 10 * number + 6, start + 6000, start + 6100)
    for table in sorted(export.required):  # as nsys leaves out tables without rows
        if not export.connection.execute(f"SELECT 1 FROM {table}").fetchone():
            export.connection.execute(f"DROP TABLE {table}")
    export.close()


@contextmanager
def copy(version):
    """(connection, path) of a valid export, free of constraints so that all can be mangled."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "mangled.sqlite")
        path.write_bytes(VALID[version][0])
        with closing(sqlite3.connect(path, isolation_level=None)) as connection:
            yield connection, path


def contents():
    """By version, the bytes of a valid export and its rows."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for version in VERSIONS:
            path = Path(folder, f"{version}.sqlite")
            valid(path, version)
            with closing(sqlite3.connect(path, isolation_level=None)) as connection:
                for table in tables(connection):
                    rebuilt(connection, table, "*", "1")
                connection.execute("VACUUM")
            found[version] = path.read_bytes(), nsys_export.read(path, "r", EXPECTED)
    return found


def tables(connection):
    return [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")]


def columns(connection, table):
    return [name for _, name, *_ in connection.execute(f"PRAGMA table_info({table})")]


def rebuilt(connection, table, selected, order):
    """Replace a table by what is selected from it, without constraints."""
    connection.execute(f"CREATE TABLE rebuilt AS SELECT {selected} FROM {table} ORDER BY {order}")
    connection.execute(f"DROP TABLE {table}")
    connection.execute(f"ALTER TABLE rebuilt RENAME TO {table}")


def outcome(path):
    """The rows, which make a valid table; None where the file is refused as it should be."""
    try:
        rows = nsys_export.read(path, "r", EXPECTED)
    except UserError as error:
        refusal = str(error)
    else:
        schema.table(rows)
        return rows
    assert refusal.startswith(str(path))
    assert "\n" not in refusal
    return None


VALID = contents()
versions = st.sampled_from(VERSIONS)


@BOUND
@given(versions, st.data())
def test_without_a_table_or_a_column_the_rows_are_right_or_refused(version, data):
    with copy(version) as (connection, path):
        table = data.draw(st.sampled_from([name for name in tables(connection) if name not in OPTIONAL]))
        column = data.draw(st.sampled_from(["", *columns(connection, table)]))
        connection.execute(f'ALTER TABLE {table} DROP COLUMN "{column}"' if column else f"DROP TABLE {table}")
        assert outcome(path) in (VALID[version][1], None)


@BOUND
@given(versions, st.data())
def test_with_wrong_values_the_rows_are_right_or_refused(version, data):
    with copy(version) as (connection, path):
        table = data.draw(st.sampled_from(tables(connection)))
        names = [name for name in columns(connection, table) if name not in OPTIONAL.get(table, ())]
        column = data.draw(st.sampled_from(names))
        wrong = data.draw(st.sampled_from(WRONG_TEXT if column in ("name", "value", "text") else WRONG_NUMBERS))
        (rows,) = connection.execute(f"SELECT count(*) FROM {table}").fetchone()
        where = data.draw(st.sampled_from(["1", f"rowid = {data.draw(st.integers(1, rows))}"]))
        connection.execute(f'UPDATE {table} SET "{column}" = ? WHERE {where}', (wrong,))
        assert outcome(path) in (VALID[version][1], None)


@BOUND
@given(versions, st.integers(0))
def test_order_and_new_columns_and_tables_change_nothing(version, seed):
    rng = random.Random(seed)
    with copy(version) as (connection, path):
        connection.create_function("shuffled", 0, rng.random)
        for table in tables(connection):
            names = [*columns(connection, table), "'new' AS newInThisRelease"]
            rebuilt(connection, table, ", ".join(rng.sample(names, len(names))), "shuffled()")
        connection.execute("CREATE TABLE ranges (start INTEGER, name TEXT)")
        connection.execute("CREATE TABLE calls (range TEXT)")
        assert outcome(path) == VALID[version][1]


@BOUND
@given(versions, st.lists(st.tuples(st.integers(0, 60_000), st.integers(0, 9000), st.integers(0, 4)), max_size=20))
def test_others_rows_change_nothing(version, times):
    theirs = NEIGHBOUR & ~0xFFFFFF
    with copy(version) as (connection, path):

        def add(table, **row):
            marks = ", ".join("?" * len(row))
            connection.execute(f"INSERT INTO {table} ({', '.join(row)}) VALUES ({marks})", tuple(row.values()))

        for number, (start, length, kind) in enumerate(times):
            end, correlation = start + length, 10_000 + number
            if kind == 0:  # a range of another domain, and one of a process that has no domain of ours
                add("NVTX_EVENTS", start=start, end=end, eventType=59, text=EXPECTED[0], globalTid=THREAD, domainId=2)
                add("NVTX_EVENTS", start=start, end=end, eventType=60, text="x", globalTid=NEIGHBOUR, domainId=OURS)
            elif kind == 1:  # a mark and an open range of another domain
                add("NVTX_EVENTS", start=start, eventType=34, text=EXPECTED[1], globalTid=THREAD, domainId=OURS)
                add("NVTX_EVENTS", start=start, eventType=59, text="y", globalTid=THREAD, domainId=0)
            else:  # a launch of another process, whose numbers are ours, or of another thread
                thread, process = (NEIGHBOUR, theirs) if kind < 4 else (THREAD + 1, PROCESS)
                correlation = number if kind < 4 else correlation
                keys = {"correlationId": correlation, "globalPid": process, "deviceId": 1}
                add("CUPTI_ACTIVITY_KIND_RUNTIME", start=start, end=end, correlationId=correlation, globalTid=thread)
                add("CUPTI_ACTIVITY_KIND_KERNEL", start=start, end=end, shortName=kind - 3, **keys)
        assert outcome(path) == VALID[version][1]


@BOUND
@given(versions, st.floats(0, 1, exclude_max=True), st.booleans())
def test_a_truncated_file_is_refused(version, part, packed):
    content = VALID[version][0]
    content = gzip.compress(content, mtime=0) if packed else content
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "cut.sqlite.gz" if packed else "cut.sqlite")
        path.write_bytes(content[: int(part * len(content))])
        assert outcome(path) is None


@BOUND
@given(versions, st.floats(0, 1, exclude_max=True), st.binary(min_size=1, max_size=200))
def test_damaged_bytes_raise_nothing_else(version, part, noise):
    content = bytearray(VALID[version][0])
    start = int(part * len(content))
    content[start : start + len(noise)] = noise[: len(content) - start]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "damaged.sqlite")
        path.write_bytes(content)
        outcome(path)
