// PyTorch's caching allocator (c10/cuda/CUDACachingAllocator.cpp) of one stream, with its default settings.
//
// Requests are rounded up to 512 byte. Those up to 1 MiB are served from segments of 2 MiB, larger ones from segments
// of 20 MiB or, from 10 MiB on, of their own size rounded up to 2 MiB. The smallest free block that fits is taken, of
// equal ones that with the lowest address (PyTorch to 2.11), and split if enough remains. Freed blocks merge with free
// neighbours of their segment and stay: only empty_cache(), or a segment that cannot be had, gives segments back, and
// then every one without a block in use. nsan.torch_alloc has the same rules, checked against real histories.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "device.hpp"
#include "errors.hpp"

namespace nsan {

// What PyTorch writes to its history. An alloc and a free carry the bytes that were asked for, a segment its size, an
// oom the rounded request.
enum class HistoryAction { kAlloc, kFreeRequested, kFreeCompleted, kSegmentAlloc, kSegmentFree, kOom };

inline const char* action_name(HistoryAction action) {
  switch (action) {
    case HistoryAction::kAlloc: return "alloc";
    case HistoryAction::kFreeRequested: return "free_requested";
    case HistoryAction::kFreeCompleted: return "free_completed";
    case HistoryAction::kSegmentAlloc: return "segment_alloc";
    case HistoryAction::kSegmentFree: return "segment_free";
    case HistoryAction::kOom: break;
  }
  return "oom";
}

// What it takes more than tensors have, as a message has it.
constexpr const char* kCacheReserves = "which the caching allocator reserves in whole segments";

// Places segments one after the other at multiples of 2 MiB and never uses an address again: for a count of what a
// program would need, without a GPU (nsan.torch_alloc.heap.ascending_places).
class AscendingPlaces {
 public:
  std::uint64_t operator()(std::uint64_t n_bytes) {
    const std::uint64_t va = following_;
    following_ += (n_bytes + 2 * kMiB - 1) / (2 * kMiB) * (2 * kMiB);
    return va;
  }

 private:
  std::uint64_t following_ = 0x7F0000000000;
};

class CachingAllocator {
 public:
  using Take = std::function<std::uint64_t(std::uint64_t n_bytes, bool is_small)>;  // 0: there is no memory
  using GiveBack = std::function<void(std::uint64_t va)>;
  using Listen = std::function<void(HistoryAction, std::uint64_t va, std::uint64_t n_bytes)>;

  struct Segment {
    std::uint64_t va, n_bytes;
    bool is_small;
  };
  // A part of a segment; what was asked for is stale where it is free.
  struct Block {
    std::uint64_t va, n_bytes, requested_bytes, segment_va;
    bool is_allocated;
  };

  explicit CachingAllocator(Take take, GiveBack give_back = {}, Listen listen = {})
      : take_(std::move(take)), give_back_(std::move(give_back)), listen_(std::move(listen)) {}

  static std::uint64_t rounded(std::uint64_t n_bytes) { return std::max(round_up(n_bytes, kMinBlock), kMinBlock); }

  static std::uint64_t segment_size(std::uint64_t rounded_bytes) {
    if (rounded_bytes <= kSmall) return kSmallSegment;
    return rounded_bytes < kMinLarge ? kLargeSegment : round_up(rounded_bytes, kRoundLarge);
  }

  // Address of a block for so many byte, at least 1: PyTorch never passes an empty request on.
  std::uint64_t allocate(std::uint64_t n_bytes) {
    if (n_bytes == 0) throw failed("a request for 0 byte never reaches the caching allocator: ask for at least 1");
    if (n_bytes > kMost) throw failed("a request for " + std::to_string(n_bytes) + " byte: no GPU has as many addresses");
    const std::uint64_t size = rounded(n_bytes);
    const bool is_small = size <= kSmall;
    auto& listed = free_[is_small];
    auto found = listed.lower_bound({size, 0});
    if (found == listed.end()) {
      make_room(size, is_small);
      found = listed.lower_bound({size, 0});
    }
    const std::uint64_t va = found->second;
    listed.erase(found);
    hand_out(blocks_.at(va), size, n_bytes, is_small);
    tell(HistoryAction::kAlloc, va, n_bytes);
    return va;
  }

  void free(std::uint64_t va) {
    const auto at = blocks_.find(va);
    if (at == blocks_.end() || !at->second.is_allocated)
      throw failed("the caching allocator holds no tensor at address " + hexadecimal(va) + ": free it once");
    Block& block = at->second;
    block.is_allocated = false;
    allocated_bytes_ -= block.n_bytes;
    tell(HistoryAction::kFreeRequested, va, block.requested_bytes);
    tell(HistoryAction::kFreeCompleted, va, block.requested_bytes);
    merge(at);
  }

  // Gives every segment without a block in use back: large ones first, smallest first, then by address.
  void empty_cache() {
    for (const bool is_small : {false, true}) {
      const auto listed = free_[is_small];  // a copy: releasing takes items out
      for (const auto& [n_bytes, va] : listed)
        if (is_whole_segment(blocks_.at(va))) release(segments_.at(va));
    }
  }

  std::vector<Segment> segments() const { return values_of(segments_); }  // by address
  std::vector<Block> blocks() const { return values_of(blocks_); }        // by address

  std::uint64_t reserved_bytes() const { return reserved_bytes_; }
  std::uint64_t peak_reserved_bytes() const { return peak_reserved_bytes_; }
  std::uint64_t allocated_bytes() const { return allocated_bytes_; }
  std::uint64_t peak_allocated_bytes() const { return peak_allocated_bytes_; }
  std::uint64_t n_segments_made() const { return n_segments_made_; }
  std::uint64_t n_retries() const { return n_retries_; }  // num_alloc_retries

