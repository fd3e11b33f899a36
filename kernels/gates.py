"""Refuses log-gates that rise within a chunk on the device, so that nothing has to wait for their values."""

import tilelang.language as T
import torch

from kernels.build import jit
from kernels.problem import CHUNK

WARP, WARPS = 32, 8  # lanes take neighbouring heads, so that loads are coalesced

# The assertion is a function call, for which ptxas would serialize all wgmma of a kernel (C7510): hence one of its own.
REFUSE = r"""
#include <cassert>
__device__ __forceinline__ void refuse(bool rises) {
  assert(!rises && "log-gates <= 0 were expected, found one above 0, with which the state grows without bound");
}
"""


def refuse_growth(g_cumsum: torch.Tensor) -> None:
    """Stop with a device-side assertion if a gate is above 0; g_cumsum [B,T,Hv] FP32 on a CUDA device.

    Gates accumulated within a chunk must not rise, but for the rounding of sums: 0.01 + 1e-5 |g_cumsum| passes.
    Asynchronous: it prints block (chunk, 32 heads, sequence) and thread, and the next synchronisation raises. As after
    any device-side assertion, the process has to start anew.
    """
    _refuse_growth()(g_cumsum)


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
