"""Every kernel cross-compiles for Hopper, spills nothing and uses the tensor cores."""

import functools
import re
import subprocess
import tempfile
from pathlib import Path

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
    # One after the other: TileLang parses code while it lowers, which threads of CPython 3.11 can't do at once.
    return {name: [f for source in each for f in build.facts(source)] for name, each in sources.items()}


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


def passed_by_an_arrival(sass: str, load: str) -> list[str]:
    """Shared loads of this kind that an mbarrier arrival overtakes: their data has not been waited for.

    `sass` is nvdisasm's with -hex. Bits 41 and up of an instruction's second word control it: 4 of stall, yield, 3 name
    the scoreboard that its result sets (7: none), 3 the one for its operands, 6 are a mask of those to wait for.
    """
    passed, outstanding, instruction = [], {}, ""
    for line in sass.splitlines():
        if line.startswith("."):
            outstanding = {}  # another way may lead here
        elif found := re.match(r"\s*/\*[0-9a-f]+\*/\s+(.*?);", line):
            instruction = found[1]
        elif instruction and (found := re.search(r"/\* 0x([0-9a-f]{16}) \*/", line)):
            control = int(found[1], 16) >> 41
            result, waited = control >> 5 & 7, control >> 11 & 63
            outstanding = {board: load for board, load in outstanding.items() if not waited >> board & 1}
            if "SYNCS.ARRIVE.TRANS64.A1T0" in instruction:
                passed += outstanding.values()
            if load in instruction:
                outstanding[result] = instruction
            instruction = ""
    return passed


def listing(*instructions):
    """nvdisasm -hex of instructions, each with its scoreboard and its mask of those to wait for."""
    lines = []
    for text, result, waited in instructions:
        control = result << 5 | 7 << 8 | waited << 11
        lines += [
            f"        /*0010*/      {text} ;      /* 0x0000000000000000 */",
            f"      /* 0x{control << 41:016x} */",
        ]
    return "\n".join(lines)


def test_a_load_is_passed_unless_its_scoreboard_was_waited_for():
    load, arrive = ("LDSM.16.MT88.4 R8, [R0]", 2, 0), ("SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR5], RZ", 7, 0)
    assert passed_by_an_arrival(listing(load, arrive), "LDSM") == ["LDSM.16.MT88.4 R8, [R0] "]
    assert passed_by_an_arrival(listing(load, ("FMUL R9, R8, R8", 7, 0b001000), arrive), "LDSM") == [
        "LDSM.16.MT88.4 R8, [R0] "
    ]
    assert passed_by_an_arrival(listing(load, ("FMUL R9, R8, R8", 7, 0b000100), arrive), "LDSM") == []


def shortest_loops(sass: str, opcode: str, least: int) -> list[list[str]]:
    """The instructions of every loop with so many of `opcode`, loops around loops after those within them."""
    instructions, labels, loops = [], {}, []
    for line in sass.splitlines():
        if found := re.match(r"(\.L_\w+):", line):
            labels[found[1]] = len(instructions)
        elif found := re.match(r"\s*/\*[0-9a-f]+\*/\s+(.*?);", line):
            instructions.append(found[1])
            if back := re.search(r"BRA.*`\((\.L_\w+)\)", found[1]):
                loops.append(instructions[labels.get(back[1], len(instructions)) :])
    return sorted((loop for loop in loops if sum(opcode in each for each in loop) >= least), key=len)


@functools.cache
def disassembled(name: str, dv_tile: int) -> str:
    """nvdisasm -hex of one of the kernels of `split`."""
    made = build.kernels_of(variants.load("split").gdn_prefill_forward, problem.SUITES["lab"])
    (source,) = [source for source in made if (source.name, source.dv_tile) == (name, dv_tile)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "split.cubin")
        path.write_bytes(build.cubin(source).content)
        command = [build.find_tool("nvdisasm"), "-c", "-hex", str(path)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(("name", "dv_tile", "loads"), [("split", 64, 12), ("split", 128, 12), ("split_fold", 32, 8)])
def test_no_arrival_passes_a_load_from_the_place_that_it_frees(name, dv_tile, loads):
    """Of V, and of N: what follows would be loaded over them."""
    sass = disassembled(name, dv_tile)
    assert sass.count("LDSM") >= loads
    assert passed_by_an_arrival(sass, "LDSM") == []


@pytest.mark.parametrize("dv_tile", [64, 128])
def test_no_proxy_fence_is_on_the_way_of_the_state(dv_tile):
    """In its two loops, of which the one for the warm-up has 20 products and the other 32; elsewhere there are some."""
    sass = disassembled("split", dv_tile)
    warm_up, main = shortest_loops(sass, "HGMMA", 20)[:2]
    assert [sum("HGMMA" in each for each in loop) for loop in (warm_up, main)] == [20, 32]
    assert not [each for each in warm_up + main if each.startswith(("FENCE", "MEMBAR"))]
    assert "FENCE.VIEW.ASYNC" in sass
