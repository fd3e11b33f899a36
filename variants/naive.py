"""naive: one kernel per formula, every intermediate through global memory

The first version that one would write down: three kernels that follow the formulas. Every product reads its
operands from global memory and leaves its result there, the state and Vnew of every chunk included.

    naive_uw      U = A B V, W = A B Γ K                        one CTA per chunk and value head
    naive_state   Vnew = U - W S, S = γ_ℓ S + (γ_ℓ/γ K)^T Vnew  one CTA per value head
    naive_output  O = scale (Γ Q S + P Vnew)                    one CTA per chunk and value head

Hypothesis: with many heads memory is the limit. A token and value head moves about 6.5 KB of intermediates:
U, W and Vnew at 512 bytes each in FP32 are written once and read once (Vnew twice), S at 1 KB (64 KiB a chunk)
is written once and read three times; inputs and output are about 0.8 KB. With few heads `naive_state` is the
limit: it walks through the chunks in order, and each waits for two round trips through global memory
(`long_scoreboard`). The tensor pipe is near idle everywhere.

Shared memory: `naive_uw` 24 KiB, `naive_state` 64 KiB, `naive_output` 56 KiB. No roles, no barriers but the
ones between a write and its use; nothing overlaps.
"""

import tilelang.language as T
import torch

from kernels.build import jit
from kernels.problem import CHUNK, HEAD_DIM, SCALE, check_core_inputs

THREADS = 128  # one warpgroup: the unit that wgmma needs
STATE_THREADS = 256  # of the state kernel: the S [128, 128] FP32 tile is then 64 registers a thread

bf16, fp32 = "bfloat16", "float32"


@jit(disable_warp_specialized=True)
def build_uw():
    B, Tn, Hq, Hv = T.dynamic("B"), T.dynamic("Tn"), T.dynamic("Hq"), T.dynamic("Hv")

    @T.prim_func
    def naive_uw(
        k: T.Tensor((B, Tn, Hq, HEAD_DIM), bf16),
        v: T.Tensor((B, Tn, Hv, HEAD_DIM), bf16),
        g_cumsum: T.Tensor((B, Tn, Hv), fp32),
        beta: T.Tensor((B, Tn, Hv), fp32),
        A: T.Tensor((B, Tn, Hv, CHUNK), bf16),
        U: T.Tensor((B, Tn, Hv, HEAD_DIM), fp32),
        W: T.Tensor((B, Tn, Hv, HEAD_DIM), fp32),
    ):
        with T.Kernel(T.ceildiv(Tn, CHUNK), Hv, B, threads=THREADS) as (c, h, b):
            A_shared = T.alloc_shared((CHUNK, CHUNK), bf16)
            x_shared = T.alloc_shared((CHUNK, HEAD_DIM), bf16)
            y_frag = T.alloc_fragment((CHUNK, HEAD_DIM), fp32)
            hk = T.alloc_var("int32", init=T.truncdiv(h, T.truncdiv(Hv, Hq)))  # one division, not one per address
            t0 = c * CHUNK

            T.copy(A[b, t0 : t0 + CHUNK, h, :], A_shared, disable_tma=True)
            # U = A B V
            for i, j in T.Parallel(CHUNK, HEAD_DIM):
                x_shared[i, j] = beta[b, t0 + i, h] * v[b, t0 + i, h, j]
            T.gemm(A_shared, x_shared, y_frag, clear_accum=True)
            T.copy(y_frag, U[b, t0 : t0 + CHUNK, h, :])
            # W = A B Γ K
            for i, j in T.Parallel(CHUNK, HEAD_DIM):
                x_shared[i, j] = beta[b, t0 + i, h] * T.exp(g_cumsum[b, t0 + i, h]) * k[b, t0 + i, hk, j]
            T.gemm(A_shared, x_shared, y_frag, clear_accum=True)
            T.copy(y_frag, W[b, t0 : t0 + CHUNK, h, :])

    return naive_uw


