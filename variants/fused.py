"""fused: one kernel, the chunk loop inside, no intermediate in global memory

Since `naive`: the three kernels are one. A CTA owns one sequence, one value head and half of dv, keeps its
slice of the state in FP32 registers and walks through the chunks in order; U, W, Vnew and P live in registers
and shared memory. Gates and beta become tables of a chunk, computed once instead of once per element. Each
matmul still fetches its own operand tile from global memory right before it starts: K three times a chunk.

Hypothesis: DRAM bytes fall to about the minimum, since K's later reads hit the L2 cache, and with many heads
time falls by at least a third. A chunk is now one chain of seven matmuls and seven loads, each waiting for
the one before: with few heads 2 B Hv CTAs run it and time is chunks x the latency of a chunk. There the gain
is small, and `long_scoreboard` (waiting for global memory) stays the first stall reason.

Shared memory, 97 KiB: K 16, Q 16, W 16, S 16, A 8, V 8, Vnew 8, P 8, gate tables 1. Two CTAs fit an SM. No
roles, no barriers but the ones between a copy and its use; nothing overlaps.
"""

import tilelang.language as T
import torch

from kernels.build import jit
from kernels.problem import CHUNK, HEAD_DIM, SCALE, check_core_inputs

THREADS = 128  # one warpgroup: the unit that wgmma needs
DV_TILE = 64  # S [128, 64] FP32 is 64 registers a thread, and two CTAs share a head

bf16, fp32 = "bfloat16", "float32"


