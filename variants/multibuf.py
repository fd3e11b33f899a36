"""multibuf: the next chunks' tiles are in flight while this chunk computes

Since `smem`: every input tile has STAGES homes. At the top of chunk c the copies of chunk c + STAGES - 1 are
issued; those of c were issued STAGES - 1 chunks ago. Gates and beta of chunk c + 1 travel in two registers.

Hypothesis: a chunk no longer waits for its tiles at all, which saves one trip to L2 or DRAM a chunk, about 1 µs of
four to five: time falls by 10 to 20 %, and `long_scoreboard` per issue with it. What is left is a chain of matmuls
and barriers, which more stages can't shorten. Only one CTA fits an SM, so where `smem` overlapped two of them
(more than one CTA an SM) this rung can lose: there the wider dv tile takes over.

Buffers and what protects them: stage s = c % STAGES holds A, K, V and Q of chunk c.
    loaded[s]  1 arrival, the thread that issues the copies of a stage; all wait, for phase (c / STAGES) % 2, before
               the first formula of chunk c
    the CTA barrier at the top of chunk c says that chunk c - 1 is done: its stage may be overwritten, and so may the
               gate tables, S, W, Vnew and P, which have one home each

Shared memory at dv 64, 3 stages: 3 x 48 for the tiles, W 16, S 16, Vnew 8, P 8, gates 1: 193 KiB. At dv 128 the tiles
take 56 KiB a stage and the rest 73, so 2 stages fit: 185 KiB.
"""

import tilelang.language as T
import torch
from tilelang.layout import make_swizzled_layout

from kernels.build import jit
from kernels.markers import mark, role
from kernels.problem import CHUNK, HEAD_DIM, SCALE, check_core_inputs
from variants import dv_tile

# At dv 64 three stages were 3 % faster than two over lab, in a sweep on an H200 before A had its swizzle; at dv 128 a
# third does not fit.
STAGES_BY_TILE = {64: 3, 128: 2}

bf16, fp32 = "bfloat16", "float32"


