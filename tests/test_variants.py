"""The ladder's registry."""

from pathlib import Path

import pytest
import torch

import variants
from kernels import build, problem, work


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
    assert work.sm_count(torch.device("meta")) == 132


def assert_budgets_fit(warpgroups):
    """Registers a thread of every warpgroup, against what their launch brings."""
    brought = 65536 // (128 * len(warpgroups)) // 8 * 8
    assert sum(warpgroups) <= len(warpgroups) * brought  # else the last role waits for ever
    assert all(registers % 8 == 0 for registers in warpgroups)


@pytest.mark.parametrize(("name", "roles"), [("ws", "STATE PREPARE OUTPUT COPY"), ("rs", "STATE OUTPUT COPY")])
def test_the_register_budgets_fit_what_the_launch_brings(name, roles):
    rung = variants.load(name)
    warpgroups = [getattr(rung, f"{role}_REGISTERS") for role in roles.split()]
    assert 128 * len(warpgroups) == rung.THREADS
    assert_budgets_fit(warpgroups)


def plan_of(*shape):
    plan = variants.plan(*shape, torch.device("cuda"))
    return plan.rung, plan.dv_tile, plan.segments, plan.exact


def test_the_plan_gives_every_sm_a_cta(monkeypatch):
    monkeypatch.setattr(variants, "sm_count", lambda device: 132)
    assert plan_of(1, 8192, 4) == ("split", 64, 16, 9)  # 33 segments of 128 columns would have 4 chunks
    assert plan_of(1, 8192, 8) == ("split", 64, 8, 9)
    assert plan_of(1, 32768, 8) == ("split", 128, 16, 24)
    assert plan_of(1, 8192, 16) == ("split", 128, 8, 9)
    assert plan_of(4, 8192, 8) == ("split", 128, 4, 8)
    assert plan_of(1, 16384, 32) == ("split", 128, 4, 8)
    assert plan_of(1, 8192, 64) == plan_of(1, 8192, 66) == ("split", 128, 2, 0)
    assert plan_of(1, 2048, 33) == ("split", 64, 2, 0)
    assert plan_of(1, 2048, 34) == plan_of(1, 2048, 66) == ("rs", 64, 1, 0)
    assert plan_of(1, 8192, 67) == plan_of(4, 8192, 64) == ("split", 128, 1, 0)
    monkeypatch.setattr(variants, "sm_count", lambda device: 16)  # a MIG slice
    assert plan_of(1, 8192, 4) == ("split", 128, 4, 8)
    assert plan_of(1, 16384, 2) == ("split", 128, 8, 16)


@pytest.mark.parametrize(("tokens", "segments"), [(1, 1), (64, 1), (256, 1), (257, 2), (320, 2), (640, 7)])
def test_every_segment_has_a_chunk(monkeypatch, tokens, segments):
    """The first one is three chunks longer."""
    monkeypatch.setattr(variants, "sm_count", lambda device: 132)
    assert variants.plan(1, tokens, 1, torch.device("cuda")).segments == segments


def test_exact_starts_have_room_in_a_segment_s_output():
    split = variants.load("split")
    for tokens in range(64, 64 * 2000, 64 * 13):
        for heads in (1, 5, 8, 16, 33, 44):
            plan = variants.plan(1, tokens, heads, torch.device("meta"))
            if plan.exact:
                assert (tokens // 64 - split.LEAD[plan.dv_tile]) // plan.exact >= split.SCRATCH


@pytest.mark.parametrize("dv_tile", [64, 128])
def test_the_register_budgets_of_split_fit_what_its_launch_brings(dv_tile):
    state, output, copy = variants.load("split").REGISTERS[dv_tile]
    assert_budgets_fit([state] * (dv_tile // 64) + [output, copy])


def test_the_public_function_is_six_kernels_for_all_of_lab():
    assert len(build.kernels_of(variants.gdn_prefill_forward, problem.SUITES["lab"])) <= 6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": lambda x: x.float()}, r"q must be torch.bfloat16, found torch.float32"),
        ({"v": lambda x: x[:, :, :3].contiguous()}, r"Hv a multiple of Hq, found B=1 T=64 Hq=2 Hv=3"),
        ({"k": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)}, r"k must be contiguous, found strides"),
        ({name: lambda x: x[:0] for name in "qkv"}, r"must be positive .* found B=0"),
        ({name: lambda x: x[:, :0] for name in "qkv"}, r"must be positive .* found B=1 T=0"),
        ({"A": lambda x: x[..., :32].contiguous()}, r"A must have shape \[1, 64, 4, 64\], found \[1, 64, 4, 32\]"),
    ],
)
def test_the_public_function_refuses_what_it_can_not_run(change, message):
    names = ("q", "k", "v", "g_cumsum", "beta", "A")
    arguments = dict(zip(names, build.meta_inputs(problem.Case("x", 1, 64, 2, 4)), strict=False))
    for name, changed in change.items():
        arguments[name] = changed(arguments[name])
    with pytest.raises((ValueError, TypeError), match=message):
        variants.gdn_prefill_forward(**arguments)


