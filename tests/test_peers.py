"""The libraries: behind the interface as far as a machine without a GPU and without them can tell, and in tables."""

import importlib.util
import sys
import types

import pytest
import synthetic
import torch

from analysis import load, plots_peers, present
from analysis import peers as tables
from kernels import peers, reference
from kernels.problem import Case, UnsupportedCase, make_inputs

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


def test_flashinfer_gets_its_conventions_and_gives_ours(monkeypatch):
    """A stand-in that computes what FlashInfer documents: linear gates, packed tokens, a state [N,Hv,dv,dk]."""
    seen = {}

    def stand_in(q, k, v, g, beta, scale, state, final, offsets, output_state, use_cp, max_seqlen):
        seen.update(use_cp=use_cp, offsets=offsets.tolist(), max_seqlen=max_seqlen, scale=scale, final=final)
        B = len(offsets) - 1
        q, k, v, alpha, beta = (x.unflatten(0, (B, -1)) for x in (q, k, v, g, beta))
        output, last = reference.recurrence(q, k, v, alpha.double().log(), beta, state.mT)
        output_state.copy_(last.mT)
        return output.flatten(0, 1).to(v.dtype), output_state

    library = types.ModuleType("flashinfer.gdn_prefill")
    library.chunk_gated_delta_rule = stand_in
    monkeypatch.setitem(sys.modules, "flashinfer.gdn_prefill", library)
    monkeypatch.setitem(sys.modules, "flashinfer", types.ModuleType("flashinfer"))
    inputs = make_inputs(Case("tiny", 2, 70, 1, 2, initial_state=True), "cpu")
    expected = reference.recurrence(*inputs)
    for name, use_cp in (("flashinfer", "auto"), ("flashinfer_nocp", False)):
        full = peers._flashinfer()[name]["full"]
        actual = full.result(full.forward(*full.convert(inputs)), inputs)
        assert reference.check(actual, expected, elementwise=True)["final_state"] < 1e-5
        assert seen == {"use_cp": use_cp, "offsets": [0, 70, 140], "max_seqlen": 70, "scale": 128**-0.5, "final": True}


def test_the_token_loop_is_the_recurrence_in_single_precision_and_skips_long_sequences():
    loop = peers._token_loop()
    inputs = make_inputs(Case("tiny", 1, 9, 1, 2), "cpu")
    output, state = loop.forward(*loop.convert(inputs))
    assert output.dtype == state.dtype == torch.float32
    assert reference.check((output, state), reference.recurrence(*inputs), elementwise=True)["output"] < 1e-6
    with pytest.raises(UnsupportedCase, match="up to 1025 tokens, found 1026"):
        loop.forward(*make_inputs(Case("long", 1, 1026, 1, 1), "cpu"))


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


def test_without_libraries_there_are_no_tables_and_figures_say_what_to_do(tmp_path):
    alone = {name: by_case for name, by_case in TIMES.items() if name in ("naive", "ws")}
    run = load.load(synthetic.write_run(tmp_path / "run", alone))
    assert tables.printed(run) == []
    for figure in (plots_peers.bars_figure(run, "core"), plots_peers.heat_figure(run)):
        assert "make peers" in figure.texts[0].get_text()
    assert "SUITE=qwen" in plots_peers.scaling_figure(run).texts[0].get_text()


def test_the_recorded_run_has_every_case_for_every_implementation():
    run = load.load(load.DEFAULT)
    for phase, names in (("core", 4), ("full", 6)):
        frame = tables.measured(run, phase)
        ran = frame[frame["variant"] != "token_loop"].groupby("variant")["case"].nunique()
        assert len(ran) == names
        assert set(ran) == {28}
    assert set(tables.cold_starts(run)["variant"]) == {tables.ours(run), "flashqla", "fla", "flashinfer"}
