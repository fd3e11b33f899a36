"""Nsight Systems: preflight, and the reader of its sqlite."""

import gzip
import sqlite3
import time
from pathlib import Path

import nsys_exports
import pytest
from nsys_exports import DOMAIN_DESTROYED, PROCESS, START_END, THREAD, VERSIONS, Export

from kernels import problem
from profiling import nsys, nsys_export, run, schema, tools

RECORDED = run.RECORDED / "h200"
TRACE = RECORDED / "nsys" / "trace.sqlite.gz"


def database(path, ranges=(), kernels=(), gpus=("NVIDIA H200",), domain="gdn", leave_out=(), version="2025.3"):
    """An export, times in ns: `ranges` (name, start, end), `kernels` (name, call's start, start, end)."""
    export = Export(path, version)
    for gpu in gpus:
        export.gpu(gpu)
    export.domain(domain)
    for name, start, end in ranges:
        export.range(name, start, end)
    for i, (name, call, start, end) in enumerate(kernels):
        export.call(i, call, call + 5)
        export.kernel(name, i, start, end)
    for table in leave_out:
        export.connection.execute(f"DROP TABLE {table}")
    export.close()
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
EXPECTED = tuple(name for name, _, _ in RANGES)
OTHER_PROCESS = THREAD + (1 << 24)


def opened(path, version="2025.3"):
    """An export with a domain, a GPU, and one core range at 300 to 400 ns whose kernel runs from 2000 to 2700 ns."""
    export = Export(path, version)
    export.gpu()
    export.domain("gdn")
    export.range(CORE, 300, 400)
    export.call(1, 310, 315)
    export.kernel("naive_kernel", 1, 2000, 2700)
    return export


def values(path):
    """(kernel, ns) of every duration in the core range, then its projected span."""
    rows = nsys_export.read(path, "r", (CORE,))
    times = [row for row in rows if row["metric"] in ("duration", "projected")]
    return [(row["kernel"] or row["metric"], round(row["value"] * 1e9)) for row in times]


@pytest.mark.parametrize("version", VERSIONS)
def test_kernels_belong_to_the_range_that_launched_them(tmp_path, version):
    path = database(tmp_path / "t.sqlite", RANGES, KERNELS, version=version)
    rows = nsys_export.read(path, "r", EXPECTED)
    seen = [(row["phase"], row["kernel"], row["metric"], round(row["value"] * 1e9)) for row in rows]
    assert seen == [
        ("preprocess", "chunk_cumsum_kernel", "duration", 500),
        ("preprocess", "chunk_cumsum_kernel", "start", 900),
        ("preprocess", "", "projected", 500),
        ("preprocess", "", "host", 100),
        ("core", "naive_uw_kernel", "duration", 700),
        ("core", "naive_uw_kernel", "start", 1700),
        ("core", "naive_state_kernel", "duration", 6100),
        ("core", "naive_state_kernel", "start", 2600),
        ("core", "", "projected", 7000),
        ("core", "", "host", 100),
    ]
    schema.table(rows)


def test_a_kernel_of_another_process_with_the_same_correlation_id_is_not_ours(tmp_path):
    path = database(tmp_path / "t.sqlite", RANGES[1:], KERNELS[2:4])
    connection = sqlite3.connect(path)
    connection.execute(
        "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL SELECT * FROM CUPTI_ACTIVITY_KIND_KERNEL WHERE correlationId = 0"
    )
    connection.execute(
        "UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET start = 1, end = 2, globalPid = ? WHERE rowid = 3",
        (PROCESS + 0x1000000,),
    )
    connection.commit()
    assert len(values(path)) == 3


@pytest.mark.parametrize("version", VERSIONS)
def test_others_threads_domains_and_processes_do_not_count(tmp_path, version):
    export = opened(tmp_path / "t.sqlite", version)
    export.call(2, 320, 325, thread=THREAD + 1)
    export.kernel("foreign_kernel", 2, 3000, 3100)
    export.domain("theirs", number=2)
    export.range(CORE, 100, 900, domainId=2)
    export.domain("theirs", number=1, thread=OTHER_PROCESS)  # numbers of domains are a process's own
    export.range(CORE, 300, 400, globalTid=OTHER_PROCESS)
    export.call(1, 310, 315, thread=OTHER_PROCESS)
    export.kernel("foreign_kernel", 1, 3000, 3100, process=OTHER_PROCESS & ~0xFFFFFF)
    export.close()
    assert values(tmp_path / "t.sqlite") == [("naive_kernel", 700), ("projected", 700)]