@jit(disable_warp_specialized=True)
def build_state(has_initial_state):
    B, Tn, Hq, Hv, chunks = (T.dynamic(name) for name in ("B", "Tn", "Hq", "Hv", "chunks"))

    @T.prim_func
    def naive_state(
        k: T.Tensor((B, Tn, Hq, HEAD_DIM), bf16),
        g_cumsum: T.Tensor((B, Tn, Hv), fp32),
        U: T.Tensor((B, Tn, Hv, HEAD_DIM), fp32),
        W: T.Tensor((B, Tn, Hv, HEAD_DIM), fp32),
        initial_state: T.Tensor((B, Hv, HEAD_DIM, HEAD_DIM), fp32),
        S: T.Tensor((B, chunks, Hv, HEAD_DIM, HEAD_DIM), fp32),
        Vnew: T.Tensor((B, Tn, Hv, HEAD_DIM), fp32),
        final_state: T.Tensor((B, Hv, HEAD_DIM, HEAD_DIM), fp32),
    ):
        with T.Kernel(Hv, B, threads=STATE_THREADS) as (h, b):
            x_shared = T.alloc_shared((CHUNK, HEAD_DIM), bf16)  # W, then K
            S_shared = T.alloc_shared((HEAD_DIM, HEAD_DIM), bf16)
            Vnew_shared = T.alloc_shared((CHUNK, HEAD_DIM), bf16)
            S_frag = T.alloc_fragment((HEAD_DIM, HEAD_DIM), fp32)
            Vnew_frag = T.alloc_fragment((CHUNK, HEAD_DIM), fp32)
            hk = T.alloc_var("int32", init=T.truncdiv(h, T.truncdiv(Hv, Hq)))  # one division, not one per address

            if has_initial_state:
                T.copy(initial_state[b, h, :, :], S_frag)
            else:
                T.clear(S_frag)
            T.copy(S_frag, S[b, 0, h, :, :])
            for c in T.serial(chunks):
                t0 = c * CHUNK
                g_last = g_cumsum[b, T.min(t0 + CHUNK, Tn) - 1, h]
                T.sync_threads()  # S is written by some threads and read by others
                # Vnew = U - W S
                for i, j in T.Parallel(CHUNK, HEAD_DIM):
                    x_shared[i, j] = W[b, t0 + i, h, j]
                for i, j in T.Parallel(HEAD_DIM, HEAD_DIM):
                    S_shared[i, j] = S[b, c, h, i, j]
                T.gemm(x_shared, S_shared, Vnew_frag, clear_accum=True)
                for i, j in T.Parallel(CHUNK, HEAD_DIM):
                    Vnew_frag[i, j] = U[b, t0 + i, h, j] - Vnew_frag[i, j]
                T.copy(Vnew_frag, Vnew[b, t0 : t0 + CHUNK, h, :])
                T.sync_threads()  # and so is Vnew
                # S = γ_ℓ S + (diag(γ_ℓ/γ) K)^T Vnew
                for i, j in T.Parallel(CHUNK, HEAD_DIM):
                    x_shared[i, j] = T.exp(g_last - g_cumsum[b, T.min(t0 + i, Tn - 1), h]) * k[b, t0 + i, hk, j]
                for i, j in T.Parallel(CHUNK, HEAD_DIM):
                    Vnew_shared[i, j] = Vnew[b, t0 + i, h, j]
                for i, j in T.Parallel(HEAD_DIM, HEAD_DIM):
                    S_frag[i, j] = T.exp(g_last) * S[b, c, h, i, j]
                T.gemm(x_shared, Vnew_shared, S_frag, transpose_A=True)
                if c + 1 < chunks:
                    T.copy(S_frag, S[b, c + 1, h, :, :])
                else:
                    T.copy(S_frag, final_state[b, h, :, :])

    return naive_state


