"""Nsight Compute itself as the oracle: Debian's ncu knows our metrics and sections, and reads reports as we do."""

import subprocess
import sys
from itertools import pairwise

import nsight
import pytest

from profiling import ncu, ncu_export, tools
from profiling.metrics import METRICS, STALLS

# Reports of other GPUs that come with the package; their kernels ran in no NVTX range.
EXAMPLES = (
    "sharedBankConflicts/transposeCoalesced",
    "uncoalescedGlobalAccesses/addConstDouble",
    "instructionMix/sobelFloat",
)


@pytest.fixture(scope="module")
def package():
    return nsight.unpacked("nsight-compute")


@pytest.fixture(scope="module")
def tool(package, tmp_path_factory):
    """The path of ncu, which writes its sections into a home of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        yield str(package / "usr/bin/ncu")


def printed(tool, *words):
    done = subprocess.run([tool, *words], capture_output=True, text=True, check=True, env=tools.environment())
    return done.stdout


def example(package, name):
    report = package / "usr/share/doc/nsight-compute/examples" / f"{name}.ncu-rep"
    if not report.exists():
        pytest.skip(f"this release of the package has no example {name}")
    return report


def test_every_counter_exists_on_hopper(tool):
    # Attributes of a launch are no counters, and are not listed.
    counters = [metric.counter for metric in METRICS.values() if not metric.counter.startswith("launch__")]
    bases = ",".join(sorted({counter.partition(".")[0] for counter in counters}))
    listed = printed(tool, "--query-metrics-mode", "suffix", "--metrics", bases, "--chips", "gh100").split()
    assert set(counters) <= set(listed)


@pytest.mark.parametrize("name", [name for name in ncu.SETS if name != "full"])
def test_the_sections_of_a_set_exist_and_hold_what_it_is_for(tool, name):
    sections = ncu.SETS[name]
    assert set(sections) <= set(printed(tool, "--list-sections").split())
    listed = set(
        printed(tool, "--list-metrics", *(word for section in sections for word in ("--section", section))).split()
    )
    promised = {"sm_throughput", "dram_throughput", "occupancy", "registers", "shared_memory"}
    promised |= {"stalls": set(STALLS), "roofline": {"l2_hit", "l2_throughput"}}.get(name, set())
    assert {METRICS[metric].counter for metric in promised} <= listed


def test_the_details_page_shows_our_counters_under_these_names(package):
    shown = set()
    for path in package.rglob("*.section"):
        lines = [line.strip().partition(": ") for line in path.read_text().splitlines()]
        section = next(value for key, _, value in lines if key == "DisplayName").strip('"')
        for (key, _, label), (following, _, counter) in pairwise(lines):
            if (key, following) == ("Label", "Name"):
                shown.add((section, label.strip('"'), counter.strip('"')))
    assert {(*metric.details, metric.counter) for metric in METRICS.values() if metric.details} <= shown


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_report_gives_what_ncu_prints_of_it(package, tool, tmp_path, name):
    pytest.importorskip("ncu_report", reason="ncu-report is not installed: pip install ncu-report")
    report = example(package, name)
    (found,) = ncu_export.launches(report)
    hopper, newer = {"tensor_flops", "stall_gmma", "tma_loads"}, {"limit_barriers"}  # the examples are older
    assert found.values.keys() >= METRICS.keys() - hopper - newer
    for page in ("raw", "details"):
        csv = tmp_path / f"{page}.csv"
        csv.write_text(printed(tool, "--import", str(report), "--page", page, "--csv"))
        (as_printed,) = ncu_export.launches(csv)
        assert as_printed.kernel == found.kernel
        for metric, value in as_printed.values.items():
            # ncu prints two decimals of its unit, and of hardware counters on the raw page six.
            percent = METRICS[metric].unit == "ratio"
            assert value == pytest.approx(found.values[metric], rel=1e-3, abs=1e-4 if percent else 5e-3), metric
        if page == "raw":
            assert (as_printed.gpu, as_printed.values.keys()) == (found.gpu, found.values.keys())
            exact = [metric for metric in found.values if metric.startswith("stall_") or METRICS[metric].unit == "byte"]
            assert [as_printed.values[metric] for metric in exact] == pytest.approx(
                [found.values[metric] for metric in exact], abs=1e-6
            )
            assert as_printed.values["duration"] == pytest.approx(found.values["duration"], rel=1e-6)


@pytest.mark.parametrize("by", ["ncu-report", "ncu"])
@pytest.mark.parametrize("share", [0, 0.1, 0.5, 0.9, 0.999])
def test_a_truncated_report_is_refused(package, tool, tmp_path, monkeypatch, share, by):
    if by == "ncu":
        monkeypatch.setitem(sys.modules, "ncu_report", None)
        monkeypatch.setattr(tools, "find", lambda *_: tool)
    else:
        pytest.importorskip("ncu_report", reason="ncu-report is not installed: pip install ncu-report")
    whole = example(package, EXAMPLES[0]).read_bytes()
    report = tmp_path / "cut.ncu-rep"
    report.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(tools.BadExport, match=r"cut\.ncu-rep.*empty, truncated or"):
        ncu_export.launches(report)
