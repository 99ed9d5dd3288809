// What the host knows of the tensors of a tape without looking: their contents, and which of them lie at the CPU.
#pragma once

#include <cstdint>
#include <vector>

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

}  // namespace nsan