@jit(disable_warp_specialized=True)
def build_output():
    B, Tn, Hq, Hv, chunks = (T.dynamic(name) for name in ("B", "Tn", "Hq", "Hv", "chunks"))

    @T.prim_func
    def naive_output(
        q: T.Tensor((B, Tn, Hq, HEAD_DIM), bf16),
        k: T.Tensor((B, Tn, Hq, HEAD_DIM), bf16),
        g_cumsum: T.Tensor((B, Tn, Hv), fp32),
        S: T.Tensor((B, chunks, Hv, HEAD_DIM, HEAD_DIM), fp32),
        Vnew: T.Tensor((B, Tn, Hv, HEAD_DIM), fp32),
        output: T.Tensor((B, Tn, Hv, HEAD_DIM), bf16),
    ):
        with T.Kernel(chunks, Hv, B, threads=THREADS) as (c, h, b):
            Q_shared = T.alloc_shared((CHUNK, HEAD_DIM), bf16)
            S_shared = T.alloc_shared((HEAD_DIM, HEAD_DIM), bf16)  # also K and Vnew, one after the other
            P_shared = T.alloc_shared((CHUNK, CHUNK), bf16)
            P_frag = T.alloc_fragment((CHUNK, CHUNK), fp32)
            O_frag = T.alloc_fragment((CHUNK, HEAD_DIM), fp32)
            hk = T.alloc_var("int32", init=T.truncdiv(h, T.truncdiv(Hv, Hq)))  # one division, not one per address
            t0 = c * CHUNK

            T.copy(q[b, t0 : t0 + CHUNK, hk, :], Q_shared, disable_tma=True)
            # O = Γ Q S
            for i, j in T.Parallel(HEAD_DIM, HEAD_DIM):
                S_shared[i, j] = S[b, c, h, i, j]
            T.gemm(Q_shared, S_shared, O_frag, clear_accum=True)
            for i, j in T.Parallel(CHUNK, HEAD_DIM):
                O_frag[i, j] *= T.exp(g_cumsum[b, T.min(t0 + i, Tn - 1), h])
            # P = Lower(Q K^T) ⊙ exp(g_i - g_j)
            T.copy(k[b, t0 : t0 + CHUNK, hk, :], S_shared[0:CHUNK, :], disable_tma=True)
            T.gemm(Q_shared, S_shared[0:CHUNK, :], P_frag, transpose_B=True, clear_accum=True)
            for i, j in T.Parallel(CHUNK, CHUNK):
                g_i = g_cumsum[b, T.min(t0 + i, Tn - 1), h]
                g_j = g_cumsum[b, T.min(t0 + j, Tn - 1), h]
                # Masked before it is exponentiated: exp(-inf) = 0, and no exponent is positive.
                P_shared[i, j] = P_frag[i, j] * T.exp(T.Select(i >= j, g_i - g_j, -T.infinity(fp32)))
            # O = scale (O + P Vnew)
            for i, j in T.Parallel(CHUNK, HEAD_DIM):
                S_shared[i, j] = Vnew[b, t0 + i, h, j]
            T.gemm(P_shared, S_shared[0:CHUNK, :], O_frag)
            for i, j in T.Parallel(CHUNK, HEAD_DIM):
                O_frag[i, j] *= SCALE
            T.copy(O_frag, output[b, t0 : t0 + CHUNK, h, :])

    return naive_output


def gdn_prefill_forward(q, k, v, g_cumsum, beta, A, initial_state=None):
    """The core forward; shapes, dtypes and errors as in `kernels.problem.check_core_inputs`.

    Returns output [B,T,Hv,128] BF16 and final_state [B,Hv,128,128] FP32.
    """
    B, tokens, _, Hv = check_core_inputs(q, k, v, g_cumsum, beta, A, initial_state)
    chunks = -(-tokens // CHUNK)
    U, W, Vnew = (torch.empty(v.shape, dtype=torch.float32, device=v.device) for _ in range(3))
    S = torch.empty(B, chunks, Hv, HEAD_DIM, HEAD_DIM, dtype=torch.float32, device=v.device)
    final_state = torch.empty(B, Hv, HEAD_DIM, HEAD_DIM, dtype=torch.float32, device=v.device)
    output = torch.empty_like(v)
    build_uw()(k, v, g_cumsum, beta, A, U, W)
    # Without an initial state the kernel never reads that argument: any tensor of its shape will do.
    state = final_state if initial_state is None else initial_state
    build_state(initial_state is not None)(k, g_cumsum, U, W, state, S, Vnew, final_state)
    build_output()(q, k, g_cumsum, S, Vnew, output)
    return output, final_state
