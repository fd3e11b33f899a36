"""split: the sequence in segments that run in parallel, each warmed up over what its head still remembers

Since `rs`: a head of a sequence is cut into segments of whole chunks, each with CTAs of its own. A segment starts some
chunks early, from a zero state, and computes their state without their output. How many, it finds from the gates. A CTA
owns 64 columns of the state as in `rs`, or all 128: two state warpgroups then share loads and P, and one computes while
the other's matmul runs. `variants.plan` chooses columns and segments.

Why that is right, for ‖k_t‖ <= 1 and 0 <= beta_t <= 2: a token maps the state to exp(g_t) (I - beta_t k_t k_t^T) S plus
what it adds. I - beta k k^T is symmetric with eigenvalues 1 and 1 - beta ‖k‖^2, so it lengthens nothing, and over the
warm-up a difference in the state shrinks at least by exp(Σ g_t). Starting from zero instead of S leaves an error of at
most exp(Σ g_t) ‖S‖, and the warm-up is as long as it takes for Σ g_t <= -12: 6e-6 ‖S‖, less than a rounding to BF16 by
a factor of 600. A warm-up that reaches the beginning starts from the true initial state, and is exact.

A head that hardly decays has to be warmed up from the beginning, which is right and hardly faster than unsplit. With
64 columns a CTA that is what happens. With 128, two segments of such a head become one, and their two CTAs take 64
columns each of it: a chunk takes them two thirds of the time. The second state warpgroup leaves, and the first arrives
at barriers for both.

Where such a head can be cut in eight, it gets exact starts instead, and segments of its own, which may be shorter than
those of the others: the whole GPU waits for it. Over a segment the transposed state goes from S^T to S^T M + N. A first
launch computes M and N, by the same recurrence as a warm-up, from the identity without V and from zero. `split_fold`
applies them one after the other from the initial state (`kernels.reference.affine_scan` composes chunks so, and says
whose idea it is). A second launch runs all segments: those of the other heads as soon as an SM is free of the first
one, and those of such a head when its starts are there. M, N and the starts wait in the part of `output` that their
segment overwrites, as sums of two BF16 numbers (16 bits of mantissa). Where all heads decay, the first two launches end
at once, and cost 3 to 10 µs. The CTAs of a launch begin when all of the one before have begun (programmatic dependent
launch), so those that wait never keep an SM from those they wait for.

Hypothesis: with few heads time falls by the number of segments, less the warm-up (four chunks at the suites' gates,
each about two thirds of one with output), until every SM has a CTA. With 128 columns a chunk takes less than twice as
long, so the tensor pipe is busier: Q, K and A are loaded, and P is made, once instead of twice.

The output is transposed too, O^T = scale S^T Q^T Γ + Vnew^T P^T, and made by the warpgroup that has S and Vnew in
registers: neither is copied to shared memory, and what is left for another warpgroup is P. In `rs` that one multiplies
Q S and P Vnew as well, which sets the pace as soon as it does so for 128 columns.

P takes 16 x 16 exponentials a warp and not 16 x 64: left of its diagonal block exp(g_i - g_j) is a product of two that
the gates' warps put in tables, exp(g_i - g_b) and exp(g_b - g_j) for the block's first token b, neither of which grows.

Sequences lie one after the other among the tokens, all of one length or as `cu_seqlens` says; each is cut into segments
of about one length, and a CTA finds its sequence by its number (kernels.sequences). Where tokens of another sequence
follow a short last chunk, they are copied with it: the copying warp waits for them and puts zeros in their place, as
the copy engine does beyond the end of a tensor, and the rows of O that count are stored one by one.

Roles, by warpgroup, at 128 columns; at 64 there is one of state, and registers are 232, 152, 40 as in `rs`
    0 and 1  state: U, W, Vnew, S and O of 64 columns each; 208 registers
    2        prepare: P, which is scale Lower(Q K^T) ⊙ exp(g_i - g_j); 64 registers
    3        warp 0 copies K, Q, V and A, warps 1 and 2 build the gate tables of alternate chunks, warp 3 stores O; 32

Barriers: full[3] (64), K, Q, V, A and tables are there; empty[3] (256 or 384), every thread of state and prepare has
read them; p_full[2] (4), a lane of each warp that prepares, and p_empty[2] (128 or 256), for two places of P; o_full (4
or 8) and o_empty (32) for O on its way out. full has a fourth place, for the copying warp alone, where a short chunk
lands. The ring begins at stage 1, and stage 0 stands for a chunk before the first.

Shared memory, KiB at 64 and 128 columns: K 48, Q 48, A 24, V 24 / 48, P 16, O 8 / 16, tables 8.
"""

import functools
import math

import tilelang.language as T
import torch
from tilelang.layout import make_swizzled_layout

from kernels.build import jit
from kernels.fragments import INSTRUCTIONS, MOVE_TRANSPOSED, accumulator
from kernels.markers import mark, role
from kernels.problem import CHUNK, HEAD_DIM, SCALE, check_core_inputs
from kernels.sequences import FIND_PIECE, layout
from variants import plan

HALF = HEAD_DIM // 2  # S^T is two tiles of 64 columns: one is converted while the other's matmul runs
STAGES = 3
# By dv tile: registers a thread of state, prepare and the rest. Their sum over the warpgroups must not exceed the
# 3 x 168 and 4 x 128 that the launches bring. With 200 for the state of 128 columns ptxas serializes its matmuls.
REGISTERS = {64: (232, 152, 40), 128: (208, 64, 32)}

LIMIT = 32  # chunks of warm-up above which a head gets exact starts, where they can be had; lanes of a warp
ONLY, FIRST, SECOND = range(3)  # launch of `split`: alone, or before and after `fold`
MAIN, M, N = range(3)  # what a CTA computes
# What the roles have to know of their CTA: its first own chunk, the chunks before it and from it on, what it computes,
# its sequence, where that begins and ends among the tokens, its key head, which half of the columns comes first, how
# many there are, whether no segment follows, and how many tokens the last chunk has, if others lie behind them.
PLACE = OWN, WARM, CHUNKS, KIND, SEQUENCE, BEGIN, STOP, KEY_HEAD, FIRST_HALF, WIDTH, IS_LAST, SHORT = range(12)
FOLDED = 32  # columns of dv a CTA of `split_fold`
# First token in a segment's output, while that is scratch, of M, N and the start. M and N have 128 rows of high and 128
# of low parts; of the start, each FOLDED columns of dv have their high parts and then their low ones.
M_ROW, N_ROW, START_ROW = 0, 256, 512
SCRATCH = (START_ROW + 256) // CHUNK + 1  # chunks of a segment that has room for them, if its last one is short, too
# By dv tile: chunks that the first segment is longer by, since it has no warm-up, which takes others about as long.
LEAD = {64: 3, 128: 2}

LOG2E = math.log2(math.e)  # exp(x) is one instruction as exp2

bf16, fp32 = "bfloat16", "float32"
FULL_ROW = T.GemmWarpPolicy.FullRow  # each state warpgroup has 64 rows of S^T, and its matmuls need no other's

