// Bytes that must migrate in a phase of uvm_bench, as far as they are certain.
//
// A page lies nowhere, on the CPU or on the GPU; who touches it first populates it without a copy, who touches it next
// has it migrated, whole pages, once. So:
//   the CPU writes what lies nowhere        nothing migrates
//   a kernel touches what lies nowhere      nothing migrates
//   a kernel touches what lies on the CPU   all pages that it touches come to the GPU; the driver's prefetcher may
//                                           bring more of the array, never more than all of it
//   a kernel touches them again             nothing migrates
//   the CPU reads what lies on the GPU      all of it comes back, if kernels touched all of it
// That holds without hints, where everything fits into the memory of the GPU. Not certain, and left out, are
//   an array that shares a VA block with another one: the prefetcher takes pages of neighbours in a block
//   an array that the CPU writes again after a kernel touched it: the driver may take it for thrashing, and pin or
//   map pages instead of migrating them
//   tensors of a caching allocator: they share segments, whose pages lie where an earlier tensor left them
#pragma once

#include <cstdint>

#include "record.hpp"

namespace nsan {

class Migrations {
 public:
  Migrations(Record& record, std::size_t allocation, bool is_certain)
      : record_(&record),
        allocation_(allocation),
        is_certain_(is_certain && fills_va_blocks(record.allocations[allocation])) {}

  void cpu_writes(std::size_t phase) {
    if (where_ == Where::kGpu) is_certain_ = false;
    nothing(phase);
    where_ = Where::kCpu;
  }

  void kernel_touches(std::size_t phase, std::uint64_t least_bytes) {
    const std::uint64_t all = record_->allocations[allocation_].n_bytes;
    if (where_ == Where::kCpu) {
      move(phase, "htod", least_bytes, all);
      move(phase, "dtoh", 0, 0);
    } else {
      nothing(phase);
    }
    where_ = Where::kGpu;
  }

  // After kernels that touched all of it.
  void cpu_reads(std::size_t phase) {
    const std::uint64_t all = record_->allocations[allocation_].n_bytes;
    move(phase, "htod", 0, 0);
    if (where_ == Where::kGpu) move(phase, "dtoh", all, all);
    where_ = Where::kCpu;
  }

 private:
  enum class Where { kNowhere, kCpu, kGpu };

  void nothing(std::size_t phase) {
    move(phase, "htod", 0, 0);
    move(phase, "dtoh", 0, 0);
  }
  void move(std::size_t phase, const char* direction, std::uint64_t least_bytes, std::uint64_t most_bytes) {
    if (is_certain_) record_->expect({phase, allocation_, direction, least_bytes, most_bytes});
  }

  Record* record_;
  std::size_t allocation_;
  bool is_certain_;
  Where where_ = Where::kNowhere;
};

}  // namespace nsan
