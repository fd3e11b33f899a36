"""Preprocessing without a GPU: its device code, compiled for a CPU with a warp's instructions emulated (warp.hpp)."""

import ctypes
import itertools
import random

import numpy as np
import pytest
import torch
from on_cpu import library, pointer

from kernels import preprocess, problem, reference
from kernels.gates import REFUSE
from kernels.sequences import FIND_PIECE, layout

NOT_WRITTEN = 0x7FC1  # a NaN of BF16

# What the kernel does with one item, and one search for a piece.
CALLS = r"""
#include "warp.hpp"
%s
extern "C" void prepare(const float* KK, const float* g, const float* beta, float* g_cumsum, uint16_t* A, int Hv,
                        int first, int heads, int length) {
  std::barrier<> cta(128);
  char *tiles = shared_memory, *products = tiles + 4 * 8192, *tables = products + 4 * %d;
  run_cta(128, [&] {
    const int own = threadIdx.x / 32;
    float gates[4], fragment[32];
    load_gates(g, beta, first, Hv, heads, length, gates);
    for (int i = 0; i < 32; ++i)
      fragment[i] = KK[(16 * own + lane() / 4 + i / 2 %% 2 * 8) * 64 + i / 4 * 8 + lane() %% 4 * 2 + i %% 2];
    share_products(fragment, products, length);
    share_gates(gates, tables);
    cta.arrive_and_wait();
    sum_gates(tables);
    cta.arrive_and_wait();
    store_sums(tables, g_cumsum, first, Hv, heads, length);
    if (own < heads) {
      invert(products, tables, tiles);
      __syncwarp();
      store_rows(tiles, A, first + own, Hv, length);
    }
  });
}

extern "C" void piece(int number, int unit, const int* offsets, int stride, int sequences, int each, int tokens,
                      Piece* found) {
  run_cta(32, [&] { found[threadIdx.x] = find_piece(number, unit, offsets, stride, sequences, each, tokens); });
}
"""


@pytest.fixture(scope="module")
def device_code(tmp_path_factory):
    """The two calls, as a library."""
    source = CALLS % (REFUSE + FIND_PIECE + preprocess.INVERT, preprocess.PRODUCTS)
    return library(source, tmp_path_factory.mktemp("device"))


def keys(spread):
    """Unit vectors [64,128], the nearer to one another the smaller `spread` is; in any direction where it is None."""
    generator = torch.Generator().manual_seed(0)
    k = torch.randn(64, 128, generator=generator)
    if spread is not None:
        k = torch.randn(1, 128, generator=generator) + spread * k
    return torch.nn.functional.normalize(k, dim=-1).bfloat16()


GATES = {
    "suite": lambda g: torch.nn.functional.logsigmoid(g) / 16,
    "zero": torch.zeros_like,
    "steep": lambda g: torch.full_like(g, -20.0),
}


@pytest.mark.parametrize(("first", "heads"), [(0, 4), (4, 3), (6, 1)])
@pytest.mark.parametrize("length", [64, 1, 2, 15, 16, 17, 33, 63])
@pytest.mark.parametrize(
    ("spread", "gates", "beta"),
    [
        (None, "suite", None),
        (None, "zero", 0.99),
        (None, "steep", None),
        (0.02, "zero", 0.99),
        (0.2, "zero", 0.5),
        (0.02, "suite", 0.99),
    ],
)
def test_a_chunk_is_inverted_as_in_fp64(device_code, spread, gates, beta, length, first, heads):
    """What lies behind a short chunk is NaN, and other heads are left alone.

    Errors of at most 3e-3 are wanted, of which BF16 takes up to 1.7e-3.
    """
    generator = torch.Generator().manual_seed(1)
    k, Hv = keys(spread), 7
    g = GATES[gates](torch.randn(64, Hv, generator=generator))
    weights = torch.randn(64, Hv, generator=generator).sigmoid() if beta is None else torch.full((64, Hv), beta)
    expected_g, expected_A = reference.preprocessing(
        k[None, :length, None].double(), g[None, :length].double(), weights[None, :length].double()
    )
    products = (k.double() @ k.double().T).float()
    for tensor in (g, weights, products):
        tensor[length:] = torch.nan
    products[:, length:] = torch.nan
    g_cumsum = np.full((64, Hv), np.nan, dtype=np.float32)
    A = np.full((64, Hv, 64), NOT_WRITTEN, dtype=np.uint16)
    device_code.prepare(
        *(pointer(x.numpy()) for x in (products, g, weights)), pointer(g_cumsum), pointer(A), Hv, first, heads, length
    )
    own = range(first, first + heads)
    written = np.zeros((64, Hv), dtype=bool)
    written[:length, first : first + heads] = True
    assert ((A != NOT_WRITTEN).any(axis=2) == written).all()
    assert (~np.isnan(g_cumsum) == written).all()
    sums = torch.from_numpy(g_cumsum[:length, own]).double()
    torch.testing.assert_close(sums, expected_g[0][:, own], rtol=1e-5, atol=1e-5)
    actual = torch.from_numpy(A.view(np.int16)).view(torch.bfloat16)[:length]
    for head in own:
        assert reference.relative_error(actual[:, head], expected_A[0, :, head]) <= 2e-3