# A state [128 dk, 32 dv] as a sum of two BF16 numbers, between the accumulator layout of two warpgroups, 64 dk each,
# and shared memory, where it is transposed: a tile of 64 dk a warpgroup, in the 128-byte swizzle, 32 rows of high
# parts, then 32 of low ones. Of each 8 x 8 matrix, thread l has dk = l / 4 and dv = 2 (l mod 4) and the next (PTX ISA:
# ldmatrix, stmatrix, wgmma's register fragments); four matrices a time, two along dk and two along dv.
MOVE_STATE = r"""
__device__ __forceinline__ unsigned state_address(const void* tiles, int dv) {
  const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3, tile = threadIdx.x >> 7, row = lane & 7;
  return (unsigned)__cvta_generic_to_shared(tiles) + tile * 8192 + (dv + (lane >> 4) * 8 + row) * 128
         + ((2 * warp + ((lane >> 3) & 1) ^ row) << 4);
}

__device__ __forceinline__ void load_state(const void* tiles, void* fragment) {
  float* x = (float*)fragment;
#pragma unroll
  for (int dv = 0; dv < 32; dv += 16) {
    unsigned high[4], low[4];
    gdn::load_transposed_matrices(high, state_address(tiles, dv));
    gdn::load_transposed_matrices(low, state_address(tiles, dv + 32));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[dv / 2 + 2 * i] = __uint_as_float(high[i] << 16) + __uint_as_float(low[i] << 16);
      x[dv / 2 + 2 * i + 1] = __uint_as_float(high[i] & 0xffff0000u) + __uint_as_float(low[i] & 0xffff0000u);
    }
  }
}

__device__ __forceinline__ void store_state(const void* fragment, void* tiles) {
  const float* x = (const float*)fragment;
#pragma unroll
  for (int dv = 0; dv < 32; dv += 16) {
    unsigned high[4], low[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float first = x[dv / 2 + 2 * i], second = x[dv / 2 + 2 * i + 1];
      high[i] = gdn::bfloat2(first, second);
      low[i] = gdn::bfloat2(first - __uint_as_float(high[i] << 16), second - __uint_as_float(high[i] & 0xffff0000u));
    }
    gdn::store_transposed_matrices(state_address(tiles, dv), high);
    gdn::store_transposed_matrices(state_address(tiles, dv + 32), low);
  }
}
"""

# Where a segment whose own chunks begin at `own` has to start; -1 where its warm-up would be longer than `limit`.
# `head` is where the head's gates begin. A warp sums the gates of 32 chunks at a time, backwards: lane l knows what is
# left of the state after l + 1 of them.
FIND_START = (
    f"constexpr int SCRATCH = {SCRATCH};"
    + r"""
__device__ __forceinline__ int find_start(const float* g_cumsum, long long head, int Hv, int own, int limit) {
  const float forgotten = -12.f;  // e^-12 = 6e-6
  const float* last = g_cumsum + head + 63LL * Hv;  // of chunk 0
  const int lane = threadIdx.x & 31;
  int start = own;
  float decay = 0.f;
  while (start > 0 && decay > forgotten) {
    if (own - start >= limit) return -1;
    const int chunk = start - 1 - lane;
    float sum = chunk >= 0 ? last[64LL * Hv * chunk] : 0.f;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const float before = __shfl_up_sync(~0u, sum, distance);
      if (lane >= distance) sum += before;
    }
    sum += decay;
    const int remembered = __popc(__ballot_sync(~0u, chunk >= 0 && sum > forgotten));
    const int taken = min(min(remembered + 1, 32), start);
    decay = __shfl_sync(~0u, sum, taken - 1);
    start -= taken;
  }
  return own - start > limit ? -1 : start;
}

__device__ __forceinline__ int count_segments(int length, int unit, int lead, int shortest) {
  return max(min((length + unit - 1) / unit, ((length + 63) / 64 - lead) / shortest), 1);
}

// Of a sequence: its number, where it begins, its tokens, its segments, and those of a head with exact starts.
__device__ __forceinline__ void place_of(const Piece& piece, int unit, int exact_unit, int lead, void* found) {
  int* place = (int*)found;
  place[0] = piece.sequence;
  place[1] = piece.begin;
  place[2] = piece.length;
  place[3] = count_segments(piece.length, unit, lead, 1);
  place[4] = exact_unit ? count_segments(piece.length, exact_unit, lead, SCRATCH) : 0;
}

__device__ __forceinline__ void find_sequence(int number, int unit, int exact_unit, const int* offsets, int stride,
                                              int tokens_each, int tokens, int lead, void* found) {
  place_of(sequence_at(number, offsets, stride, tokens_each, tokens), unit, exact_unit, lead, found);
}

// The same of the segment that a CTA has, whose number within the sequence it returns. CTAs are numbered by segments of
// either kind of head.
__device__ __forceinline__ int find_segment(int number, int exact, int unit, int exact_unit, const int* offsets,
                                            int stride, int sequences, int tokens_each, int tokens, int lead,
                                            void* found) {
  const Piece piece =
      find_piece(number, exact ? exact_unit : unit, offsets, stride, sequences, tokens_each, tokens);
  place_of(piece, unit, exact_unit, lead, found);
  return piece.index;
}

__device__ __forceinline__ int first_chunk(int segment, int total, int segments, int lead) {
  return segment ? lead + (int)((long long)segment * (total - lead) / segments) : 0;
}

// Whether a segment of the head would need a longer warm-up; the warps of a CTA share the search.
__device__ __forceinline__ int hardly_decays(const float* g_cumsum, long long head, int Hv, int total, int segments,
                                             int lead, int limit) {
  int found = 0;
  for (int segment = 1 + threadIdx.x / 32; segment < segments; segment += blockDim.x / 32)
    found |= find_start(g_cumsum, head, Hv, first_chunk(segment, total, segments, lead), limit) < 0;
  return __syncthreads_or(found) != 0;
}

__device__ __forceinline__ void exit_unless(int needed) {
  if (!needed) asm volatile("exit;");
}
"""
)

# P = scale Lower(Q K^T) ⊙ exp(g_i - g_j), a warp 16 rows, from Q K^T [64, 64] in the accumulator layout. Left of a
# warp's diagonal block the exponential is the product of two, and right of it one of them is 0. In the block the
# exponent is capped, and the result masked. Which registers are the block's depends on the warp: they are selected,
# since a branch for each warp takes longer. `store_P` puts P into a tile in the 128-byte swizzle, 16 columns a time.
PREPARE = r"""
__device__ __forceinline__ void compute_P(const void* product, const float* g, const float* row, const float* before,
                                          float log2_scale, void* result) {
  const float* QK = (const float*)product;
  unsigned* P = (unsigned*)result;
  const int lane = threadIdx.x & 31, block = (threadIdx.x >> 5) & 3, i = lane >> 2, j = 2 * (lane & 3);
  float diagonal[8];
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    const float here = block & 1 ? QK[8 + n] : QK[n], there = block & 1 ? QK[24 + n] : QK[16 + n];
    diagonal[n] = block & 2 ? there : here;
  }
  const float upper = row[16 * block + i], lower = row[16 * block + i + 8];
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    const float2 factor = *(const float2*)(before + 64 * block + 8 * n + j);
    P[2 * n] = gdn::bfloat2(QK[4 * n] * (upper * factor.x), QK[4 * n + 1] * (upper * factor.y));
    P[2 * n + 1] = gdn::bfloat2(QK[4 * n + 2] * (lower * factor.x), QK[4 * n + 3] * (lower * factor.y));
  }
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const float2 gate = *(const float2*)(g + 16 * block + 8 * n + j);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float own = g[16 * block + 8 * r + i] + log2_scale;
      const float even = diagonal[4 * n + 2 * r] * gdn::power2(fminf(own - gate.x, log2_scale));
      const float odd = diagonal[4 * n + 2 * r + 1] * gdn::power2(fminf(own - gate.y, log2_scale));
      const int distance = 8 * (r - n) + i - j;
      const unsigned word = gdn::bfloat2(distance >= 0 ? even : 0.f, distance >= 1 ? odd : 0.f);
#pragma unroll
      for (int b = 0; b < 4; ++b) P[4 * b + 2 * n + r] = b == block ? word : P[4 * b + 2 * n + r];
    }
  }
}

__device__ __forceinline__ unsigned address_of_P(const void* tile) {
  const int lane = threadIdx.x & 31, row = (threadIdx.x >> 5 & 3) * 16 + (lane & 15);
  return (unsigned)__cvta_generic_to_shared(tile) + row * 128 + (((lane >> 4) ^ (row & 7)) << 4);
}

__device__ __forceinline__ void store_P(const void* fragment, unsigned address) {
#pragma unroll
  for (int n = 0; n < 4; ++n) gdn::store_matrices(address ^ (n << 5), (const unsigned*)fragment + 4 * n);
}
"""

