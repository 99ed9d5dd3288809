// What the operations of a tape add up to, by step and at the peak: sums over the tape, nothing of a GPU.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "caching_allocator.hpp"
#include "device.hpp"
#include "json.hpp"
#include "tape.hpp"

namespace nsan {

// As nsan.model.networks.training counts them: a tensor that is changed in place is read and written.
struct StepCounts {
  std::size_t step = 0;
  std::uint64_t n_operations = 0, n_kernels = 0, n_tensors = 0;
  std::uint64_t read_bytes = 0, written_bytes = 0, peak_bytes = 0, flops = 0;
};

inline std::uint64_t read_bytes(const TapeKernel& kernel) {
  std::uint64_t sum = 0;
  for (const Reading& each : kernel.reads) sum += each.n_bytes;
  return sum;
}

inline std::uint64_t written_bytes(const Tape& tape, const TapeKernel& kernel) {
  std::uint64_t sum = 0;
  for (const std::size_t tensor : kernel.writes) sum += tape.tensors[tensor].n_bytes;
  return sum;
}

inline std::vector<StepCounts> count_steps(const Tape& tape) {
  std::vector<StepCounts> steps;
  std::uint64_t live = 0;
  for (const Operation& operation : tape.operations) {
    if (operation.kind == Operation::kStep) steps.emplace_back().step = operation.which;
    if (operation.kind == Operation::kCreate) live += tape.tensors[operation.which].n_bytes;
    if (operation.kind == Operation::kDrop) live -= tape.tensors[operation.which].n_bytes;
    if (steps.empty()) continue;
    StepCounts& step = steps.back();
    step.n_operations += 1;
    step.n_tensors += operation.kind == Operation::kCreate;
    step.peak_bytes = std::max(step.peak_bytes, live);
    if (operation.kind != Operation::kKernel) continue;
    const TapeKernel& kernel = tape.kernels[operation.which];
    step.n_kernels += 1;
    step.read_bytes += read_bytes(kernel);
    step.written_bytes += written_bytes(tape, kernel);
    step.flops += kernel.flops;
  }
  return steps;
}

// Most bytes that are alive at once, each tensor counted as `size` says.
inline std::uint64_t peak_bytes(const Tape& tape, const std::function<std::uint64_t(std::uint64_t)>& size) {
  std::uint64_t live = 0, peak = 0;
  for (const Operation& operation : tape.operations) {
    if (operation.kind == Operation::kCreate) live += size(tape.tensors[operation.which].n_bytes);
    if (operation.kind == Operation::kDrop) live -= size(tape.tensors[operation.which].n_bytes);
    peak = std::max(peak, live);
  }
  return peak;
}

inline std::uint64_t peak_tensor_bytes(const Tape& tape) {
  return peak_bytes(tape, [](std::uint64_t n_bytes) { return n_bytes; });
}

// Each tensor as the VA blocks that it fills or begins: what tensors of their own take of the GPU where the driver does
// not pack small managed allocations into one block, which is not known.
inline std::uint64_t peak_whole_blocks_bytes(const Tape& tape) {
  return peak_bytes(tape, [](std::uint64_t n_bytes) { return (n_bytes + kVaBlock - 1) / kVaBlock * kVaBlock; });
}

// An upper bound of the GPU memory that tensors of their own take: each whole VA blocks, and one for its alignment.
inline std::uint64_t peak_block_bytes(const Tape& tape) {
  return peak_bytes(tape, [](std::uint64_t n_bytes) { return (n_bytes / kVaBlock + 2) * kVaBlock; });
}

// What a caching allocator reserves at most where it gets segments from `take`.
inline std::uint64_t peak_reserved_bytes(const Tape& tape, CachingAllocator::Take take) {
  CachingAllocator cache(std::move(take));
  std::vector<std::uint64_t> vas(tape.tensors.size());
  for (const Operation& operation : tape.operations) {
    if (operation.kind == Operation::kCreate)
      vas[operation.which] = cache.allocate(tape.tensors[operation.which].n_bytes);
    if (operation.kind == Operation::kDrop) cache.free(vas[operation.which]);
  }
  return cache.peak_reserved_bytes();
}

// The same for a GPU, before the order of its addresses is known: of equal free blocks the lowest is taken, so that the
// order changes where tensors lie and, by some per cent, what is reserved. The larger of both orders.
inline std::uint64_t peak_reserved_bytes(const Tape& tape) {
  AscendingPlaces places;
  std::uint64_t last = std::uint64_t{1} << 47;
  const auto ascending = [&places](std::uint64_t n_bytes, bool) { return places(n_bytes); };
  const auto descending = [&last](std::uint64_t n_bytes, bool) { return last -= n_bytes; };
  return std::max(peak_reserved_bytes(tape, ascending), peak_reserved_bytes(tape, descending));
}

// A fact as a number where it is one.
inline void add_fact(Json& json, const std::string& key, const std::string& value) {
  const bool is_number = value.size() <= 18 && value.find_first_not_of("0123456789") == std::string::npos;
  is_number ? json.add(key, std::stoull(value)) : json.add(key, value);
}

// What a program says of the tape that it plays.
inline void add_counts(Json& json, const Tape& tape) {
  Json facts, steps = Json::list();
  for (const auto& [key, value] : tape.facts) add_fact(facts, key, value);
  std::uint64_t n_kernels = 0;
  for (const StepCounts& each : count_steps(tape)) {
    Json step;
    step.add("step", each.step).add("n_operations", each.n_operations).add("n_kernels", each.n_kernels);
    step.add("n_tensors", each.n_tensors).add("read_bytes", each.read_bytes);
    step.add("written_bytes", each.written_bytes).add("peak_bytes", each.peak_bytes).add("flops", each.flops);
    steps.add("", step);
    n_kernels += each.n_kernels;
  }
  json.add("network", tape.network).add("facts", facts).add("n_steps", tape.n_steps).add("n_kernels", n_kernels);
  json.add("peak_tensor_bytes", peak_tensor_bytes(tape)).add("per_step", steps);
}

}  // namespace nsan
