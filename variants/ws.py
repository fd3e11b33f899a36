"""ws: a warpgroup or warp for every kind of work, their steps overlapping

Since `multibuf`: no thread does everything. Three warpgroups each own part of the formulas and meet at mbarriers,
so that the elementwise work of one runs under the matmuls of another; four warps move data and never compute.
What does not depend on the state is off the state's path: W and A B are ready before a chunk's turn comes, U is
computed at the end of the chunk before, and O follows behind.

Hypothesis: a chunk takes as long as its slowest role instead of the sum of all: about half of `multibuf`. The tensor
pipe's share doubles. The path S -> W S -> Vnew -> K^T Vnew -> S stays sequential: two matmuls, two conversions to
BF16 through shared memory and two barriers a chunk bound it from below, at any number of heads.

Roles, by warp:
     0 to  3  state    Vnew = U + W S, S = γ_ℓ S + K^T (γ_ℓ/γ Vnew), then U = A B V of the next chunk; S in registers
     4 to  7  prepare  A B, W = -A B Γ K: reads A, scales it in registers
     8 to 11  output   P = scale Lower(Q K^T) ⊙ exp(g_i - g_j) of the next chunk, O = scale Γ Q S + P Vnew
    12        copies K and Q        13  copies V and A        14  gate tables        15  stores O
Registers a thread, 4 x 128 in all: 160 for state (S 64, Vnew 32), 152 for prepare (W 64, A three times 16), 144 for
output (O 32, Q K^T 32, P 16), 40 for the copying warps.

Barriers: arrivals, who arrives -> who waits, for what. A warp arrives with one thread, a copying warp with all 32; at
kq_empty every thread arrives, since each has read gate tables itself and racecheck follows threads, not their warp.
    kq_full[3]    64  warps 12 and 14 -> state, prepare, output: K, Q and the gate tables of a chunk
    kq_empty[3]  384  state after K^T Vnew, prepare after W, output after P Vnew -> warps 12 and 14
    va_full[2]    32  warp 13 -> prepare (A), state (V, for U)
    va_empty[2]    8  prepare after it has A in registers, state after U -> warp 13
    au_full        4  prepare -> state: A B, for U                  au_empty    4  state after U -> prepare
    w_full         4  prepare -> state: W, for W S                  w_empty     4  state after W S -> prepare
    s_full         4  state -> output: S in BF16, for Q S           s_empty     4  output after Q S -> state
    vnew_full      4  state -> output: Vnew, for P Vnew             vnew_empty  4  output after P Vnew -> state
    o_full         4  output -> warp 15: O                          o_empty    32  warp 15, once it is read -> output
    STATE_SYNC   128  among the state warps: what they stored is complete before their own matmul reads it

The last chunk has no successor: state and output repeat their look-ahead product on it, and nobody reads the result.
So a sequence of one chunk takes the same path as any other. No wgmma is in flight where a loop turns round, since
ptxas would then serialize them all.

Shared memory, 198 KiB: K and Q 3 x 32, V and A 2 x 16, A B 8, W 16, S 16, Vnew 8, scaled Vnew 8, O 8, tables 6. For
dv 128 it would do with two stages of K and Q (56 KiB more for S, V, Vnew and O, 32 less), but the registers would not:
S 128 and Vnew 64 in state and O 64 in output, beside the rest, pass the 4 x 128.
"""

import math

import tilelang.language as T
import torch
from tilelang.layout import make_swizzled_layout

from kernels.build import jit
from kernels.markers import mark, role
from kernels.problem import CHUNK, HEAD_DIM, SCALE, check_core_inputs

DV_TILE = 64  # columns of the state a CTA owns; see the docstring for why not 128
HALF = HEAD_DIM // 2  # S is two tiles of 64 rows: one is converted while the other's matmul runs
KQ_STAGES = 3  # prepare is one chunk ahead of state, and the copies one ahead of prepare
VA_STAGES = 2  # A is free as soon as it is in registers, V after U
THREADS = 512
# Their sum over the four warpgroups must not exceed the 4 x 128 that the launch brings.
STATE_REGISTERS, PREPARE_REGISTERS, OUTPUT_REGISTERS, COPY_REGISTERS = 160, 152, 144, 40
STATE_SYNC = 8  # a named barrier; the compiler hands out ids from 3 up

