"""Preprocessing, not part of the core: the chunk-local cumulative gates and the inverse A of every chunk.

`chunk_cumsum` and `kkt_inverse` run as TileLang kernels on CUDA tensors and in PyTorch on CPU tensors.
"""

from __future__ import annotations

import tilelang.language as T
import torch
from torch.nn.functional import pad

from kernels.build import jit
from kernels.problem import CHUNK, HEAD_DIM, Inputs

CoreInputs = tuple[
    torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None
]


def core_inputs(inputs: Inputs) -> CoreInputs:
    """What `gdn_prefill_forward` takes, in its order: (q, k, v, g_cumsum, beta, A, initial_state)."""
    g_cumsum = chunk_cumsum(inputs.g)
    A = kkt_inverse(inputs.k, g_cumsum, inputs.beta)
    return inputs.q, inputs.k, inputs.v, g_cumsum, inputs.beta, A, inputs.initial_state


def on_core_inputs(q, k, v, g_cumsum, beta, A, initial_state=None) -> None:
    """Preprocessing with the signature of a variant, for `build.kernels_of`: shapes alone matter there."""
    kkt_inverse(k, chunk_cumsum(g_cumsum), beta)


def chunk_cumsum(g: torch.Tensor) -> torch.Tensor:
    """Cumulative sum of log-gates g [B,T,Hv] FP32 along T, starting anew every 64 tokens; same shape and dtype."""
    if g.device.type == "cpu":
        tokens = g.shape[1]
        chunks = pad(g, (0, 0, 0, -tokens % CHUNK)).unflatten(1, (-1, CHUNK))
        return chunks.cumsum(2).flatten(1, 2)[:, :tokens].contiguous()
    g_cumsum = torch.empty_like(g)
    _chunk_cumsum()(g, g_cumsum)
    return g_cumsum


