"""smem: every input tile of a chunk is loaded once, by the copy engine, and used from shared memory

Since `fused`: the tiles of a chunk, A, K, V and Q, are requested together at its start by four TMA copies that
complete on one mbarrier, and every matmul uses them from there; K is read once instead of three times. The two
scaled versions of A never exist in memory: A B and -A B Γ are made in registers and are the left operands of
their products. U needs no subtraction, since -W S is added to it in the accumulator. A CTA owns 64 or all 128
columns of dv (`variants.dv_tile`), a warpgroup for each 64.

Hypothesis: a chunk waits for memory once instead of seven times, so `long_scoreboard` per issue falls by half or
more, the tensor pipe's share rises by half and time falls by a third, most where the chunk loop is all there is
(chain_equal). DRAM bytes stay at the minimum. Bank conflicts: every tile has the 128-byte swizzle that TMA writes,
ldmatrix and stmatrix use and wgmma reads, so there should be next to none.

Shared memory at dv 64, 97 KiB, so that two CTAs fit an SM (at dv 128, 129 KiB):
    A 8, K 16, V 8, Q 16        input tiles, written by TMA
    W 16                        stmatrix, left operand of W S
    S 16                        stmatrix, right operand of W S and Q S
    Vnew 8                      stmatrix, right operand of P Vnew; then scaled by γ_ℓ/γ, of K^T Vnew
    P 8                         stmatrix, left operand of P Vnew
    gate tables 1
Plans that lost: scaled copies of A in shared memory (16 KiB and two barriers more, for operands that registers hold
for free); A as it comes, without a swizzle (no matmul asks for one there, but its loads into registers then meet in
the same banks, eight at a time); a second home for the scaled Vnew (8 KiB more, and the barrier that it saves is not
what a chunk waits for). FP32 tiles for W, Vnew and S lost on paper: twice the bytes, and wgmma would take them as
TF32 at half the rate.

No roles. `loaded` (1 arrival, the thread that issues the copies): all wait for it before the first formula.
"""

import tilelang.language as T
import torch
from tilelang.layout import make_swizzled_layout

from kernels.build import jit
from kernels.markers import mark, role
from kernels.problem import CHUNK, HEAD_DIM, SCALE, check_core_inputs
from variants import dv_tile

bf16, fp32 = "bfloat16", "float32"


