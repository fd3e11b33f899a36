"""Register fragments and tiles in shared memory: the device code between them, on a CPU (warp.hpp)."""

import ctypes

import numpy as np
import pytest
from on_cpu import library, pointer

from kernels.fragments import MOVE_TRANSPOSED
from variants.split import MOVE_STATE, PREPARE

CALLS = r"""
#include "warp.hpp"
%s
extern "C" void load_tile(const char* from, uint32_t* registers) {
  memcpy(shared_memory, from, 16384);
  run_cta(256, [&] { load_transposed(transposed_address(shared_memory), registers + 16 * threadIdx.x); });
}

extern "C" void store_tile(const uint32_t* registers, char* to) {
  run_cta(256, [&] { store_transposed(registers + 16 * threadIdx.x, transposed_address(shared_memory)); });
  memcpy(to, shared_memory, 16384);
}

extern "C" void load_parts(const char* from, float* registers) {
  memcpy(shared_memory, from, 16384);
  run_cta(256, [&] { load_state(shared_memory, registers + 16 * threadIdx.x); });
}

extern "C" void store_parts(const float* registers, char* to) {
  run_cta(256, [&] { store_state(registers + 16 * threadIdx.x, shared_memory); });
  memcpy(to, shared_memory, 16384);
}

extern "C" void prepare(const float* product, const float* g, const float* row, const float* before, float log2_scale,
                        char* to) {
  run_cta(128, [&] {
    uint32_t P[16];
    compute_P(product + 32 * threadIdx.x, g, row, before, log2_scale, P);
    store_P(P, address_of_P(shared_memory));
  });
  memcpy(to, shared_memory, 8192);
}
"""


@pytest.fixture(scope="module")
def device_code(tmp_path_factory):
    """The calls, as a library."""
    return library(CALLS % (MOVE_TRANSPOSED + MOVE_STATE + PREPARE), tmp_path_factory.mktemp("device"))


def fragment(matrix):
    """What threads hold of a matrix, two of them a row: wgmma's result, 64 rows a warpgroup (PTX ISA: wgmma, D)."""
    thread, i = np.arange(2 * matrix.shape[0])[:, None], np.arange(matrix.shape[1] // 2)
    warp, lane = thread // 32, thread % 32
    return matrix[16 * warp + lane // 4 + i // 2 % 2 * 8, i // 4 * 8 + lane % 4 * 2 + i % 2]


def swizzled(tiles):
    """Tiles [n, 64, 64] of 16 bits as the copy engine lays them out: 16-byte units of row r at their number xor r."""
    units = tiles.reshape(-1, 64, 8, 8)
    return np.stack([units[:, r, np.arange(8) ^ r % 8] for r in range(64)], axis=1).copy()


def bits(x):
    """BF16 of FP32 numbers, rounded to nearest, ties to even."""
    raw = x.astype(np.float32).view(np.uint32)
    return (raw + 0x7FFF + (raw >> 16 & 1) >> 16).astype(np.uint16)


def value(x):
    return (x.astype(np.uint32) << 16).view(np.float32)


def test_a_tile_is_read_and_written_transposed(device_code):
    numbers = np.arange(128 * 64, dtype=np.uint16).reshape(2, 64, 64)  # by tile of dv, token, dv within the tile
    held = fragment(numbers.transpose(0, 2, 1).reshape(128, 64)).copy()
    loaded, stored = np.zeros((256, 32), np.uint16), np.zeros((2, 64, 8, 8), np.uint16)
    device_code.load_tile(pointer(swizzled(numbers)), pointer(loaded))
    device_code.store_tile(pointer(held), pointer(stored))
    assert np.array_equal(loaded, held)
    assert np.array_equal(stored, swizzled(numbers))


def test_a_state_is_kept_as_the_sum_of_two_numbers(device_code):
    state = np.random.default_rng(0).standard_normal((128, 32)).astype(np.float32)  # dk, dv
    high = bits(state)
    low = bits(state - value(high))
    assert np.abs(value(high) + value(low) - state).max() < 2**-15
    parts = np.concatenate([high, low], axis=1).reshape(2, 64, 64).transpose(0, 2, 1)  # half of dk; parts of dv; dk
    loaded, stored = np.zeros((256, 16), np.float32), np.zeros((2, 64, 8, 8), np.uint16)
    device_code.load_parts(pointer(swizzled(parts)), pointer(loaded))
    device_code.store_parts(pointer(fragment(state).copy()), pointer(stored))
    assert np.array_equal(loaded, fragment(value(high) + value(low)))
    assert np.array_equal(stored, swizzled(parts))


@pytest.mark.parametrize("strength", [0, 0.1, 4, 200])
def test_p_is_the_masked_product_with_its_decay(device_code, strength):
    """Whether gates hardly decay or leave nothing of a neighbour: against FP64, and every other number is a zero."""
    rng, scale = np.random.default_rng(0), 0.0884
    product = rng.standard_normal((64, 64)).astype(np.float32)
    g = (np.cumsum(-strength * rng.random(64)) / np.log(2)).astype(np.float32).astype(np.float64)
    first = g[::16]  # of each block of 16 tokens
    row = scale * np.exp2(g - np.repeat(first, 16))
    j = np.arange(64)
    before = np.where(j < 16 * np.arange(4)[:, None], np.exp2(np.minimum(first[:, None] - g, 0)), 0)
    tables = [np.ascontiguousarray(x, np.float32) for x in (g, row, before)]
    stored = np.full((1, 64, 8, 8), 0xFFFF, np.uint16)
    device_code.prepare(
        pointer(fragment(product).copy()), *map(pointer, tables), ctypes.c_float(np.log2(scale)), pointer(stored)
    )
    P = value(swizzled(stored.reshape(1, 64, 64)).reshape(64, 64))  # which undoes itself
    decay = np.tril(np.exp2(np.minimum(g[:, None] - g, 0)))
    expected = scale * product.astype(np.float64) * decay
    np.testing.assert_allclose(P, expected, rtol=2**-8 + 2**-10, atol=1e-36)  # BF16, and gates
    assert np.all(P[np.triu_indices(64, 1)] == 0)
