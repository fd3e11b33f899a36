"""The libraries behind the interface, as far as a machine without a GPU and without them can tell."""

import importlib.util
import sys
import types

import pytest
import torch

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
