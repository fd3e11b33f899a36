"""Preprocessing, not part of the core: from log-gates to their chunk-local sums and the inverse A of every chunk.

`prepare` is one TileLang kernel on CUDA tensors, and PyTorch on CPU tensors. `l2norm` normalises q and k.

A = (I + L)^-1 with L = StrictLower(B Γ K K^T Γ^-1), by blocks of 16 x 16. The blocks on the diagonal are inverted by
forward substitution in FP32. Block row i below it follows from those above: A_ij = -A_ii Σ_{j<=m<i} L_im A_mj, on
tensor cores, with FP16 operands and FP32 sums.

Why FP16 is enough there: with ‖k‖ <= 1 and 0 <= beta <= 2 no element passes beta_i, since
A_ij = -beta_i γ_i/γ_j k_i^T Π_{j<m<i} (I - beta_m k_m k_m^T) k_j and none of the factors lengthens a vector (see
variants/split.py). So nothing overflows, and FP16 rounds to 11 bits where the BF16 that A is stored in has 8. Rounded
are L, the rows above and the sum, each once; that sum is (I + L_ii) A_ij, and of the same size as its terms unless
keys are nearly parallel, when A_ii takes differences of its rows: they lose what cancels, which is why the diagonal
blocks, where up to 15 differences follow one another, are FP32. Powers of L, as in Neumann's series, would grow beyond
FP16 for such keys before they cancel.
"""

import itertools

import tilelang.language as T
import torch
from tilelang.layout import make_swizzled_layout
from torch.nn.functional import pad

from kernels.build import jit
from kernels.fragments import INSTRUCTIONS, accumulator
from kernels.gates import REFUSE
from kernels.problem import CHUNK, HEAD_DIM, Inputs
from kernels.sequences import FIND_PIECE, layout
from kernels.work import sm_count

CoreInputs = tuple[torch.Tensor | None, ...]

THREADS = 128  # a warpgroup multiplies K K^T; then each of its warps inverts for a head of its own
HEADS = 4
CTAS = 3  # an SM: what shared memory allows

# In shared memory: of K K^T the ten blocks that are not above the diagonal, FP32, as wgmma's fragments have them;
# tables of gates, of beta and of the gates' sums times log2 e, FP32, a row a head, so long that four heads meet in no
# bank; of each warp a tile, where first L^T lies, then the transposed inverses of its diagonal blocks in FP16, and at
# last A.
PRODUCTS, ROW, TABLES = 10 * 256, CHUNK + 8, 3 * HEADS  # floats, floats, rows

bf16, fp32 = "bfloat16", "float32"

# What a CTA does as its turn `number`.
FIND_ITEM = r"""
// First token and how many, key head, first value head and how many.
__device__ __forceinline__ void find_item(int number, const int* offsets, int stride, int sequences, int tokens_each,
                                          int tokens, int Hq, int Hv, void* found) {
  int* item = (int*)found;
  const int group = Hv / Hq, quads = (group + 3) / 4, chunk = number / (Hq * quads);
  const int key_head = number % (Hq * quads) / quads, member = number % quads * 4;
  const Piece piece = find_piece(chunk, 64, offsets, stride, sequences, tokens_each, tokens);
  item[0] = piece.begin + piece.index * 64;
  item[1] = max(min(piece.length - piece.index * 64, 64), 0);
  item[2] = key_head;
  item[3] = key_head * group + member;
  item[4] = min(group - member, 4);
}
"""

