"""Refuses log-gates above 0, and offsets that can't be, on the device, so that nothing has to wait for their values."""

import tilelang.language as T
import torch

from kernels.build import jit
from kernels.problem import CHUNK
from kernels.sequences import Layout

WARP, WARPS = 32, 8  # lanes take neighbouring heads, so that loads are coalesced

# The assertion is a function call, for which ptxas would serialize all wgmma of a kernel (C7510): hence one of its own.
REFUSE = r"""
#include <cassert>
__device__ __forceinline__ void refuse(bool rises) {
  assert(!rises && "log-gates <= 0 were expected, found one above 0, with which the state grows without bound");
}

__device__ __forceinline__ void refuse_offsets(const int* offsets, int stride, int sequences, int tokens) {
  for (int n = threadIdx.x; n < sequences; n += blockDim.x) {
    const int begin = offsets[(long long)n * stride], end = offsets[(long long)(n + 1) * stride];
    assert(0 <= begin && begin <= end && end <= tokens &&
           "cu_seqlens were expected to rise, from 0 to the number of tokens at most, found others");
  }
}
"""


def refuse_growth(g_cumsum: torch.Tensor) -> None:
    """Stop with a device-side assertion if a gate is above 0; g_cumsum [B,T,Hv] FP32 on a CUDA device.

    Gates accumulated within a chunk must not rise, but for the rounding of sums: 0.01 + 1e-5 |g_cumsum| passes.
    Asynchronous: it prints block (chunk, 32 heads, sequence) and thread, and the next synchronisation raises. As after
    any device-side assertion, the process has to start anew.
    """
    _refuse_growth()(g_cumsum)


def refuse_inputs(g: torch.Tensor, where: Layout) -> None:
    """As `refuse_growth`, from log-gates per token, g [tokens,Hv] FP32; offsets must rise within the tokens too.

    Gates past the last offset are nobody's, and may be anything.
    """
    _refuse_inputs()(g, where.offsets, where.stride, where.sequences, where.tokens_each)


@jit()
def _refuse_growth():
    B, Tn, Hv = T.dynamic("B"), T.dynamic("Tn"), T.dynamic("Hv")

    @T.prim_func
    def refuse_growth(g_cumsum: T.Tensor((B, Tn, Hv), "float32")):
        with T.Kernel(T.ceildiv(Tn, CHUNK), T.ceildiv(Hv, WARP), B, threads=WARP * WARPS, prelude=REFUSE) as (c, x, b):
            T.pdl_trigger()  # what comes next need not wait for this to begin
            head = x * WARP + T.get_thread_binding() % WARP
            first = T.get_thread_binding() // WARP * (CHUNK // WARPS)
            rises = T.alloc_var("bool", init=False)
            if head < Hv:
                for i in T.unroll(CHUNK // WARPS):
                    t = c * CHUNK + first + i
                    if t < Tn:
                        before = T.if_then_else(first + i == 0, 0.0, g_cumsum[b, T.max(t - 1, 0), head])
                        gate = g_cumsum[b, t, head]
                        rises = rises or gate - before > 0.01 + 1e-5 * T.abs(gate)
            T.call_extern("handle", "refuse", rises)

    return refuse_growth


@jit()
def _refuse_inputs():
    Tn, Hv, words = T.dynamic("Tn"), T.dynamic("Hv"), T.dynamic("words")

    @T.prim_func
    def refuse_inputs(
        g: T.Tensor((Tn, Hv), "float32"),
        offsets: T.Tensor((words,), "int32"),
        stride: T.int32,
        sequences: T.int32,
        tokens_each: T.int32,
    ):
        with T.Kernel(T.ceildiv(Tn, CHUNK), T.ceildiv(Hv, WARP), threads=WARP * WARPS, prelude=REFUSE) as (c, x):
            T.pdl_trigger()  # what comes next need not wait for this to begin
            head = x * WARP + T.get_thread_binding() % WARP
            first = c * CHUNK + T.get_thread_binding() // WARP * (CHUNK // WARPS)
            end = T.alloc_var("int32", init=Tn)
            if tokens_each == 0:
                end = T.min(T.max(offsets[sequences * stride], 0), Tn)
                if c + x == 0:
                    T.call_extern("handle", "refuse_offsets", T.address_of(offsets[0]), stride, sequences, Tn)
            rises = T.alloc_var("bool", init=False)
            if head < Hv:
                for i in T.unroll(CHUNK // WARPS):
                    if first + i < end:
                        rises = rises or g[first + i, head] > 0.0
            T.call_extern("handle", "refuse", rises)

    return refuse_inputs
