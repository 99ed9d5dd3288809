// Runs programs for the caching allocator that stand on the standard input, and prints what it did and what it holds.
//
//   program LIMIT   a new allocator; the fake driver has LIMIT bytes (0: as many as asked for)
//   a BYTES         allocate
//   f N             free what the N-th successful request of the program gave, from 0
//   e               empty the cache
//   end             print what is left
//
// Segments lie where nsan.torch_alloc.heap.ascending_places puts them.
#include <cstdint>
#include <iostream>
#include <map>
#include <string>
#include <vector>

#include "nsan/caching_allocator.hpp"

namespace {

class Driver {
 public:
  explicit Driver(std::uint64_t limit) : limit_(limit) {}
  std::uint64_t take(std::uint64_t n_bytes) {
    if (limit_ != 0 && held_ + n_bytes > limit_) return 0;
    held_ += n_bytes;
    const std::uint64_t va = places_(n_bytes);
    sizes_[va] = n_bytes;
    return va;
  }
  void give_back(std::uint64_t va) {
    held_ -= sizes_.at(va);
    sizes_.erase(va);
  }

 private:
  nsan::AscendingPlaces places_;
  std::uint64_t limit_, held_ = 0;
  std::map<std::uint64_t, std::uint64_t> sizes_;
};

void print_state(const nsan::CachingAllocator& cache) {
  for (const auto& s : cache.segments())
    std::cout << "segment " << s.va << ' ' << s.n_bytes << ' ' << (s.is_small ? "small" : "large") << '\n';
  for (const auto& b : cache.blocks())
    std::cout << "block " << b.segment_va << ' ' << b.va << ' ' << b.n_bytes << ' ' << b.requested_bytes << ' '
              << (b.is_allocated ? "allocated" : "free") << '\n';
  std::cout << "sums " << cache.reserved_bytes() << ' ' << cache.peak_reserved_bytes() << ' ' << cache.allocated_bytes()
            << ' ' << cache.peak_allocated_bytes() << ' ' << cache.n_segments_made() << ' ' << cache.n_retries() << '\n';
}

void run_operation(nsan::CachingAllocator& cache, const std::string& word, std::vector<std::uint64_t>& given) {
  std::uint64_t number = 0;
  if (word == "e") return cache.empty_cache();
  std::cin >> number;
  if (word == "f") return cache.free(given.at(number));
  given.push_back(cache.allocate(number));
}

void run_program() {
  std::uint64_t limit = 0;
  std::cin >> limit;
  Driver driver(limit);
  nsan::CachingAllocator cache(
      [&](std::uint64_t n_bytes, bool) { return driver.take(n_bytes); },
      [&](std::uint64_t va) { driver.give_back(va); },
      [](nsan::HistoryAction action, std::uint64_t va, std::uint64_t n_bytes) {
        std::cout << "entry " << nsan::action_name(action) << ' ' << va << ' ' << n_bytes << '\n';
      });
  std::vector<std::uint64_t> given;
  std::string word;
  while (std::cin >> word && word != "end") {
    try {
      run_operation(cache, word, given);
    } catch (const nsan::Ended& end) {
      std::cout << "error " << end.what() << '\n';
    }
  }
  print_state(cache);
  std::cout << "end\n";
}

}  // namespace

int main() {
  std::ios::sync_with_stdio(false);
  std::string word;
  while (std::cin >> word) run_program();
}