class Piece(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int) for name in ("sequence", "begin", "length", "index")]


def find(device_code, number, unit, where, tokens):
    """What all lanes of a warp agree on."""
    found = (Piece * 32)()
    offsets = where.offsets.numpy()
    device_code.piece(
        number, unit, pointer(offsets), where.stride, where.sequences, where.tokens_each, tokens, ctypes.byref(found)
    )
    (agreed,) = {(each.sequence, each.begin, each.length, each.index) for each in found}
    return agreed


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("sequences", [1, 2, 5, 33, 1100])
def test_every_piece_of_packed_sequences_is_found_once(device_code, sequences, dtype):
    choose = random.Random(sequences)
    for unit in (64, 640):
        lengths = [choose.choice((0, 1, 16, 63, 64, 65, 300, 5000)) for _ in range(sequences)]
        offsets = list(itertools.accumulate(lengths, initial=0))
        where = layout(1, offsets[-1] + 7, torch.tensor(offsets, dtype=dtype), torch.empty(0))
        numbers, tokens = where.pieces(unit, offsets[-1] + 7), offsets[-1] + 7
        sought = range(numbers) if numbers < 100 else sorted(choose.sample(range(numbers), 50))
        found = [find(device_code, number, unit, where, tokens) for number in sought]
        for sequence, begin, length, _ in found:
            assert (begin, length) == (offsets[sequence], lengths[sequence])
        real = [(sequence, index) for sequence, _, length, index in found if index * unit < max(length, 1)]
        assert len(set(real)) == len(real)
        if numbers < 100:  # all of them were looked for; a sequence without tokens has one piece too
            assert real == [(n, i) for n, length in enumerate(lengths) for i in range(max(-(-length // unit), 1))]


def test_every_piece_of_a_batch_is_found(device_code):
    for tokens_each in (1, 64, 200):
        where = layout(3, tokens_each, None, torch.empty(0))
        of_each = -(-tokens_each // 64)
        assert where.pieces(64, 3 * tokens_each) == 3 * of_each
        for number in range(3 * of_each):
            sequence, index = divmod(number, of_each)
            expected = (sequence, sequence * tokens_each, tokens_each, index)
            assert find(device_code, number, 64, where, 3 * tokens_each) == expected


@pytest.mark.parametrize("offsets", [[3, 100, 200], [0, 300, 100], [-70, 30, 1000]])
def test_offsets_that_can_not_be_lead_nowhere(device_code, offsets):
    where = layout(1, 200, torch.tensor(offsets, dtype=torch.int32), torch.empty(0))
    for number in range(where.pieces(64, 200)):
        _, begin, length, index = find(device_code, number, 64, where, 200)
        assert 0 <= begin <= begin + length <= 200
        assert index >= 0


def test_normalised_rows_have_length_one():
    x = torch.randn(3, 5, 2, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    lengths = preprocess.l2norm(x).double().norm(dim=-1)
    torch.testing.assert_close(lengths, torch.ones_like(lengths), rtol=4e-3, atol=0)


def test_packed_sequences_on_a_cpu_equal_one_call_each():
    case = problem.Case("packed", 1, 165, 2, 4, lengths=(100, 0, 65))
    inputs = problem.make_inputs(case, "cpu")
    g_cumsum, A = preprocess.prepare(inputs.k, inputs.g, inputs.beta, inputs.cu_seqlens)
    for begin, end in ((0, 100), (100, 165)):
        alone = preprocess.prepare(*(x[:, begin:end] for x in (inputs.k, inputs.g, inputs.beta)))
        assert torch.equal(g_cumsum[:, begin:end], alone[0])
        assert torch.equal(A[:, begin:end], alone[1])
