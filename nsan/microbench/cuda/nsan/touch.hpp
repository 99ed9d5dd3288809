// Kernels that touch exactly the tensors that an operation of a network touches, compute as long as it would, and prove
// that they did.
//
// Each version of a tensor's contents has a value, of 32 bit: its word i holds `value + i * kWordStep`. A kernel knows
// the values that it must find in what it reads. What differs goes into what it writes, and into a flag. So nothing can
// be optimised away, and a wrong word shows in all that is computed from it. That each kernel ran, also one whose output
// nobody reads, shows in a tally (tally.hpp).
#pragma once

#include <algorithm>
#include <cstdint>

#include "device.hpp"
#include "interrupt.hpp"
#include "tally.hpp"

namespace nsan {

constexpr std::uint32_t kWordStep = 0x9E3779B1u;  // odd, so that no two words of 2^32 are alike
constexpr unsigned kTouchThreads = 256;
constexpr std::size_t kMostTouched = 12;

// What one thread loads and stores at once.
struct alignas(16) Quad {
  std::uint32_t words[4];
};
constexpr std::uint64_t kQuadBytes = sizeof(Quad);

// Mixes a number into another (finalizer of MurmurHash3); the host follows values with it, kernels choose rows.
NSAN_HD inline std::uint32_t mixed(std::uint32_t into, std::uint32_t number) {
  std::uint32_t x = into ^ (number * 0xCC9E2D51u);
  x ^= x >> 16;
  x *= 0x85EBCA6Bu;
  x ^= x >> 13;
  x *= 0xC2B2AE35u;
  return x ^ (x >> 16);
}

// A tensor as one kernel uses it. Of rows, n_bytes are read in n_bytes / row_bytes of the n_rows that there are.
struct Touched {
  void* at;
  std::uint64_t n_bytes;
  std::uint64_t row_bytes, n_rows;  // 0: from the front
  std::uint32_t found, left;        // the values that are read and written
  bool reads, writes;
};

NSAN_HD inline std::uint64_t quads_of(std::uint64_t n_bytes) { return (n_bytes + kQuadBytes - 1) / kQuadBytes; }

NSAN_HD inline std::uint32_t word_of(std::uint32_t value, std::uint64_t word) {
  return value + static_cast<std::uint32_t>(word) * kWordStep;
}

NSAN_HD inline std::uint8_t byte_of(std::uint32_t value, std::uint64_t byte) {
  return static_cast<std::uint8_t>(word_of(value, byte / 4) >> (8 * (byte % 4)));
}

// Bits that are not as they must be, in one quad of a tensor.
NSAN_HD inline std::uint32_t difference(const Touched& tensor, std::uint64_t quad) {
  const auto* bytes = static_cast<const std::uint8_t*>(tensor.at);
  std::uint32_t bits = 0;
  if ((quad + 1) * kQuadBytes <= tensor.n_bytes || tensor.row_bytes > 0) {
    const Quad loaded = static_cast<const Quad*>(tensor.at)[quad];
    for (unsigned i = 0; i < 4; ++i) bits |= loaded.words[i] ^ word_of(tensor.found, quad * 4 + i);
    return bits;
  }
  for (std::uint64_t byte = quad * kQuadBytes; byte < tensor.n_bytes; ++byte)
    bits |= static_cast<std::uint32_t>(bytes[byte] ^ byte_of(tensor.found, byte));
  return bits;
}

NSAN_HD inline void fill(const Touched& tensor, std::uint64_t quad, std::uint32_t wrong_bits) {
  const std::uint32_t value = tensor.left + wrong_bits;
  if ((quad + 1) * kQuadBytes <= tensor.n_bytes) {
    Quad stored;
    for (unsigned i = 0; i < 4; ++i) stored.words[i] = word_of(value, quad * 4 + i);
    static_cast<Quad*>(tensor.at)[quad] = stored;
    return;
  }
  auto* bytes = static_cast<std::uint8_t*>(tensor.at);
  for (std::uint64_t byte = quad * kQuadBytes; byte < tensor.n_bytes; ++byte) bytes[byte] = byte_of(value, byte);
}

// Where the quad with this number lies: rows follow each other in the order of the words of a text, not in memory.
NSAN_HD inline std::uint64_t place_of(const Touched& tensor, std::uint64_t quad, std::uint32_t seed) {
  if (tensor.row_bytes == 0) return quad;
  const std::uint64_t row_quads = tensor.row_bytes / kQuadBytes;
  const auto drawn = mixed(seed, static_cast<std::uint32_t>(quad / row_quads));
  return drawn % tensor.n_rows * row_quads + quad % row_quads;
}

// Multiplies and adds, without memory; the result is never above 1, which no compiler knows.
NSAN_HD inline float computed(std::uint64_t n_fmas, float start) {
  float x = start;
  for (std::uint64_t i = 0; i < n_fmas; ++i) x = x * 0.75f + 0.25f;
  return x;
}

// Thread t handles quads t, t + n_threads, ... of each tensor: it reads, computes and writes as it goes, as a kernel on
// elements does. A tensor that is changed in place is read and written by the same thread.
struct Touch {
  Touched tensors[kMostTouched];
  unsigned n_tensors;
  std::uint32_t number, seed;    // of the kernel in its run, from 1; of the rows
  std::uint64_t n_quads;         // of the tensor that is used most
  std::uint64_t fmas_per_quad;   // per thread, for each quad number that it handles
  std::uint32_t* wrong;          // gets the number of the first kernel that finds what it must not
  Tally tally;