# A warp's inverse is made of mma.m16n8k16, whose operands are registers that hold earlier results. A fragment [16, 16]
# is four registers of two elements: lane l has, in rows l / 4 and l / 4 + 8, columns 2 (l mod 4) and the next, and the
# same 8 columns on. Of a first operand and of a result that is the same, so results are kept transposed:
# A_ij^T = -(Σ A_mj^T L_im^T) A_ii^T. A second operand is held transposed: L_im^T as L_im, which K K^T has in registers.
INVERT = (
    f"constexpr int ROW = {ROW};"
    + r"""

// Log-gates and beta of a chunk whose first is number `first` of both: neighbouring threads take neighbouring heads.
// Past the end of the chunk neither decays nor adds anything.
__device__ __forceinline__ void load_gates(const float* g, const float* beta, long long first, int Hv, int heads,
                                           int length, void* loaded) {
  float* gates = (float*)loaded;
  const int head = threadIdx.x % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int token = threadIdx.x / 4 + 32 * half;
    const bool there = head < heads && token < length;
    gates[half] = there ? g[first + (long long)token * Hv + head] : 0.f;
    gates[2 + half] = there ? beta[first + (long long)token * Hv + head] : 0.f;
  }
}

// Tables of gates, betas and exponents follow one another, four heads each. The assertion, a function call, makes ptxas
// serialize the kernel's eight wgmma (C7510), which are waited for at once anyway.
__device__ __forceinline__ void share_gates(const void* loaded, void* tables) {
  const float* gates = (const float*)loaded;
  float* row = (float*)tables + threadIdx.x % 4 * ROW;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    refuse(gates[half] > 0.f);
    row[threadIdx.x / 4 + 32 * half] = gates[half];
    row[4 * ROW + threadIdx.x / 4 + 32 * half] = gates[2 + half];
  }
}

// Warp w sums the gates of head w where they are, and leaves the sums times log2 e as exponents.
__device__ __forceinline__ void sum_gates(void* tables) {
  const int lane = threadIdx.x & 31;
  float* row = (float*)tables + threadIdx.x / 32 * ROW;
  float before = 0.f;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int token = lane + 32 * half;
    float sum = row[token];
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const float other = __shfl_up_sync(~0u, sum, distance);
      if (lane >= distance) sum += other;
    }
    sum += before;
    before = __shfl_sync(~0u, sum, 31);
    row[token] = sum;
    row[8 * ROW + token] = sum * 1.44269504f;
  }
}

__device__ __forceinline__ void store_sums(const void* tables, float* g_cumsum, long long first, int Hv, int heads,
                                           int length) {
  const int head = threadIdx.x % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int token = threadIdx.x / 4 + 32 * half;
    if (head < heads && token < length)
      g_cumsum[first + (long long)token * Hv + head] = ((const float*)tables)[head * ROW + token];
  }
}

// Warp w leaves block row w of K K^T. Rows past the end become zero, whatever lies there.
__device__ __forceinline__ void share_products(const void* fragment, void* products, int length) {
  const float* x = (const float*)fragment;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, row = 16 * warp + lane / 4;
  float4* own = (float4*)products + warp * (warp + 1) / 2 * 64 + lane;
  const bool upper = row < length, lower = row + 8 < length;
#pragma unroll
  for (int m = 0; m < 4; ++m)
    if (m <= warp) {
      own[m * 64] = upper ? make_float4(x[8 * m], x[8 * m + 1], x[8 * m + 4], x[8 * m + 5])
                          : make_float4(0.f, 0.f, 0.f, 0.f);
      own[m * 64 + 32] = lower ? make_float4(x[8 * m + 2], x[8 * m + 3], x[8 * m + 6], x[8 * m + 7])
                               : make_float4(0.f, 0.f, 0.f, 0.f);
    }
}

// Warp w inverts for head w; A is left in its tile, in the 128-byte swizzle.
__device__ __forceinline__ void invert(const void* products, const void* tables, void* tiles) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, row = lane / 4, column = 2 * (lane & 3);
  const float4* KK = (const float4*)products + lane;
  const float *beta = (const float*)tables + (4 + warp) * ROW, *g = beta + 4 * ROW;
  char* tile = (char*)tiles + warp * 8192;

  // Of this lane's rows and columns of every block, read once; `corner` is a block's first token.
  float gate[4][2], weight[4][2], column_gate[4][4], corner[4];
#pragma unroll
  for (int b = 0; b < 4; ++b) {
    corner[b] = g[16 * b];
#pragma unroll
    for (int i = 0; i < 2; ++i) gate[b][i] = g[16 * b + row + 8 * i], weight[b][i] = beta[16 * b + row + 8 * i];
#pragma unroll
    for (int i = 0; i < 4; ++i) column_gate[b][i] = g[16 * b + column + i % 2 + i / 2 * 8];
  }

  // The diagonal: L^T to shared memory, 15 rows of 80 bytes a block, then a lane solves for two columns of an inverse.
  float* L = (float*)tile;
  char* inverses = tile + 4 * 1232;
#pragma unroll
  for (int b = 0; b < 4; ++b)
#pragma unroll
    for (int lower = 0; lower < 2; ++lower) {
      const int r = row + 8 * lower;
      const float4 x = KK[(b * (b + 1) / 2 + b) * 64 + lower * 32];
      const float values[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int c = column + i % 2 + i / 2 * 8;
        const float decay = gdn::power2(gate[b][lower] - column_gate[b][i]);
        if (c < 15) L[b * 308 + c * 20 + r] = r > c ? weight[b][lower] * decay * values[i] : 0.f;
      }
    }
  __syncwarp();
  {
    const int b = lane / 8, own = lane % 8;
    float x[16], y[16];  // of columns own and own + 8, whose first eight rows are zero
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      x[i] = i == own ? 1.f : 0.f;
      y[i] = i == own + 8 ? 1.f : 0.f;
    }
#pragma unroll
    for (int m = 0; m < 15; ++m) {
      const float4* LT = (const float4*)(L + b * 308 + m * 20);
#pragma unroll
      for (int four = (m + 1) / 4; four < 4; ++four) {
        const float4 l = LT[four];
        const float values[4] = {l.x, l.y, l.z, l.w};
#pragma unroll
        for (int i = 0; i < 4; ++i)
          if (4 * four + i > m) {
            x[4 * four + i] -= values[i] * x[m];
            if (m >= 8) y[4 * four + i] -= values[i] * y[m];
          }
      }
    }
    uint4* to = (uint4*)(inverses + b * 768 + own * 48);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      to[half] = make_uint4(gdn::half2(x[8 * half], x[8 * half + 1]), gdn::half2(x[8 * half + 2], x[8 * half + 3]),
                            gdn::half2(x[8 * half + 4], x[8 * half + 5]), gdn::half2(x[8 * half + 6], x[8 * half + 7]));
      to[24 + half] = make_uint4(gdn::half2(y[8 * half], y[8 * half + 1]), gdn::half2(y[8 * half + 2], y[8 * half + 3]),
                                 gdn::half2(y[8 * half + 4], y[8 * half + 5]),
                                 gdn::half2(y[8 * half + 6], y[8 * half + 7]));
    }
  }
  __syncwarp();

  // A_bb^T as a first operand, and as a second one.
  unsigned left[4][4], right[4][4];
  const unsigned inverse = (unsigned)__cvta_generic_to_shared(inverses) + (lane % 16) * 48 + lane / 16 * 16;
#pragma unroll
  for (int b = 0; b < 4; ++b) {
    gdn::load_matrices(left[b], inverse + b * 768);
    gdn::load_transposed_matrices(right[b], inverse + b * 768);
  }

  __syncwarp();  // A takes their place

  float to_corner[3][4];
#pragma unroll
  for (int m = 0; m < 3; ++m)
#pragma unroll
    for (int i = 0; i < 4; ++i) to_corner[m][i] = gdn::power2(corner[m + 1] - column_gate[m][i]);

  unsigned above[4][4][4];  // A_mj^T
  const unsigned stage = (unsigned)__cvta_generic_to_shared(tile);
  const int to_row = lane % 8 + lane / 16 * 8, to_unit = lane / 8 % 2;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    // -L_im^T. Its exponential is a product of three, none of which grows: from a token of block m to the first one of
    // block m + 1, from there to the first one of block i, and on.
    unsigned L_operand[3][4];
    const float from_corner[2] = {-weight[i][0] * gdn::power2(gate[i][0] - corner[i]),
                                  -weight[i][1] * gdn::power2(gate[i][1] - corner[i])};
#pragma unroll
    for (int m = 0; m < i; ++m) {
      const float4 x = KK[(i * (i + 1) / 2 + m) * 64], y = KK[(i * (i + 1) / 2 + m) * 64 + 32];
      const float between = m + 1 < i ? gdn::power2(corner[i] - corner[m + 1]) : 1.f;
      const float upper = from_corner[0] * between, lower = from_corner[1] * between;
      const float* d = to_corner[m];
      L_operand[m][0] = gdn::half2(upper * d[0] * x.x, upper * d[1] * x.y);
      L_operand[m][1] = gdn::half2(upper * d[2] * x.z, upper * d[3] * x.w);
      L_operand[m][2] = gdn::half2(lower * d[0] * y.x, lower * d[1] * y.y);
      L_operand[m][3] = gdn::half2(lower * d[2] * y.z, lower * d[3] * y.w);
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      unsigned written[4] = {};
      if (j < i) {
        float sum[8] = {}, result[8] = {};
        unsigned operand[4];
#pragma unroll
        for (int m = j; m < i; ++m) gdn::multiply(sum, m == j ? left[j] : above[m][j], L_operand[m]);
#pragma unroll
        for (int n = 0; n < 4; ++n) operand[n] = gdn::half2(sum[2 * n], sum[2 * n + 1]);
        gdn::multiply(result, operand, right[i]);
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          above[i][j][n] = gdn::half2(result[2 * n], result[2 * n + 1]);
          written[n] = gdn::bfloat2(result[2 * n], result[2 * n + 1]);
        }
      } else if (j == i) {
#pragma unroll
        for (int n = 0; n < 4; ++n) written[n] = gdn::half2_as_bfloat2(left[i][n]);
      }
      const int r = 16 * i + to_row;
      gdn::store_transposed_matrices(stage + r * 128 + ((2 * j + to_unit) ^ (r & 7)) * 16, written);
    }
  }
}

// Rows of the warp's tile, the first of which is number `first` of A's; Hv lie between two of a chunk.
__device__ __forceinline__ void store_rows(const void* tiles, void* A, long long first, int Hv, int length) {
  const uint4* tile = (const uint4*)tiles + threadIdx.x / 32 * 512;
  for (int i = threadIdx.x & 31; i < length * 8; i += 32)
    ((uint4*)A)[(first + (long long)(i / 8) * Hv) * 8 + i % 8] = tile[i / 8 * 8 + (i % 8 ^ i / 8 % 8)];
}
"""
)


