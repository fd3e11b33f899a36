"""Nsight Compute: preflight, and the reader of raw CSV."""

import csv
import gzip
import io

import pytest

from profiling import ncu, run, schema, tools
from profiling.metrics import METRICS

RECORDED = run.RECORDED / "h200"
EXPORTS = sorted((RECORDED / "ncu").glob("*.csv.gz"))

HEAD = ["ID", "Host Name", "thread Domain:Push/Pop_Range:PL_Type", "Kernel Name", "device__attribute_display_name"]
COUNTERS = {
    "gpu__time_duration.sum": ("us", "1,284.256"),
    "dram__bytes_read.sum": ("Mbyte", "273.5"),
    "sm__warps_active.avg.pct_of_peak_sustained_active": ("%", "24.5"),
    "launch__registers_per_thread": ("register/thread", "128"),
    "launch__shared_mem_per_block_dynamic": ("Kbyte/block", "99.328"),
    "sm__cycles_elapsed.avg.per_second": ("Ghz", "1.75"),
    "lts__t_sector_hit_rate.pct": ("%", "n/a"),
    "smsp__average_warps_issue_stalled_gmma_per_issue_active.ratio": ("inst", "1.5"),
}


def export(*kernels, counters=COUNTERS, domain="gdn"):
    """A raw CSV as ncu prints it; `kernels` are (kernel name, range)."""
    out = io.StringIO()
    writer = csv.writer(out, quoting=csv.QUOTE_ALL)
    writer.writerow(HEAD + list(counters))
    writer.writerow([""] * len(HEAD) + [unit for unit, _ in counters.values()])
    for i, (kernel, name) in enumerate(kernels):
        nvtx = f'1478  "{domain}:{name}:none:none:RGB:0xff:REGISTERED:{name}" ' if name else ""
        writer.writerow([i, "node7", nvtx, kernel, "NVIDIA H200"] + [value for _, value in counters.values()])
    return out.getvalue()


def read(tmp_path, text):
    path = tmp_path / "export.csv"
    path.write_text(text)
    return ncu.read(path, "r")


def test_units_become_base_units_and_missing_cells_stay_out(tmp_path):
    rows = read(tmp_path, export(("fused_kernel", "fused/chain_equal/core")))
    assert {row["metric"]: row["value"] for row in rows} == pytest.approx(
        {
            "duration": 1284.256e-6,
            "dram_read": 273.5e6,
            "occupancy": 0.245,
            "registers": 128,
            "shared_memory": 99328,
            "sm_clock": 1.75e9,
            "stall_gmma": 1.5,
        }
    )
    first = rows[0]
    assert (first["variant"], first["case"], first["phase"]) == ("fused", "chain_equal", "core")
    assert (first["tool"], first["kernel"], first["gpu"]) == ("ncu", "fused_kernel", "NVIDIA H200")
    schema.table(rows)


def test_several_kernels_and_repeats_are_kept_apart(tmp_path):
    name = "naive/chain_equal/core"
    rows = read(tmp_path, export(("naive_uw_kernel", name), ("naive_state_kernel", name), ("naive_uw_kernel", name)))
    durations = [(row["kernel"], row["sample"]) for row in rows if row["metric"] == "duration"]
    assert durations == [("naive_uw_kernel", 0), ("naive_state_kernel", 0), ("naive_uw_kernel", 1)]


def test_output_of_tool_and_program_before_the_table_is_passed_over(tmp_path):
    text = "==PROF== Connected to process 1\nhello\n" + export(("fused_kernel", "fused/chain_equal/core"))
    assert len(read(tmp_path, text)) == 7


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", "found no table"),
        ("==WARNING== No kernels were profiled.\n", "found no table"),
        (export(), "found no kernel"),
        (export(("fused_kernel", "")), "found fused_kernel outside of any"),
        (export(("fused_kernel", "fused/chain_equal/core"), domain="other"), "outside of any"),
        (export(("fused_kernel", "fused")), "ranges named variant/case/phase were expected, found 'fused'"),
        (export(("at::native::fill_kernel", "fused/chain_equal/core")), "only kernels of fused were expected"),
        (
            export(("fused_kernel", "fused/chain_equal/core"), counters={"gpu__time_duration.sum": ("fortnight", "1")}),
            "unit 'fortnight'",
        ),
        (
            export(("fused_kernel", "fused/chain_equal/core"), counters={"gpu__time_duration.sum": ("us", "1.2.3")}),
            "found '1.2.3'",
        ),
        (export(("fused_kernel", "fused/chain_equal/core"))[:-60], "truncated"),
    ],
)
def test_exports_that_cannot_be_trusted_are_refused(tmp_path, text, found):
    with pytest.raises(tools.BadExport, match=found) as refused:
        read(tmp_path, text)
    assert "export.csv" in str(refused.value)