def test_where_the_clocks_disagree_the_first_operation_is_the_origin(tmp_path):
    path = database(
        tmp_path / "t.sqlite", RANGES[1:], [("naive_uw_kernel", 310, 290, 320), ("naive_state_kernel", 320, 330, 340)]
    )
    starts = [round(row["value"] * 1e9) for row in nsys_export.read(path, "r", (CORE,)) if row["metric"] == "start"]
    assert starts == [0, 40]


@pytest.mark.parametrize("inline", [False, True])
@pytest.mark.parametrize("kind", [nsys_exports.PUSH_POP, START_END])
def test_ranges_of_both_kinds_are_read_by_name_or_text(tmp_path, kind, inline):
    export = opened(tmp_path / "t.sqlite")
    export.connection.execute("DELETE FROM NVTX_EVENTS WHERE eventType = 59")
    export.range(CORE, 300, 400, inline=inline, eventType=kind)
    export.close()
    assert values(tmp_path / "t.sqlite") == [("naive_kernel", 700), ("projected", 700)]


def test_a_call_counts_only_if_it_lies_in_the_range_whole(tmp_path):
    export = opened(tmp_path / "t.sqlite")
    for number, (start, end) in enumerate([(299, 305), (396, 401), (300, 305), (395, 400)], 2):
        export.call(number, start, end)
        export.kernel("naive_late_kernel", number, 3000 + number, 3010 + number)
    export.close()
    assert values(tmp_path / "t.sqlite") == [
        ("naive_kernel", 700),
        ("naive_late_kernel", 10),
        ("naive_late_kernel", 10),
        ("projected", 1015),
    ]


@pytest.mark.parametrize("version", ["2022.4", "2023.4"])
def test_copies_and_fills_count_for_the_span_only(tmp_path, version):
    export = opened(tmp_path / "t.sqlite", version)
    export.call(2, 305, 308)
    export.operation("MEMSET", 2, 1500, 1600)
    export.call(3, 320, 330)
    export.operation("MEMCPY", 3, 2800, 2900)
    export.close()
    assert values(tmp_path / "t.sqlite") == [("naive_kernel", 700), ("projected", 1400)]


def test_kernels_of_a_graph_share_the_call_that_launched_it(tmp_path):
    export = opened(tmp_path / "t.sqlite")
    export.kernel("naive_late_kernel", 1, 2800, 2900, graphNodeId=1)
    export.close()
    assert values(tmp_path / "t.sqlite") == [("naive_kernel", 700), ("naive_late_kernel", 100), ("projected", 900)]


def test_a_graph_that_hides_its_kernels_is_refused(tmp_path):
    export = opened(tmp_path / "t.sqlite")
    export.call(2, 320, 325)
    export.operation("GRAPH_TRACE", 2, 3000, 3100)
    export.close()
    with pytest.raises(tools.BadExport, match=rf"in the range {CORE}, found a CUDA graph.*--cuda-graph-trace=node"):
        values(tmp_path / "t.sqlite")


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
        ({"ranges": RANGES, "kernels": [("vectorized_elementwise_kernel", 310, 900, 950)]}, "launched no kernel"),
        (
            {"ranges": RANGES[1:], "kernels": [("vectorized_elementwise_kernel", 310, 900, 950)]},
            "only kernels of naive were expected .* found vectorized_elementwise_kernel",
        ),
        ({"ranges": [*RANGES, ("fused/chain_equal/core", 350, 380)], "kernels": KERNELS}, f"opened inside {CORE}"),
        ({"ranges": [RANGES[0], (CORE, 300, None)], "kernels": KERNELS}, f"found that {CORE} did not"),
        ({"ranges": RANGES, "kernels": KERNELS, "gpus": ()}, "one kind of GPU was expected, found none"),
        (
            {"ranges": RANGES, "kernels": KERNELS, "gpus": ("NVIDIA H100", "NVIDIA H200")},
            "one kind of GPU was expected, found NVIDIA H100, NVIDIA H200",
        ),
        (
            {"ranges": RANGES, "kernels": KERNELS, "leave_out": tuple(nsys_export._NEEDED)},
            "lacks CUPTI_ACTIVITY_KIND_RUNTIME, .*TARGET_INFO_GPU",
        ),
    ],
)
def test_traces_that_cannot_be_trusted_are_refused(tmp_path, content, found):
    path = database(tmp_path / "t.sqlite", **content)
    with pytest.raises(tools.BadExport, match=found) as refused:
        nsys_export.read(path, "r", (CORE,))
    assert "t.sqlite" in str(refused.value)