LOG2E = math.log2(math.e)  # exp(x) is one instruction as exp2
LOG2_SCALE = math.log2(SCALE)

bf16, fp32 = "bfloat16", "float32"


@jit(disable_warp_specialized=True, disable_thread_storage_sync=True, enable_fast_math=True)
def build(has_initial_state):
    B, Tn, Hq, Hv = T.dynamic("B"), T.dynamic("Tn"), T.dynamic("Hq"), T.dynamic("Hv")

    @T.macro
    def weigh(QK_frag, g_shared, stage, P_frag):
        # P = scale Lower(Q K^T) ⊙ exp(g_i - g_j); above the diagonal the exponent is capped, then masked
        for i, j in T.Parallel(CHUNK, CHUNK):
            QK_frag[i, j] *= T.exp2(T.min(g_shared[stage, i] + LOG2_SCALE - g_shared[stage, j], LOG2_SCALE))
        for i, j in T.Parallel(CHUNK, CHUNK):
            P_frag[i, j] = T.Select(i >= j, QK_frag[i, j], 0.0)

    @T.prim_func
    def ws(
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
            Q_shared = T.alloc_shared((KQ_STAGES, CHUNK, HEAD_DIM), bf16)
            K_shared = T.alloc_shared((KQ_STAGES, CHUNK, HEAD_DIM), bf16)
            V_shared = T.alloc_shared((VA_STAGES, CHUNK, DV_TILE), bf16)
            A_shared = T.alloc_shared((VA_STAGES, CHUNK, CHUNK), bf16)
            Au_shared = T.alloc_shared((CHUNK, CHUNK), bf16)  # A B
            W_shared = T.alloc_shared((CHUNK, HEAD_DIM), bf16)
            S0_shared = T.alloc_shared((HALF, DV_TILE), bf16)
            S1_shared = T.alloc_shared((HALF, DV_TILE), bf16)
            Vnew_shared = T.alloc_shared((CHUNK, DV_TILE), bf16)
            Vdecayed_shared = T.alloc_shared((CHUNK, DV_TILE), bf16)
            O_shared = T.alloc_shared((CHUNK, DV_TILE), bf16)
            beta_shared = T.alloc_shared((KQ_STAGES, CHUNK), fp32, scope="shared")
            minus_beta_gamma_shared = T.alloc_shared((KQ_STAGES, CHUNK), fp32, scope="shared")
            g_shared = T.alloc_shared((KQ_STAGES, CHUNK), fp32, scope="shared")  # times log2 e
            scaled_gamma_shared = T.alloc_shared((KQ_STAGES, CHUNK), fp32, scope="shared")
            decay_shared = T.alloc_shared((KQ_STAGES, CHUNK), fp32, scope="shared")  # γ_ℓ/γ
            gamma_last_shared = T.alloc_shared((KQ_STAGES,), fp32, scope="shared")

            S0_frag = T.alloc_fragment((HALF, DV_TILE), fp32)
            S1_frag = T.alloc_fragment((HALF, DV_TILE), fp32)
            Vdecayed_frag = T.alloc_fragment((CHUNK, DV_TILE), bf16)
            Vnew_frag = T.alloc_fragment((CHUNK, DV_TILE), fp32)
            A_frag = T.alloc_fragment((CHUNK, CHUNK), bf16)
            Au_frag = T.alloc_fragment((CHUNK, CHUNK), bf16)
            Aw_frag = T.alloc_fragment((CHUNK, CHUNK), bf16)
            W_frag = T.alloc_fragment((CHUNK, HEAD_DIM), fp32)
            QK_frag = T.alloc_fragment((CHUNK, CHUNK), fp32)
            P_frag = T.alloc_fragment((CHUNK, CHUNK), bf16)
            O_frag = T.alloc_fragment((CHUNK, DV_TILE), fp32)

            kq_full = T.alloc_barrier([64] * KQ_STAGES)
            kq_empty = T.alloc_barrier([384] * KQ_STAGES)
            va_full = T.alloc_barrier([32] * VA_STAGES)
            va_empty = T.alloc_barrier([8] * VA_STAGES)
            au_full = T.alloc_barrier([4])
            au_empty = T.alloc_barrier([4])
            w_full = T.alloc_barrier([4])
            w_empty = T.alloc_barrier([4])
            s_full = T.alloc_barrier([4])
            s_empty = T.alloc_barrier([4])
            vnew_full = T.alloc_barrier([4])
            vnew_empty = T.alloc_barrier([4])
            o_full = T.alloc_barrier([4])
            o_empty = T.alloc_barrier([32])

            tx = T.get_thread_binding()
            # No matmul reads A from shared memory, so nothing else asks for the swizzle that spares ldmatrix conflicts.
            T.annotate_layout({A_shared: make_swizzled_layout(A_shared)})
            hk = T.alloc_var("int32", init=T.truncdiv(h, T.truncdiv(Hv, Hq)))  # one division, not one per address
            dv = tile * DV_TILE
            chunks = T.ceildiv(Tn, CHUNK)

            if tx < 128:  # state
                T.set_max_nreg(STATE_REGISTERS, 1)
                if has_initial_state:
                    T.copy(initial_state[b, h, 0:HALF, dv : dv + DV_TILE], S0_frag)
                    T.copy(initial_state[b, h, HALF:HEAD_DIM, dv : dv + DV_TILE], S1_frag)
                else:
                    T.clear(S0_frag)
                    T.clear(S1_frag)
                T.copy(S0_frag, S0_shared)
                T.copy(S1_frag, S1_shared)
                T.fence_proxy_async()
                T.sync_threads(STATE_SYNC, 128)
                if tx % 32 == 0:
                    T.barrier_arrive(s_full[0])
                T.barrier_wait(va_full[0], 0)
                T.barrier_wait(au_full[0], 0)
                T.wgmma_gemm(Au_shared, V_shared[0, :, :], Vnew_frag, clear_accum=True)
                T.wait_wgmma(0)
                if tx % 32 == 0:
                    T.barrier_arrive(va_empty[0])
                    T.barrier_arrive(au_empty[0])
                stage = T.alloc_var("int32", init=0)
                phase = T.alloc_var("int32", init=0)
                for c in T.serial(chunks):
                    role("state", 0, c)
                    mark("wait kq_full")
                    following = T.min(c + 1, chunks - 1)
                    slot = following % VA_STAGES
                    T.barrier_wait(kq_full[stage], phase)
                    # Vnew = U + W S
                    mark("wait w_full")
                    T.barrier_wait(w_full[0], c % 2)
                    mark("issue W S")
                    T.wgmma_gemm(W_shared[:, 0:HALF], S0_shared, Vnew_frag)
                    T.wgmma_gemm(W_shared[:, HALF:HEAD_DIM], S1_shared, Vnew_frag)
                    mark("compute γ_ℓ S")
                    for i, j in T.Parallel(HALF, DV_TILE):
                        S0_frag[i, j] *= gamma_last_shared[stage]
                    for i, j in T.Parallel(HALF, DV_TILE):
                        S1_frag[i, j] *= gamma_last_shared[stage]
                    mark("drain W S")
                    T.wait_wgmma(0)
                    mark("arrive w_empty")
                    if tx % 32 == 0:
                        T.barrier_arrive(w_empty[0])
                    # S = γ_ℓ S + K^T (diag(γ_ℓ/γ) Vnew)
                    mark("compute γ_ℓ/γ Vnew")
                    for i, j in T.Parallel(CHUNK, DV_TILE):
                        Vdecayed_frag[i, j] = Vnew_frag[i, j] * decay_shared[stage, i]
                    T.copy(Vdecayed_frag, Vdecayed_shared)
                    T.fence_proxy_async()
                    mark("wait STATE_SYNC")
                    T.sync_threads(STATE_SYNC, 128)
                    mark("issue K^T Vnew")
                    T.wgmma_gemm(K_shared[stage, :, 0:HALF], Vdecayed_shared, S0_frag, transpose_A=True)
                    T.wgmma_gemm(K_shared[stage, :, HALF:HEAD_DIM], Vdecayed_shared, S1_frag, transpose_A=True)
                    mark("wait vnew_empty", -1)
                    T.barrier_wait(vnew_empty[0], (c + 1) % 2)
                    mark("copy Vnew")
                    T.copy(Vnew_frag, Vnew_shared)
                    T.fence_proxy_async()
                    T.sync_warp()
                    mark("arrive vnew_full")
                    if tx % 32 == 0:
                        T.barrier_arrive(vnew_full[0])
                    # U = A B V of the following chunk; the last chunk repeats its own
                    mark("wait va_full", 1)
                    T.barrier_wait(va_full[slot], following // VA_STAGES % 2)
                    mark("wait au_full", 1)
                    T.barrier_wait(au_full[0], following % 2)
                    mark("issue U", 1)
                    T.wgmma_gemm(Au_shared, V_shared[slot, :, :], Vnew_frag, clear_accum=True)
                    mark("wait s_empty")
                    T.barrier_wait(s_empty[0], c % 2)
                    mark("drain K^T Vnew")
                    T.wait_wgmma(2)
                    mark("copy S")
                    T.copy(S0_frag, S0_shared)
                    mark("drain K^T Vnew")
                    T.wait_wgmma(1)
                    mark("arrive kq_empty")
                    T.barrier_arrive(kq_empty[stage])
                    mark("copy S")
                    T.copy(S1_frag, S1_shared)
                    T.fence_proxy_async()
                    mark("wait STATE_SYNC")
                    T.sync_threads(STATE_SYNC, 128)
                    mark("arrive s_full", 1)
                    if tx % 32 == 0:
                        T.barrier_arrive(s_full[0])
                    mark("drain U", 1)
                    T.wait_wgmma(0)
                    mark("arrive va_empty", 1)
                    mark("arrive au_empty", 1)
                    if tx % 32 == 0:
                        T.barrier_arrive(va_empty[slot])
                        T.barrier_arrive(au_empty[0])
                    phase = T.if_then_else(stage == KQ_STAGES - 1, 1 - phase, phase)
                    stage = T.if_then_else(stage == KQ_STAGES - 1, 0, stage + 1)
                T.copy(S0_frag, final_state[b, h, 0:HALF, dv : dv + DV_TILE])
                T.copy(S1_frag, final_state[b, h, HALF:HEAD_DIM, dv : dv + DV_TILE])
            elif tx < 256:  # prepare
                T.set_max_nreg(PREPARE_REGISTERS, 1)
                stage = T.alloc_var("int32", init=0)
                phase = T.alloc_var("int32", init=0)
                for c in T.serial(chunks):
                    role("prepare", 128, c)
                    mark("wait va_full")
                    slot = c % VA_STAGES
                    T.barrier_wait(va_full[slot], c // VA_STAGES % 2)
                    mark("copy A")
                    T.copy(A_shared[slot, :, :], A_frag)
                    mark("wait kq_full")
                    T.barrier_wait(kq_full[stage], phase)
                    # W = -A B Γ K
                    mark("compute -A B Γ")
                    for i, j in T.Parallel(CHUNK, CHUNK):
                        Aw_frag[i, j] = A_frag[i, j] * minus_beta_gamma_shared[stage, j]
                    mark("issue W")
                    T.wgmma_gemm(Aw_frag, K_shared[stage, :, :], W_frag, clear_accum=True)
                    mark("compute A B")
                    for i, j in T.Parallel(CHUNK, CHUNK):
                        Au_frag[i, j] = A_frag[i, j] * beta_shared[stage, j]
                    mark("wait au_empty", -1)
                    T.barrier_wait(au_empty[0], (c + 1) % 2)
                    mark("copy A B")
                    T.copy(Au_frag, Au_shared)
                    T.fence_proxy_async()
                    T.sync_warp()
                    mark("arrive au_full")
                    mark("arrive va_empty")
                    if tx % 32 == 0:
                        T.barrier_arrive(au_full[0])
                        T.barrier_arrive(va_empty[slot])
                    mark("drain W")
                    T.wait_wgmma(0)
                    mark("arrive kq_empty")
                    T.barrier_arrive(kq_empty[stage])
                    mark("wait w_empty", -1)
                    T.barrier_wait(w_empty[0], (c + 1) % 2)
                    mark("copy W")
                    T.copy(W_frag, W_shared)
                    T.fence_proxy_async()
                    T.sync_warp()
                    mark("arrive w_full")
                    if tx % 32 == 0:
                        T.barrier_arrive(w_full[0])
                    phase = T.if_then_else(stage == KQ_STAGES - 1, 1 - phase, phase)
                    stage = T.if_then_else(stage == KQ_STAGES - 1, 0, stage + 1)
            elif tx < 384:  # output
                T.set_max_nreg(OUTPUT_REGISTERS, 1)
                T.barrier_wait(kq_full[0], 0)
                T.wgmma_gemm(Q_shared[0, :, :], K_shared[0, :, :], QK_frag, transpose_B=True, clear_accum=True)
                T.wait_wgmma(0)
                weigh(QK_frag, g_shared, 0, P_frag)
                stage = T.alloc_var("int32", init=0)
                phase = T.alloc_var("int32", init=0)
                ahead = T.alloc_var("int32", init=0)
                for c in T.serial(chunks):
                    role("output", 256, c)
                    # O = scale Γ Q S
                    mark("wait s_full")
                    T.barrier_wait(s_full[0], c % 2)
                    mark("issue Q S")
                    T.wgmma_gemm(Q_shared[stage, :, 0:HALF], S0_shared, O_frag, clear_accum=True)
                    T.wgmma_gemm(Q_shared[stage, :, HALF:HEAD_DIM], S1_shared, O_frag)
                    mark("drain Q S")
                    T.wait_wgmma(0)
                    mark("arrive s_empty")
                    if tx % 32 == 0:
                        T.barrier_arrive(s_empty[0])
                    mark("compute scale Γ Q S")
                    for i, j in T.Parallel(CHUNK, DV_TILE):
                        O_frag[i, j] *= scaled_gamma_shared[stage, i]
                    # O = O + P Vnew
                    mark("wait vnew_full")
                    T.barrier_wait(vnew_full[0], c % 2)
                    mark("issue P Vnew")
                    T.wgmma_gemm(P_frag, Vnew_shared, O_frag)
                    # Q K^T of the following chunk; the last chunk repeats its own
                    if c + 1 < chunks:
                        phase = T.if_then_else(stage == KQ_STAGES - 1, 1 - phase, phase)
                        ahead = T.if_then_else(stage == KQ_STAGES - 1, 0, stage + 1)
                    mark("wait kq_full", 1)
                    T.barrier_wait(kq_full[ahead], phase)
                    mark("issue Q K^T", 1)
                    T.wgmma_gemm(
                        Q_shared[ahead, :, :], K_shared[ahead, :, :], QK_frag, transpose_B=True, clear_accum=True
                    )
                    mark("drain P Vnew")
                    T.wait_wgmma(1)
                    T.sync_warp()
                    mark("arrive vnew_empty")
                    if tx % 32 == 0:
                        T.barrier_arrive(vnew_empty[0])
                    mark("arrive kq_empty")
                    T.barrier_arrive(kq_empty[stage])
                    mark("wait o_empty", -1)
                    T.barrier_wait(o_empty[0], (c + 1) % 2)
                    mark("copy O")
                    T.copy(O_frag, O_shared)
                    T.fence_proxy_async()
                    T.sync_warp()
                    mark("arrive o_full")
                    if tx % 32 == 0:
                        T.barrier_arrive(o_full[0])
                    mark("drain Q K^T", 1)
                    T.wait_wgmma(0)
                    mark("compute P", 1)
                    weigh(QK_frag, g_shared, ahead, P_frag)
                    stage = ahead
            else:
                T.set_max_nreg(COPY_REGISTERS, 0)
                if tx < 416:  # copy K and Q
                    stage = T.alloc_var("int32", init=0)
                    phase = T.alloc_var("int32", init=0)
                    for c in T.serial(chunks):
                        role("load K Q", 384, c)
                        mark("wait kq_empty", -KQ_STAGES)
                        t0 = c * CHUNK
                        T.barrier_wait(kq_empty[stage], 1 - phase)
                        mark("copy K, Q")
                        T.tma_copy(k[b, t0 : t0 + CHUNK, hk, 0:HEAD_DIM], K_shared[stage, :, :], barrier=kq_full[stage])
                        T.tma_copy(q[b, t0 : t0 + CHUNK, hk, 0:HEAD_DIM], Q_shared[stage, :, :], barrier=kq_full[stage])
                        mark("arrive kq_full")
                        T.barrier_arrive(kq_full[stage])
                        phase = T.if_then_else(stage == KQ_STAGES - 1, 1 - phase, phase)
                        stage = T.if_then_else(stage == KQ_STAGES - 1, 0, stage + 1)
                elif tx < 448:  # copy V and A
                    for c in T.serial(chunks):
                        role("load V A", 416, c)
                        mark("wait va_empty", -VA_STAGES)
                        slot = c % VA_STAGES
                        t0 = c * CHUNK
                        T.barrier_wait(va_empty[slot], (c // VA_STAGES + 1) % 2)
                        mark("copy V, A")
                        T.tma_copy(A[b, t0 : t0 + CHUNK, h, 0:CHUNK], A_shared[slot, :, :], barrier=va_full[slot])
                        T.tma_copy(
                            v[b, t0 : t0 + CHUNK, h, dv : dv + DV_TILE], V_shared[slot, :, :], barrier=va_full[slot]
                        )
                        mark("arrive va_full")
                        T.barrier_arrive(va_full[slot])
                elif tx < 480:  # gates
                    lane = tx - 448
                    gate = T.alloc_local((2,), fp32)
                    weight = T.alloc_local((2,), fp32)
                    stage = T.alloc_var("int32", init=0)
                    phase = T.alloc_var("int32", init=0)
                    for c in T.serial(chunks):
                        role("gates", 448, c)
                        mark("copy g, beta")
                        t0 = c * CHUNK
                        for half in T.unroll(2):
                            # Past the end the last gate is repeated: no exponent is positive, and K, V and A are zero.
                            gate[half] = g_cumsum[b, T.min(t0 + half * 32 + lane, Tn - 1), h] * LOG2E
                            weight[half] = beta[b, T.min(t0 + half * 32 + lane, Tn - 1), h]
                        mark("wait kq_empty", -KQ_STAGES)
                        T.barrier_wait(kq_empty[stage], 1 - phase)
                        mark("compute gates")
                        for half in T.unroll(2):
                            g_shared[stage, half * 32 + lane] = gate[half]
                            beta_shared[stage, half * 32 + lane] = weight[half]
                            minus_beta_gamma_shared[stage, half * 32 + lane] = -weight[half] * T.exp2(gate[half])
                            scaled_gamma_shared[stage, half * 32 + lane] = SCALE * T.exp2(gate[half])
                            decay_shared[stage, half * 32 + lane] = T.exp2(T.shfl_sync(gate[1], 31) - gate[half])
                        if lane == 31:
                            gamma_last_shared[stage] = T.exp2(gate[1])
                        mark("arrive kq_full")
                        T.barrier_arrive(kq_full[stage])
                        phase = T.if_then_else(stage == KQ_STAGES - 1, 1 - phase, phase)
                        stage = T.if_then_else(stage == KQ_STAGES - 1, 0, stage + 1)
                else:  # store O
                    for c in T.serial(chunks):
                        role("store O", 480, c)
                        mark("wait o_full")
                        T.barrier_wait(o_full[0], c % 2)
                        mark("copy O")
                        T.copy(O_shared, output[b, c * CHUNK : (c + 1) * CHUNK, h, dv : dv + DV_TILE])
                        mark("arrive o_empty")
                        T.barrier_arrive(o_empty[0])

    return ws


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
