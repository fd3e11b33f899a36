"""Counts of work against numbers worked out by hand."""

import pytest

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


def test_speed_of_light_is_the_slower_of_the_two():
    ceilings = Ceilings(flops_per_second=100.0, bytes_per_second=10.0)
    assert work.speed_of_light(Work(flops=1000, bytes=10), ceilings) == pytest.approx(10.0)
    assert work.speed_of_light(Work(flops=100, bytes=100), ceilings) == pytest.approx(10.0)


def test_the_wide_case_is_about_balanced_on_an_h200():
    """By hand: 128 chunks x 64 heads x (9.44 - 0.75 * 1.05) MFLOP at 790 TFLOP/s, and 410 MB at 4.2 TB/s."""
    wide = work.core(CASES["wide_gva_state"])
    assert wide.flops / 790e12 == pytest.approx(89.7e-6, rel=0.01)
    assert wide.bytes / 4.2e12 == pytest.approx(99e-6, rel=0.02)
