"""Every kernel cross-compiles for Hopper, spills nothing and uses the tensor cores."""

from concurrent.futures import ThreadPoolExecutor

import pytest

import variants
from kernels import build, gates, preprocess, problem


@pytest.fixture(scope="module")
def facts():
    """What the compiler made of every kernel of every rung, of preprocessing and the check of gates, for `lab`."""
    forwards = {name: variants.load(name).gdn_prefill_forward for name in variants.LADDER}
    forwards["preprocess"] = preprocess.on_core_inputs
    forwards["gates"] = lambda *core: gates.refuse_growth(core[3])
    sources = {name: build.kernels_of(forward, problem.SUITES["lab"]) for name, forward in forwards.items()}
    with ThreadPoolExecutor(2) as pool:
        return {name: [f for found in pool.map(build.facts, each) for f in found] for name, each in sources.items()}


def test_nothing_spills(facts):
    for f in (f for each in facts.values() for f in each):
        assert (f.spill_bytes, f.ldl, f.stl) == (0, 0, 0), f
        assert 0 < f.registers <= 255
        assert f.shared_bytes <= 227 * 1024


@pytest.mark.parametrize("name", variants.LADDER)
def test_a_rung_is_a_handful_of_kernels_named_after_it_on_the_tensor_cores(name, facts):
    assert 1 <= len(facts[name]) <= 4
    for f in facts[name]:
        assert f.kernel.startswith(name)
        assert f.hgmma > 0


def test_a_kernel_is_built_once_for_all_shapes_of_a_suite():
    forward = variants.load("fused").gdn_prefill_forward
    assert len(build.kernels_of(forward, problem.SUITES["qwen"])) == 1  # all have an initial state
    assert len(build.kernels_of(forward, problem.SUITES["lab"])) == 2


def test_target_is_hopper_where_there_is_no_gpu(monkeypatch):
    monkeypatch.setattr(build.torch.cuda, "is_available", lambda: False)
    assert build.target.__wrapped__() == {"kind": "cuda", "arch": "sm_90a"}


@pytest.mark.parametrize(("capability", "arch"), [((9, 0), "sm_90a"), ((8, 9), "sm_89"), ((10, 0), "sm_100a")])
def test_target_is_the_gpu_s(monkeypatch, capability, arch):
    monkeypatch.setattr(build.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(build.torch.cuda, "get_device_capability", lambda: capability)
    assert build.target.__wrapped__()["arch"] == arch


def test_facts_are_parsed_per_function():
    log = """ptxas info    : Compiling entry function 'a_kernel' for 'sm_90a'
ptxas info    : Function properties for a_kernel
    16 bytes stack frame, 12 bytes spill stores, 20 bytes spill loads
ptxas info    : Function properties for b_kernel
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
"""
    usage = """ Function b_kernel:
  REG:40 STACK:0 SHARED:1024 LOCAL:0 CONSTANT[0]:560 TEXTURE:0 SURFACE:0 SAMPLER:0
 Function a_kernel:
  REG:168 STACK:16 SHARED:0 LOCAL:0 CONSTANT[0]:560 TEXTURE:0 SURFACE:0 SAMPLER:0
"""
    sass = """.text.a_kernel:
  HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4] ;
  @P0 LDL.64 R2, [R1] ;
  STL [R1], R2 ;
.text.b_kernel:
  HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4] ;
  HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8] ;
  LDG.E R2, [R4] ;
"""
    b, a = build.parse_facts(log, usage, sass, {"a_kernel": 2048})
    assert a == build.Facts("a_kernel", 168, 32, 2048, hgmma=1, ldl=1, stl=1)
    assert b == build.Facts("b_kernel", 40, 0, 1024, hgmma=2, ldl=0, stl=0)


def test_a_missing_tool_is_named_with_the_places_and_the_remedy(monkeypatch):
    monkeypatch.setattr(build.shutil, "which", lambda *_, **__: None)
    with pytest.raises(build.ToolMissing, match=r"^nvdisasm is needed.*PATH.*make env"):
        build.find_tool.__wrapped__("nvdisasm")