def test_a_range_that_was_open_when_its_process_ended_is_refused(tmp_path):
    export = opened(tmp_path / "t.sqlite")
    # nsys 2022 and 2023 give it the end of the process, after the domain was destroyed.
    export.range("naive/chain_equal/preprocess", 500, 900)
    export.add("NVTX_EVENTS", start=800, eventType=DOMAIN_DESTROYED, globalTid=THREAD, domainId=nsys_exports.OURS)
    export.close()
    with pytest.raises(tools.BadExport, match="found that naive/chain_equal/preprocess did not"):
        values(tmp_path / "t.sqlite")


def test_a_range_that_ended_on_another_thread_is_refused(tmp_path):
    export = opened(tmp_path / "t.sqlite")
    export.range("fused/chain_equal/core", 500, 600, eventType=START_END, endGlobalTid=THREAD + 1)
    export.close()
    with pytest.raises(tools.BadExport, match="found that fused/chain_equal/core did not"):
        values(tmp_path / "t.sqlite")


def test_kernels_on_several_devices_are_refused(tmp_path):
    export = opened(tmp_path / "t.sqlite")
    export.kernel("naive_late_kernel", 1, 3000, 3100, deviceId=1)
    export.close()
    with pytest.raises(tools.BadExport, match="one GPU was expected, found devices 0, 1"):
        values(tmp_path / "t.sqlite")


def test_traces_of_different_gpus_do_not_share_a_table(tmp_path):
    rows = []
    for gpu in ("NVIDIA H100", "NVIDIA H200"):
        path = database(tmp_path / f"{gpu[-4:]}.sqlite", RANGES, KERNELS, gpus=(gpu,))
        rows += nsys_export.read(path, gpu, EXPECTED)
    with pytest.raises(schema.BadTable, match="one run on one GPU was expected"):
        schema.table(rows)


@pytest.mark.parametrize(
    ("name", "content", "found"),
    [
        ("t.sqlite", b"", "found an empty file"),
        ("t.sqlite", b"not a database, " * 100, "found another kind of file"),
        ("t.sqlite", b"SQLite format 3\0" + bytes(500), "found file is not a database"),
        ("t.sqlite.gz", gzip.compress(bytes(2000), mtime=0)[:-9], "found Compressed file ended"),
        ("t.sqlite.gz", b"not compressed", "found Not a gzipped file"),
        ("t.nsys-rep", b"NVIDIA", r"found a report: make one with `nsys export --type sqlite .*t\.nsys-rep`"),
        ("t.qdstrm", b"NVIDIA", r"found nsys's raw trace: .*libdw\.so\.1"),
    ],
)
def test_files_that_are_no_database_are_refused(tmp_path, name, content, found):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(tools.BadExport, match=found) as refused:
        nsys_export.read(path, "r", (CORE,))
    assert str(refused.value).startswith(str(path))


@pytest.mark.parametrize("lost", [1, 100, 5000])
def test_a_truncated_export_is_refused(tmp_path, lost):
    path = database(tmp_path / "t.sqlite", RANGES, KERNELS)
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-lost])
    with pytest.raises(tools.BadExport, match=f"found {size - lost} of its {size} bytes"):
        nsys_export.read(path, "r", EXPECTED)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(tools.BadExport, match="No such file"):
        nsys_export.read(tmp_path / "t.sqlite", "r", (CORE,))


def test_reading_leaves_the_export_as_it_is(tmp_path):
    path = database(tmp_path / "a place?with #signs.sqlite", RANGES, KERNELS)
    before = path.read_bytes()
    path.chmod(0o444)
    tmp_path.chmod(0o555)
    nsys_export.read(path, "r", EXPECTED)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_the_time_to_read_grows_with_the_size_and_no_faster(tmp_path):
    """Of this process alone, and of both sizes by turns: other tests run beside it."""

    def seconds(path, names):
        begin = time.process_time()
        rows = nsys_export.read(path, "r", names)
        taken = time.process_time() - begin
        assert len(rows) == 10 * len(names)
        values = {(row["metric"], round(row["value"] * 1e9)) for row in rows}
        assert {("duration", 300), ("projected", 3300)} <= values
        return taken

    small, large = tmp_path / "small.sqlite", tmp_path / "large.sqlite"
    names = [nsys_exports.large(small, 10_000, 200), nsys_exports.large(large, 100_000, 2_000)]
    times = [(seconds(small, names[0]), seconds(large, names[1])) for _ in range(5)]
    of_small, of_large = map(min, zip(*times, strict=True))
    assert of_large < 15 * of_small


