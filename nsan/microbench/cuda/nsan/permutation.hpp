// Numbers that look random and can be told again from a seed and a place: on the CPU and on the GPU alike.
#pragma once

#include <cstdint>

#include "device.hpp"

namespace nsan {

// The finalizer of SplitMix64 over a counter: each bit depends on every bit of the place and of the seed.
NSAN_HD inline std::uint64_t mixed(std::uint64_t seed, std::uint64_t place) {
  std::uint64_t x = (seed * 0xD1342543DE82EF95ull) ^ (place + 0x9E3779B97F4A7C15ull);
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

// Every number below n once, in a shuffled order that needs no memory: a Feistel network over the next power of four,
// walked until it comes back below n.
class Permutation {
 public:
  Permutation(std::uint64_t n, std::uint64_t seed) : n_(n), seed_(seed) {
    while (half_bits_ < 32 && (1ull << (2 * half_bits_)) < n) ++half_bits_;
  }

  NSAN_HD std::uint64_t operator()(std::uint64_t place) const {
    do place = once(place);
    while (place >= n_);
    return place;
  }

 private:
  static constexpr unsigned kRounds = 4;

  NSAN_HD std::uint64_t once(std::uint64_t place) const {
    const std::uint64_t mask = (1ull << half_bits_) - 1;
    std::uint64_t left = place >> half_bits_, right = place & mask;
    for (unsigned round = 0; round < kRounds; ++round) {
      const std::uint64_t next = left ^ (mixed(seed_ + round, right) & mask);
      left = right;
      right = next;
    }
    return left << half_bits_ | right;
  }

  std::uint64_t n_, seed_;
  unsigned half_bits_ = 1;
};

}  // namespace nsan
