// Managed memory for the tensors of a run: each by cudaMallocManaged of its own, or as blocks of a caching allocator
// over managed segments. What was allocated stands in the record, under the names of tensors or of segments.
#pragma once

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "axes.hpp"
#include "caching_allocator.hpp"
#include "errors.hpp"
#include "footprint.hpp"
#include "record.hpp"
#include "tables.hpp"

namespace nsan {

struct Tensor {
  void* at = nullptr;
  std::uint64_t n_bytes = 0;
  std::size_t id = 0;  // its place in the order in which the memory made tensors
};

// One entry of the history of the caching allocator.
struct HistoryEntry {
  std::int64_t time_ns;
  HistoryAction action;
  std::uint64_t va, n_bytes;
  std::string tensor;  // empty: of no tensor, as where the cache is emptied
};

template <class Device>
class Memory {
 public:
  Memory(Device& device, Record& record, AllocatorKind kind, Limit limit = {})
      : device_(device),
        record_(record),
        kind_(kind),
        limit_(std::move(limit)),
        cache_([this](std::uint64_t n_bytes, bool is_small) { return take_segment(n_bytes, is_small); },
               [this](std::uint64_t va) { give_back(va); },
               [this](HistoryAction action, std::uint64_t va, std::uint64_t n_bytes) { note(action, va, n_bytes); }) {}

  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  // Frees what is left, also when a failure ends the run: an error of the driver has been reported by then.
  ~Memory() {
    while (!held_.empty()) {
      try {
        give_back(held_.begin()->first);
      } catch (const std::exception&) {
        held_.erase(held_.begin());
      }
    }
  }

  Tensor allocate(const std::string& name, const std::string& role, std::uint64_t n_bytes) {
    if (n_bytes == 0) throw failed("tensor " + name + " has no bytes: there is nothing to allocate");
    Tensor tensor{nullptr, n_bytes, names_.size()};
    if (kind_ == AllocatorKind::kRaw) {
      tensor.at = take(name, role, n_bytes);
    } else {
      of_ = name;
      tensor.at = pointer(allocate_cached(name, n_bytes));
    }
    names_.push_back(name);
    live_[address(tensor.at)] = tensor.id;
    return tensor;
  }

  void free(const Tensor& tensor) {
    const auto at = live_.find(address(tensor.at));
    if (at == live_.end() || at->second != tensor.id)
      throw failed("tensor " + name_of(tensor) + " is not allocated: free it once");
    if (kind_ == AllocatorKind::kRaw) {
      give_back(at->first);
    } else {
      of_ = names_[tensor.id];
      cache_.free(at->first);
    }
    live_.erase(at);
  }

  // torch.cuda.empty_cache: nothing to do where nothing is cached.
  void empty_cache() {
    of_.clear();
    cache_.empty_cache();
  }

  // Where the record has the memory of a tensor: its own, or the segment that it lies in.
  std::size_t allocation_of(const Tensor& tensor) const {
    auto after = held_.upper_bound(address(tensor.at));
    if (after == held_.begin()) throw failed("tensor " + name_of(tensor) + " is not allocated");
    return std::prev(after)->second;
  }

  const CachingAllocator& cache() const { return cache_; }
  const std::vector<HistoryEntry>& history() const { return history_; }

  // history.csv: what the caching allocator did. blocks.csv: the segments and blocks that it holds now. Nothing is
  // written for memory without a cache.
  void write_history(const std::filesystem::path& folder) const {
    if (kind_ == AllocatorKind::kRaw) return;
    write(folder / "history.csv", history_csv());
    write(folder / "blocks.csv", blocks_csv());
  }

  std::string history_csv() const {
    std::string text = "sequence,time_ns,action,va,bytes,stream,pool,tensor\n";
    std::size_t sequence = 0;
    for (const HistoryEntry& entry : history_) {
      const bool has_va = entry.action != HistoryAction::kOom;
      text += std::to_string(sequence++) + ',' + std::to_string(entry.time_ns) + ',' + action_name(entry.action) + ',' +
              (has_va ? std::to_string(entry.va) : "") + ',' + std::to_string(entry.n_bytes) + ",0,\"0,0\"," +
              (entry.tensor.empty() ? "" : csv_text(entry.tensor)) + '\n';
    }
    return text;
  }

