import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import synthetic

from analysis import load, present, tables
from kernels.errors import UserError
from profiling import schema

CHAIN, WIDE = "chain_equal", "wide_gva_state"
# Speed-ups over naive: fused 2 and 4, smem 4 and 16; over the previous rung: 2 and 4, both times.
TIMES = {
    "naive": {CHAIN: 400e-6, WIDE: 800e-6},
    "fused": {CHAIN: 200e-6, WIDE: 200e-6},
    "smem": {CHAIN: 100e-6, WIDE: 50e-6},
}
# chain_equal moves q, k, v, output (8192 tokens, 16 heads of 128 BF16), one state (4 heads of 128x128 FP32), and
# per token and head 64 BF16 of A and two FP32: 33554432 + 262144 + 4456448 bytes, at 4 TB/s slower than arithmetic.
CHAIN_FLOOR = 38273024 / 4e12


@pytest.fixture
def run(tmp_path):
    return load.load(synthetic.write_run(tmp_path / "run", TIMES, profiled=(WIDE,)))


@pytest.fixture
def with_skip(tmp_path):
    """As TIMES, but fused skips chain_equal."""
    times = TIMES | {"fused": {WIDE: 200e-6}}
    return load.load(synthetic.write_run(tmp_path / "run", times, skipped=[("fused", CHAIN, "T_8192 | too long")]))


# Frames


def test_the_ladder_has_the_values_worked_out_by_hand(run):
    table = tables.ladder(run)
    assert list(zip(table["case"], table["variant"], strict=True)) == [(c, v) for c in (CHAIN, WIDE) for v in TIMES]
    assert table["time_s"].tolist() == pytest.approx([400e-6, 200e-6, 100e-6, 800e-6, 200e-6, 50e-6])
    assert table["eager_s"].tolist() == pytest.approx([800e-6, 400e-6, 200e-6, 1600e-6, 400e-6, 100e-6])
    assert table["spread"].tolist() == pytest.approx([1e-3] * 6)
    assert table["speedup"].tolist() == pytest.approx([1, 2, 4, 1, 4, 16])
    assert table["step"].tolist() == pytest.approx([math.nan, 2, 2, math.nan, 4, 4], nan_ok=True)
    assert table["light_share"].tolist()[:3] == pytest.approx([CHAIN_FLOOR / t for t in (400e-6, 200e-6, 100e-6)])
    assert set(table["error_output"]) == set(table["error_final_state"]) == {3e-3}


def test_a_ratio_spreads_as_its_rounds_do(run):
    # Both rungs slow down together in later rounds: times spread, the ratio does not.
    assert tables.ladder(run)["speedup_spread"].tolist() == pytest.approx([0] * 6, abs=1e-9)
    frame = run.frame.copy()
    graph = (frame["metric"] == "latency_graph") & (frame["case"] == CHAIN) & (frame["sample"] < 3)
    frame.loc[graph & (frame["variant"] == "naive"), "value"] = [1.0, 2.0, 3.0]
    frame.loc[graph & (frame["variant"] == "fused"), "value"] = [1.0, 1.0, 1.0]
    frame = frame[(frame["metric"] != "latency_graph") | (frame["sample"] < 3)]
    fused = tables.ladder(dataclasses.replace(run, frame=frame)).iloc[1]
    assert fused["speedup"] == 2
    assert fused["speedup_spread"] == 0.25  # of the ratios 1, 2, 3: quartiles 1.5 and 2.5, half of that over 2


def test_geometric_means(run):
    mean = tables.geomean(tables.ladder(run)).set_index("variant")
    assert mean["cases"].tolist() == [2, 2, 2]
    assert mean["time_s"].tolist() == pytest.approx([math.sqrt(4e-4 * 8e-4), 2e-4, math.sqrt(1e-4 * 5e-5)])
    assert mean["speedup"].tolist() == pytest.approx([1, math.sqrt(8), 8])
    assert mean["step"].tolist()[1:] == pytest.approx([math.sqrt(8), math.sqrt(8)])
    assert mean.loc["smem", ["speedup_min", "speedup_max"]].tolist() == pytest.approx([4, 16])
    assert mean["spread"].tolist() == pytest.approx([1e-3 * math.sqrt(2) / 2] * 3)