def test_packed_sequences_share_the_segments_of_one(monkeypatch):
    monkeypatch.setattr(variants, "sm_count", lambda device: 132)
    gpu = torch.device("cuda")
    assert variants.plan(1, 32768, 8, gpu, packed=2) == variants.Plan("split", 128, 16, 24)
    assert variants.plan(1, 32768, 8, gpu, packed=8) == variants.Plan("split", 128, 16, 0)  # two segments each
    assert variants.plan(1, 8192, 8, gpu, packed=8) == variants.Plan("split", 64, 8, 0)


def full_arguments(device="meta"):
    q, k, v, g, beta, _, state = (
        x if x is None else torch.empty_like(x, device=device)
        for x in build.meta_inputs(problem.Case("x", 1, 300, 2, 4, initial_state=True))
    )
    return {"q": q, "k": k, "v": v, "g": g, "beta": beta, "initial_state": state}


def test_the_full_function_has_these_kernels_on_all_suites():
    def full(q, k, v, g, beta, A, state=None, cu_seqlens=None):
        variants.chunk_gated_delta_rule(q, k, v, g, beta, initial_state=state, cu_seqlens=cu_seqlens)

    names = {source.name for source in build.kernels_of(full, tuple(problem.CASES.values()))}
    assert names == {"prepare", "rs", "split", "split_fold"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": lambda x: x.float()}, r"q must be torch.bfloat16, found torch.float32"),
        ({"g": lambda x: x.double()}, r"g must be torch.float32, found torch.float64"),
        ({"v": lambda x: x[:, :, :3]}, r"Hv a multiple of Hq, found B=1 T=300 Hq=2 Hv=3"),
        ({"scale": lambda _: 0.0}, r"scale must be above 0, found 0.0"),
        (
            {"cu_seqlens": lambda _: torch.empty(3, device="meta")},
            r"cu_seqlens must be torch.int32, found torch.float32",
        ),
        (
            {"cu_seqlens": lambda _: torch.empty(3, dtype=torch.int32, device="meta")},
            r"initial_state must have shape \[2, 4, 128, 128\], found \[1, 4, 128, 128\]",
        ),
        ({"cu_seqlens": lambda _: torch.empty(1, dtype=torch.int32, device="meta")}, r"cu_seqlens must be \[N\+1\]"),
    ],
)
def test_the_full_function_refuses_what_it_can_not_run(change, message):
    arguments = full_arguments()
    for name, changed in change.items():
        arguments[name] = changed(arguments.get(name))
    with pytest.raises((ValueError, TypeError), match=message):
        variants.chunk_gated_delta_rule(**arguments)


def launched(arguments, **more):
    launches = build.launches_of(lambda: variants.chunk_gated_delta_rule(**arguments, **more), ())
    return [launch.source.name for launch in launches]


def test_the_full_function_copies_what_is_not_contiguous_and_takes_gates_in_bf16():
    arguments = full_arguments()
    arguments["q"] = arguments["q"].transpose(1, 2).contiguous().transpose(1, 2)
    arguments["beta"] = arguments["beta"].bfloat16()
    assert launched(arguments) == ["prepare", "split"]
    normalised = launched(arguments, use_qk_l2norm_in_kernel=True)
    assert normalised == ["l2norm", "l2norm", "prepare", "split"]


def test_only_split_is_called_with_another_scale_or_packed_sequences():
    arguments = full_arguments()
    for name in ("q", "k", "v", "g", "beta"):
        arguments[name] = arguments[name].repeat_interleave(16, dim=2)  # 64 heads: more than a half of the SMs
    arguments["initial_state"] = None
    assert launched(arguments)[-1] == "rs"
    assert launched(arguments, scale=1.0)[-1] == "split"
    assert launched(arguments, cu_seqlens=torch.empty(2, dtype=torch.int32, device="meta"))[-1] == "split"