def core_inputs(inputs: Inputs) -> CoreInputs:
    """What `gdn_prefill_forward` takes, in its order: (q, k, v, g_cumsum, beta, A, initial_state[, cu_seqlens])."""
    g_cumsum, A = prepare(inputs.k, inputs.g, inputs.beta, inputs.cu_seqlens)
    core = (inputs.q, inputs.k, inputs.v, g_cumsum, inputs.beta, A, inputs.initial_state)
    return core if inputs.cu_seqlens is None else (*core, inputs.cu_seqlens)


def on_core_inputs(q, k, v, g_cumsum, beta, A, initial_state=None, cu_seqlens=None) -> None:
    """Preprocessing with the signature of a variant, for `build.kernels_of`: shapes alone matter there."""
    prepare(k, g_cumsum, beta, cu_seqlens)


def prepare(
    k: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, cu_seqlens: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return g_cumsum [B,T,Hv] FP32 and A [B,T,Hv,64] BF16 of k [B,T,Hq,128] BF16 and g, beta [B,T,Hv] FP32.

    g are log-gates per token; g_cumsum is their sum along T, starting anew every 64 tokens. Row t of A is the row of
    token t in its chunk's matrix (I + StrictLower(B Γ K K^T Γ^-1))^-1; in a short last chunk the columns past the end
    are zero. With cu_seqlens [N+1], INT32 or INT64, B is 1, chunks start anew in every sequence, and rows past the last
    offset are left as they are. What is taken for granted of k and beta stands in the module's docstring.

    Nobody waits for the values of g and cu_seqlens: on a CUDA device an assertion refuses those that can't be, see
    `kernels.gates`.

    Raises:
        RuntimeError: at the next synchronisation, if a log-gate is above 0, or offsets don't rise from 0 to at most T.
    """
    B, tokens, Hv = g.shape
    if k.device.type == "cpu":
        return _prepare_torch(k, g, beta, cu_seqlens)
    g_cumsum = torch.empty_like(g)
    A = torch.empty(B, tokens, Hv, CHUNK, dtype=torch.bfloat16, device=k.device)
    Hq = k.shape[2]
    where = layout(B, tokens, cu_seqlens, beta)
    items = where.pieces(CHUNK, B * tokens) * Hq * -(-Hv // Hq // HEADS)
    _prepare()(
        k.flatten(0, 1), g.flatten(0, 1), beta.flatten(0, 1), where.offsets, g_cumsum.flatten(0, 1), A.flatten(0, 1),
        where.stride, where.sequences, where.tokens_each, items, min(items, CTAS * sm_count(k.device)),
    )  # fmt: skip
    return g_cumsum, A


def _prepare_torch(k, g, beta, cu_seqlens) -> tuple[torch.Tensor, torch.Tensor]:
    if cu_seqlens is not None:
        g_cumsum, A = torch.zeros_like(g), torch.zeros(*g.shape, CHUNK, dtype=torch.bfloat16)
        for begin, end in itertools.pairwise(cu_seqlens.tolist()):
            of = slice(begin, end)
            g_cumsum[:, of], A[:, of] = _prepare_torch(k[:, of], g[:, of], beta[:, of], None)
        return g_cumsum, A
    tokens, group = k.shape[1], g.shape[2] // k.shape[2]
    tail = -tokens % CHUNK
    k = k.float().repeat_interleave(group, dim=2).transpose(1, 2)
    k = pad(k, (0, 0, 0, tail)).unflatten(2, (-1, CHUNK))  # [B,Hv,chunks,64,128]
    g, beta = (pad(x.transpose(1, 2), (0, tail)).unflatten(2, (-1, CHUNK)).unsqueeze(-1) for x in (g, beta))
    g = g.cumsum(3)
    eye = torch.eye(CHUNK)
    strict = (beta * (g - g.mT).tril(-1).exp() * (k @ k.mT)).tril(-1)
    A = torch.linalg.solve_triangular(eye + strict, eye, upper=False, unitriangular=True)
    g, A = (x.flatten(2, 3)[:, :, :tokens].transpose(1, 2) for x in (g, A))
    return g[..., 0].contiguous(), A.bfloat16().contiguous()


def l2norm(x: torch.Tensor) -> torch.Tensor:
    """x [...,128] BF16 with each row divided by √(its squares' sum + 1e-6), as the libraries do it; a new tensor."""
    if x.device.type == "cpu":
        return (x.float() * (x.float().square().sum(-1, keepdim=True) + 1e-6).rsqrt()).bfloat16()
    normalised = torch.empty_like(x)
    _l2norm()(x.view(-1, HEAD_DIM), normalised.view(-1, HEAD_DIM))
    return normalised


@jit(disable_warp_specialized=True, disable_thread_storage_sync=True, enable_fast_math=True)
def _prepare():
    """A CTA takes a chunk and up to HEADS value heads of a key head, then the next, whose loads are on their way."""
    Tn, Hq, Hv, words = T.dynamic("Tn"), T.dynamic("Hq"), T.dynamic("Hv"), T.dynamic("words")

    @T.macro
    def fetch(number, k, g, beta, offsets, stride, sequences, tokens_each, K_shared, item, gates, landed):
        T.call_extern(
            "handle",
            "find_item",
            number,
            T.address_of(offsets[0]),
            stride,
            sequences,
            tokens_each,
            Tn,
            Hq,
            Hv,
            T.address_of(item[0]),
        )
        T.tma_copy(k[item[0] : item[0] + CHUNK, item[2], 0:HEAD_DIM], K_shared, barrier=landed[0])
        T.barrier_arrive(landed[0])
        T.call_extern(
            "handle",
            "load_gates",
            T.address_of(g[0, 0]),
            T.address_of(beta[0, 0]),
            T.Cast("int64", item[0]) * Hv + item[3],
            Hv,
            item[4],
            item[1],
            T.address_of(gates[0]),
        )

    @T.macro
    def store(warp, tiles, A, t0, h):  # a lane of each warp starts the copy, where the code says whose warp it is
        T.tma_copy(tiles[warp, :, :], A[t0 : t0 + CHUNK, h + warp, 0:CHUNK])

    @T.prim_func
    def prepare(
        k: T.Tensor((Tn, Hq, HEAD_DIM), bf16),
        g: T.Tensor((Tn, Hv), fp32),
        beta: T.Tensor((Tn, Hv), fp32),
        offsets: T.Tensor((words,), "int32"),
        g_cumsum: T.Tensor((Tn, Hv), fp32),
        A: T.Tensor((Tn, Hv, CHUNK), bf16),
        stride: T.int32,
        sequences: T.int32,
        tokens_each: T.int32,
        items: T.int32,
        ctas: T.int32,
    ):
        with T.Kernel(ctas, threads=THREADS, prelude=REFUSE + FIND_PIECE + FIND_ITEM + INSTRUCTIONS + INVERT) as cta:
            K_shared = T.alloc_shared((CHUNK, HEAD_DIM), bf16)
            products = T.alloc_shared((PRODUCTS,), fp32, scope="shared")
            tables = T.alloc_shared((TABLES, ROW), fp32, scope="shared")
            tiles = T.alloc_shared((HEADS, CHUNK, CHUNK), bf16)
            KK_frag = T.alloc_fragment((CHUNK, CHUNK), fp32)
            item = T.alloc_local((5,), "int32")  # first token, tokens, key head, first value head, value heads
            gates = T.alloc_local((4,), fp32)
            landed = T.alloc_barrier([THREADS])
            T.annotate_layout({KK_frag: accumulator(CHUNK), tiles: make_swizzled_layout(tiles)})
            T.annotate_min_blocks_per_sm(CTAS)

            heads = T.alloc_var("int32", init=0)
            length = T.alloc_var("int32", init=0)
            first = T.alloc_var("int64", init=0)  # where the heads' gates of this chunk begin
            t0 = T.alloc_var("int32", init=0)
            h = T.alloc_var("int32", init=0)
            tx = T.get_thread_binding()
            T.pdl_trigger()
            T.pdl_sync()
            if tokens_each == 0 and cta == 0:
                T.call_extern("handle", "refuse_offsets", T.address_of(offsets[0]), stride, sequences, Tn)
            fetch(cta, k, g, beta, offsets, stride, sequences, tokens_each, K_shared, item, gates, landed)
            for turn in T.serial(T.ceildiv(items - cta, ctas)):
                length = item[1]
                heads = item[4]
                t0 = item[0]
                h = item[3]
                first = T.Cast("int64", t0) * Hv + h
                T.sync_threads()  # everybody has read the products and the tables before
                T.call_extern("handle", "share_gates", T.address_of(gates[0]), T.address_of(tables[0, 0]))
                T.sync_threads()
                T.call_extern("handle", "sum_gates", T.address_of(tables[0, 0]))
                T.barrier_wait(landed[0], turn % 2)
                T.wgmma_gemm(K_shared, K_shared, KK_frag, transpose_B=True, clear_accum=True)
                T.wait_wgmma(0)
                T.call_extern(
                    "handle", "share_products", T.address_of(KK_frag[0, 0]), T.address_of(products[0]), length
                )
                T.sync_threads()
                if cta + (turn + 1) * ctas < items:
                    number = cta + (turn + 1) * ctas
                    fetch(number, k, g, beta, offsets, stride, sequences, tokens_each, K_shared, item, gates, landed)
                T.call_extern(
                    "handle",
                    "store_sums",
                    T.address_of(tables[0, 0]),
                    T.address_of(g_cumsum[0, 0]),
                    first,
                    Hv,
                    heads,
                    length,
                )
                T.tma_store_wait(0)  # tiles are free
                T.sync_warp()
                if tx // 32 < heads:
                    T.call_extern(
                        "handle",
                        "invert",
                        T.address_of(products[0]),
                        T.address_of(tables[0, 0]),
                        T.address_of(tiles[0, 0, 0]),
                    )
                    T.fence_proxy_async()
                    T.sync_warp()
                    if length < CHUNK:
                        T.call_extern(
                            "handle",
                            "store_rows",
                            T.address_of(tiles[0, 0, 0]),
                            T.address_of(A[0, 0, 0]),
                            first + tx // 32,
                            Hv,
                            length,
                        )
                    elif tx < 32:
                        store(0, tiles, A, t0, h)
                    elif tx < 64:
                        store(1, tiles, A, t0, h)
                    elif tx < 96:
                        store(2, tiles, A, t0, h)
                    else:
                        store(3, tiles, A, t0, h)
            T.tma_store_wait(0)

    return prepare


@jit()
def _l2norm():
    rows, block = T.dynamic("rows"), 32

    @T.prim_func
    def l2norm(x: T.Tensor((rows, HEAD_DIM), bf16), normalised: T.Tensor((rows, HEAD_DIM), bf16)):
        with T.Kernel(T.ceildiv(rows, block), threads=THREADS) as tile:
            x_frag = T.alloc_fragment((block, HEAD_DIM), fp32)
            squares = T.alloc_fragment((block, HEAD_DIM), fp32)
            factor = T.alloc_fragment((block,), fp32)
            T.copy(x[tile * block : (tile + 1) * block, :], x_frag)
            for i, j in T.Parallel(block, HEAD_DIM):
                squares[i, j] = x_frag[i, j] * x_frag[i, j]
            T.reduce_sum(squares, factor, dim=1)
            for i in T.Parallel(block):
                factor[i] = T.rsqrt(factor[i] + 1e-6)
            for i, j in T.Parallel(block, HEAD_DIM):
                x_frag[i, j] *= factor[i]
            T.copy(x_frag, normalised[tile * block : (tile + 1) * block, :])

    return l2norm
