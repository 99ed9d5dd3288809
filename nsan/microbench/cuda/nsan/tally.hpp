// What kernels add up beside their work, in memory of the GPU itself: each adds what it wrote or read, so that a kernel
// of any iteration that did not run is missing in the sum. Managed memory would be touched by it; this is cudaMalloc's.
#pragma once

#include <cstdint>

#include "device.hpp"

namespace nsan {

// Many slots, so that threads seldom add to the same one at the same time.
constexpr std::uint64_t kTallySlots = 4096;
constexpr unsigned kWholeWarp = 0xffffffffu;

struct Tally {
  std::uint64_t* slots;
  NSAN_HD void add(std::uint64_t thread, std::uint64_t amount) const {
    std::uint64_t* const slot = slots + thread % kTallySlots;
#ifdef __CUDA_ARCH__
    static_assert(sizeof(unsigned long long) == sizeof(std::uint64_t), "what atomicAdd takes");
    auto sum = static_cast<unsigned long long>(amount);
    // A whole warp adds up first: an atomic for each thread could cost a kernel without faults more than its work.
    const unsigned lanes = __activemask();
    if (lanes == kWholeWarp) {
      for (unsigned half = 16; half > 0; half /= 2) sum += __shfl_down_sync(kWholeWarp, sum, half);
      if (threadIdx.x % 32 != 0) return;
    }
    atomicAdd(reinterpret_cast<unsigned long long*>(slot), sum);
#else
    *slot += amount;
#endif
  }
};

// The sum over the iterations 0 to n - 1 of base + iteration * step.
inline std::uint64_t over_iterations(std::uint64_t n, std::uint64_t base, std::uint64_t step) {
  const std::uint64_t pairs = n == 0 ? 0 : n % 2 == 0 ? n / 2 * (n - 1) : (n - 1) / 2 * n;
  return n * base + pairs * step;
}

}  // namespace nsan
