// The memory of a tally (tally.hpp), and a word beside it that kernels set where they find what they must not.
#pragma once

#include <cstdint>
#include <numeric>
#include <vector>

#include "errors.hpp"
#include "program.hpp"
#include "tally.hpp"

namespace nsan {

// To be made before the free memory of the GPU is planned with, so that it is none of it.
template <class Device>
class TallyMemory {
 public:
  explicit TallyMemory(Run<Device>& run) : held_(run) {
    const std::vector<std::uint64_t> zeroes(kTallySlots + 1);
    run.device.copy(held_.at, zeroes.data(), kBytes);
  }

  Tally tally() const { return Tally{held_.at}; }
  // 0, until a kernel writes a number there.
  std::uint32_t* wrong() const { return reinterpret_cast<std::uint32_t*>(held_.at + kTallySlots); }

  struct Sums {
    std::uint64_t total;
    std::uint32_t wrong;
  };
  // Once the GPU is idle.
  Sums read() const {
    std::vector<std::uint64_t> words(kTallySlots + 1);
    held_.run.device.copy(words.data(), held_.at, kBytes);
    const auto wrong = static_cast<std::uint32_t>(words.back());  // the GPU, too, has the low half first
    words.pop_back();
    return {std::accumulate(words.begin(), words.end(), std::uint64_t{0}), wrong};
  }

 private:
  static constexpr std::uint64_t kBytes = (kTallySlots + 1) * sizeof(std::uint64_t);

  struct Held {
    explicit Held(Run<Device>& of) : run(of), at(static_cast<std::uint64_t*>(of.device.allocate_device(kBytes))) {
      allocation = of.record.allocated("tally of kernels", "buffer", false, at, kBytes);
    }
    Held(const Held&) = delete;
    Held& operator=(const Held&) = delete;
    ~Held() {
      try {
        run.device.free(at);
        run.record.freed(allocation);
      } catch (const Ended&) {  // the driver has failed before, and that was reported
      }
    }
    Run<Device>& run;
    std::uint64_t* at;
    std::size_t allocation = 0;
  };

  Held held_;
};

}  // namespace nsan