# A sequence's short last chunk is copied with tokens behind it that are another's, or nobody's. In shared memory a tile
# of 64 columns has a row of 128 bytes for each: those behind become zero, as the copy engine does it beyond a tensor.
# From there rows of O go out one by one, undoing the swizzle.
SHORT_CHUNK = r"""
__device__ __forceinline__ void zero_rows(void* tiles, int count, int tokens) {
  for (int i = tokens * 8 + (threadIdx.x & 31); i < 512; i += 32)
    for (int tile = 0; tile < count; ++tile) ((uint4*)tiles)[tile * 512 + i] = make_uint4(0, 0, 0, 0);
}

__device__ __forceinline__ void store_rows(const void* tiles, void* output, long long first, int stride, int count,
                                           int tokens) {
  for (int i = threadIdx.x & 31; i < tokens * 8 * count; i += 32) {
    const int row = i / 8 % tokens, tile = i / 8 / tokens, unit = i % 8;
    *(uint4*)((short*)output + first + (long long)row * stride + tile * 64 + unit * 8) =
        ((const uint4*)tiles)[tile * 512 + row * 8 + (unit ^ row % 8)];
  }
}
"""

# The final state of a sequence without tokens: its initial one, or zero.
COPY_STATE = r"""
__device__ __forceinline__ void copy_state(const float* from, float* to, long long which, int known, int column,
                                           int columns) {
  for (int i = threadIdx.x; i < 128 * columns; i += blockDim.x) {
    const long long at = which * 16384 + i / columns * 128 + column + i % columns;
    to[at] = known ? from[at] : 0.f;
  }
}
"""