def test_a_stripped_copy_gives_the_same_rows_and_no_secrets(tmp_path):
    path = database(tmp_path / "t.sqlite", RANGES, KERNELS, version="2023.4")
    connection = sqlite3.connect(path)
    connection.execute("INSERT INTO StringIds VALUES (999, ?)", ("PATH=/bin\0TOKEN=SECRET",))
    connection.execute(
        "INSERT INTO NVTX_EVENTS (start, end, eventType, text, globalTid) VALUES (310, 320, 59, 'SECRET', ?)", (THREAD,)
    )
    connection.execute("UPDATE NVTX_EVENTS SET jsonText = 'SECRET'")
    connection.execute("UPDATE TARGET_INFO_GPU SET ctxswDevPath = '/dev/SECRET'")
    for table in ("TARGET_INFO_SYSTEM_ENV", "PROCESSES", "META_DATA_CAPTURE", "META_DATA_EXPORT"):
        columns = [name for _, name, *_ in connection.execute(f"PRAGMA table_info({table})")]
        connection.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(columns))})", ["SECRET"] * len(columns))
    connection.commit()
    connection.close()
    copy = tmp_path / "t.sqlite.gz"
    nsys_export.strip(path, copy)
    assert nsys_export.read(copy, "r", EXPECTED) == nsys_export.read(path, "r", EXPECTED)
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
        assert "--cuda-graph-trace=node" in command
        output = next(word for word in command if word.startswith("--output=")).removeprefix("--output=")
        Path(output).with_suffix(".qdstrm").touch()
        return ""

    monkeypatch.setattr(tools, "profile", profile)
    with pytest.raises(tools.ProfileFailed, match=r"left trace\.qdstrm.*libdw\.so\.1"):
        nsys.collect("nsys", ("naive",), problem.SUITES["lab"], tmp_path)


def test_a_failed_export_says_what_nsys_said(monkeypatch, tmp_path):
    nsys_tool = tmp_path / "nsys"
    nsys_tool.write_text("#!/bin/sh\necho 'Exportation error:'\necho 'newer version'\n")  # and exit code 0
    nsys_tool.chmod(0o755)
    monkeypatch.setattr(tools, "profile", lambda *_: (tmp_path / "nsys_out/nsys/trace.nsys-rep").touch())
    with pytest.raises(tools.ProfileFailed, match=r"write .*trace\.sqlite, and said Exportation error: newer version:"):
        nsys.collect(str(nsys_tool), ("naive",), problem.SUITES["lab"], tmp_path / "nsys_out")


def test_the_profiled_process_keeps_no_private_environment(monkeypatch):
    monkeypatch.setenv("API_TOKEN", "secret")
    monkeypatch.setenv("CUDA_HOME", "/cuda")
    kept = tools.environment()
    assert "API_TOKEN" not in kept
    assert kept["CUDA_HOME"] == "/cuda"
    assert kept["LC_ALL"] == "C"


def test_the_recorded_trace_gives_the_recorded_rows():
    info = run.read_info(RECORDED)
    frame = schema.read(schema.stored(RECORDED))
    frame = frame[frame["tool"] == "nsys"].reset_index(drop=True)
    expected = nsys.expected_ranges(tuple(info["variants"]), problem.SUITES["lab"])
    again = schema.table(nsys_export.read(TRACE, info["run"], expected))
    assert again.drop(columns="value").equals(frame.drop(columns="value"))
    assert again["value"].tolist() == pytest.approx(frame["value"].tolist(), rel=1e-8)


def test_the_recorded_trace_holds_only_names_of_ours():
    with nsys_export._opened(TRACE) as connection:
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        strings = {value for (value,) in connection.execute("SELECT value FROM StringIds")}
        others = set()
        for table in tables - {"StringIds"}:
            for _, name, *_ in connection.execute(f"PRAGMA table_info({table})").fetchall():
                found = connection.execute(
                    f"SELECT DISTINCT {name} FROM {table} WHERE typeof({name}) IN ('text', 'blob')"
                )
                others |= {value for (value,) in found}
    assert set(nsys_export._NEEDED) <= tables <= {*nsys_export._NEEDED, *nsys_export._OPTIONAL}
    assert all(len(s) < 200 for s in strings)
    assert not [s for s in strings if "\0" in s or s.startswith("/")]
    assert others <= {"", "gdn", run.read_info(RECORDED)["gpu"]["name"], "GH100"}


def test_stripping_the_recorded_trace_again_changes_no_row(tmp_path):
    info = run.read_info(RECORDED)
    expected = nsys.expected_ranges(tuple(info["variants"]), problem.SUITES["lab"])
    nsys_export.strip(TRACE, tmp_path / "t.sqlite.gz")
    assert nsys_export.read(tmp_path / "t.sqlite.gz", "r", expected) == nsys_export.read(TRACE, "r", expected)
