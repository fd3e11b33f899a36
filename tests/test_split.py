"""How `split` cuts a sequence into segments and where each has to start: its device code on a CPU (warp.hpp)."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from kernels.problem import CHUNK
from variants import split

HERE = Path(__file__).resolve().parent
CALLS = r"""
#include "warp.hpp"
%s
extern "C" int first(int segment, int total, int segments, int lead) {
  return first_chunk(segment, total, segments, lead);
}

extern "C" int start(const float* g_cumsum, int head, int Hv, int own, int limit) {
  return run_warp([&] { return find_start(g_cumsum, head, Hv, own, limit); });
}

extern "C" int lasting(const float* g_cumsum, int head, int Hv, int total, int segments, int lead, int limit) {
  return run_warp([&] { return hardly_decays(g_cumsum, head, Hv, total, segments, lead, limit); });
}
"""


@pytest.fixture(scope="module")
def device_code(tmp_path_factory):
    """The three calls, as a library."""
    if shutil.which("g++") is None:
        pytest.skip("g++, which nvcc needs too, is not on PATH")
    folder = tmp_path_factory.mktemp("device")
    (folder / "calls.cpp").write_text(CALLS % split.FIND_START)
    words = ["g++", "-std=c++20", "-O1", "-shared", "-fPIC", "-pthread", f"-I{HERE}", "-o", folder / "calls.so"]
    subprocess.run([*words, folder / "calls.cpp"], check=True)
    return ctypes.CDLL(folder / "calls.so")


@pytest.mark.parametrize("lead", split.LEAD.values())
@pytest.mark.parametrize(("total", "segments"), [(1, 1), (5, 1), (5, 2), (66, 4), (128, 16), (513, 33)])
def test_every_chunk_is_of_one_segment(device_code, total, segments, lead):
    bounds = [device_code.first(segment, total, segments, lead) for segment in range(segments + 1)]
    assert (bounds[0], bounds[-1]) == (0, total)
    lengths = np.diff(bounds)
    assert lengths.min() >= 1
    if segments > 1:
        lengths[0] -= lead  # what it is longer by, having no warm-up
        assert np.ptp(lengths) <= 1


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
    gates = g_cumsum.ctypes.data_as(ctypes.c_void_p)
    for own in (0, 1, 5, 31, 32, 33, 64, 149):
        start = expected_start(g_cumsum, own)
        for limit in (1, 32, CHUNKS):
            found = device_code.start(gates, HEAD, HV, own, limit)
            assert found == (start if own - start <= limit else -1)


@pytest.mark.parametrize("a_chunk", [0.0, -0.3, -3.0, "random"])
@pytest.mark.parametrize("limit", [1, 4, 16, 64])
def test_a_head_hardly_decays_if_one_of_its_segments_would_be_warmed_up_for_longer(device_code, a_chunk, limit):
    g_cumsum, segments, lead = summed_gates(a_chunk), 5, 2
    gates = g_cumsum.ctypes.data_as(ctypes.c_void_p)
    begins = [device_code.first(segment, CHUNKS, segments, lead) for segment in range(1, segments)]
    expected = any(own - expected_start(g_cumsum, own) > limit for own in begins)
    assert device_code.lasting(gates, HEAD, HV, CHUNKS, segments, lead, limit) == expected