def test_host_and_process_leave_the_csv():
    text = ncu._without_private(export(("fused_kernel", "fused/chain_equal/core")), "x")
    assert "node7" not in text
    assert "Host Name" not in text
    assert '"1,284.256"' in text


@pytest.mark.parametrize(
    ("params", "capabilities", "restricted"),
    [
        ("RmProfilingAdminOnly: 1\n", "0000000000000000", True),
        ("RmProfilingAdminOnly: 1\n", "000001ffffffffff", False),
        ("RmProfilingAdminOnly: 0\n", "0000000000000000", False),
        ("", "0000000000000000", False),
    ],
)
def test_permission_is_read_from_driver_and_capabilities(params, capabilities, restricted):
    status = f"Name:\tpython\nCapEff:\t{capabilities}\n"
    assert ncu._counters_restricted(params, status) is restricted


def test_a_missing_ncu_is_named_with_places_and_remedy(monkeypatch):
    monkeypatch.setattr(tools.shutil, "which", lambda *_, **__: None)
    with pytest.raises(tools.ToolMissing, match=r"Nsight Compute \(ncu\).*PATH.*make report"):
        ncu.preflight()


def test_without_permission_the_command_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(tools.shutil, "which", lambda name, **_: f"/usr/bin/{name}")
    monkeypatch.setattr(run, "require_gpu", lambda: None)
    texts = {"/proc/driver/nvidia/params": "RmProfilingAdminOnly: 1\n", "/proc/self/status": "CapEff:\t00\n"}
    monkeypatch.setattr(ncu, "_read", texts.get)
    with pytest.raises(ncu.NoPermission, match=r"ERR_NVGPUCTRPERM.*--cap-add=SYS_ADMIN"):
        ncu.preflight()


def test_a_refusal_while_profiling_is_the_same_error(monkeypatch, tmp_path):
    def refused(*_):
        raise tools.ProfileFailed("ncu ended with exit code 1: ==ERROR== ERR_NVGPUCTRPERM")

    monkeypatch.setattr(tools, "profile", refused)
    with pytest.raises(ncu.NoPermission, match="RmProfilingAdminOnly"):
        ncu.collect("ncu", ("fused",), "chain_equal", tmp_path)


def test_a_filter_that_matched_nothing_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(tools, "profile", lambda *_: "==WARNING== No kernels were profiled.")
    with pytest.raises(tools.ProfileFailed, match="profiled no kernel"):
        ncu.collect("ncu", ("fused",), "chain_equal", tmp_path)


def test_the_filter_names_our_ranges_escaped(monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(tools, "profile", lambda words, *_: seen.extend(words) or "")
    with pytest.raises(tools.ProfileFailed):
        ncu.collect("ncu", ("naive", "fused"), "chain_equal", tmp_path)
    assert r"gdn@naive\/chain_equal\/core/" in seen
    assert r"gdn@fused\/chain_equal\/core/" in seen


@pytest.mark.parametrize("path", EXPORTS, ids=lambda path: path.stem)
def test_recorded_exports_give_the_recorded_rows(path):
    case = path.name.removesuffix(".csv.gz")
    frame = schema.read(RECORDED / "measurements.csv")
    frame = frame[(frame["tool"] == "ncu") & (frame["case"] == case)].reset_index(drop=True)
    again = schema.table(ncu.read(path, frame["run"].iloc[0]))
    assert len(again) >= len(frame["variant"].unique()) * len(METRICS) * 0.9
    assert again.drop(columns="value").equals(frame.drop(columns="value"))
    assert again["value"].tolist() == pytest.approx(frame["value"].tolist(), rel=1e-8)


def test_there_are_recorded_exports_without_host_user_or_path():
    assert EXPORTS
    for path in EXPORTS:
        text = gzip.decompress(path.read_bytes()).decode()
        assert not {"Host Name", "Process Name", "/home", "/root", "/work", "python3"} & set(text.split('"'))
        assert "/home/" not in text
        assert "/root/" not in text


def test_the_summary_shows_what_the_command_promises(tmp_path):
    counters = COUNTERS | {
        METRICS[name].counter: ("%", "50") for name in ("sm_throughput", "dram_throughput", "tensor_pipe")
    }
    rows = read(tmp_path, export(("fused_kernel", "fused/chain_equal/core"), counters=counters))
    text = ncu.summary(rows)
    for part in ("1284.3 µs", "50.0%", "24.5%", "128", "97.0 KiB", "gmma 1.50"):
        assert part in text