  std::string blocks_csv() const {
    std::map<std::uint64_t, CachingAllocator::Segment> segments;
    for (const auto& segment : cache_.segments()) segments[segment.va] = segment;
    std::string text = "segment_va,segment_bytes,size_class,va,bytes,requested_bytes,state,tensor\n";
    for (const auto& block : cache_.blocks()) {
      const auto& segment = segments.at(block.segment_va);
      text += std::to_string(segment.va) + ',' + std::to_string(segment.n_bytes) + ',' +
              (segment.is_small ? "small" : "large") + ',' + std::to_string(block.va) + ',' +
              std::to_string(block.n_bytes) + ',' + std::to_string(block.requested_bytes) + ',' +
              (block.is_allocated ? "active_allocated," + csv_text(names_[live_.at(block.va)]) : "inactive,") + '\n';
    }
    return text;
  }

 private:
  static std::uint64_t address(const void* at) {
    return static_cast<std::uint64_t>(reinterpret_cast<std::uintptr_t>(at));
  }
  static void* pointer(std::uint64_t va) { return reinterpret_cast<void*>(static_cast<std::uintptr_t>(va)); }

  static void write(const std::filesystem::path& path, const std::string& text) {
    const std::filesystem::path scratch = path.string() + ".partial";
    std::ofstream file(scratch, std::ios::binary);
    file << text;
    file.close();
    std::error_code error;
    if (file) std::filesystem::rename(scratch, path, error);
    if (!file || error) {
      std::filesystem::remove(scratch, error);
      throw failed("cannot write " + path.string() + ": choose another folder with --out");
    }
  }

  std::string name_of(const Tensor& tensor) const {
    return tensor.id < names_.size() ? names_[tensor.id] : "number " + std::to_string(tensor.id);
  }

  // Managed memory of the driver's, recorded. What could leave the machine without memory is not asked for.
  void* take(const std::string& name, const std::string& role, std::uint64_t n_bytes) {
    if (n_bytes > limit_.bytes || held_bytes_ > limit_.bytes - n_bytes)
      throw refused(name + " would take " + size_text(n_bytes) + " of managed memory beside " + size_text(held_bytes_) +
                        ", more than the " + size_text(limit_.bytes) + " that " + limit_.of,
                    WayOut::kLessMemory);
    void* at = device_.allocate_managed(n_bytes);
    held_bytes_ += n_bytes;
    held_[address(at)] = record_.allocated(name, role, true, at, n_bytes);
    return at;
  }

  void give_back(std::uint64_t va) {
    const auto at = held_.find(va);
    device_.free(pointer(va));
    held_bytes_ -= record_.allocations.at(at->second).n_bytes;
    record_.freed(at->second);
    held_.erase(at);
  }

  // For the cache, whose answer to a refusal is to give back what it holds: so the reason is kept, not thrown.
  std::uint64_t take_segment(std::uint64_t n_bytes, bool is_small) {
    const std::string name =
        "segment " + std::to_string(cache_.n_segments_made() + 1) + (is_small ? " (small)" : " (large)");
    try {
      return address(take(name, "segment", n_bytes));
    } catch (const Ended& refusal) {
      if (refusal.status() != kFailed && refusal.status() != kRefused) throw;
      refusal_ = refusal.what();
      is_beyond_limit_ = refusal.status() == kRefused;
      return 0;
    }
  }

  std::uint64_t allocate_cached(const std::string& name, std::uint64_t n_bytes) {
    refusal_.clear();
    try {
      return cache_.allocate(n_bytes);
    } catch (const Ended& end) {
      const std::string why = refusal_.empty() ? "" : (is_beyond_limit_ ? "; " : "; the driver said: ") + refusal_;
      throw Ended(refusal_.empty() || !is_beyond_limit_ ? end.status() : kRefused,
                  "tensor " + name + ": " + end.what() + why, end.way_out());
    }
  }

  void note(HistoryAction action, std::uint64_t va, std::uint64_t n_bytes) {
    history_.push_back({record_.now_ns(), action, va, n_bytes, of_});
  }

  Device& device_;
  Record& record_;
  const AllocatorKind kind_;
  const Limit limit_;
  std::uint64_t held_bytes_ = 0;               // of the driver's
  std::map<std::uint64_t, std::size_t> held_;  // memory of the driver's by address: its place in the record
  std::map<std::uint64_t, std::size_t> live_;  // tensors by address
  std::vector<std::string> names_;             // of tensors by id
  std::vector<HistoryEntry> history_;
  std::string of_, refusal_;  // whose request is served; why there was no segment
  bool is_beyond_limit_ = false;  // it was not asked of the driver
  CachingAllocator cache_;
};

}  // namespace nsan
