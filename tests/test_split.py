"""How `split` cuts sequences into segments and where each has to start: its device code on a CPU (warp.hpp)."""

import ctypes
import itertools
import random

import numpy as np
import pytest
import torch
from on_cpu import library, pointer

from kernels.problem import CHUNK
from kernels.sequences import FIND_PIECE, layout
from variants import split

CALLS = r"""
#include "warp.hpp"
%s
extern "C" void segment(int number, int exact, int unit, int exact_unit, const int* offsets, int stride, int sequences,
                        int each, int tokens, int lead, int* found) {
  run_cta(32, [&] {
    int place[5];
    const int index =
        find_segment(number, exact, unit, exact_unit, offsets, stride, sequences, each, tokens, lead, place);
    if (lane() == 9) {
      const int total = (place[2] + 63) / 64, parts = place[3 + exact];
      std::copy(place, place + 3, found);
      found[3] = parts;
      found[4] = index;
      found[5] = index < parts ? first_chunk(index, total, parts, lead) : 0;
      found[6] = index < parts ? first_chunk(index + 1, total, parts, lead) : 0;
    }
  });
}

extern "C" int start(const float* g_cumsum, int head, int Hv, int own, int limit) {
  int found[32];
  run_cta(32, [&] { found[lane()] = find_start(g_cumsum, head, Hv, own, limit); });
  return found[9];
}

extern "C" int lasting(const float* g_cumsum, int head, int Hv, int total, int segments, int lead, int limit) {
  int found[32];
  run_cta(32, [&] { found[lane()] = hardly_decays(g_cumsum, head, Hv, total, segments, lead, limit); });
  return found[9];
}

extern "C" int first(int segment, int total, int segments, int lead) {
  return first_chunk(segment, total, segments, lead);
}
"""


@pytest.fixture(scope="module")
def device_code(tmp_path_factory):
    """The calls, as a library."""
    return library(CALLS % (FIND_PIECE + split.FIND_START), tmp_path_factory.mktemp("device"))


def segments(device_code, where, tokens, exact, units, lead):
    """(sequence, begin, tokens, segments, number, first chunk, end) of every CTA that has work."""
    offsets, found = where.offsets.numpy(), (ctypes.c_int * 7)()
    for number in range(where.pieces(units[exact], tokens)):
        device_code.segment(
            number, exact, *units, pointer(offsets), where.stride, where.sequences,
            where.tokens_each, tokens, lead, found,
        )  # fmt: skip
        if found[4] < found[3]:
            yield tuple(found)


@pytest.mark.parametrize("dv_tile", [64, 128])
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("length", [5, 16, 33, 200])  # chunks of a segment
def test_every_chunk_is_of_one_segment_and_exact_starts_have_room(device_code, dv_tile, exact, length):
    choose = random.Random(length)
    lengths = [choose.choice((0, 1, 64, 100, 1000, 7000, 12800, 30001)) for _ in range(12)]
    offsets = list(itertools.accumulate(lengths, initial=0))
    units = (length * CHUNK, 11 * CHUNK) if not exact else (77 * CHUNK, length * CHUNK)
    cases = [(layout(1, offsets[-1], torch.tensor(offsets, dtype=torch.int32), torch.empty(0)), lengths)]
    cases += [(layout(3, each, None, torch.empty(0)), [each] * 3) for each in (1, 4161, 8192)]
    for where, tokens in cases:
        chunks = {n: [] for n in range(len(tokens))}
        for n, begin, count, parts, _, own, end in segments(
            device_code, where, sum(tokens), exact, units, split.LEAD[dv_tile]
        ):
            assert (begin, count) == (sum(tokens[:n]), tokens[n])
            chunks[n] += range(own, end)
            if parts > 1:
                assert end - own >= (split.SCRATCH if exact else 1)
                # M, N and the start lie in rows that are the segment's own.
                assert not exact or own * CHUNK + split.START_ROW + 256 <= min(end * CHUNK, count)
        assert chunks == {n: list(range(-(-count // CHUNK))) for n, count in enumerate(tokens)}


CHUNKS, HV, HEAD = 150, 3, 1


def summed_gates(a_chunk):
    """Cumulative gates [T,Hv] of which one head's chunks decay by `a_chunk`, or as drawn."""
    g_cumsum = np.full((CHUNKS * CHUNK, HV), 99.0, dtype=np.float32)
    drawn = -np.random.default_rng(0).exponential(1.0, CHUNKS)
    g_cumsum[CHUNK - 1 :: CHUNK, HEAD] = drawn if a_chunk == "random" else a_chunk
    return g_cumsum


def expected_start(g_cumsum, own):
    """Gates summed one chunk after the other, backwards from the segment's first chunk."""
    start, decay = own, 0.0
    while start > 0 and decay > -12:
        start -= 1
        decay += float(g_cumsum[start * CHUNK + CHUNK - 1, HEAD])
    return start


@pytest.mark.parametrize("a_chunk", [0.0, -0.01, -0.3, -3.0, -11.99, -12.0, -700.0, "random"])
def test_a_segment_starts_where_its_head_has_forgotten(device_code, a_chunk):
    g_cumsum = summed_gates(a_chunk)
    gates = pointer(g_cumsum)
    for own in (0, 1, 5, 31, 32, 33, 64, 149):
        start = expected_start(g_cumsum, own)
        for limit in (1, 32, CHUNKS):
            found = device_code.start(gates, HEAD, HV, own, limit)
            assert found == (start if own - start <= limit else -1)


@pytest.mark.parametrize("a_chunk", [0.0, -0.3, -3.0, "random"])
@pytest.mark.parametrize("limit", [1, 4, 16, 64])
def test_a_head_hardly_decays_if_one_of_its_segments_would_be_warmed_up_for_longer(device_code, a_chunk, limit):
    g_cumsum, segments, lead = summed_gates(a_chunk), 5, 2
    gates = pointer(g_cumsum)
    begins = [device_code.first(segment, CHUNKS, segments, lead) for segment in range(1, segments)]
    expected = any(own - expected_start(g_cumsum, own) > limit for own in begins)
    assert device_code.lasting(gates, HEAD, HV, CHUNKS, segments, lead, limit) == expected
