"""What moved between two rungs: the arithmetic by hand, the words, and what is refused."""

import math

import pytest
import synthetic

from analysis import diff, load, present, tables
from profiling import run as runs
from profiling import schema
from profiling.metrics import METRICS

TIMES = {"naive": {"chain_equal": 1e-3}, "ws": {"chain_equal": 0.25e-3}}
WHERE = (synthetic.RUN, synthetic.GPU, "ncu")


def rows(variant, kernel, **values):
    return [
        schema.row(*WHERE, variant, "chain_equal", "core", name, METRICS[name].unit, value, kernel=kernel)
        for name, value in values.items()
    ]


@pytest.fixture
def run(tmp_path):
    """naive: a short kernel and one that takes three times as long; ws: one kernel."""
    folder = synthetic.write_run(tmp_path / "run", TIMES)
    runs.add_rows(
        folder,
        rows(
            "naive", "naive_uw_kernel", duration=1e-4, tensor_pipe=0.4, dram_read=10e6, dram_write=0, registers=100,
            stall_barrier=1.0, stall_wait=0.5, limit_registers=5, limit_warps=16, bank_conflicts=10,
            shared_wavefronts=50,
        )
        + rows(
            "naive", "naive_state_kernel", duration=3e-4, tensor_pipe=0.2, dram_read=30e6, dram_write=20e6,
            registers=200, stall_barrier=2.0, stall_wait=0.5, limit_registers=2, limit_warps=8, bank_conflicts=30,
            shared_wavefronts=50,
        )
        + rows(
            "ws", "ws_kernel", duration=1e-4, tensor_pipe=0.75, dram_read=20e6, dram_write=20e6, registers=128,
            stall_barrier=0.5, stall_wait=0.6, limit_registers=1, limit_warps=4, bank_conflicts=0, shared_wavefronts=50,
        ),
    )  # fmt: skip
    return load.load(folder)


def test_kernels_of_a_rung_are_taken_together(run):
    naive = tables.profile(run, "naive", "chain_equal")
    assert naive["duration"] == pytest.approx(4e-4)  # summed
    assert naive["dram_read"] == pytest.approx(40e6)
    assert naive["tensor_pipe"] == pytest.approx((1 * 0.4 + 3 * 0.2) / 4)  # weighted by duration
    assert naive["stall_barrier"] == pytest.approx((1 * 1.0 + 3 * 2.0) / 4)
    assert (naive["registers"], naive["limit_registers"]) == (200, 2)  # of the longest kernel


def test_changes_are_b_over_a_and_waits_come_by_how_far_they_moved(run):
    frame = diff.diff(run, "naive", "ws", "chain_equal").set_index("metric")
    assert frame.loc["tensor_pipe", "change"] == pytest.approx(0.75 / 0.25)
    assert frame.loc["dram_read", "change"] == pytest.approx(0.5)
    waits = frame[frame["group"] == diff.WAITS]
    assert list(waits.index) == ["stall_barrier", "stall_wait"]
    assert waits.loc["stall_barrier", "a"] == pytest.approx(1.75)


def test_a_change_from_nothing_has_no_factor(run):
    frame = diff.diff(run, "ws", "naive", "chain_equal").set_index("metric")
    assert math.isnan(frame.loc["bank_conflicts", "change"])


def test_the_tables_put_numbers_in_words(run):
    text = present.markdown(*diff.explain(run, "naive", "ws", "chain_equal"))
    for part in (
        "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
        "cycles in which the tensor cores work",
        "25.0% | 75.0% | **3.00×**",  # the row that changed most stands out
        "naive moves 1.57×",  # 60 MB of the 38.3 MB of kernels/work.py
        "An SM has room for 2 CTAs of naive, limited by registers. An SM has room for 1 CTA of ws",
        "bank conflicts are 40.0% in naive, 0.0% in ws",
        "for other threads at a CTA barrier",
    ):
        assert part in text, part


def test_the_headline_is_the_benchmark_s(run):
    text = diff.headline(run, "naive", "ws", "chain_equal")
    assert "naive takes 1000 µs and ws 250.0 µs: ws is 4.00 ±0.1% times as fast" in text


@pytest.mark.parametrize(
    ("a", "b", "case", "found"),
    [
        ("naive", "faster", "chain_equal", "two rungs of naive, ws were expected, found 'faster'"),
        ("naive", "ws", "wide_gva_state", "found them on chain_equal.*make ncu VARIANT=naive CASE=wide_gva_state"),
    ],
)
def test_what_the_run_cannot_compare_is_refused(run, a, b, case, found):
    with pytest.raises(diff.NoDiff, match=found):
        diff.explain(run, a, b, case)


def test_the_recorded_run_explains_every_neighbour():
    recorded = load.load(load.DEFAULT)
    for a, b in zip(recorded.variants, recorded.variants[1:], strict=False):
        frame = diff.diff(recorded, a, b, "wide_gva_state")
        assert set(frame["group"]) == {*diff.GROUPS, diff.WAITS}
        assert frame[["a", "b"]].notna().all(axis=None)


def test_left_out_the_rungs_are_the_last_two(monkeypatch, capsys):
    recorded = load.load(load.DEFAULT)
    monkeypatch.setattr("sys.argv", ["diff"])
    diff.main()
    a, b = recorded.variants[-2:]
    assert capsys.readouterr().out.startswith(diff.headline(recorded, a, b, "wide_gva_state"))
