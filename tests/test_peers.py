"""The libraries: behind the interface as far as a machine without a GPU and without them can tell, and in tables."""

import dataclasses
import importlib.util
import math
import sys
import types

import pytest
import synthetic
import torch

from analysis import load, plots_peers, present
from analysis import peers as tables
from kernels import peers, reference
from kernels.problem import Case, UnsupportedCase, make_inputs
from profiling import schema

NAMES = [name for _, _, names, _ in peers._LIBRARIES for name in names]


def test_a_missing_library_is_a_note(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None)
    found, missing = peers.find()
    assert list(found) == ["token_loop"]
    assert list(missing) == NAMES
    assert missing["fla"] == "fla-core is not installed: pip install '.[peers]'"


def test_a_library_that_refuses_this_machine_is_a_note(monkeypatch):
    def refuses():
        raise ValueError("supports sm90\nonly")

    monkeypatch.setattr(peers, "_LIBRARIES", (("flash-qla", "torch", ("flashqla", "flashqla_nocp"), refuses),))
    _, missing = peers.find()
    assert missing["flashqla_nocp"] == "flash-qla could not be imported: ValueError: supports sm90 only"


def test_every_name_is_in_the_module_s_table():
    table = peers.__doc__.split("core starts")[0]
    assert all(f"| {name} " in table for name in [*NAMES, "token_loop"])


BATCH = Case("batch", 2, 70, 1, 2, initial_state=True)
SINGLE = Case("single", 1, 70, 1, 2, initial_state=True)
PACKED = Case("packed", 1, 140, 1, 2, initial_state=True, lengths=(65, 0, 75))
each_case = pytest.mark.parametrize("case", [BATCH, SINGLE, PACKED], ids=lambda case: case.name)


def install(monkeypatch, modules):
    """Stand-ins for modules, by their full names: a package has its modules as attributes."""
    for name, content in modules.items():
        module = types.ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    for name in modules:
        package, _, short = name.rpartition(".")
        if package in sys.modules:
            setattr(sys.modules[package], short, sys.modules[name])


def assert_right(implementation, inputs, expected, names=("output", "final_state")):
    """It is, through its conversions, what the reference says; the error of BF16 is left room for."""
    actual = implementation.result(implementation.forward(*implementation.convert(inputs)), inputs)
    reference.check(actual, expected, elementwise=True, names=names)


@each_case
def test_flashinfer_gets_its_conventions_and_gives_ours(monkeypatch, case):
    """A stand-in that computes what FlashInfer documents: linear gates, packed tokens, a state [N,Hv,dv,dk]."""
    seen = {}

    def stand_in(q, k, v, g, beta, scale, state, final, offsets, output_state, use_cp, max_seqlen):
        seen.update(use_cp=use_cp, offsets=offsets.tolist(), max_seqlen=max_seqlen, scale=scale, final=final)
        assert offsets.dtype == torch.int64
        q, k, v, alpha, beta = (x[None] for x in (q, k, v, g, beta))
        output, last = reference.chunkwise(q, k, v, alpha.double().log(), beta, state.mT, offsets)
        output_state.copy_(last.mT)
        return output[0].to(v.dtype), output_state

    install(monkeypatch, {"flashinfer": {}, "flashinfer.gdn_prefill": {"chunk_gated_delta_rule": stand_in}})
    inputs = make_inputs(case, "cpu")
    offsets, longest = {"batch": ([0, 70, 140], 70), "single": ([0, 70], 70), "packed": ([0, 65, 65, 140], 75)}[
        case.name
    ]
    for name, use_cp in (("flashinfer", "auto"), ("flashinfer_nocp", False)):
        full = peers._flashinfer()[name]["full"]
        assert_right(full, inputs, reference.chunkwise(*inputs))
        assert seen == {"use_cp": use_cp, "offsets": offsets, "max_seqlen": longest, "scale": 128**-0.5, "final": True}


def sums(g, offsets):
    """Chunk-local sums of log-gates in FP32."""
    k = torch.zeros(*g.shape[:2], 1, 128)
    return reference.preprocessing(k, g, torch.zeros_like(g), offsets)[0].float()