  // What it adds to the tally: its number, for each quad number and once more.
  std::uint64_t tallied() const { return (n_quads + 1) * number; }

  NSAN_HD void operator()(std::uint64_t thread, std::uint64_t n_threads) const {
    std::uint32_t bits = 0;
    std::uint64_t n_done = thread == 0 ? 1 : 0;
    for (std::uint64_t quad = thread; quad < n_quads; quad += n_threads) {
      for (unsigned i = 0; i < n_tensors; ++i) {
        const Touched& tensor = tensors[i];
        if (tensor.reads && quad < quads_of(tensor.n_bytes)) bits |= difference(tensor, place_of(tensor, quad, seed));
      }
      if (computed(fmas_per_quad, static_cast<float>(quad % 2)) > 1.0f) bits |= 1u;
      for (unsigned i = 0; i < n_tensors; ++i) {
        const Touched& tensor = tensors[i];
        if (tensor.writes && quad < quads_of(tensor.n_bytes)) fill(tensor, quad, bits);
      }
      ++n_done;
    }
    tally.add(thread, n_done * number);
    if (bits != 0 && *wrong == 0) *wrong = number;
  }
};

// The same work under the name that a profiler shows for each phase.
struct ForwardOp : Touch {};
struct BackwardOp : Touch {};
struct UpdateOp : Touch {};

// The CPU's side of it: fills a tensor whole, or looks at one byte of it.
inline void fill_whole(void* at, std::uint64_t n_bytes, std::uint32_t value) {
  const Touched tensor{at, n_bytes, 0, 0, 0, value, false, true};
  for (std::uint64_t quad = 0; quad < quads_of(n_bytes); ++quad) {
    throw_if_interrupted_at(4 * quad);
    fill(tensor, quad, 0);
  }
}

inline bool holds(const void* at, std::uint64_t byte, std::uint32_t value) {
  return static_cast<const std::uint8_t*>(at)[byte] == byte_of(value, byte);
}

// One thread per quad of the largest tensor: thread blocks go through memory from the front to the back.
inline Grid touch_grid(std::uint64_t n_quads) {
  const std::uint64_t most = 0x7FFFFFFF;
  const std::uint64_t blocks = (n_quads + kTouchThreads - 1) / kTouchThreads;
  return {static_cast<unsigned>(std::min(std::max<std::uint64_t>(blocks, 1), most)), kTouchThreads};
}

// How many multiply-adds (2 FLOPs) each quad number gets.
inline std::uint64_t fmas_per_quad(std::uint64_t flops, double scale, std::uint64_t n_quads) {
  const auto n = static_cast<double>(std::max<std::uint64_t>(n_quads, 1));
  const double fmas = static_cast<double>(flops) * scale / 2.0 / n;
  return fmas < 9e18 ? static_cast<std::uint64_t>(fmas + 0.5) : UINT64_MAX;
}

}  // namespace nsan

NSAN_KERNEL(forward_op, nsan::ForwardOp);
NSAN_KERNEL(backward_op, nsan::BackwardOp);
NSAN_KERNEL(update_op, nsan::UpdateOp);