@jit(disable_warp_specialized=True, disable_thread_storage_sync=True, enable_fast_math=True)
def build(dv_tile):
    """The kernel with 64 or 128 columns a CTA."""
    Tn, Hq, Hv, words = T.dynamic("Tn"), T.dynamic("Hq"), T.dynamic("Hv"), T.dynamic("words")
    initial_states, final_states = T.dynamic("initial_states"), T.dynamic("final_states")
    state_threads = 2 * dv_tile
    threads = state_threads + 256
    state_registers, prepare_registers, copy_registers = REGISTERS[dv_tile]
    wide = dv_tile == HEAD_DIM
    V_bytes = 2 * CHUNK * dv_tile  # a place of V_shared

    def column(half, i):  # of the state, in row i of a CTA's S^T
        return (half + i // HALF) % 2 * HALF + i % HALF

    def start_row(half, i):  # of that column's high part; its low part is FOLDED rows on
        return column(half, i) // FOLDED * (2 * FOLDED) + i % FOLDED

    @T.prim_func
    def split(
        q: T.Tensor((Tn, Hq, HEAD_DIM), bf16),
        k: T.Tensor((Tn, Hq, HEAD_DIM), bf16),
        v: T.Tensor((Tn, Hv, HEAD_DIM), bf16),
        g_cumsum: T.Tensor((Tn, Hv), fp32),
        beta: T.Tensor((Tn, Hv), fp32),
        A: T.Tensor((Tn, Hv, CHUNK), bf16),
        offsets: T.Tensor((words,), "int32"),
        initial_state: T.Tensor((initial_states, Hv, HEAD_DIM, HEAD_DIM), fp32),
        output: T.Tensor((Tn, Hv, HEAD_DIM), bf16),
        final_state: T.Tensor((final_states, Hv, HEAD_DIM, HEAD_DIM), fp32),
        scale: T.float32,
        log2_scale: T.float32,
        pieces: T.int32,
        exact_pieces: T.int32,
        stride: T.int32,
        sequences: T.int32,
        tokens_each: T.int32,
        unit: T.int32,
        exact_unit: T.int32,
        lead: T.int32,
        limit: T.int32,
        turn: T.int32,
    ):
        with T.Kernel(
            # Neighbours are heads, so that those of a group share K and Q, and the segments that wait begin last.
            HEAD_DIM
            // dv_tile
            * (
                Hv
                * (T.if_then_else(turn == FIRST, exact_pieces, pieces) + T.if_then_else(turn == ONLY, 0, exact_pieces))
            ),
            threads=threads,
            prelude=INSTRUCTIONS + MOVE_TRANSPOSED + PREPARE + FIND_PIECE + FIND_START + SHORT_CHUNK + COPY_STATE,
        ) as cta:
            Q_shared = T.alloc_shared((STAGES, CHUNK, HEAD_DIM), bf16)
            K_shared = T.alloc_shared((STAGES, CHUNK, HEAD_DIM), bf16)
            V_shared = T.alloc_shared((STAGES, dv_tile // HALF, CHUNK, HALF), bf16)
            A_shared = T.alloc_shared((STAGES, CHUNK, CHUNK), bf16)
            P_shared = T.alloc_shared((2, CHUNK, CHUNK), bf16)
            O_shared = T.alloc_shared((dv_tile // HALF, CHUNK, HALF), bf16)
            beta_shared = T.alloc_shared((STAGES, CHUNK), fp32, scope="shared")
            beta_gamma_shared = T.alloc_shared((STAGES, CHUNK), fp32, scope="shared")
            g_shared = T.alloc_shared((STAGES, CHUNK), fp32, scope="shared")  # times log2 e
            row_shared = T.alloc_shared((STAGES, CHUNK), fp32, scope="shared")  # scale exp(g_i - g_b), i in block b
            before_shared = T.alloc_shared((STAGES, 4, CHUNK), fp32, scope="shared")  # exp(g_b - g_j), j before block b
            scaled_gamma_shared = T.alloc_shared((STAGES, CHUNK), fp32, scope="shared")
            decay_shared = T.alloc_shared((STAGES, CHUNK), fp32, scope="shared")  # γ_ℓ/γ
            gamma_last_shared = T.alloc_shared((STAGES,), fp32, scope="shared")
            place_shared = T.alloc_shared((len(PLACE),), "int32", scope="shared")

            S0_frag = T.alloc_fragment((dv_tile, HALF), fp32)
            S1_frag = T.alloc_fragment((dv_tile, HALF), fp32)
            S0_operand = T.alloc_fragment((dv_tile, HALF), bf16)
            S1_operand = T.alloc_fragment((dv_tile, HALF), bf16)
            U_frag = T.alloc_fragment((dv_tile, CHUNK), fp32)
            V_frag = T.alloc_fragment((dv_tile, CHUNK), bf16)
            weighted_V_frag = T.alloc_fragment((dv_tile, CHUNK), fp32)  # B V^T
            beta_gamma_frag = T.alloc_fragment((dv_tile, CHUNK), fp32)
            decay_frag = T.alloc_fragment((dv_tile, CHUNK), fp32)
            W_operand = T.alloc_fragment((dv_tile, CHUNK), bf16)
            Vnew_frag = T.alloc_fragment((dv_tile, CHUNK), fp32)
            Vnew_operand = T.alloc_fragment((dv_tile, CHUNK), bf16)
            Vdecayed_operand = T.alloc_fragment((dv_tile, CHUNK), bf16)
            O_frag = T.alloc_fragment((dv_tile, CHUNK), fp32)
            O_bf16 = T.alloc_fragment((dv_tile, CHUNK), bf16)
            QK_frag = T.alloc_fragment((CHUNK, CHUNK), fp32)
            P_frag = T.alloc_fragment((CHUNK, CHUNK), bf16)

            full = T.alloc_barrier([64] * STAGES + [32])  # the last one is for a short chunk alone
            empty = T.alloc_barrier([state_threads + 128] * STAGES)
            p_full = T.alloc_barrier([4] * 2)
            p_empty = T.alloc_barrier([state_threads] * 2)
            o_full = T.alloc_barrier([state_threads // 32])
            o_empty = T.alloc_barrier([32])

            T.annotate_layout(
                {
                    V_shared: make_swizzled_layout(V_shared),
                    O_shared: make_swizzled_layout(O_shared),
                    P_shared: make_swizzled_layout(P_shared),
                    V_frag: accumulator(dv_tile),
                    O_bf16: accumulator(dv_tile),
                    QK_frag: accumulator(CHUNK),
                    P_frag: accumulator(CHUNK),
                }
            )
            tx = T.get_thread_binding()
            x = T.alloc_var("int32", init=T.truncdiv(cta, Hv))
            h = T.alloc_var("int32", init=cta - x * Hv)
            hk = T.alloc_var("int32", init=T.truncdiv(h, T.truncdiv(Hv, Hq)))  # one division, not one per address
            number = T.alloc_var("int32", init=x if wide else x // 2)
            kind = T.alloc_var("int32", init=MAIN)
            segment = T.alloc_var("int32", init=0)
            total = T.alloc_var("int32", init=0)  # chunks of the sequence
            parts = T.alloc_var("int32", init=0)  # segments of this head of it
            head = T.alloc_var("int64", init=0)  # where its gates begin
            # The sequence, where it begins, its tokens, its segments, those of a head with exact starts
            place = T.alloc_local((5,), "int32")
            if turn != SECOND:
                T.pdl_sync()
            if turn != ONLY:
                T.pdl_trigger()
            exact = T.alloc_var("int32", init=0)  # whether this CTA is for a head that hardly decays
            if turn == FIRST:
                exact = 1
                kind = N
                if number >= exact_pieces:
                    number -= exact_pieces
                    kind = M
            elif turn == SECOND and number >= pieces:
                exact = 1
                number -= pieces
                if number + h == 0:
                    T.pdl_sync()  # a CTA of the grid always waits, so that the grid's end means the end of all before
            segment = T.call_extern(
                "int32",
                "find_segment",
                number,
                exact,
                unit,
                exact_unit,
                T.address_of(offsets[0]),
                stride,
                sequences,
                tokens_each,
                Tn,
                lead,
                T.address_of(place[0]),
            )
            head = T.Cast("int64", place[1]) * Hv + h
            total = T.ceildiv(place[2], CHUNK)
            parts = T.if_then_else(exact != 0, place[4], place[3])
            # The segment's own chunks are `own` to `end` - 1; it begins at `start` and is warmed up until `own`.
            start = T.alloc_var("int32", init=0)
            lasting = T.alloc_var("int32", init=0)  # whether the head hardly decays
            width = T.alloc_var("int32", init=dv_tile)  # columns of this CTA
            half = T.alloc_var("int32", init=0 if wide else x % 2)  # the one of S that comes first
            T.call_extern("handle", "exit_unless", segment < parts)
            if limit > 0:
                lasting = T.call_extern(
                    "int32", "hardly_decays", T.address_of(g_cumsum[0, 0]), head, Hv, total, place[3], lead, limit
                )
                if wide and turn == ONLY and lasting != 0:
                    width = HALF
                    parts = T.truncdiv(parts, 2)
                    half = segment % 2
                    segment = segment // 2
                    T.call_extern("handle", "exit_unless", segment < parts)  # one is left over of an odd number
            own = T.alloc_var("int32", init=T.call_extern("int32", "first_chunk", segment, total, parts, lead))
            end = T.alloc_var("int32", init=T.call_extern("int32", "first_chunk", segment + 1, total, parts, lead))
            if turn == FIRST:
                # The first segment has an initial state in its N, and no M; nothing follows the last.
                T.call_extern(
                    "handle", "exit_unless", lasting != 0 and segment < parts - 1 and (kind == N or segment > 0)
                )
            elif turn == SECOND:
                if exact != 0 and lasting != 0:
                    T.pdl_sync()
                T.call_extern("handle", "exit_unless", lasting == exact)
            if total == 0:
                if final_states > 0 and kind == MAIN:
                    T.assume(place[0] >= 0 and place[0] < final_states)
                    T.call_extern(
                        "handle",
                        "copy_state",
                        T.address_of(initial_state[0, 0, 0, 0]),
                        T.address_of(final_state[0, 0, 0, 0]),
                        T.Cast("int64", place[0]) * Hv + h,
                        initial_states,
                        half * HALF,
                        dv_tile,
                    )
                T.call_extern("handle", "exit_unless", False)
            start = own
            if kind != MAIN:  # nothing but warm-up: no output, but an end state
                own = end
            elif exact == 0:
                start = T.call_extern("int32", "find_start", T.address_of(g_cumsum[0, 0]), head, Hv, own, total)
            if kind != MAIN or segment == 0:
                exact = 0  # from here on: whether `split_fold` has left its start
            # Chunks are counted from `own`: those below 0 are warm-up. Every role reads this from shared memory, so
            # that no register of one has to live through another.
            if tx == 0:
                place_shared[OWN] = own
                place_shared[WARM] = own - start
                place_shared[CHUNKS] = end - own
                place_shared[KIND] = kind
                place_shared[SEQUENCE] = place[0]
                place_shared[BEGIN] = place[1]
                place_shared[STOP] = place[1] + place[2]
                place_shared[KEY_HEAD] = hk
                place_shared[FIRST_HALF] = half
                place_shared[WIDTH] = width
                place_shared[IS_LAST] = segment == parts - 1
                place_shared[SHORT] = T.if_then_else(
                    segment == parts - 1 and place[1] + place[2] < Tn, place[2] % CHUNK, 0
                )
            T.sync_threads()

            if tx < state_threads:  # state
                T.set_max_nreg(state_registers, 1)
                width = place_shared[WIDTH] if wide else HALF
                if wide:  # the second warpgroup has 64 columns, or nothing
                    T.call_extern("handle", "exit_unless", width == HEAD_DIM or tx < 128)
                half = place_shared[FIRST_HALF]
                T.assume(half >= 0 and half < 2)
                own = T.alloc_var("int32", init=place_shared[OWN])
                warm = T.alloc_var("int32", init=place_shared[WARM])
                chunks = T.alloc_var("int32", init=place_shared[CHUNKS])
                kind = T.alloc_var("int32", init=place_shared[KIND])
                n = T.alloc_var("int32", init=place_shared[SEQUENCE])
                T.clear(S0_frag)
                T.clear(S1_frag)
                if kind == M:  # from the identity
                    for i, j in T.Parallel(dv_tile, HALF):
                        S0_frag[i, j] = T.Select(column(half, i) == j, 1.0, 0.0)
                    for i, j in T.Parallel(dv_tile, HALF):
                        S1_frag[i, j] = T.Select(column(half, i) == j + HALF, 1.0, 0.0)
                if exact != 0:
                    row = T.alloc_var("int32", init=place_shared[BEGIN] + own * CHUNK + START_ROW)
                    T.assume(row >= 0 and row + 2 * HEAD_DIM <= Tn)
                    for i, j in T.Parallel(dv_tile, HALF):
                        S0_frag[i, j] = output[row + start_row(half, i), h, j]
                        S0_frag[i, j] += output[row + start_row(half, i) + FOLDED, h, j]
                    for i, j in T.Parallel(dv_tile, HALF):
                        S1_frag[i, j] = output[row + start_row(half, i), h, HALF + j]
                        S1_frag[i, j] += output[row + start_row(half, i) + FOLDED, h, HALF + j]
                if initial_states > 0 and own == warm and kind != M:
                    T.assume(n >= 0 and n < initial_states)
                    for i, j in T.Parallel(dv_tile, HALF):
                        S0_frag[i, j] = initial_state[n, h, j, column(half, i)]
                    for i, j in T.Parallel(dv_tile, HALF):
                        S1_frag[i, j] = initial_state[n, h, HALF + j, column(half, i)]
                T.copy(S0_frag, S0_operand)
                T.copy(S1_frag, S1_operand)
                V_address = T.alloc_var(
                    "uint32", init=T.call_extern("uint32", "transposed_address", T.address_of(V_shared[0, 0, 0, 0]))
                )
                O_address = T.alloc_var(
                    "uint32", init=T.call_extern("uint32", "transposed_address", T.address_of(O_shared[0, 0, 0]))
                )
                T.barrier_wait(full[1], 0)
                T.wgmma_gemm(
                    S0_operand, K_shared[1, :, 0:HALF], U_frag, transpose_B=True, clear_accum=True, policy=FULL_ROW
                )
                T.wgmma_gemm(S1_operand, K_shared[1, :, HALF:HEAD_DIM], U_frag, transpose_B=True, policy=FULL_ROW)
                T.barrier_arrive(empty[0])
                if wide and width == HALF:
                    T.barrier_arrive(empty[0])
                T.call_extern("handle", "load_transposed", V_address + V_bytes, T.address_of(V_frag[0, 0]))
                T.wait_wgmma(0)
                stage = T.alloc_var("int32", init=1)
                ahead = T.alloc_var("int32", init=0)
                phase = T.alloc_var("int32", init=0)
                for warming in (True, False):  # the same loop twice, first without what the output needs
                    for c in T.serial(-warm if warming else 0, 0 if warming else chunks):
                        role(None if warming else "state", 0, c)
                        if not warming:
                            # O^T = scale S^T Q^T Γ + Vnew^T P^T
                            mark("issue S Q")
                            T.wgmma_gemm(
                                S0_operand,
                                Q_shared[stage, :, 0:HALF],
                                O_frag,
                                transpose_B=True,
                                clear_accum=True,
                                policy=FULL_ROW,
                            )
                            T.wgmma_gemm(
                                S1_operand, Q_shared[stage, :, HALF:HEAD_DIM], O_frag, transpose_B=True, policy=FULL_ROW
                            )
                        mark("compute W")
                        # Vnew^T = (B V^T - B Γ U^T) A^T
                        for i, j in T.Parallel(dv_tile, CHUNK):
                            # Rounded here, whichever product the compiler would fuse into W's subtraction.
                            weighted_V_frag[i, j] = T.ieee_mul(beta_shared[stage, j], T.Cast(fp32, V_frag[i, j]))
                        for i, j in T.Parallel(dv_tile, CHUNK):
                            beta_gamma_frag[i, j] = beta_gamma_shared[stage, j]
                        for i, j in T.Parallel(dv_tile, CHUNK):
                            W_operand[i, j] = weighted_V_frag[i, j] - beta_gamma_frag[i, j] * U_frag[i, j]
                        mark("issue Vnew")
                        T.wgmma_gemm(
                            W_operand,
                            A_shared[stage, :, :],
                            Vnew_frag,
                            transpose_B=True,
                            clear_accum=True,
                            policy=FULL_ROW,
                        )
                        mark("compute γ_ℓ S")
                        ahead = stage
                        if c + 1 < chunks:
                            phase = T.if_then_else(stage == STAGES - 1, 1 - phase, phase)
                            ahead = T.if_then_else(stage == STAGES - 1, 0, stage + 1)
                        for i, j in T.Parallel(dv_tile, CHUNK):
                            decay_frag[i, j] = decay_shared[stage, j]
                        for i, j in T.Parallel(dv_tile, HALF):
                            S0_frag[i, j] *= gamma_last_shared[stage]
                        for i, j in T.Parallel(dv_tile, HALF):
                            S1_frag[i, j] *= gamma_last_shared[stage]
                        if not warming:
                            mark("drain S Q")
                            T.wait_wgmma(1)
                            mark("compute scale Γ S Q")
                            for i, j in T.Parallel(dv_tile, CHUNK):
                                O_frag[i, j] *= scaled_gamma_shared[stage, j]
                        mark("drain Vnew")
                        T.wait_wgmma(0)
                        mark("compute γ_ℓ/γ Vnew")
                        # S^T = γ_ℓ S^T + (γ_ℓ/γ Vnew)^T K
                        for i, j in T.Parallel(dv_tile, CHUNK):
                            Vdecayed_operand[i, j] = Vnew_frag[i, j] * decay_frag[i, j]
                        if not warming:
                            T.copy(Vnew_frag, Vnew_operand)
                        mark("issue K^T Vnew")
                        T.wgmma_gemm(Vdecayed_operand, K_shared[stage, :, 0:HALF], S0_frag, policy=FULL_ROW)
                        T.wgmma_gemm(Vdecayed_operand, K_shared[stage, :, HALF:HEAD_DIM], S1_frag, policy=FULL_ROW)
                        if not warming:
                            mark("wait p_full")
                            T.barrier_wait(p_full[c % 2], c // 2 % 2)
                            mark("wait o_empty", -1)
                            T.barrier_wait(o_empty[0], (c + 1) % 2)
                            mark("issue P Vnew")
                            T.wgmma_gemm(Vnew_operand, P_shared[c % 2, :, :], O_frag, transpose_B=True, policy=FULL_ROW)
                        # U^T = S^T K^T of the following chunk; the last chunk repeats its own
                        mark("wait full", 1)
                        T.barrier_wait(full[ahead], phase)
                        mark("drain K^T Vnew")
                        T.wait_wgmma(1 if warming else 2)
                        mark("issue U", 1)
                        T.copy(S0_frag, S0_operand)
                        T.wgmma_gemm(
                            S0_operand,
                            K_shared[ahead, :, 0:HALF],
                            U_frag,
                            transpose_B=True,
                            clear_accum=True,
                            policy=FULL_ROW,
                        )
                        mark("drain K^T Vnew")
                        T.wait_wgmma(1 if warming else 2)
                        mark("issue U", 1)
                        T.copy(S1_frag, S1_operand)
                        T.wgmma_gemm(
                            S1_operand, K_shared[ahead, :, HALF:HEAD_DIM], U_frag, transpose_B=True, policy=FULL_ROW
                        )
                        mark("arrive empty")
                        T.barrier_arrive(empty[stage])
                        if wide and width == HALF:
                            T.barrier_arrive(empty[stage])
                        if not warming:
                            mark("drain P Vnew")
                            T.wait_wgmma(2)
                            mark("arrive p_empty")
                            T.barrier_arrive(p_empty[c % 2])
                            if wide and width == HALF:
                                T.barrier_arrive(p_empty[c % 2])
                            mark("copy O")
                            T.copy(O_frag, O_bf16)
                            T.call_extern("handle", "store_transposed", T.address_of(O_bf16[0, 0]), O_address)
                            T.sync_warp()
                            mark("arrive o_full")
                            if tx % 32 == 0:
                                T.barrier_arrive(o_full[0])
                                if wide and width == HALF:
                                    T.barrier_arrive(o_full[0])
                        mark("copy V", 1)
                        T.call_extern(
                            "handle", "load_transposed", V_address + ahead * V_bytes, T.address_of(V_frag[0, 0])
                        )
                        stage = ahead
                        mark("drain U", 1)
                        T.wait_wgmma(0)
                half = place_shared[FIRST_HALF]
                T.assume(half >= 0 and half < 2)
                kind = place_shared[KIND]
                if kind != MAIN:
                    row = (
                        place_shared[BEGIN]
                        + (place_shared[OWN] - place_shared[WARM]) * CHUNK
                        + T.if_then_else(kind == M, M_ROW, N_ROW)
                    )
                    T.assume(row >= 0 and row + 2 * HEAD_DIM <= Tn)
                    for i, j in T.Parallel(dv_tile, HALF):
                        output[row + column(half, i), h, j] = S0_operand[i, j]
                        output[row + HEAD_DIM + column(half, i), h, j] = S0_frag[i, j] - S0_operand[i, j]
                    for i, j in T.Parallel(dv_tile, HALF):
                        output[row + column(half, i), h, HALF + j] = S1_operand[i, j]
                        output[row + HEAD_DIM + column(half, i), h, HALF + j] = S1_frag[i, j] - S1_operand[i, j]
                elif final_states > 0 and place_shared[IS_LAST] != 0:
                    n = place_shared[SEQUENCE]
                    T.assume(n >= 0 and n < final_states)
                    for i, j in T.Parallel(dv_tile, HALF):
                        final_state[n, h, j, column(half, i)] = S0_frag[i, j]
                    for i, j in T.Parallel(dv_tile, HALF):
                        final_state[n, h, HALF + j, column(half, i)] = S1_frag[i, j]
            elif tx < state_threads + 128:  # prepare P
                T.set_max_nreg(prepare_registers, 0)
                warm = T.alloc_var("int32", init=place_shared[WARM])
                chunks = T.alloc_var("int32", init=place_shared[CHUNKS])
                kind = T.alloc_var("int32", init=place_shared[KIND])
                stage = T.alloc_var("int32", init=1)
                phase = T.alloc_var("int32", init=0)
                T.fence_proxy_async()  # for what went before: TileLang puts one into the loop otherwise
                T.barrier_arrive(empty[0])
                for _ in T.serial(warm):
                    T.barrier_wait(full[stage], phase)
                    T.barrier_arrive(empty[stage])
                    phase = T.if_then_else(stage == STAGES - 1, 1 - phase, phase)
                    stage = T.if_then_else(stage == STAGES - 1, 0, stage + 1)
                T.call_extern("handle", "exit_unless", kind == MAIN)
                P_address = T.alloc_var(
                    "uint32", init=T.call_extern("uint32", "address_of_P", T.address_of(P_shared[0, 0, 0]))
                )
                for c in T.serial(chunks):
                    role("prepare", state_threads, c)
                    mark("wait full")
                    T.barrier_wait(full[stage], phase)
                    mark("matmul Q K^T")
                    T.wgmma_gemm(
                        Q_shared[stage, :, :], K_shared[stage, :, :], QK_frag, transpose_B=True, clear_accum=True
                    )
                    T.wait_wgmma(0)
                    mark("compute P")
                    T.call_extern(
                        "handle",
                        "compute_P",
                        T.address_of(QK_frag[0, 0]),
                        T.address_of(g_shared[stage, 0]),
                        T.address_of(row_shared[stage, 0]),
                        T.address_of(before_shared[stage, 0, 0]),
                        log2_scale,
                        T.address_of(P_frag[0, 0]),
                    )
                    T.barrier_arrive(empty[stage])  # the state's arrival is later
                    mark("wait p_empty", -2)
                    T.barrier_wait(p_empty[c % 2], (c // 2 + 1) % 2)
                    mark("copy P")
                    T.call_extern(
                        "handle", "store_P", T.address_of(P_frag[0, 0]), P_address + c % 2 * (2 * CHUNK * CHUNK)
                    )
                    T.fence_proxy_async()
                    T.sync_warp()
                    mark("arrive p_full")
                    if tx % 32 == 0:
                        T.barrier_arrive(p_full[c % 2])
                    phase = T.if_then_else(stage == STAGES - 1, 1 - phase, phase)
                    stage = T.if_then_else(stage == STAGES - 1, 0, stage + 1)
            else:
                T.set_max_nreg(copy_registers, 0)
                own = T.alloc_var("int32", init=place_shared[OWN])
                warm = T.alloc_var("int32", init=place_shared[WARM])
                chunks = T.alloc_var("int32", init=place_shared[CHUNKS])
                begin = T.alloc_var("int32", init=place_shared[BEGIN])
                stop = T.alloc_var("int32", init=place_shared[STOP])
                hk = T.alloc_var("int32", init=place_shared[KEY_HEAD])
                dv = T.alloc_var("int32", init=place_shared[FIRST_HALF] * HALF)
                width = place_shared[WIDTH] if wide else HALF
                T.assume(begin >= 0 and stop > 0 and stop <= Tn)
                if tx < state_threads + 160:  # copy K, Q, V and A
                    stage = T.alloc_var("int32", init=1)
                    phase = T.alloc_var("int32", init=0)
                    T.fence_proxy_async()  # as above
                    T.barrier_arrive(full[0])  # there is no chunk before the first
                    for c in T.serial(-warm, chunks):
                        role("load", state_threads + 128, c)
                        mark("wait empty", -STAGES)
                        t0 = begin + (own + c) * CHUNK
                        T.barrier_wait(empty[stage], 1 - phase)
                        mark("copy K, V, A, Q")
                        landing = T.if_then_else(c + 1 == chunks and place_shared[SHORT] != 0, STAGES, stage)
                        T.tma_copy(k[t0 : t0 + CHUNK, hk, 0:HEAD_DIM], K_shared[stage, :, :], barrier=full[landing])
                        T.tma_copy(
                            v[t0 : t0 + CHUNK, h, dv : dv + HALF],
                            V_shared[stage, 0, :, :],
                            barrier=full[landing],
                        )
                        if wide and width == HEAD_DIM:
                            T.tma_copy(
                                v[t0 : t0 + CHUNK, h, HALF:HEAD_DIM], V_shared[stage, 1, :, :], barrier=full[landing]
                            )
                        T.tma_copy(A[t0 : t0 + CHUNK, h, 0:CHUNK], A_shared[stage, :, :], barrier=full[landing])
                        if c >= 0:
                            T.tma_copy(q[t0 : t0 + CHUNK, hk, 0:HEAD_DIM], Q_shared[stage, :, :], barrier=full[landing])
                        if landing == STAGES:
                            T.barrier_arrive(full[STAGES])
                            T.barrier_wait(full[STAGES], 0)
                            short = place_shared[SHORT]
                            T.call_extern("handle", "zero_rows", T.address_of(K_shared[stage, 0, 0]), 2, short)
                            T.call_extern("handle", "zero_rows", T.address_of(Q_shared[stage, 0, 0]), 2, short)
                            T.call_extern("handle", "zero_rows", T.address_of(A_shared[stage, 0, 0]), 1, short)
                            T.call_extern(
                                "handle",
                                "zero_rows",
                                T.address_of(V_shared[stage, 0, 0, 0]),
                                dv_tile // HALF,
                                short,
                            )
                            T.fence_proxy_async()
                        mark("arrive full")
                        T.barrier_arrive(full[stage])
                        phase = T.if_then_else(stage == STAGES - 1, 1 - phase, phase)
                        stage = T.if_then_else(stage == STAGES - 1, 0, stage + 1)
                elif tx < state_threads + 224:  # gates
                    lane = (tx - state_threads - 160) % 32
                    first = (tx - state_threads - 160) // 32
                    gate = T.alloc_local((2,), fp32)
                    weight = T.alloc_local((2,), fp32)
                    if tx >= state_threads + 192:
                        T.barrier_arrive(full[0])
                    for pair in T.serial((warm + chunks + 1 - first) // 2):
                        c = pair * 2 + first
                        slot = (c + 1) % STAGES
                        t0 = begin + (own - warm + c) * CHUNK
                        for half in T.unroll(2):
                            # Past the end the last gate is repeated: no exponent is positive, and K, V and A are zero.
                            gate[half] = g_cumsum[T.min(t0 + half * 32 + lane, stop - 1), h] * LOG2E
                            weight[half] = beta[T.min(t0 + half * 32 + lane, stop - 1), h]
                        T.barrier_wait(empty[slot], ((c + 1) // STAGES + 1) % 2)
                        for half in T.unroll(2):
                            g_shared[slot, half * 32 + lane] = gate[half]
                            beta_shared[slot, half * 32 + lane] = T.if_then_else(
                                place_shared[KIND] == M, 0.0, weight[half]
                            )  # M has no V
                            beta_gamma_shared[slot, half * 32 + lane] = weight[half] * T.exp2(gate[half])
                            scaled_gamma_shared[slot, half * 32 + lane] = scale * T.exp2(gate[half])
                            row_shared[slot, half * 32 + lane] = scale * T.exp2(
                                gate[half] - T.shfl_sync(gate[half], lane // 16 * 16)
                            )
                            for block in (0, 1, 2, 3):
                                before_shared[slot, block, half * 32 + lane] = T.exp2(
                                    T.shfl_sync(gate[block // 2], block % 2 * 16)
                                    - gate[half]
                                    - T.Select(half * 32 + lane < block * 16, 0.0, T.infinity(fp32))
                                )
                            decay_shared[slot, half * 32 + lane] = T.exp2(T.shfl_sync(gate[1], 31) - gate[half])
                        if lane == 31:
                            gamma_last_shared[slot] = T.exp2(gate[1])
                        T.barrier_arrive(full[slot])
                else:  # store O
                    short = T.alloc_var("int32", init=place_shared[SHORT])
                    for c in T.serial(chunks - T.if_then_else(short != 0, 1, 0)):
                        role("store O", state_threads + 224, c)
                        mark("wait o_full")
                        T.barrier_wait(o_full[0], c % 2)
                        T.fence_proxy_async()  # here, where nobody waits for it
                        mark("copy O")
                        t0 = begin + (own + c) * CHUNK
                        T.copy(O_shared[0, :, :], output[t0 : t0 + CHUNK, h, dv : dv + HALF])
                        if wide and width == HEAD_DIM:
                            T.copy(O_shared[1, :, :], output[t0 : t0 + CHUNK, h, HALF:HEAD_DIM])
                        mark("arrive o_empty")
                        T.barrier_arrive(o_empty[0])
                    if short != 0:
                        T.barrier_wait(o_full[0], (chunks - 1) % 2)
                        t0 = begin + (own + chunks - 1) * CHUNK
                        T.call_extern(
                            "handle",
                            "store_rows",
                            T.address_of(O_shared[0, 0, 0]),
                            T.address_of(output[0, 0, 0]),
                            (T.Cast("int64", t0) * Hv + h) * HEAD_DIM + dv,
                            Hv * HEAD_DIM,
                            width // HALF,
                            short,
                        )

    return split


@jit(disable_warp_specialized=True, disable_thread_storage_sync=True, enable_fast_math=True)
def build_fold():
    """The kernel that turns the segments' M and N into their starts, 32 columns of a head a CTA."""
    Tn, Hv, words = T.dynamic("Tn"), T.dynamic("Hv"), T.dynamic("words")

    @T.prim_func
    def split_fold(
        g_cumsum: T.Tensor((Tn, Hv), fp32),
        offsets: T.Tensor((words,), "int32"),
        output: T.Tensor((Tn, Hv, HEAD_DIM), bf16),
        stride: T.int32,
        sequences: T.int32,
        tokens_each: T.int32,
        unit: T.int32,
        exact_unit: T.int32,
        lead: T.int32,
        limit: T.int32,
    ):
        prelude = INSTRUCTIONS + FIND_PIECE + FIND_START + MOVE_STATE
        with T.Kernel(HEAD_DIM // FOLDED, Hv, sequences, threads=320, prelude=prelude) as (tile, h, n):
            # Of M, 128 rows of high parts, then of low ones, 64 a tile. Of N and S, the halves of dk, each with rows of
            # high parts of this CTA's columns of dv, then of low ones.
            M_shared = T.alloc_shared((2, 4, HALF, HEAD_DIM), bf16)
            N_shared = T.alloc_shared((2, 2, 2 * FOLDED, HALF), bf16)
            S_shared = T.alloc_shared((2, 2, 2 * FOLDED, HALF), bf16)
            S_frag = T.alloc_fragment((HEAD_DIM, FOLDED), fp32)
            N_frag = T.alloc_fragment((HEAD_DIM, FOLDED), fp32)
            high_frag = T.alloc_fragment((HEAD_DIM, 2 * FOLDED), fp32)
            low_frag = T.alloc_fragment((HEAD_DIM, FOLDED), fp32)
            full = T.alloc_barrier([32] * 2)
            empty = T.alloc_barrier([256] * 2)
            start_full = T.alloc_barrier([256] * 2)
            start_empty = T.alloc_barrier([32] * 2)
            T.annotate_layout(
                {
                    N_shared: make_swizzled_layout(N_shared),
                    S_shared: make_swizzled_layout(S_shared),
                    S_frag: accumulator(HEAD_DIM, FOLDED),
                    N_frag: accumulator(HEAD_DIM, FOLDED),
                }
            )
            tx = T.get_thread_binding()
            # The sequence, where it begins, its tokens, its segments, those of a head with exact starts
            place = T.alloc_local((5,), "int32")
            total = T.alloc_var("int32", init=0)
            segments = T.alloc_var("int32", init=0)
            lasting = T.alloc_var("int32", init=0)
            row = T.alloc_var("int32", init=0)
            T.pdl_trigger()
            T.call_extern(
                "handle",
                "find_sequence",
                n,
                unit,
                exact_unit,
                T.address_of(offsets[0]),
                stride,
                tokens_each,
                Tn,
                lead,
                T.address_of(place[0]),
            )
            total = T.ceildiv(place[2], CHUNK)
            segments = place[4]
            lasting = T.call_extern(
                "int32",
                "hardly_decays",
                T.address_of(g_cumsum[0, 0]),
                T.Cast("int64", place[1]) * Hv + h,
                Hv,
                total,
                place[3],
                lead,
                limit,
            )
            if lasting != 0 or tile + h + n == 0:
                T.pdl_sync()
            T.call_extern("handle", "exit_unless", lasting != 0 and segments > 1)
            if tx < 256:
                # What the first segment ends with is in the place of its N; M follows from the second on.
                T.barrier_wait(full[0], 0)
                T.call_extern("handle", "load_state", T.address_of(N_shared[0, 0, 0, 0]), T.address_of(S_frag[0, 0]))
                for s in T.serial(1, segments):
                    T.barrier_wait(start_empty[s % 2], ((s - 1) // 2 + 1) % 2)
                    T.call_extern(
                        "handle", "store_state", T.address_of(S_frag[0, 0]), T.address_of(S_shared[s % 2, 0, 0, 0])
                    )
                    T.fence_proxy_async()
                    T.barrier_arrive(start_full[s % 2])
                    # Only now is N known to have been read: ptxas lets an arrival pass a shared load on its way, and
                    # S was made of it.
                    T.barrier_arrive(empty[(s - 1) % 2])
                    T.barrier_wait(start_full[s % 2], (s - 1) // 2 % 2)
                    if s < segments - 1:
                        # S = M^T S + N^T, as M_high^T [S_high S_low] + M_low^T S_high; low times low is beyond FP32
                        T.barrier_wait(full[s % 2], s // 2 % 2)
                        for half in range(2):
                            T.wgmma_gemm(
                                M_shared[s % 2, half, :, :],
                                S_shared[s % 2, half, :, :],
                                high_frag,
                                transpose_A=True,
                                transpose_B=True,
                                clear_accum=half == 0,
                                policy=FULL_ROW,
                            )
                        for half in range(2):
                            T.wgmma_gemm(
                                M_shared[s % 2, 2 + half, :, :],
                                S_shared[s % 2, half, 0:FOLDED, :],
                                low_frag,
                                transpose_A=True,
                                transpose_B=True,
                                clear_accum=half == 0,
                                policy=FULL_ROW,
                            )
                        T.call_extern(
                            "handle", "load_state", T.address_of(N_shared[s % 2, 0, 0, 0]), T.address_of(N_frag[0, 0])
                        )
                        T.wait_wgmma(0)
                        for i, j in T.Parallel(HEAD_DIM, FOLDED):
                            S_frag[i, j] = high_frag[i, FOLDED + j] + low_frag[i, j] + N_frag[i, j]
                        for i, j in T.Parallel(HEAD_DIM, FOLDED):
                            S_frag[i, j] += high_frag[i, j]
            elif tx < 288:  # copy M and N
                for s in T.serial(segments - 1):
                    row = place[1] + T.call_extern("int32", "first_chunk", s, total, segments, lead) * CHUNK
                    high = row + N_ROW + tile * FOLDED
                    T.barrier_wait(empty[s % 2], (s // 2 + 1) % 2)
                    if s > 0:
                        for part in range(4):
                            T.tma_copy(
                                output[row + part * HALF : row + (part + 1) * HALF, h, 0:HEAD_DIM],
                                M_shared[s % 2, part, :, :],
                                barrier=full[s % 2],
                            )
                    for half in range(2):
                        for low in range(2):
                            T.tma_copy(
                                output[
                                    high + low * HEAD_DIM : high + low * HEAD_DIM + FOLDED,
                                    h,
                                    half * HALF : (half + 1) * HALF,
                                ],
                                N_shared[s % 2, half, low * FOLDED : (low + 1) * FOLDED, :],
                                barrier=full[s % 2],
                            )
                    T.barrier_arrive(full[s % 2])
            else:  # store starts
                for s in T.serial(1, segments):
                    row = place[1] + START_ROW + tile * 2 * FOLDED
                    row += T.call_extern("int32", "first_chunk", s, total, segments, lead) * CHUNK
                    T.barrier_wait(start_full[s % 2], (s - 1) // 2 % 2)
                    for half in range(2):
                        T.copy(
                            S_shared[s % 2, half, :, :],
                            output[row : row + 2 * FOLDED, h, half * HALF : (half + 1) * HALF],
                        )
                    T.barrier_arrive(start_empty[s % 2])

    return split_fold


def gdn_prefill_forward(
    q, k, v, g_cumsum, beta, A, initial_state=None, cu_seqlens=None, scale=SCALE, output_final_state=True
):
    """The core forward; shapes, dtypes and errors as in `kernels.problem.check_core_inputs`.

    Returns output [B,T,Hv,128] BF16 and final_state FP32, [B,Hv,128,128] or, with cu_seqlens [N+1], [N,Hv,128,128];
    None instead where it is not wanted. `scale` is that of the output, above 0. Rows past the last offset are not
    written.
    """
    B, tokens, _, Hv = check_core_inputs(q, k, v, g_cumsum, beta, A, initial_state, cu_seqlens)
    where = layout(B, tokens, cu_seqlens, q)
    chosen = plan(B, tokens, Hv, v.device, 1 if cu_seqlens is None else where.sequences)
    output = torch.empty_like(v)
    none = beta.new_empty(0, Hv, HEAD_DIM, HEAD_DIM)  # a state that the kernels leave alone
    final_state = beta.new_empty(where.sequences, Hv, HEAD_DIM, HEAD_DIM) if output_final_state else none
    tile, length = chosen.dv_tile, -(-tokens // (CHUNK * chosen.segments))  # chunks of a segment
    # Chunks of warm-up above which a head hardly decays; 0 where that would change nothing. Two segments are worth
    # joining from a third of one on: a chunk takes half as long again with its output as without, or with 64 columns.
    if chosen.exact:
        limit = LIMIT
    elif tile == HEAD_DIM and chosen.segments > 1:
        limit = max(1, length // 3)
    else:
        limit = 0
    unit = length * CHUNK
    exact_unit = CHUNK * -(-tokens // (CHUNK * chosen.exact)) if chosen.exact else 0
    q, k, v, g_cumsum, beta, A, flat = (x.flatten(0, 1) for x in (q, k, v, g_cumsum, beta, A, output))
    segmentation = (*where[1:], unit, exact_unit, LEAD[tile], limit)
    initial_state = none if initial_state is None else initial_state
    tensors = (q, k, v, g_cumsum, beta, A, where.offsets, initial_state, flat, final_state)
    pieces = where.pieces(unit, B * tokens), where.pieces(exact_unit, B * tokens) if chosen.exact else 0
    run = functools.partial(build(tile), *tensors, scale, math.log2(scale), *pieces, *segmentation)
    if chosen.exact:
        run(FIRST)
        build_fold()(g_cumsum, where.offsets, flat, *segmentation)
        run(SECOND)
    else:
        run(ONLY)
    return output, final_state if output_final_state else None