 private:
  static constexpr std::uint64_t kMinBlock = 512;             // kMinBlockSize
  static constexpr std::uint64_t kSmall = 1 * kMiB;           // kSmallSize
  static constexpr std::uint64_t kSmallSegment = 2 * kMiB;    // kSmallBuffer
  static constexpr std::uint64_t kLargeSegment = 20 * kMiB;   // kLargeBuffer
  static constexpr std::uint64_t kMinLarge = 10 * kMiB;       // kMinLargeAlloc
  static constexpr std::uint64_t kRoundLarge = 2 * kMiB;      // kRoundLarge
  static constexpr std::uint64_t kMost = 1ull << 57;          // of 57-bit addresses

  using Blocks = std::map<std::uint64_t, Block>;

  static std::string hexadecimal(std::uint64_t va) {
    char text[24];
    std::snprintf(text, sizeof text, "%#llx", static_cast<unsigned long long>(va));
    return text;
  }

  static std::uint64_t round_up(std::uint64_t n_bytes, std::uint64_t unit) { return (n_bytes + unit - 1) / unit * unit; }

  template <class Key, class Value>
  static std::vector<Value> values_of(const std::map<Key, Value>& items) {
    std::vector<Value> values;
    values.reserve(items.size());
    for (const auto& item : items) values.push_back(item.second);
    return values;
  }

  bool is_whole_segment(const Block& block) const { return block.n_bytes == segments_.at(block.segment_va).n_bytes; }

  // Lists a free block that fits; PyTorch's order when no listed one does.
  void make_room(std::uint64_t size, bool is_small) {
    if (grow(size, is_small)) return;
    empty_cache();
    ++n_retries_;
    if (grow(size, is_small)) return;
    tell(HistoryAction::kOom, 0, size);
    throw failed("out of memory: " + std::to_string(size) + " byte asked for, " + std::to_string(reserved_bytes_) +
                     " byte reserved (segments: " + std::to_string(segments_.size()) + "), of these " +
                     std::to_string(allocated_bytes_) + " byte in use",
                 WayOut::kLessMemory);
  }

  bool grow(std::uint64_t size, bool is_small) {
    const std::uint64_t n_bytes = segment_size(size);
    const std::uint64_t va = take_(n_bytes, is_small);
    if (va == 0) return false;
    segments_[va] = {va, n_bytes, is_small};
    blocks_[va] = {va, n_bytes, 0, va, false};
    free_[is_small].insert({n_bytes, va});
    ++n_segments_made_;
    reserved_bytes_ += n_bytes;
    peak_reserved_bytes_ = std::max(peak_reserved_bytes_, reserved_bytes_);
    tell(HistoryAction::kSegmentAlloc, va, n_bytes);
    return true;
  }

  // Makes the front of an unlisted free block a tensor's; the rest is listed if there is enough of it to split.
  void hand_out(Block& block, std::uint64_t size, std::uint64_t n_bytes, bool is_small) {
    const std::uint64_t rest = block.n_bytes - size;
    if (is_small ? rest >= kMinBlock : rest > kSmall) {
      blocks_[block.va + size] = {block.va + size, rest, block.requested_bytes, block.segment_va, false};
      free_[is_small].insert({rest, block.va + size});
      block.n_bytes = size;
    }
    block.is_allocated = true;
    block.requested_bytes = n_bytes;
    allocated_bytes_ += block.n_bytes;
    peak_allocated_bytes_ = std::max(peak_allocated_bytes_, allocated_bytes_);
  }

  // Joins a free, unlisted block with its free neighbours, and lists what results.
  void merge(Blocks::iterator at) {
    auto& listed = free_[segments_.at(at->second.segment_va).is_small];
    if (const auto after = std::next(at); after != blocks_.end() && is_free_neighbour(at->second, after->second)) {
      listed.erase({after->second.n_bytes, after->first});
      at->second.n_bytes += after->second.n_bytes;
      blocks_.erase(after);
    }
    if (at != blocks_.begin()) {
      if (const auto before = std::prev(at); is_free_neighbour(at->second, before->second)) {
        listed.erase({before->second.n_bytes, before->first});
        before->second.n_bytes += at->second.n_bytes;
        before->second.requested_bytes = at->second.requested_bytes;
        blocks_.erase(at);
        at = before;
      }
    }
    listed.insert({at->second.n_bytes, at->first});
  }

  static bool is_free_neighbour(const Block& block, const Block& other) {
    return !other.is_allocated && other.segment_va == block.segment_va;
  }

  // The books follow what the driver did: where it throws, the segment is still held.
  void release(const Segment segment) {
    if (give_back_) give_back_(segment.va);
    free_[segment.is_small].erase({segment.n_bytes, segment.va});
    blocks_.erase(segment.va);
    segments_.erase(segment.va);
    reserved_bytes_ -= segment.n_bytes;
    tell(HistoryAction::kSegmentFree, segment.va, segment.n_bytes);
  }

  void tell(HistoryAction action, std::uint64_t va, std::uint64_t n_bytes) const {
    if (listen_) listen_(action, va, n_bytes);
  }

  Take take_;
  GiveBack give_back_;
  Listen listen_;
  std::map<std::uint64_t, Segment> segments_;
  Blocks blocks_;
  std::set<std::pair<std::uint64_t, std::uint64_t>> free_[2];  // (size, address), by is_small
  std::uint64_t reserved_bytes_ = 0, peak_reserved_bytes_ = 0;
  std::uint64_t allocated_bytes_ = 0, peak_allocated_bytes_ = 0;
  std::uint64_t n_segments_made_ = 0, n_retries_ = 0;
};

}  // namespace nsan
