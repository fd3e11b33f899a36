// Device code on a CPU: a thread for each of a CTA's, and what warps do together through memory that they share.
//
// Stands in for the names that CUDA gives device code, and for the PTX that kernels.fragments has in functions of one
// instruction each. Layouts of fragments are those of the PTX ISA (ldmatrix, stmatrix, mma.m16n8k16).
#include <algorithm>
#include <barrier>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

#define __device__
#define __forceinline__ inline
using std::max;
using std::min;

struct float4 { float x, y, z, w; };
struct uint4 { unsigned x, y, z, w; };
struct float2 { float x, y; };
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

struct Index { int x; };
inline thread_local Index threadIdx;
inline Index blockDim{32};
alignas(128) inline char shared_memory[1 << 16];
struct Warp {
  std::barrier<> barrier{32};
  uint32_t values[32][8];
};
inline Warp warps[8];
inline Warp& warp() { return warps[threadIdx.x / 32]; }
inline int lane() { return threadIdx.x % 32; }

inline void run_cta(int threads, const std::function<void()>& body) {
  std::vector<std::thread> started;
  for (int t = 0; t < threads; ++t)
    started.emplace_back([&, t] {
      threadIdx.x = t;
      body();
    });
  for (auto& thread : started) thread.join();
}

inline void __syncwarp() { warp().barrier.arrive_and_wait(); }
inline unsigned __cvta_generic_to_shared(const void* pointer) { return (const char*)pointer - shared_memory; }
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }

// What every lane gives is there for all until the barrier after `use`.
template <class Use> inline void together(std::initializer_list<uint32_t> given, Use use) {
  std::copy(given.begin(), given.end(), warp().values[lane()]);
  __syncwarp();
  use(warp().values);
  __syncwarp();
}

inline float bits_as_float(uint32_t bits) { float x; memcpy(&x, &bits, 4); return x; }
inline uint32_t float_as_bits(float x) { uint32_t bits; memcpy(&bits, &x, 4); return bits; }
inline float __uint_as_float(uint32_t bits) { return bits_as_float(bits); }
inline float half_as_float(uint16_t bits) { _Float16 x; memcpy(&x, &bits, 2); return x; }
inline uint16_t float_as_half(float x) { _Float16 half = x; uint16_t bits; memcpy(&bits, &half, 2); return bits; }
inline uint16_t float_as_bfloat(float x) {
  const uint32_t bits = float_as_bits(x);
  return std::isnan(x) ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;  // to nearest, ties to even
}
inline uint16_t half_of(uint32_t packed, int which) { return which ? packed >> 16 : packed & 0xffff; }

inline float __shfl_sync(unsigned, float value, int from) {
  together({float_as_bits(value)}, [&](auto& values) { value = bits_as_float(values[from][0]); });
  return value;
}
inline float __shfl_up_sync(unsigned all, float value, int distance) {
  return __shfl_sync(all, value, lane() < distance ? lane() : lane() - distance);
}
inline unsigned __ballot_sync(unsigned, bool vote) {
  unsigned votes = 0;
  together({vote}, [&](auto& values) { for (int l = 0; l < 32; ++l) votes |= values[l][0] << l; });
  return votes;
}

inline int __syncthreads_or(int condition) { return __ballot_sync(~0u, condition != 0) != 0; }  // of a CTA of one warp

namespace gdn {
inline unsigned half2(float low, float high) { return float_as_half(low) | (unsigned)float_as_half(high) << 16; }
inline unsigned bfloat2(float low, float high) { return float_as_bfloat(low) | (unsigned)float_as_bfloat(high) << 16; }
inline unsigned half2_as_bfloat2(unsigned packed) {
  return bfloat2(half_as_float(half_of(packed, 0)), half_as_float(half_of(packed, 1)));
}
inline float power2(float x) { return std::exp2(x); }

// Element (row, column) of an 8 x 8 matrix is half `column % 2` of lane 4 row + column / 2. Lanes 8 m to 8 m + 7 give
// the addresses of matrix m's rows.
inline void aligned(unsigned address) {
  if (address % 16) std::puts("a row of a matrix is not aligned to 16 bytes"), std::abort();
}
inline void load_matrices(unsigned* to, unsigned from, bool transposed) {
  aligned(from);
  together({from}, [&](auto& rows) {
    for (int m = 0; m < 4; ++m) {
      uint16_t halves[2];
      for (int which = 0; which < 2; ++which) {
        int row = lane() / 4, column = lane() % 4 * 2 + which;
        if (transposed) std::swap(row, column);
        memcpy(&halves[which], shared_memory + rows[8 * m + row][0] + 2 * column, 2);
      }
      to[m] = halves[0] | (unsigned)halves[1] << 16;
    }
  });
}
inline void load_matrices(unsigned* to, unsigned from) { load_matrices(to, from, false); }
inline void load_transposed_matrices(unsigned* to, unsigned from) { load_matrices(to, from, true); }
inline void store_matrices(unsigned to, const unsigned* from, bool transposed) {
  aligned(to);
  together({to}, [&](auto& rows) {
    for (int m = 0; m < 4; ++m)
      for (int which = 0; which < 2; ++which) {
        const uint16_t half = half_of(from[m], which);
        int row = lane() / 4, column = lane() % 4 * 2 + which;
        if (transposed) std::swap(row, column);
        memcpy(shared_memory + rows[8 * m + row][0] + 2 * column, &half, 2);
      }
  });
}
inline void store_matrices(unsigned to, const unsigned* from) { store_matrices(to, from, false); }
inline void store_transposed_matrices(unsigned to, const unsigned* from) { store_matrices(to, from, true); }

// sum [16, 16] += a [16, 16] b [16, 16]: two of mma.m16n8k16.
inline void multiply(float* sum, const unsigned* a, const unsigned* b) {
  together({a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3]}, [&](auto& values) {
    for (int n8 = 0; n8 < 2; ++n8)
      for (int i = 0; i < 4; ++i) {
        const int row = lane() / 4 + i / 2 * 8, column = lane() % 4 * 2 + i % 2;
        float total = sum[4 * n8 + i];
        for (int k = 0; k < 16; ++k) {
          const uint32_t left = values[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2];
          const uint32_t right = values[column * 4 + k % 8 / 2][4 + 2 * n8 + k / 8];
          total += half_as_float(half_of(left, k % 2)) * half_as_float(half_of(right, k % 2));
        }
        sum[4 * n8 + i] = total;
      }
  });
}
}  // namespace gdn
