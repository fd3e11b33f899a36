"""Nsight Systems: preflight, and the reader of its sqlite."""

import gzip
import sqlite3
from pathlib import Path

import pytest

from kernels import problem
from profiling import nsys, run, schema, tools

RECORDED = run.RECORDED / "h200"
TRACE = RECORDED / "nsys" / "trace.sqlite.gz"
THREAD, PROCESS = 0x1_2345_6000_0AAA, 0x1_2345_6000_0AAA & ~0xFFFFFF


def database(path, ranges=(), kernels=(), gpu="NVIDIA H200", domain="gdn", leave_out=()):
    """An export with what the reader needs, in ns: `ranges` (name, start, end), `kernels` (name, call, start, end)."""
    tables = {
        "StringIds": "id INTEGER, value TEXT",
        "NVTX_EVENTS": "start INTEGER, end INTEGER, eventType INTEGER, text TEXT, globalTid INTEGER, textId INTEGER, "
        "domainId INTEGER",
        "CUPTI_ACTIVITY_KIND_RUNTIME": "start INTEGER, end INTEGER, globalTid INTEGER, correlationId INTEGER, "
        "nameId INTEGER",
        "CUPTI_ACTIVITY_KIND_KERNEL": "start INTEGER, end INTEGER, correlationId INTEGER, globalPid INTEGER, "
        "shortName INTEGER, demangledName INTEGER, mangledName INTEGER",
        "TARGET_INFO_GPU": "name TEXT, uuid TEXT, busLocation TEXT",
        "TARGET_INFO_SYSTEM_ENV": "name TEXT, value TEXT",
    }
    connection = sqlite3.connect(path)
    for name, columns in tables.items():
        if name not in leave_out:
            connection.execute(f"CREATE TABLE {name} ({columns})")

    def add(table, *values):
        if table not in leave_out:
            connection.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(values))})", values)

    add("TARGET_INFO_GPU", gpu, "uuid-1", "0000:00:06.0")
    add("TARGET_INFO_SYSTEM_ENV", "DeviceEnvironment", "SECRET=1")
    add("StringIds", 999, "SECRET=1")
    add("NVTX_EVENTS", 0, None, 75, domain, THREAD, None, 1)
    for i, (name, start, end) in enumerate(ranges):
        add("StringIds", 100 + i, name)
        add("NVTX_EVENTS", start, end, 59, None, THREAD, 100 + i, 1)
    for i, (name, call, start, end) in enumerate(kernels):
        add("StringIds", 200 + i, name)
        add("CUPTI_ACTIVITY_KIND_RUNTIME", call, call + 5, THREAD, i, 200 + i)
        add("CUPTI_ACTIVITY_KIND_KERNEL", start, end, i, PROCESS, 200 + i, 200 + i, 200 + i)
    connection.commit()
    connection.close()
    return path


CORE = "naive/chain_equal/core"
RANGES = [("naive/chain_equal/preprocess", 100, 200), (CORE, 300, 400)]
KERNELS = [
    ("warmup_kernel", 50, 60, 90),
    ("chunk_cumsum_kernel", 110, 1000, 1500),
    ("naive_uw_kernel", 310, 2000, 2700),
    ("naive_state_kernel", 320, 2900, 9000),
    ("late_kernel", 500, 9000, 9100),
]


def test_kernels_belong_to_the_range_that_launched_them(tmp_path):
    path = database(tmp_path / "t.sqlite", RANGES, KERNELS)
    rows = nsys.read(path, "r", tuple(name for name, _, _ in RANGES))
    seen = [(row["phase"], row["kernel"], row["metric"], round(row["value"] * 1e9)) for row in rows]
    assert seen == [
        ("preprocess", "chunk_cumsum_kernel", "duration", 500),
        ("preprocess", "", "projected", 500),
        ("core", "naive_uw_kernel", "duration", 700),
        ("core", "naive_state_kernel", "duration", 6100),
        ("core", "", "projected", 7000),
    ]
    schema.table(rows)