@each_case
def test_flashqla_gets_its_conventions_and_gives_ours(monkeypatch, case):
    """A stand-in that computes what FlashQLA does: an A without gates, offsets in INT32, one context for all calls."""
    inputs = make_inputs(case, "cpu")
    expected = reference.chunkwise(*inputs)
    split = []  # the offsets that were given to be split

    def context(cu_seqlens=None, **how):
        return types.SimpleNamespace(cu_seqlens=cu_seqlens, is_intra=False, seq_map_c2r=None, intra_cp_cu_seqlens=None)

    def build_cp_context(cu_seqlens, *, enable_intra, num_v_heads, chunk_size):
        assert (cu_seqlens.dtype, enable_intra, num_v_heads, chunk_size) == (torch.int32, True, 2, 64)
        split.append(cu_seqlens.tolist())
        return context(cu_seqlens)

    def kkt_solve(k, b, chunk_size, cu_seqlens):
        return reference.preprocessing(k, torch.zeros_like(b), b, cu_seqlens)[1].bfloat16()

    def fused_gdr_fwd(q, k, v, a, g, b, initial_state, cu_seqlens, cp_seq_map, raw_cu_seqlens):
        assert torch.equal(g, sums(inputs.g, cu_seqlens))
        assert torch.equal(a, kkt_solve(k, b, 64, cu_seqlens))
        output, state = reference.chunkwise(q, k, v, inputs.g, b, initial_state, raw_cu_seqlens)
        return output, None, state

    def whole(q, k, v, g, beta, initial_state, cu_seqlens, auto_cp):
        assert cu_seqlens is inputs.cu_seqlens
        output, state = reference.chunkwise(q, k, v, g, beta, initial_state, cu_seqlens)
        return None, None, output, None, state, None

    chunk = {
        "chunk_local_cumsum": lambda g, cu_seqlens, chunk_size: sums(g, cu_seqlens),
        "kkt_solve": kkt_solve,
        "cp_preprocess_fwd": lambda context, initial_state, **_: (initial_state, None),
        "fused_gdr_fwd": fused_gdr_fwd,
        "chunk_gated_delta_rule_fwd": whole,
    }
    operator = "flash_qla.ops.gated_delta_rule"
    cp = {"FlashQLACPContext": context, "build_cp_context": build_cp_context}
    install(
        monkeypatch,
        {"flash_qla": {}, "flash_qla.ops": {}, operator: {}, f"{operator}.chunk": chunk, f"{operator}.chunk.cp": cp},
    )
    found = peers._flashqla()
    for phases in found.values():
        assert_right(phases["core"], inputs, expected)
        assert_right(phases["full"], inputs, expected)
    g_cumsum, A = reference.preprocessing(inputs.k, inputs.g, inputs.beta, inputs.cu_seqlens)
    assert_right(found["flashqla"]["cumsum"], inputs, (g_cumsum,), ("g_cumsum",))
    assert_right(found["flashqla"]["A"], inputs, (A,), ("A",))
    assert list(found["flashqla_nocp"]) == ["core", "full"]
    # The core, cumsum and A of the one that splits; a batch can't be.
    assert split == {"batch": [], "single": [[0, 70]] * 3, "packed": [[0, 65, 65, 140]] * 3}[case.name]


