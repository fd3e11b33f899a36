"""Counts of work against numbers worked out by hand."""

import pytest

from analysis import load, tables
from kernels import work
from kernels.problem import CASES, Case
from kernels.work import Ceilings, Work


def test_one_full_chunk():
    case = Case("one", 1, 64, 1, 1)
    # K S, Q S, K^T Vnew: 2*64*128*128 = 2,097,152 each; A·, P Vnew, Q K^T: 2*64*64*128 = 1,048,576 each.
    assert work.core(case).flops == 3 * 2_097_152 + 3 * 1_048_576 == 9_437_184
    # q, k, v, output: 16 KiB each; A 8 KiB; g_cumsum, beta 256 bytes each; final state 64 KiB.
    assert work.core(case).bytes == 4 * 16384 + 8192 + 2 * 256 + 65536
    # K K^T as Q K^T, and 64^3/3 for the inverse; g instead of g_cumsum, no A.
    assert work.full(case).flops == 9_437_184 + 1_048_576 + 87_381
    assert work.full(case).bytes == 4 * 16384 + 2 * 256 + 65536


def test_a_short_chunk_counts_its_tokens_and_grouped_heads_share_their_products():
    case = Case("tail", 2, 65, 1, 4, initial_state=True)
    state = 3 * 2 * 2 * 65 * 4 * 128 * 128
    squares = 2 * (64 * 64 + 1)  # two sequences, chunks of 64 tokens and of one
    assert work.core(case).flops == state + 2 * squares * 128 * (4 + 4 + 1)
    tokens = 2 * 65 * 128 * 2 * (2 * 1 + 2 * 4)
    assert work.core(case).bytes == tokens + 2 * (2 * 4 * 65536) + 2 * 65 * 4 * (128 + 4 + 4)


def test_packed_sequences_have_their_own_chunks_and_states():
    """As many tokens as one sequence of 195 would have, in chunks of 64, 1, 64, 64, 2."""
    case = Case("packed", 1, 195, 1, 4, initial_state=True, lengths=(65, 0, 130))
    squares = 3 * 64 * 64 + 1 * 1 + 2 * 2
    state = 3 * 2 * 195 * 4 * 128 * 128
    assert work.core(case).flops == state + 2 * squares * 128 * (4 + 4 + 1)
    assert work.core(case).bytes == 195 * 128 * 2 * (2 * 1 + 2 * 4) + 2 * (3 * 4 * 65536) + 195 * 4 * (128 + 4 + 4)
    cubes = 3 * 64**3 + 1 + 2**3
    assert work.full(case).flops == work.core(case).flops + 2 * squares * 128 + cubes * 4 // 3
    assert work.intermediates(case) == 195 * 4 * (64 * 2 + 4)
    equal, batch = Case("equal", 1, 130, 1, 4, lengths=(65, 65)), Case("batch", 2, 65, 1, 4)
    assert (work.core(equal), work.full(equal)) == (work.core(batch), work.full(batch))
    assert work.formulations(equal) == work.formulations(batch)


def test_speed_of_light_is_the_slower_of_the_two():
    ceilings = Ceilings(flops_per_second=100.0, bytes_per_second=10.0)
    assert work.speed_of_light(Work(flops=1000, bytes=10), ceilings) == pytest.approx(10.0)
    assert work.speed_of_light(Work(flops=100, bytes=100), ceilings) == pytest.approx(10.0)


def test_the_wide_case_is_about_balanced_on_an_h200():
    """By hand: 128 chunks x 64 heads x (9.44 - 0.75 * 1.05) MFLOP at 790 TFLOP/s, and 410 MB at 4.2 TB/s."""
    wide = work.core(CASES["wide_gva_state"])
    assert wide.flops / 790e12 == pytest.approx(89.7e-6, rel=0.01)
    assert wide.bytes / 4.2e12 == pytest.approx(99e-6, rel=0.02)


def test_formulations_of_one_full_chunk():
    found = work.formulations(Case("one", 1, 64, 1, 1))
    # 64 tokens of 7 x 128 x 128; q, k, v, output, g, beta and a state.
    assert found["token recurrence"] == Work(64 * 7 * 16384, 4 * 16384 + 2 * 256 + 65536)
    least = work.core(Case("one", 1, 64, 1, 1))
    assert found["chunk-wise, at least"] == least
    # K S, Q S, K^T Vnew as ever; U, W, P and P Vnew; then W and P of a second tile.
    formed, tiled, stored = list(found.values())[2:]
    assert formed == Work(3 * 2_097_152 + 4 * 1_048_576, least.bytes)
    assert tiled == Work(3 * 2_097_152 + 6 * 1_048_576, least.bytes)
    # U, W, Vnew and one S in FP32, written and read.
    assert stored == Work(formed.flops, least.bytes + 2 * (3 * 64 * 128 * 4 + 128 * 128 * 4))


@pytest.mark.parametrize("case", ["wide_gva_state", "chain_equal"])
def test_the_hardware_counts_what_the_formulations_say(case):
    """Nsight Compute on an H200: naive forms W and P once, fused in two tiles of dv, and naive stores all."""
    run = load.load(load.DEFAULT)
    *_, formed, tiled, stored = work.formulations(CASES[case]).values()
    naive, fused = (tables.profile(run, name, case) for name in ("naive", "fused"))
    assert naive["tensor_flops"] == pytest.approx(formed.flops, rel=1e-8)  # the table keeps nine digits
    assert fused["tensor_flops"] == pytest.approx(tiled.flops, rel=1e-8)
    if case == "wide_gva_state":  # the intermediates of the other case fit the L2 cache in part
        assert naive["dram_read"] + naive["dram_write"] == pytest.approx(stored.bytes, rel=0.05)
