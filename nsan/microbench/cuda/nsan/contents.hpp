// What the host knows of the tensors of a tape without looking: their contents, and which of them lie at the CPU.
#pragma once

#include <unistd.h>

#include <cstdint>
#include <vector>

#include "memory.hpp"
#include "record.hpp"
#include "touch.hpp"

namespace nsan {

// The value of each tensor's contents (touch.hpp): whatever is written anew gets another one, so that what was there
// before, or belongs to another tensor, is not taken for it.
class Contents {
 public:
  Contents(std::uint64_t seed, std::size_t n_tensors)
      : seed_(mixed(static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32))),
        values_(n_tensors),
        is_written_(n_tensors, false) {}

  std::uint32_t of(std::size_t tensor) const { return values_[tensor]; }
  bool is_written(std::size_t tensor) const { return is_written_[tensor]; }

  // The CPU or a kernel writes it whole: the value that is there from now on.
  std::uint32_t write(std::size_t tensor) {
    is_written_[tensor] = true;
    return values_[tensor] = mixed(seed_, ++n_writes_);  // of 2^32 writes no two get the same
  }

 private:
  std::uint32_t seed_, n_writes_ = 0;
  std::vector<std::uint32_t> values_;
  std::vector<bool> is_written_;
};

// Tensors that the CPU has filled and no kernel has touched since: all their pages lie at the CPU.
class AtCpu {
 public:
  explicit AtCpu(std::size_t n_tensors) : is_there_(n_tensors, false) {}
  void fills(std::size_t tensor) { is_there_[tensor] = true; }
  // Whether a kernel that touches the tensor is the first one.
  bool leaves(std::size_t tensor) {
    const bool was_there = is_there_[tensor];
    is_there_[tensor] = false;
    return was_there;
  }

 private:
  std::vector<bool> is_there_;
};

// Bytes that come to the GPU with a tensor that lay at the CPU: at least the pages that are all its own, at most those
// that it shares, too.
inline Expected arrival(std::size_t phase, std::size_t allocation, const Tensor& tensor, std::uint64_t page) {
  const auto start = static_cast<std::uint64_t>(reinterpret_cast<std::uintptr_t>(tensor.at));
  const std::uint64_t end = start + tensor.n_bytes;
  const std::uint64_t first = (start + page - 1) / page, last = end / page;
  const std::uint64_t least = last > first ? (last - first) * page : 0;
  return {phase, allocation, "htod", least, (end + page - 1) / page * page - start / page * page};
}

inline std::uint64_t page_bytes() { return static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE)); }

}  // namespace nsan
