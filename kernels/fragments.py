"""Register fragments by hand: the layouts that the hardware fixes, and the instructions that move and multiply them."""

import tilelang.language as T

from kernels.problem import CHUNK

# PTX that CUDA C++ has no name for, an instruction a function: tests/warp.hpp has the same for a CPU.
INSTRUCTIONS = r"""
namespace gdn {
__device__ __forceinline__ unsigned half2(float low, float high) {
  unsigned packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

__device__ __forceinline__ unsigned bfloat2(float low, float high) {
  unsigned packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

__device__ __forceinline__ unsigned half2_as_bfloat2(unsigned packed) {
  float low, high;
  asm("{ .reg .f16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h; }"
      : "=f"(low), "=f"(high) : "r"(packed));
  return bfloat2(low, high);
}

__device__ __forceinline__ float power2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ void load_matrices(unsigned* to, unsigned from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(from) : "memory");
}

__device__ __forceinline__ void load_transposed_matrices(unsigned* to, unsigned from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(from) : "memory");
}

__device__ __forceinline__ void store_transposed_matrices(unsigned to, const unsigned* from) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
               :: "r"(to), "r"(from[0]), "r"(from[1]), "r"(from[2]), "r"(from[3]) : "memory");
}

__device__ __forceinline__ void store_matrices(unsigned to, const unsigned* from) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
               :: "r"(to), "r"(from[0]), "r"(from[1]), "r"(from[2]), "r"(from[3]) : "memory");
}

// sum [16, 16] += a [16, 16] b [16, 16]
__device__ __forceinline__ void multiply(float* sum, const unsigned* a, const unsigned* b) {
#pragma unroll
  for (int half = 0; half < 2; ++half)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sum[4 * half]), "+f"(sum[4 * half + 1]), "+f"(sum[4 * half + 2]), "+f"(sum[4 * half + 3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[2 * half]), "r"(b[2 * half + 1]));
}
}  // namespace gdn
"""

# A tile [64 tokens, 64 dv] in the 128-byte swizzle, transposed into the accumulator layout of m64n64: of each 8 x 8
# matrix, thread l of warp w gets tokens 2 (l mod 4) and the next, in row dv = 16 w + l / 4 and in row dv + 8. A load
# brings four matrices, two along dv and two along tokens (PTX ISA: ldmatrix, wgmma's register fragments). A second
# warpgroup has the tile behind. A thread computes its address in a tile once, and calls take a number: of a pointer to
# shared memory TileLang assumes that it is stored to, and puts a proxy fence, which waits for loads, before a matmul.
MOVE_TRANSPOSED = r"""
__device__ __forceinline__ unsigned transposed_address(const void* tiles) {
  const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3, tile = threadIdx.x >> 7;
  const int row = lane & 7, dv8 = 2 * warp + ((lane >> 3) & 1), token8 = lane >> 4;
  return (unsigned)__cvta_generic_to_shared(tiles) + tile * 8192 + (token8 * 8 + row) * 128 + ((dv8 ^ row) << 4);
}

__device__ __forceinline__ void load_transposed(unsigned address, void* fragment) {
#pragma unroll
  for (int i = 0; i < 4; ++i) gdn::load_transposed_matrices((unsigned*)fragment + 4 * i, address + i * 2048);
}

__device__ __forceinline__ void store_transposed(const void* fragment, unsigned address) {
#pragma unroll
  for (int i = 0; i < 4; ++i) gdn::store_transposed_matrices(address + i * 2048, (const unsigned*)fragment + 4 * i);
}
"""


def accumulator(rows: int, columns: int = CHUNK) -> T.Fragment:
    """The layout of a wgmma's result [rows, columns], 64 rows a warpgroup (PTX ISA: wgmma, register fragments of D)."""
    return T.Fragment(
        [rows, columns],
        forward_thread_fn=lambda i, j: i // 16 * 32 + i % 8 * 4 + j % 8 // 2,
        forward_index_fn=lambda i, j: j // 8 * 4 + i % 16 // 8 * 2 + j % 2,
    )