def test_a_skipped_case_is_left_out_of_means_and_steps_over_the_rung(with_skip):
    table = tables.ladder(with_skip)
    smem = table[(table["case"] == CHAIN) & (table["variant"] == "smem")].iloc[0]
    assert smem["step"] == pytest.approx(4)  # over naive, the previous rung that ran
    assert tables.shared_cases(table) == [WIDE]
    assert tables.geomean(table)["speedup"].tolist() == pytest.approx([1, 4, 16])
    assert f"Left out, because not every rung runs them: {CHAIN}." in present.rungs(with_skip).note


def test_a_case_without_the_first_rung_has_no_speedup(tmp_path):
    times = TIMES | {"naive": {WIDE: 800e-6}}
    run = load.load(synthetic.write_run(tmp_path / "run", times, skipped=[("naive", CHAIN, "too long")]))
    chain = tables.ladder(run).query("case == @CHAIN")
    assert chain["speedup"].isna().all()
    assert chain["step"].tolist() == pytest.approx([math.nan, 2], nan_ok=True)
    printed = present.ladder(run)
    assert printed.head[4] == "vs naive"
    assert [row[4] for row in printed.rows] == ["–", "–", "–", "–", "4.00× ±0%", "16.0× ±0%"]


def test_variants_without_a_shared_case_are_refused(tmp_path):
    times = {"naive": {CHAIN: 1e-3}, "fused": {WIDE: 1e-3}}
    skipped = [("naive", WIDE, "no"), ("fused", CHAIN, "no")]
    run = load.load(synthetic.write_run(tmp_path / "run", times, skipped))
    with pytest.raises(UserError, match="a case that all of naive, fused run was expected, found none"):
        tables.geomean(tables.ladder(run))


def test_counters(run):
    frame = tables.counters(run, WIDE)
    assert frame["kernel"].tolist() == [
        *synthetic.KERNELS["naive"],
        tables.ALL_KERNELS,
        "fused_kernel",
        "smem_kernel",
    ]
    kernel, total = frame.iloc[0], frame.iloc[3]
    assert kernel["duration"] == pytest.approx(800e-6 / 3)
    assert (kernel["tensor_pipe"], kernel["registers"], kernel["shared_memory"]) == (0.5, 128, 2**16)
    assert kernel["dram_bytes"] == 30e6
    assert kernel["stalls"] == [("long scoreboard", 4.0), ("barrier", 3.0), ("wait", 1.5)]
    assert total["duration"] == pytest.approx(800e-6)
    # wide_gva_state: q, k, v, output; two states of 64 heads; A, g_cumsum and beta.
    minimum = 8192 * 128 * 2 * 160 + 2 * 64 * 128**2 * 4 + 8192 * 64 * 136
    assert total["dram_over_minimum"] == pytest.approx(90e6 / minimum)
    assert math.isnan(total["registers"])


def test_timeline(run):
    frame = tables.timeline(run)
    assert frame[["variant", "phase"]].values.tolist() == [[v, p] for v in TIMES for p in ("preprocess", "core")]
    assert frame["launches"].tolist() == [1, 3, 1, 1, 1, 1]
    assert frame["kernel_s"].tolist() == pytest.approx([800e-6, 800e-6, 200e-6, 200e-6, 50e-6, 50e-6])
    assert (frame["kernel_s"] / frame["projected_s"]).tolist() == pytest.approx([0.9] * 6)
    assert frame["host_s"].tolist() == pytest.approx([50e-6] * 6)
    assert (tables.shortest(run), tables.longest(run)) == (WIDE, WIDE)


def test_launches_have_their_place_on_the_clock(run):
    naive = tables.launches(run, WIDE).query("variant == 'naive' and phase == 'core'")
    assert naive["kernel"].tolist() == synthetic.KERNELS["naive"]
    third = 800e-6 / 3
    late = 800e-6 / 0.9 - 800e-6  # the last one waits for a tenth of the span
    assert naive["start_s"].tolist() == pytest.approx([20e-6, 20e-6 + third, 20e-6 + 2 * third + late])
    assert (naive["end_s"] - naive["start_s"]).tolist() == pytest.approx([third] * 3)


def test_a_trace_without_starts_has_no_place_on_the_clock(run):
    frame = run.frame[~run.frame["metric"].isin(["start", "host"])]
    older = dataclasses.replace(run, frame=frame)
    assert tables.launches(older, WIDE).empty
    assert tables.shortest(older) is None
    assert tables.timeline(older)["host_s"].isna().all()


