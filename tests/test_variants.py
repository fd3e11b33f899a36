"""The ladder's registry."""

from pathlib import Path

import pytest
import torch

import variants


def test_the_ladder_is_the_files_of_the_folder():
    files = {path.stem for path in Path(variants.__file__).parent.glob("*.py")} - {"__init__", "__main__"}
    assert set(variants.LADDER) == files


@pytest.mark.parametrize("name", variants.LADDER)
def test_a_rung_has_a_label_and_the_operator(name):
    label = variants.label(name)
    assert label
    assert not label.startswith(name)
    assert callable(variants.load(name).gdn_prefill_forward)


def test_select_keeps_ladder_order_and_refuses_unknown_names():
    assert variants.select("all") == variants.LADDER
    assert variants.select("fused,naive") == ("naive", "fused")
    with pytest.raises(variants.UnknownVariant, match=r"one of naive, fused.*found 'faster'.*LADDER"):
        variants.select("naive,faster")


def test_the_dv_tile_follows_heads_and_sms(monkeypatch):
    gpu = torch.device("cuda")
    monkeypatch.setattr(variants, "sm_count", lambda device: 132)
    assert [variants.dv_tile(B, Hv, gpu) for B, Hv in ((1, 4), (1, 66), (1, 67), (4, 64))] == [64, 64, 128, 128]
    monkeypatch.setattr(variants, "sm_count", lambda device: 16)  # a MIG slice
    assert [variants.dv_tile(B, Hv, gpu) for B, Hv in ((1, 8), (1, 9))] == [64, 128]


def test_without_a_gpu_sms_are_those_of_a_full_hopper():
    assert variants.sm_count(torch.device("meta")) == 132


def test_the_register_budgets_of_ws_fit_what_its_launch_brings():
    ws = variants.load("ws")
    roles = (ws.STATE_REGISTERS, ws.PREPARE_REGISTERS, ws.OUTPUT_REGISTERS, ws.COPY_REGISTERS)
    assert 128 * len(roles) == ws.THREADS
    assert sum(roles) <= len(roles) * (65536 // ws.THREADS // 8 * 8)  # else the last role waits for ever
    assert all(registers % 8 == 0 for registers in roles)