@jit(disable_warp_specialized=True)
def build(has_initial_state, DV_TILE):
    THREADS = 2 * DV_TILE  # a warpgroup for every 64 columns of the state: 64 registers a thread
    B, Tn, Hq, Hv = T.dynamic("B"), T.dynamic("Tn"), T.dynamic("Hq"), T.dynamic("Hv")

    @T.prim_func
    def smem(
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
            Q_shared = T.alloc_shared((CHUNK, HEAD_DIM), bf16)
            K_shared = T.alloc_shared((CHUNK, HEAD_DIM), bf16)
            V_shared = T.alloc_shared((CHUNK, DV_TILE), bf16)
            A_shared = T.alloc_shared((CHUNK, CHUNK), bf16)
            W_shared = T.alloc_shared((CHUNK, HEAD_DIM), bf16)
            S_shared = T.alloc_shared((HEAD_DIM, DV_TILE), bf16)
            Vnew_shared = T.alloc_shared((CHUNK, DV_TILE), bf16)
            P_shared = T.alloc_shared((CHUNK, CHUNK), bf16)
            g_shared = T.alloc_shared((CHUNK,), fp32)
            gamma_shared = T.alloc_shared((CHUNK,), fp32)
            decay_shared = T.alloc_shared((CHUNK,), fp32)  # γ_ℓ/γ
            beta_shared = T.alloc_shared((CHUNK,), fp32)
            A_frag = T.alloc_fragment((CHUNK, CHUNK), bf16)
            Au_frag = T.alloc_fragment((CHUNK, CHUNK), bf16)
            Aw_frag = T.alloc_fragment((CHUNK, CHUNK), bf16)
            S_frag = T.alloc_fragment((HEAD_DIM, DV_TILE), fp32)
            Vnew_frag = T.alloc_fragment((CHUNK, DV_TILE), fp32)
            W_frag = T.alloc_fragment((CHUNK, HEAD_DIM), fp32)
            P_frag = T.alloc_fragment((CHUNK, CHUNK), fp32)
            O_frag = T.alloc_fragment((CHUNK, DV_TILE), fp32)
            loaded = T.alloc_barrier(1)
            # No matmul reads A from shared memory, so nothing else asks for the swizzle that spares ldmatrix conflicts.
            T.annotate_layout({A_shared: make_swizzled_layout(A_shared)})
            hk = T.alloc_var("int32", init=T.truncdiv(h, T.truncdiv(Hv, Hq)))  # one division, not one per address
            dv = tile * DV_TILE

            if has_initial_state:
                T.copy(initial_state[b, h, :, dv : dv + DV_TILE], S_frag)
            else:
                T.clear(S_frag)
            for c in T.serial(T.ceildiv(Tn, CHUNK)):
                role("all", 0, c)
                mark("wait CTA")
                t0 = c * CHUNK
                g_last = g_cumsum[b, T.min(t0 + CHUNK, Tn) - 1, h]
                T.sync_threads()  # the previous chunk's tiles are no longer read
                mark("copy A, K, V, Q")
                T.tma_copy(A[b, t0 : t0 + CHUNK, h, 0:CHUNK], A_shared, barrier=loaded)
                T.tma_copy(k[b, t0 : t0 + CHUNK, hk, 0:HEAD_DIM], K_shared, barrier=loaded)
                T.tma_copy(v[b, t0 : t0 + CHUNK, h, dv : dv + DV_TILE], V_shared, barrier=loaded)
                T.tma_copy(q[b, t0 : t0 + CHUNK, hk, 0:HEAD_DIM], Q_shared, barrier=loaded)
                mark("arrive loaded")
                if T.shuffle_elect(THREADS):
                    T.barrier_arrive(loaded)
                mark("compute gates")
                for i in T.Parallel(CHUNK):
                    # Past the end the last gate is repeated: exponents stay <= 0, and K, V and A are zero there.
                    g_shared[i] = g_cumsum[b, T.min(t0 + i, Tn - 1), h]
                    gamma_shared[i] = T.exp(g_shared[i])
                    decay_shared[i] = T.exp(g_last - g_shared[i])
                    beta_shared[i] = beta[b, T.min(t0 + i, Tn - 1), h]
                mark("copy S")
                T.copy(S_frag, S_shared)
                mark("wait loaded")
                T.barrier_wait(loaded, c % 2)
                mark("wait CTA")
                T.sync_threads()
                # W = -A B Γ K
                mark("compute -A B Γ")
                T.copy(A_shared, A_frag)
                for i, j in T.Parallel(CHUNK, CHUNK):
                    Aw_frag[i, j] = A_frag[i, j] * (-beta_shared[j] * gamma_shared[j])
                mark("matmul W")
                T.gemm(Aw_frag, K_shared, W_frag, clear_accum=True)
                mark("copy W")
                T.copy(W_frag, W_shared)
                # Vnew = A B V + W S
                mark("compute A B")
                for i, j in T.Parallel(CHUNK, CHUNK):
                    Au_frag[i, j] = A_frag[i, j] * beta_shared[j]
                mark("matmul U")
                T.gemm(Au_frag, V_shared, Vnew_frag, clear_accum=True)
                mark("matmul W S")
                T.gemm(W_shared, S_shared, Vnew_frag)
                mark("copy Vnew")
                T.copy(Vnew_frag, Vnew_shared)
                # O = Γ Q S
                mark("matmul Q S")
                T.gemm(Q_shared, S_shared, O_frag, clear_accum=True)
                mark("compute Γ Q S")
                for i, j in T.Parallel(CHUNK, DV_TILE):
                    O_frag[i, j] *= gamma_shared[i]
                # P = Lower(Q K^T) ⊙ exp(g_i - g_j)
                mark("matmul Q K^T")
                T.gemm(Q_shared, K_shared, P_frag, transpose_B=True, clear_accum=True)
                mark("compute P")
                for i, j in T.Parallel(CHUNK, CHUNK):
                    # Above the diagonal the exponent is capped at 0 and the product masked.
                    P_frag[i, j] *= T.exp(T.min(g_shared[i] - g_shared[j], 0.0))
                for i, j in T.Parallel(CHUNK, CHUNK):
                    P_frag[i, j] = T.Select(i >= j, P_frag[i, j], 0.0)
                mark("copy P")
                T.copy(P_frag, P_shared)
                # O = scale (O + P Vnew)
                mark("matmul P Vnew")
                T.gemm(P_shared, Vnew_shared, O_frag)
                mark("compute scale O")
                for i, j in T.Parallel(CHUNK, DV_TILE):
                    O_frag[i, j] *= SCALE
                mark("copy O")
                T.copy(O_frag, output[b, t0 : t0 + CHUNK, h, dv : dv + DV_TILE])
                # S = γ_ℓ S + K^T (diag(γ_ℓ/γ) Vnew)
                mark("compute γ_ℓ/γ Vnew")
                for i, j in T.Parallel(CHUNK, DV_TILE):
                    Vnew_shared[i, j] = decay_shared[i] * Vnew_frag[i, j]
                mark("compute γ_ℓ S")
                for i, j in T.Parallel(HEAD_DIM, DV_TILE):
                    S_frag[i, j] *= T.exp(g_last)
                mark("matmul K^T Vnew")
                T.gemm(K_shared, Vnew_shared, S_frag, transpose_A=True)
            T.copy(S_frag, final_state[b, h, :, dv : dv + DV_TILE])

    return smem


def gdn_prefill_forward(q, k, v, g_cumsum, beta, A, initial_state=None):
    """The core forward; shapes, dtypes and errors as in `kernels.problem.check_core_inputs`.

    Returns output [B,T,Hv,128] BF16 and final_state [B,Hv,128,128] FP32.
    """
    B, _, _, Hv = check_core_inputs(q, k, v, g_cumsum, beta, A, initial_state)
    output = torch.empty_like(v)
    final_state = torch.empty(B, Hv, HEAD_DIM, HEAD_DIM, dtype=torch.float32, device=v.device)
    # Without an initial state the kernel never reads that argument: any tensor of its shape will do.
    state = final_state if initial_state is None else initial_state
    build(initial_state is not None, dv_tile(B, Hv, v.device))(q, k, v, g_cumsum, beta, A, state, output, final_state)
    return output, final_state