def test_preprocessing_is_its_share_of_both(run):
    frame = tables.preprocessing(run)
    assert frame["variant"].tolist() == list(TIMES)
    assert frame["share"].tolist() == pytest.approx([0.5] * 3)  # the synthetic phases take the same time


def test_a_profile_takes_kernels_together(run):
    naive = tables.profile(run, "naive", WIDE)
    assert naive["duration"] == pytest.approx(800e-6)
    assert naive["tensor_flops"] == 18e9
    assert (naive["tensor_pipe"], naive["sm_clock"], naive["registers"]) == pytest.approx((0.5, 128, 128))
    assert tables.profile(run, "naive", CHAIN) == {}
    assert list(tables.profiles(run, WIDE).index) == list(TIMES)
    assert tables.most_work(run) == WIDE


def test_formulations_are_counted_on_the_case_with_most_arithmetic(run):
    frame = tables.formulations(run)
    assert set(frame["case"]) == {WIDE}
    assert frame["light_s"].min() == frame["light_s"][0]


def test_the_effect_of_a_rung_is_in_words(run):
    assert present.effect(run, "naive") == (
        "naive takes 565.7 ±0.07% µs, "
        f"{math.sqrt(CHAIN_FLOOR / 400e-6 * tables.cases(run)['light_s'][1] / 800e-6):.1%} of speed of light "
        "(geometric mean over 2 cases)."
    )
    assert "It is 2.83× ±0% as fast as fused: from 2.00× on chain_equal to 4.00× on wide" in present.effect(run, "smem")
    assert "did not time" in present.effect(run, "ws")


def test_the_bottleneck_of_a_rung_is_in_words(run):
    text = present.bottleneck(run, "fused", WIDE)
    assert "Tensor pipe 50.0%, Issue slots 50.0%, L2 50.0%, DRAM 50.0%" in text
    assert (
        "longest wait is long scoreboard (for data from global or local memory, or at an mbarrier): 4.0 warps" in text
    )
    assert present.bottleneck(run, "fused", CHAIN) == ""


def test_a_run_without_profiles_says_how_to_add_them(with_skip):
    assert tables.counters(with_skip, CHAIN).empty
    assert tables.timeline(with_skip).empty
    (counters,) = present.counters(with_skip)
    for table, part in ((counters, "ncu"), (present.timeline(with_skip), "nsys")):
        assert table.rows == []
        assert f"make record PART={part}" in present.markdown(table)


# Refusals


def edit(folder, change):
    """Apply `change` to the run.json of a folder."""
    path = folder / "run.json"
    info = json.loads(path.read_text())
    change(info)
    path.write_text(json.dumps(info))


def forget_fused(info):
    del info["variants"]["fused"]


def promise_ws(info):
    info["variants"]["ws"] = "not measured"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda info: info.update(run="another"), "rows of run another were expected"),
        (lambda info: info["gpu"].update(name="NVIDIA H100"), "rows of gpu NVIDIA H100 were expected"),
        (forget_fused, r"variants named in run.json \(naive, smem\) were expected, found rows of fused"),
        (promise_ws, "rows or a skip of every variant were expected, found neither of ws"),
        (lambda info: info.update(ceilings={}), "ceilings with flops_per_second and bytes_per_second were expected"),
        (lambda info: info.pop("protocol"), "lacks protocol"),
    ],
)
def test_a_run_that_does_not_fit_its_rows_is_refused(tmp_path, change, message):
    folder = synthetic.write_run(tmp_path / "run", TIMES)
    edit(folder, change)
    with pytest.raises(UserError, match=message) as refused:
        load.load(folder)
    assert str(folder) in str(refused.value)


def test_a_case_that_was_neither_measured_nor_skipped_is_refused(tmp_path):
    folder = synthetic.write_run(tmp_path / "run", TIMES | {"fused": {WIDE: 1e-3}})
    with pytest.raises(UserError, match=rf"of fused on {CHAIN} \(core\) was expected, or a skip in run.json"):
        load.load(folder)


def test_an_unknown_case_is_refused(tmp_path):
    folder = synthetic.write_run(tmp_path / "run", {"naive": {"nonsense": 1e-3}})
    with pytest.raises(UserError, match=r"cases of kernels/problem.py were expected, found nonsense"):
        load.load(folder)


def test_a_missing_folder_is_refused(tmp_path):
    with pytest.raises(UserError, match="no such file"):
        load.load(tmp_path / "nowhere")