@jit(disable_warp_specialized=True)
def build(has_initial_state):
    B, Tn, Hq, Hv = T.dynamic("B"), T.dynamic("Tn"), T.dynamic("Hq"), T.dynamic("Hv")

    @T.prim_func
    def fused(
        q: T.Tensor((B, Tn, Hq, HEAD_DIM), bf16),
        k: T.Tensor((B, Tn, Hq, HEAD_DIM), bf16),
        v: T.Tensor((B, Tn, Hv, HEAD_DIM), bf16),
        g_cumsum: T.Tensor((B, Tn, Hv), fp32),
        beta: T.Tensor((B, Tn, Hv), fp32),
        A: T.Tensor((B, Tn, Hv, CHUNK), bf16),
        initial_state: T.Tensor((B, Hv, HEAD_DIM, HEAD_DIM), fp32),
        output: T.Tensor((B, Tn, Hv, HEAD_DIM), bf16),
        final_state: T.Tensor((B, Hv, HEAD_DIM, HEAD_DIM), fp32),
    ):
        with T.Kernel(HEAD_DIM // DV_TILE, Hv, B, threads=THREADS) as (tile, h, b):
            A_shared = T.alloc_shared((CHUNK, CHUNK), bf16)
            V_shared = T.alloc_shared((CHUNK, DV_TILE), bf16)
            K_shared = T.alloc_shared((CHUNK, HEAD_DIM), bf16)
            W_shared = T.alloc_shared((CHUNK, HEAD_DIM), bf16)
            Q_shared = T.alloc_shared((CHUNK, HEAD_DIM), bf16)
            S_shared = T.alloc_shared((HEAD_DIM, DV_TILE), bf16)
            Vnew_shared = T.alloc_shared((CHUNK, DV_TILE), bf16)
            P_shared = T.alloc_shared((CHUNK, CHUNK), bf16)
            g_shared = T.alloc_shared((CHUNK,), fp32)
            gamma_shared = T.alloc_shared((CHUNK,), fp32)
            decay_shared = T.alloc_shared((CHUNK,), fp32)  # γ_ℓ/γ
            beta_shared = T.alloc_shared((CHUNK,), fp32)
            A_frag = T.alloc_fragment((CHUNK, CHUNK), bf16)
            S_frag = T.alloc_fragment((HEAD_DIM, DV_TILE), fp32)
            Vnew_frag = T.alloc_fragment((CHUNK, DV_TILE), fp32)
            W_frag = T.alloc_fragment((CHUNK, HEAD_DIM), fp32)
            WS_frag = T.alloc_fragment((CHUNK, DV_TILE), fp32)
            P_frag = T.alloc_fragment((CHUNK, CHUNK), fp32)
            O_frag = T.alloc_fragment((CHUNK, DV_TILE), fp32)
            hk = T.alloc_var("int32", init=T.truncdiv(h, T.truncdiv(Hv, Hq)))  # one division, not one per address
            dv = tile * DV_TILE

            if has_initial_state:
                T.copy(initial_state[b, h, :, dv : dv + DV_TILE], S_frag)
            else:
                T.clear(S_frag)
            for c in T.serial(T.ceildiv(Tn, CHUNK)):
                t0 = c * CHUNK
                g_last = g_cumsum[b, T.min(t0 + CHUNK, Tn) - 1, h]
                for i in T.Parallel(CHUNK):
                    # Past the end the last gate is repeated: exponents stay <= 0, and K, V and A are zero there.
                    g_shared[i] = g_cumsum[b, T.min(t0 + i, Tn - 1), h]
                    gamma_shared[i] = T.exp(g_shared[i])
                    decay_shared[i] = T.exp(g_last - g_shared[i])
                    beta_shared[i] = beta[b, T.min(t0 + i, Tn - 1), h]
                T.copy(S_frag, S_shared)
                # U = A B V
                T.copy(A[b, t0 : t0 + CHUNK, h, :], A_frag)
                for i, j in T.Parallel(CHUNK, CHUNK):
                    A_shared[i, j] = A_frag[i, j] * beta_shared[j]
                T.copy(v[b, t0 : t0 + CHUNK, h, dv : dv + DV_TILE], V_shared, disable_tma=True)
                T.gemm(A_shared, V_shared, Vnew_frag, clear_accum=True)
                # W = A B Γ K
                for i, j in T.Parallel(CHUNK, CHUNK):
                    A_shared[i, j] = A_frag[i, j] * (beta_shared[j] * gamma_shared[j])
                T.copy(k[b, t0 : t0 + CHUNK, hk, :], K_shared, disable_tma=True)
                T.gemm(A_shared, K_shared, W_frag, clear_accum=True)
                T.copy(W_frag, W_shared)
                # Vnew = U - W S
                T.gemm(W_shared, S_shared, WS_frag, clear_accum=True)
                for i, j in T.Parallel(CHUNK, DV_TILE):
                    Vnew_frag[i, j] -= WS_frag[i, j]
                T.copy(Vnew_frag, Vnew_shared)
                # O = Γ Q S
                T.copy(q[b, t0 : t0 + CHUNK, hk, :], Q_shared, disable_tma=True)
                T.gemm(Q_shared, S_shared, O_frag, clear_accum=True)
                for i, j in T.Parallel(CHUNK, DV_TILE):
                    O_frag[i, j] *= gamma_shared[i]
                # P = Lower(Q K^T) ⊙ exp(g_i - g_j)
                T.copy(k[b, t0 : t0 + CHUNK, hk, :], K_shared, disable_tma=True)
                T.gemm(Q_shared, K_shared, P_frag, transpose_B=True, clear_accum=True)
                for i, j in T.Parallel(CHUNK, CHUNK):
                    # Above the diagonal the exponent is capped at 0 and the product masked.
                    P_frag[i, j] *= T.exp(T.min(g_shared[i] - g_shared[j], 0.0))
                for i, j in T.Parallel(CHUNK, CHUNK):
                    P_frag[i, j] = T.Select(i >= j, P_frag[i, j], 0.0)
                T.copy(P_frag, P_shared)
                # O = scale (O + P Vnew)
                T.gemm(P_shared, Vnew_shared, O_frag)
                for i, j in T.Parallel(CHUNK, DV_TILE):
                    O_frag[i, j] *= SCALE
                T.copy(O_frag, output[b, t0 : t0 + CHUNK, h, dv : dv + DV_TILE])
                # S = γ_ℓ S + K^T (diag(γ_ℓ/γ) Vnew)
                for i, j in T.Parallel(CHUNK, DV_TILE):
                    Vnew_shared[i, j] = decay_shared[i] * Vnew_frag[i, j]
                T.copy(k[b, t0 : t0 + CHUNK, hk, :], K_shared, disable_tma=True)
                for i, j in T.Parallel(HEAD_DIM, DV_TILE):
                    S_frag[i, j] *= T.exp(g_last)
                T.gemm(K_shared, Vnew_shared, S_frag, transpose_A=True)
            T.copy(S_frag, final_state[b, h, :, dv : dv + DV_TILE])

    return fused


def gdn_prefill_forward(q, k, v, g_cumsum, beta, A, initial_state=None):
    """The core forward; shapes, dtypes and errors as in `kernels.problem.check_core_inputs`.

    Returns output [B,T,Hv,128] BF16 and final_state [B,Hv,128,128] FP32.
    """
    B, _, _, Hv = check_core_inputs(q, k, v, g_cumsum, beta, A, initial_state)
    output = torch.empty_like(v)
    final_state = torch.empty(B, Hv, HEAD_DIM, HEAD_DIM, dtype=torch.float32, device=v.device)
    # Without an initial state the kernel never reads that argument: any tensor of its shape will do.
    state = final_state if initial_state is None else initial_state
    build(initial_state is not None)(q, k, v, g_cumsum, beta, A, state, output, final_state)
    return output, final_state