@each_case
def test_fla_gets_its_conventions_and_gives_ours(monkeypatch, case):
    """A stand-in that computes what FLA does: sums in base 2, a gated A from a kernel of its own, offsets in INT64."""
    inputs = make_inputs(case, "cpu")
    expected = reference.chunkwise(*inputs)
    rcp_ln2 = 1 / math.log(2)

    def packed(offsets):
        assert (offsets is None) == (inputs.cu_seqlens is None)
        assert offsets is None or offsets.dtype == torch.int64
        return offsets

    def local_cumsum(g, chunk_size, scale, cu_seqlens):
        return sums(g, packed(cu_seqlens)) * scale

    class Kernel:
        def __getitem__(self, grid):
            chunks = {"batch": 2, "single": 2, "packed": 4}[case.name]
            assert grid == (chunks, 4 if case is BATCH else 2)
            return self.launch

        def launch(self, k, g, beta, A, cu_seqlens, chunk_indices, T, H, HV, K, BT, BC):
            assert (T, H, HV, K, BT, BC) == (case.T, 1, 2, 128, 64, 16)
            assert torch.equal(g, sums(inputs.g, cu_seqlens) * rcp_ln2)
            A.copy_(reference.preprocessing(k, inputs.g, beta, packed(cu_seqlens))[1])

    def prepare_chunk_indices(cu_seqlens, chunk_size):
        counts = [-(-length // chunk_size) for length in cu_seqlens.diff().tolist()]
        return torch.tensor([[n, i] for n, count in enumerate(counts) for i in range(count)])

    def forward_h(k, w, u, g, initial_state, output_final_state, cu_seqlens):
        assert output_final_state
        return None, None, reference.chunkwise(inputs.q, k, *inputs[2:5], initial_state, packed(cu_seqlens))[1]

    def forward_o(q, k, v, h, g, scale, cu_seqlens):
        return reference.chunkwise(q, k, *inputs[2:6], packed(cu_seqlens))[0]

    def whole(q, k, v, g, beta, scale, initial_state, output_final_state, cu_seqlens):
        assert output_final_state
        return reference.chunkwise(q, k, v, g, beta, initial_state, packed(cu_seqlens))

    install(
        monkeypatch,
        {
            **dict.fromkeys(("fla", "fla.ops", "fla.ops.common", "fla.ops.gated_delta_rule", "fla.ops.utils"), ()),
            "fla.ops.common.chunk_delta_h": {"chunk_gated_delta_rule_fwd_h": forward_h},
            "fla.ops.common.chunk_o": {"chunk_fwd_o": forward_o},
            "fla.ops.gated_delta_rule.chunk": {"chunk_gated_delta_rule": whole, "RCP_LN2": rcp_ln2},
            "fla.ops.gated_delta_rule.chunk_fwd": {
                "chunk_gated_delta_rule_fwd_kkt_solve_kernel": Kernel(),
                "prepare_chunk_indices": prepare_chunk_indices,
            },
            "fla.ops.gated_delta_rule.wy_fast": {
                "recompute_w_u_fwd": lambda cu_seqlens, **_: (None, packed(cu_seqlens))
            },
            "fla.ops.utils.cumsum": {"chunk_local_cumsum": local_cumsum},
            **dict.fromkeys(("triton", "triton.runtime"), ()),
            "triton.runtime.autotuner": {"Autotuner": type("Autotuner", (), {})},
            "triton.runtime.jit": {"KernelInterface": type("KernelInterface", (), {})},
        },
    )
    phases = peers._fla()["fla"]
    assert_right(phases["core"], inputs, expected)
    assert_right(phases["full"], inputs, expected)
    g_cumsum, A = reference.preprocessing(inputs.k, inputs.g, inputs.beta, inputs.cu_seqlens)
    assert_right(phases["cumsum"], inputs, (g_cumsum,), ("g_cumsum",))
    assert_right(phases["A"], inputs, (A,), ("A",))


@pytest.mark.parametrize("gates", ["random", "steep", "zero"])
@each_case
def test_gating_an_A_without_gates_gives_the_gated_one(case, gates):
    inputs = make_inputs(dataclasses.replace(case, gates=gates), "cpu")
    k, g, beta, offsets = inputs.k, inputs.g, inputs.beta, inputs.cu_seqlens
    _, bare = reference.preprocessing(k, torch.zeros_like(g), beta, offsets)
    _, gated = reference.preprocessing(k, g, beta, offsets)
    torch.testing.assert_close(peers._gated(bare, inputs), gated, rtol=1e-9, atol=1e-12)


def test_the_token_loop_is_the_recurrence_in_single_precision_and_skips_what_takes_too_long():
    loop = peers._token_loop()
    inputs = make_inputs(Case("tiny", 1, 9, 1, 2), "cpu")
    output, state = loop.forward(*loop.convert(inputs))
    assert output.dtype == state.dtype == torch.float32
    assert reference.check((output, state), reference.recurrence(*inputs), elementwise=True)["output"] < 1e-6
    with pytest.raises(UnsupportedCase, match="up to 1025 tokens, found 1026"):
        loop.forward(*make_inputs(Case("long", 1, 1026, 1, 1), "cpu"))
    with pytest.raises(UnsupportedCase, match="sequences of one length"):
        loop.forward(*make_inputs(PACKED, "cpu"))


CHAIN, WIDE, LONG = "chain_equal", "wide_gva_state", "q2_8_32768"
TIMES = {
    "naive": {CHAIN: 400e-6, WIDE: 800e-6, LONG: 900e-6},
    "ws": {CHAIN: 100e-6, WIDE: 50e-6, LONG: 300e-6},
    "flashqla": {CHAIN: 150e-6, WIDE: 40e-6, LONG: 600e-6},
    "fla": {CHAIN: 120e-6, WIDE: 80e-6, LONG: 600e-6},
}


@pytest.fixture
def run(tmp_path):
    return load.load(synthetic.write_run(tmp_path / "run", TIMES))


def test_the_last_rung_stands_against_the_fastest_library_of_each_case(run):
    assert tables.ours(run) == "ws"
    frame = tables.against(run, "core")
    assert frame[["case", "best"]].values.tolist() == [[CHAIN, "fla"], [WIDE, "flashqla"], [LONG, "flashqla"]]
    assert frame["ratio"].tolist() == pytest.approx([1.2, 0.8, 2.0])
    over = tables.measured(run, "core").set_index(["case", "variant"])["over_best"]
    assert over[WIDE].to_dict() == pytest.approx({"ws": 1.25, "flashqla": 1.0, "fla": 2.0})
    assert tables.phases(run) == ["core"]
    assert tables.headline(run, "core") == (
        "Core: ws is ahead of the best library on 2 of 3 cases, and 0.980× as fast over lab and 2.00× as fast over "
        "qwen (geometric mean)."
    )


def test_losses_are_printed_and_wins_are_bold(run):
    (table,) = tables.standing(run)
    assert [row[0] for row in table.rows] == [CHAIN, WIDE, "geometric mean, lab", LONG, "geometric mean, qwen"]
    assert table.rows[1] == [WIDE, "50.00", "flashqla", "40.00", "0.800× ±0%"]
    assert table.bold == [(0, 4), (3, 4)]


def test_the_token_loop_is_no_library(tmp_path):
    times = TIMES | {"token_loop": {CHAIN: 1e-9}}
    run = load.load(
        synthetic.write_run(tmp_path / "run", times, skipped=[("token_loop", WIDE, "x"), ("token_loop", LONG, "x")])
    )
    assert tables.against(run, "core")["best"].tolist() == ["fla", "flashqla", "flashqla"]
    (table,) = tables.everybody(run)
    assert table.head[-1] == "token_loop"
    assert table.rows[1][-1] == present.NONE
    assert "token_loop" not in table.note


def test_a_missing_library_and_one_that_failed_are_notes(tmp_path):
    folder = synthetic.write_run(
        tmp_path / "run",
        {**TIMES, "flashqla": {CHAIN: 1e-4}},
        skipped=[("flashqla", WIDE, "wrong: output: relative L2 error 1e-1"), ("flashqla", LONG, "wrong")],
    )
    run = load.load(folder)
    run.info["missing"] = {"flashinfer": "flashinfer-python is not installed"}
    (table,) = tables.everybody(run)
    assert "flashinfer: flashinfer-python is not installed." in table.note
    assert f"flashqla on {WIDE}: wrong: output: relative L2 error 1e-1." in table.note
    (table,) = tables.standing(run)
    assert table.note.endswith(f" Not timed: flashqla on {WIDE}, wrong. Not timed: flashqla on {LONG}, wrong.")


def test_without_libraries_there_are_no_tables_and_figures_say_what_to_do(tmp_path):
    alone = {name: by_case for name, by_case in TIMES.items() if name in ("naive", "ws")}
    run = load.load(synthetic.write_run(tmp_path / "run", alone))
    assert tables.printed(run) == []
    for figure in (plots_peers.bars_figure(run, "core"), plots_peers.heat_figure(run)):
        assert "make peers" in figure.texts[0].get_text()
    assert "SUITE=qwen" in plots_peers.scaling_figure(run).texts[0].get_text()


PACKINGS = ("v2_8_8x4096", "v8_32_8x4096")
WHOLE = {
    "ws": {CHAIN: 100e-6, WIDE: 400e-6, PACKINGS[0]: 50e-6, PACKINGS[1]: 70e-6},
    "flashqla": {CHAIN: 150e-6, WIDE: 150e-6, PACKINGS[0]: 200e-6},
    "fla": {CHAIN: 300e-6, WIDE: 300e-6, PACKINGS[0]: 100e-6, PACKINGS[1]: 100e-6},
    "flashinfer": {CHAIN: 500e-6, WIDE: 300e-6, PACKINGS[0]: 300e-6, PACKINGS[1]: 140e-6},
}


@pytest.fixture
def whole(tmp_path):
    """A run with every phase; FlashQLA failed on a case."""
    failed = [("flashqla", PACKINGS[1], "wrong")]
    return load.load(synthetic.write_run(tmp_path / "run", WHOLE, failed, phases=tuple(schema.CHECKED)))


def test_every_suite_has_its_mean_in_the_headline(whole):
    assert tables.headline(whole, "full") == (
        "Full: ws is ahead of the best library on 3 of 4 cases, and 0.750× as fast over lab and 1.69× as fast over "
        "varlen (geometric mean)."
    )
    three = {name: by_case | {LONG: 1e-4} for name, by_case in WHOLE.items()}
    folder = whole.folder.parent / "three"
    failed = [("flashqla", PACKINGS[1], "wrong")]
    run = load.load(synthetic.write_run(folder, three, failed, phases=("core", "full")))
    assert "0.750× as fast over lab, 1.00× as fast over qwen and 1.69× as fast over varlen" in tables.headline(
        run, "core"
    )


def test_phases_are_shown_of_those_that_can_be_taken_apart_on_the_cases_they_share(whole):
    frame = tables.parts(whole).set_index(["case", "variant", "phase"])["time_s"].sort_index()
    assert set(frame.index.get_level_values("variant")) == {"ws", "flashqla", "fla"}
    assert frame[CHAIN, "fla"].to_dict() == pytest.approx(
        {"cumsum": 30e-6, "A": 120e-6, "core": 300e-6, "full": 450e-6}
    )
    assert list(frame[CHAIN, "ws"].index) == ["A", "core", "full"]
    table = tables.parts_table(whole)
    assert table.head[2:] == ["cumsum, µs", "A, µs", "core, µs", "full, µs"]
    assert [row[:2] for row in table.rows] == [
        ["lab, 2 cases", "ws"], ["", "flashqla"], ["", "fla"],
        ["varlen, 1 case", "ws"], ["", "flashqla"], ["", "fla"],
    ]  # fmt: skip
    assert table.rows[0][2:] == [present.NONE, "80.00", "200.0", "300.0"]  # sqrt(100 x 400) µs
    assert table.rows[5][2:] == ["10.00", "40.00", "100.0", "150.0"]


def test_peak_memory_stands_beside_what_the_intermediates_take(whole):
    frame = tables.memory(whole).set_index(["case", "variant"])
    assert frame.loc[(WIDE, "ws"), "intermediates_bytes"] == 8192 * 64 * (64 * 2 + 4)
    table = tables.memory_table(whole)
    assert table.head == ["Case", "ws", "flashqla", "fla", "flashinfer", "A and g_cumsum"]
    by_case = {row[0]: row[1:] for row in table.rows}
    assert by_case[WIDE] == ["3.00", "6.00", "9.00", "12.0", "66.0"]
    assert by_case[PACKINGS[1]][1] == present.NONE


def test_a_run_without_these_phases_has_no_table_of_them(run):
    assert tables.parts(run).empty
    assert tables.memory(run).empty
    assert tables.parts_table(run) is tables.memory_table(run) is None


def test_the_recorded_run_has_every_case_for_every_implementation():
    run = load.load(load.DEFAULT)
    for phase, names in (("core", 4), ("full", 6)):
        frame = tables.measured(run, phase)
        ran = frame[frame["variant"] != "token_loop"].groupby("variant")["case"].nunique()
        left_out = [name for name, _, _ in tables._failed(run, phase)]
        assert len(ran) == names
        assert all(cases == 40 - left_out.count(name) for name, cases in ran.items())
        assert left_out == (["flashinfer", "flashinfer_nocp"] if phase == "full" else [])
    steps = tables.parts(run).groupby(["phase", "variant"])["case"].nunique()
    assert steps["cumsum"].to_dict() == {"flashqla": 40, "fla": 40}
    assert steps["A"].to_dict() == {"split": 40, "flashqla": 40, "fla": 40}
    assert set(tables.cold_starts(run)["variant"]) == {tables.ours(run), "flashqla", "fla", "flashinfer"}