def test_a_run_without_a_benchmark_has_no_ladder(tmp_path):
    folder = synthetic.write_run(tmp_path / "run", TIMES, profiled=(WIDE,))
    frame = schema.read(folder / "measurements.csv")
    schema.write(frame[frame["tool"] == "ncu"], folder / "measurements.csv")
    with pytest.raises(UserError, match="a benchmark was expected, found rows of ncu only"):
        tables.ladder(load.load(folder))


# Text


def test_the_headline_is_true_whichever_is_faster(tmp_path):
    def headline(name, **times):
        return present.headline(
            load.load(synthetic.write_run(tmp_path / name, {v: {CHAIN: t} for v, t in times.items()}))
        )

    over = "(geometric mean over 1 case, NVIDIA H200)."
    share = f"{CHAIN_FLOOR / 1e-4:.1%} of speed of light"
    faster = headline("faster", naive=4e-4, fused=1e-4, smem=2e-4)
    assert faster == f"fused is 4.00 times as fast as naive, and reaches {share} {over}"
    slower = headline("slower", naive=5e-5, fused=1e-4)
    assert slower == f"fused takes 2.00 times as long as naive, and reaches {share} {over}"
    same = headline("same", naive=1e-4, fused=1e-4)
    assert same == f"fused is as fast as naive, within the measurement's spread, and reaches {share} {over}"
    assert headline("alone", naive=1e-4) == f"naive reaches {share} {over}"


def test_the_printed_ladder(with_skip):
    table = present.ladder(with_skip)
    assert [row[:3] for row in table.rows] == [
        [CHAIN, "naive", "400.0 ±0.1%"],
        ["", "fused", "skipped"],
        ["", "smem", "100.0 ±0.1%"],
        [WIDE, "naive", "800.0 ±0.1%"],
        ["", "fused", "200.0 ±0.1%"],
        ["", "smem", "50.00 ±0.1%"],
    ]
    assert table.rows[2][4:] == ["4.00× ±0%", "4.00× ±0%", f"{CHAIN_FLOOR / 1e-4:.1%}"]
    assert table.blocks == [3]
    assert table.bold == [(2, 1), (2, 2), (5, 1), (5, 2)]
    assert f"fused skips {CHAIN}: T_8192 | too long." in table.note


@pytest.mark.parametrize(
    ("value", "significant", "text"),
    [
        (11261.4, 4, "11261"),
        (144.15, 4, "144.2"),
        (0.3933, 3, "0.393"),
        (9.996, 3, "10.0"),
        (0.0634, 1, "0.06"),
        (0, 3, "0"),
    ],
)
def test_digits(value, significant, text):
    assert present.digits(value, significant) == text


AWKWARD = present.Table("T", ["Name", "µs"], [["a_b|c*", "1 ±5%"], ["", "50% & #3"]], "_x_ <y> ~\\", bold=[(1, 1)])


def test_markdown_shows_text_as_it_is():
    assert present.markdown(AWKWARD) == "\n".join(
        [
            "**T**",
            "",
            r"| Name     |           µs |",
            r"| -------- | -----------: |",
            r"| a_b\|c\* |        1 ±5% |",
            r"|          | **50% & #3** |",
            "",
            r"\_x\_ \<y\> ~\\",
        ]
    )


def test_latex_shows_text_as_it_is():
    text = present.latex(AWKWARD)
    assert r"Name & \textmu{}s \\" in text
    assert r"a\_b\textbar{}c* & 1 $\pm$5\% \\" in text
    assert r" & \textbf{50\% \& \#3} \\" in text
    assert r"\_x\_ \textless{}y\textgreater{} \textasciitilde{}\textbackslash{}" in text
    assert r"\begin{longtable}{@{}lr@{}}" in text


def test_latex_separates_the_cases(run):
    assert present.latex(present.ladder(run)).count(r"\addlinespace") == 1


# Imports


def test_explaining_a_run_needs_neither_torch_nor_tilelang(tmp_path):
    folder = synthetic.write_run(tmp_path / "run", TIMES)
    code = (
        "import sys\n"
        "sys.modules.update(torch=None, tilelang=None)\n"
        "from analysis import load, notebooks, present, report\n"
        f"print(present.headline(load.load({str(folder)!r})))"
    )
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("smem is 8.00 times as fast as naive")
