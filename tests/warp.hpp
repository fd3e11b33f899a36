// Device code on a CPU: a thread for each of a warp's lanes, and what they do together through memory that they share.
// Stands in for the names that CUDA gives device code.
#include <algorithm>
#include <barrier>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

#define __device__
#define __forceinline__ inline
using std::max;
using std::min;

struct Index { int x; };
inline thread_local Index threadIdx;
inline Index blockDim{32};
inline std::barrier<> in_step{32};
inline uint32_t given[32];

// Returns what lane 9 does, as good as any.
inline int run_warp(const std::function<int()>& body) {
  int returned = 0;
  std::vector<std::thread> lanes;
  for (int lane = 0; lane < 32; ++lane)
    lanes.emplace_back([&, lane] {
      threadIdx.x = lane;
      const int own = body();
      if (lane == 9) returned = own;
    });
  for (auto& lane : lanes) lane.join();
  return returned;
}

// What every lane gives is there for all until the barrier after `use`.
template <class Value, class Use> inline void together(Value value, Use use) {
  static_assert(sizeof(Value) == sizeof(uint32_t));
  memcpy(&given[threadIdx.x], &value, sizeof(value));
  in_step.arrive_and_wait();
  use();
  in_step.arrive_and_wait();
}

inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline float __shfl_sync(unsigned, float value, int from) {
  together(value, [&] { memcpy(&value, &given[from], sizeof(value)); });
  return value;
}
inline float __shfl_up_sync(unsigned all, float value, int distance) {
  return __shfl_sync(all, value, threadIdx.x < distance ? threadIdx.x : threadIdx.x - distance);
}
inline unsigned __ballot_sync(unsigned, bool vote) {
  unsigned votes = 0;
  together<uint32_t>(vote, [&] { for (int lane = 0; lane < 32; ++lane) votes |= given[lane] << lane; });
  return votes;
}
inline int __syncthreads_or(int condition) { return __ballot_sync(~0u, condition != 0) != 0; }