@jit(disable_warp_specialized=True)
def build(has_initial_state, DV_TILE):
    STAGES = STAGES_BY_TILE[DV_TILE]
    THREADS = 2 * DV_TILE  # a warpgroup for every 64 columns of the state: 64 registers a thread
    B, Tn, Hq, Hv = T.dynamic("B"), T.dynamic("Tn"), T.dynamic("Hq"), T.dynamic("Hv")

    @T.prim_func
    def multibuf(
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
            Q_shared = T.alloc_shared((STAGES, CHUNK, HEAD_DIM), bf16)
            K_shared = T.alloc_shared((STAGES, CHUNK, HEAD_DIM), bf16)
            V_shared = T.alloc_shared((STAGES, CHUNK, DV_TILE), bf16)
            A_shared = T.alloc_shared((STAGES, CHUNK, CHUNK), bf16)
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
            loaded = T.alloc_barrier([1] * STAGES)
            # No matmul reads A from shared memory, so nothing else asks for the swizzle that spares ldmatrix conflicts.
            T.annotate_layout({A_shared: make_swizzled_layout(A_shared)})
            hk = T.alloc_var("int32", init=T.truncdiv(h, T.truncdiv(Hv, Hq)))  # one division, not one per address
            dv = tile * DV_TILE

            chunks = T.ceildiv(Tn, CHUNK)
            tx = T.get_thread_binding()
            g_next = T.alloc_var(fp32)
            beta_next = T.alloc_var(fp32)

            # Chunks 0 to STAGES - 2: their tiles, and the gates of chunk 0 as thread i's token i.
            for s in T.unroll(STAGES - 1):
                T.tma_copy(A[b, s * CHUNK : (s + 1) * CHUNK, h, 0:CHUNK], A_shared[s, :, :], barrier=loaded[s])
                T.tma_copy(k[b, s * CHUNK : (s + 1) * CHUNK, hk, 0:HEAD_DIM], K_shared[s, :, :], barrier=loaded[s])
                T.tma_copy(
                    v[b, s * CHUNK : (s + 1) * CHUNK, h, dv : dv + DV_TILE], V_shared[s, :, :], barrier=loaded[s]
                )
                T.tma_copy(q[b, s * CHUNK : (s + 1) * CHUNK, hk, 0:HEAD_DIM], Q_shared[s, :, :], barrier=loaded[s])
                if T.shuffle_elect(THREADS):
                    T.barrier_arrive(loaded[s])
            g_next = g_cumsum[b, T.min(tx % CHUNK, Tn - 1), h]
            beta_next = beta[b, T.min(tx % CHUNK, Tn - 1), h]
            if has_initial_state:
                T.copy(initial_state[b, h, :, dv : dv + DV_TILE], S_frag)
            else:
                T.clear(S_frag)
            for c in T.serial(chunks):
                role("all", 0, c)
                mark("wait CTA")
                t0 = c * CHUNK
                stage = c % STAGES
                ahead = c + STAGES - 1
                T.sync_threads()  # the previous chunk's tiles and tables are no longer read
                mark("copy A, K, V, Q", STAGES - 1)
                if ahead < chunks:
                    a0 = ahead * CHUNK
                    slot = ahead % STAGES
                    T.tma_copy(A[b, a0 : a0 + CHUNK, h, 0:CHUNK], A_shared[slot, :, :], barrier=loaded[slot])
                    T.tma_copy(k[b, a0 : a0 + CHUNK, hk, 0:HEAD_DIM], K_shared[slot, :, :], barrier=loaded[slot])
                    T.tma_copy(v[b, a0 : a0 + CHUNK, h, dv : dv + DV_TILE], V_shared[slot, :, :], barrier=loaded[slot])
                    T.tma_copy(q[b, a0 : a0 + CHUNK, hk, 0:HEAD_DIM], Q_shared[slot, :, :], barrier=loaded[slot])
                    mark("arrive loaded", STAGES - 1)
                    if T.shuffle_elect(THREADS):
                        T.barrier_arrive(loaded[slot])
                mark("compute gates")
                if tx < CHUNK:
                    g_shared[tx] = g_next
                    beta_shared[tx] = beta_next
                mark("copy S")
                T.copy(S_frag, S_shared)
                mark("wait CTA")
                T.sync_threads()
                mark("compute γ, γ_ℓ/γ")
                if tx < CHUNK:
                    gamma_shared[tx] = T.exp(g_shared[tx])
                    decay_shared[tx] = T.exp(g_shared[CHUNK - 1] - g_shared[tx])
                g_next = g_cumsum[b, T.min(t0 + CHUNK + tx % CHUNK, Tn - 1), h]
                beta_next = beta[b, T.min(t0 + CHUNK + tx % CHUNK, Tn - 1), h]
                mark("wait loaded")
                T.barrier_wait(loaded[stage], c // STAGES % 2)
                mark("wait CTA")
                T.sync_threads()
                # W = -A B Γ K
                mark("compute -A B Γ")
                T.copy(A_shared[stage, :, :], A_frag)
                for i, j in T.Parallel(CHUNK, CHUNK):
                    Aw_frag[i, j] = A_frag[i, j] * (-beta_shared[j] * gamma_shared[j])
                mark("matmul W")
                T.gemm(Aw_frag, K_shared[stage, :, :], W_frag, clear_accum=True)
                mark("copy W")
                T.copy(W_frag, W_shared)
                # Vnew = A B V + W S
                mark("compute A B")
                for i, j in T.Parallel(CHUNK, CHUNK):
                    Au_frag[i, j] = A_frag[i, j] * beta_shared[j]
                mark("matmul U")
                T.gemm(Au_frag, V_shared[stage, :, :], Vnew_frag, clear_accum=True)
                mark("matmul W S")
                T.gemm(W_shared, S_shared, Vnew_frag)
                mark("copy Vnew")
                T.copy(Vnew_frag, Vnew_shared)
                # O = Γ Q S
                mark("matmul Q S")
                T.gemm(Q_shared[stage, :, :], S_shared, O_frag, clear_accum=True)
                mark("compute Γ Q S")
                for i, j in T.Parallel(CHUNK, DV_TILE):
                    O_frag[i, j] *= gamma_shared[i]
                # P = Lower(Q K^T) ⊙ exp(g_i - g_j)
                mark("matmul Q K^T")
                T.gemm(Q_shared[stage, :, :], K_shared[stage, :, :], P_frag, transpose_B=True, clear_accum=True)
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
                    S_frag[i, j] *= gamma_shared[CHUNK - 1]
                mark("matmul K^T Vnew")
                T.gemm(K_shared[stage, :, :], Vnew_shared, S_frag, transpose_A=True)
            T.copy(S_frag, final_state[b, h, :, dv : dv + DV_TILE])

    return multibuf


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
