// What a run knows of itself, written as tables beside its trace: allocations with names and lives, phases, bytes that
// are certain. Times are ns of this process's steady clock since the record was begun.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "device.hpp"

namespace nsan {

struct Allocation {
  std::string name, role;
  bool managed;
  std::uint64_t va, n_bytes;
  std::int64_t alloc_ns, free_ns = -1;  // -1: lived to the end
};

struct Phase {
  std::string name;
  int iteration;  // from 0; -1: not part of one
  std::int64_t start_ns, end_ns = -1;  // -1: it was not left
};

// Whether no other allocation can lie in a VA block of this one: only then is certain what migrates of it, since the
// driver's prefetcher takes pages of neighbours in a block.
inline bool fills_va_blocks(const Allocation& allocation) {
  return allocation.va % kVaBlock == 0 && allocation.n_bytes % kVaBlock == 0;
}

// Bytes that migrate in a phase, of one allocation and in one direction, as far as they are certain.
struct Expected {
  std::size_t phase, allocation;
  const char* direction;  // "htod" or "dtoh"
  std::uint64_t least_bytes, most_bytes;
};

class Record {
 public:
  Record() : begun_(std::chrono::steady_clock::now()) {
    const auto since = std::chrono::system_clock::now().time_since_epoch();
    start_utc_ns = std::chrono::duration_cast<std::chrono::nanoseconds>(since).count();
  }

  std::int64_t now_ns() const {
    const auto passed = std::chrono::steady_clock::now() - begun_;
    return std::chrono::duration_cast<std::chrono::nanoseconds>(passed).count();
  }
  std::size_t allocated(const std::string& name, const std::string& role, bool managed, const void* at,
                        std::uint64_t n_bytes) {
    const auto va = static_cast<std::uint64_t>(reinterpret_cast<std::uintptr_t>(at));
    allocations.push_back({name, role, managed, va, n_bytes, now_ns()});
    return allocations.size() - 1;
  }
  void freed(std::size_t allocation) { allocations.at(allocation).free_ns = now_ns(); }
  std::size_t begin(const std::string& name, int iteration) {
    phases.push_back({name, iteration, now_ns()});
    return phases.size() - 1;
  }
  void end(std::size_t phase) { phases.at(phase).end_ns = now_ns(); }
  void expect(const Expected& bytes) { expected.push_back(bytes); }

  std::int64_t start_utc_ns;  // time 0 of the others, since the Unix epoch
  std::vector<Allocation> allocations;
  std::vector<Phase> phases;
  std::vector<Expected> expected;

 private:
  std::chrono::steady_clock::time_point begun_;
};

}  // namespace nsan