def kkt_inverse(k: torch.Tensor, g_cumsum: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
    """A = (I + StrictLower(diag(beta) Γ K K^T Γ^-1))^-1 of every chunk, as [B,T,Hv,64] BF16.

    k [B,T,Hq,128] BF16, g_cumsum and beta [B,T,Hv] FP32. Row t holds the row of token t in its chunk's
    matrix; in a short last chunk the columns past the end are zero.
    """
    B, tokens, Hv = g_cumsum.shape
    if k.device.type == "cpu":
        return _kkt_inverse_torch(k, g_cumsum, beta)
    A = torch.empty(B, tokens, Hv, CHUNK, dtype=torch.bfloat16, device=k.device)
    _kkt_inverse()(k, g_cumsum, beta, A)
    return A


def _kkt_inverse_torch(k: torch.Tensor, g_cumsum: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
    tokens, group = k.shape[1], g_cumsum.shape[2] // k.shape[2]
    tail = -tokens % CHUNK
    k = k.float().repeat_interleave(group, dim=2).transpose(1, 2)
    k = pad(k, (0, 0, 0, tail)).unflatten(2, (-1, CHUNK))  # [B,Hv,chunks,64,128]
    g, beta = (
        pad(x.float().transpose(1, 2), (0, tail)).unflatten(2, (-1, CHUNK)).unsqueeze(-1) for x in (g_cumsum, beta)
    )
    eye = torch.eye(CHUNK)
    strict = (beta * (g - g.mT).tril(-1).exp() * (k @ k.mT)).tril(-1)
    A = torch.linalg.solve_triangular(eye + strict, eye, upper=False, unitriangular=True)
    return A.flatten(2, 3)[:, :, :tokens].transpose(1, 2).bfloat16().contiguous()


@jit()
def _chunk_cumsum():
    B, Tn, Hv = T.dynamic("B"), T.dynamic("Tn"), T.dynamic("Hv")
    warp = 32  # neighbouring lanes sum neighbouring heads: every load is coalesced

    @T.prim_func
    def chunk_cumsum(g: T.Tensor((B, Tn, Hv), "float32"), g_cumsum: T.Tensor((B, Tn, Hv), "float32")):
        with T.Kernel(T.ceildiv(Tn, CHUNK), T.ceildiv(Hv, warp), B, threads=warp) as (c, tile, b):
            head = tile * warp + T.get_thread_binding()
            total = T.alloc_var("float32", init=0.0)
            if head < Hv:
                for i in T.unroll(CHUNK):
                    if c * CHUNK + i < Tn:
                        total = total + g[b, c * CHUNK + i, head]
                        g_cumsum[b, c * CHUNK + i, head] = total

    return chunk_cumsum


@jit(disable_warp_specialized=True)
def _kkt_inverse():
    """One CTA per chunk and value head: K K^T on tensor cores, then forward substitution in FP32 registers.

    Thread j of the first two warps solves (I + L) x = e_j, row by row: x_i = δ_ij - Σ_{m<i} L_im x_m. All
    threads read the same L_im, four at a time: one broadcast of 16 bytes for four multiply-adds, which go to
    four sums so that they need not wait for each other.
    """
    B, Tn, Hq, Hv = T.dynamic("B"), T.dynamic("Tn"), T.dynamic("Hq"), T.dynamic("Hv")

    @T.prim_func
    def kkt_inverse(
        k: T.Tensor((B, Tn, Hq, HEAD_DIM), "bfloat16"),
        g_cumsum: T.Tensor((B, Tn, Hv), "float32"),
        beta: T.Tensor((B, Tn, Hv), "float32"),
        A: T.Tensor((B, Tn, Hv, CHUNK), "bfloat16"),
    ):
        with T.Kernel(T.ceildiv(Tn, CHUNK), Hv, B, threads=128) as (c, h, b):
            k_shared = T.alloc_shared((CHUNK, HEAD_DIM), "bfloat16")
            L_shared = T.alloc_shared((CHUNK, CHUNK), "float32")
            A_shared = T.alloc_shared((CHUNK, CHUNK), "bfloat16")
            g_shared = T.alloc_shared((CHUNK,), "float32")
            beta_shared = T.alloc_shared((CHUNK,), "float32")
            L_frag = T.alloc_fragment((CHUNK, CHUNK), "float32")
            x = T.alloc_local((CHUNK,), "float32")
            row = T.alloc_local((4,), "float32")
            sums = T.alloc_local((4,), "float32")
            column = T.get_thread_binding()
            hk = T.alloc_var("int32", init=T.truncdiv(h, T.truncdiv(Hv, Hq)))  # one division, not one per address

            T.copy(k[b, c * CHUNK : (c + 1) * CHUNK, hk, :], k_shared)
            for i in T.Parallel(CHUNK):
                # Past the end the last gate is repeated, so that no exponent is positive.
                g_shared[i] = g_cumsum[b, T.min(c * CHUNK + i, Tn - 1), h]
                beta_shared[i] = beta[b, T.min(c * CHUNK + i, Tn - 1), h]

            # L = StrictLower(B Γ K K^T Γ^-1)
            T.gemm(k_shared, k_shared, L_frag, transpose_B=True, clear_accum=True)
            for i, j in T.Parallel(CHUNK, CHUNK):
                L_shared[i, j] = T.if_then_else(
                    i > j, beta_shared[i] * T.exp(g_shared[i] - g_shared[j]) * L_frag[i, j], 0.0
                )

            # A = (I + L)^-1
            if column < CHUNK:
                for i in T.unroll(CHUNK):
                    x[i] = 0.0
                for i in T.unroll(CHUNK):
                    for u in T.unroll(4):
                        sums[u] = 0.0
                    for m in T.unroll(T.ceildiv(i, 4)):
                        for u in T.vectorized(4):
                            row[u] = L_shared[i, m * 4 + u]
                        for u in T.unroll(4):
                            sums[u] += row[u] * x[m * 4 + u]  # L is zero and x still zero from i on
                    x[i] = T.if_then_else(i == column, 1.0, 0.0) - (sums[0] + sums[1]) - (sums[2] + sums[3])
                    A_shared[i, column] = x[i]
            T.copy(A_shared, A[b, c * CHUNK : (c + 1) * CHUNK, h, :])

    return kkt_inverse