def test_a_kernel_of_another_process_with_the_same_correlation_id_is_not_ours(tmp_path):
    path = database(tmp_path / "t.sqlite", RANGES[1:], KERNELS[2:4])
    connection = sqlite3.connect(path)
    connection.execute(
        "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (1, 2, 0, ?, 200, 200, 200)", (PROCESS + 0x1000000,)
    )
    connection.commit()
    assert len(nsys.read(path, "r", (CORE,))) == 3


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ({"ranges": RANGES, "kernels": KERNELS, "leave_out": ("CUPTI_ACTIVITY_KIND_KERNEL",)}, "lacks CUPTI_.*_KERNEL"),
        ({"ranges": RANGES, "kernels": KERNELS, "leave_out": ("NVTX_EVENTS",)}, "lacks NVTX_EVENTS"),
        ({"ranges": RANGES, "kernels": KERNELS, "leave_out": ("TARGET_INFO_GPU",)}, "lacks TARGET_INFO_GPU"),
        ({"kernels": KERNELS}, rf"ranges {CORE} were expected, found none.*0\.2\.12"),
        ({"ranges": RANGES, "kernels": KERNELS, "domain": "other"}, "found none"),
        ({"ranges": RANGES}, "launched no kernel"),
        ({"ranges": [*RANGES, RANGES[1]], "kernels": KERNELS}, f"found {CORE} more than once"),
        (
            {"ranges": RANGES, "kernels": [*KERNELS, ("at::fill", 330, 9200, 9300)]},
            "only kernels of naive were expected",
        ),
        ({"ranges": [("setup", 300, 400), *RANGES], "kernels": KERNELS}, "ranges named variant/case/phase"),
    ],
)
def test_traces_that_cannot_be_trusted_are_refused(tmp_path, content, found):
    path = database(tmp_path / "t.sqlite", **content)
    with pytest.raises(tools.BadExport, match=found) as refused:
        nsys.read(path, "r", (CORE,))
    assert "t.sqlite" in str(refused.value)


@pytest.mark.parametrize("content", [b"", b"not a database, " * 100])
def test_files_that_are_no_database_are_refused(tmp_path, content):
    path = tmp_path / "t.sqlite"
    path.write_bytes(content)
    with pytest.raises(tools.BadExport, match=r"t\.sqlite"):
        nsys.read(path, "r", (CORE,))


def test_a_stripped_copy_gives_the_same_rows_and_no_secrets(tmp_path):
    path = database(tmp_path / "t.sqlite", RANGES, KERNELS)
    copy = tmp_path / "t.sqlite.gz"
    nsys.strip(path, copy)
    expected = tuple(name for name, _, _ in RANGES)
    assert nsys.read(copy, "r", expected) == nsys.read(path, "r", expected)
    content = gzip.decompress(copy.read_bytes())
    for private in (b"SECRET", b"uuid-1", b"0000:00:06.0", b"warmup_kernel", b"late_kernel"):
        assert private in path.read_bytes()
        assert private not in content


def test_a_missing_nsys_is_named_with_places_and_remedy(monkeypatch):
    monkeypatch.setattr(tools.shutil, "which", lambda *_, **__: None)
    with pytest.raises(tools.ToolMissing, match=r"Nsight Systems \(nsys\).*/opt/nvidia/nsight-compute"):
        nsys.preflight()


def test_a_failed_importer_is_explained(monkeypatch, tmp_path):
    def profile(command, *_):
        output = next(word for word in command if word.startswith("--output=")).removeprefix("--output=")
        Path(output).with_suffix(".qdstrm").touch()
        return ""

    monkeypatch.setattr(tools, "profile", profile)
    with pytest.raises(tools.ProfileFailed, match=r"left trace\.qdstrm.*libdw\.so\.1"):
        nsys.collect("nsys", ("naive",), problem.SUITES["lab"], tmp_path)


def test_the_profiled_process_keeps_no_private_environment(monkeypatch):
    monkeypatch.setenv("API_TOKEN", "secret")
    monkeypatch.setenv("CUDA_HOME", "/cuda")
    kept = tools.environment()
    assert "API_TOKEN" not in kept
    assert kept["CUDA_HOME"] == "/cuda"
    assert kept["LC_ALL"] == "C"


def test_the_recorded_trace_gives_the_recorded_rows():
    info = run.read_info(RECORDED)
    frame = schema.read(RECORDED / "measurements.csv")
    frame = frame[frame["tool"] == "nsys"].reset_index(drop=True)
    expected = nsys.expected_ranges(tuple(info["variants"]), problem.SUITES["lab"])
    again = schema.table(nsys.read(TRACE, info["run"], expected))
    assert again.drop(columns="value").equals(frame.drop(columns="value"))
    assert again["value"].tolist() == pytest.approx(frame["value"].tolist(), rel=1e-8)


def test_the_recorded_trace_holds_only_names_of_ours():
    with nsys._opened(TRACE) as connection:
        strings = [value for (value,) in connection.execute("SELECT value FROM StringIds")]
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    assert tables == set(nsys._NEEDED)
    assert all(len(s) < 200 for s in strings)
    assert not [s for s in strings if "\0" in s or s.startswith("/")]
