// What every access pattern of uvm_bench has: its arrays, how an iteration can be cut, and what it is asked with.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "bodies.hpp"
#include "device.hpp"
#include "errors.hpp"
#include "interrupt.hpp"
#include "tally.hpp"
#include "values.hpp"

namespace nsan {

struct Options {
  std::uint64_t bytes = 0;       // of all arrays together, at most
  std::uint64_t page_bytes = 0;  // of the host
  std::uint64_t seed = 1;
  unsigned n_sms = 1;
  std::uint64_t stride_bytes = 8 * kKiB, node_bytes = 4 * kKiB, n_chasers = 1;
  double zipf_exponent = 1.1;
  bool reads_elements = false;  // signature: every element, not one of each page
};

struct ArrayPlan {
  std::string name, role;
  std::uint64_t n_bytes = 0;
  std::uint64_t item_bytes = 0;  // of each item of a part; 0: every part needs the whole array
  std::uint64_t n_halo = 0;      // items that a part reads on either side of its own
  bool is_filled = false;        // before the first iteration
  bool is_filled_on_cpu = false; // whoever fills the others
  bool is_read_only = false;     // nobody writes it after that
  bool is_temporary = false;     // allocated and freed in every iteration
  bool is_rewritten = false;     // by the CPU, before the kernels of every iteration
  bool is_checked = false;       // the CPU reads all of it in the end
  // Of the pages that the kernels of an iteration touch; the same ones in each.
  std::uint64_t least_touched_bytes = 0;
};

// Memory of the arrays, in the order of their plans.
class Places {
 public:
  explicit Places(std::size_t n) : at_(n) {}
  void*& operator[](std::size_t i) { return at_[i]; }
  template <class Item>
  Item* as(std::size_t i) const {
    return static_cast<Item*>(at_[i]);
  }

  Tally tally{};  // of all kernels that are measured

 private:
  std::vector<void*> at_;
};

// A large array is a multiple of the VA block, a smaller one of the page: a large one that begins at a VA block shares
// none with another array, and what migrates of it is certain.
inline std::uint64_t array_bytes(const Options& options, std::uint64_t most) {
  const std::uint64_t granule = most >= kVaBlock ? kVaBlock : options.page_bytes;
  return most / granule * granule;
}

inline ArrayPlan input(const std::string& name, std::uint64_t n_bytes, std::uint64_t item_bytes) {
  ArrayPlan plan;
  plan.name = name;
  plan.role = "input";
  plan.n_bytes = plan.least_touched_bytes = n_bytes;
  plan.item_bytes = item_bytes;
  plan.is_filled = plan.is_read_only = true;
  return plan;
}

inline ArrayPlan output(const std::string& name, std::uint64_t n_bytes, std::uint64_t item_bytes) {
  ArrayPlan plan;
  plan.name = name;
  plan.role = "output";
  plan.n_bytes = plan.least_touched_bytes = n_bytes;
  plan.item_bytes = item_bytes;
  plan.is_temporary = plan.is_checked = true;
  return plan;
}

// Where an iteration may be cut: `items` in multiples of a granule.
struct Cut {
  std::uint64_t n_items = 1, granule = 1;
  bool is_possible = false;
};

constexpr std::uint64_t kParts = 8;

inline std::vector<Part> parts_of(const Cut& cut, bool in_parts) {
  if (!in_parts || !cut.is_possible) return {{0, cut.n_items}};
  const std::uint64_t n_granules = (cut.n_items + cut.granule - 1) / cut.granule;
  std::vector<Part> parts;
  for (std::uint64_t i = 0; i < std::min(kParts, n_granules); ++i) {
    const Part share = share_of(n_granules, i, std::min(kParts, n_granules));
    parts.push_back({share.begin * cut.granule, std::min(share.end * cut.granule, cut.n_items)});
  }
  return parts;
}

// Bytes of an array that a part touches.
inline Part bytes_of(const ArrayPlan& array, const Part& part) {
  if (array.item_bytes == 0) return {0, array.n_bytes};
  const std::uint64_t begin = part.begin - std::min(part.begin, array.n_halo);
  return {begin * array.item_bytes, std::min((part.end + array.n_halo) * array.item_bytes, array.n_bytes)};
}

// A pattern derives from this and adds
//   static constexpr const char *kName, *kHelp
//   explicit Pattern(const Options&)
//   void prepare()                                  what takes longer than arithmetic, once a GPU is there
//   void fill(const Places&, launch) const          bodies that fill what is_filled: launch(body, grid)
//   void fill_on_cpu(const Places&) const           what the CPU fills in any case
//   void write(const Places&) const                 the CPU's part of an iteration
//   void run(const Places&, iteration, Part, launch) const   the GPU's; what it writes tells the iteration
//   std::uint64_t check(const Places&, n_iterations) const   throws failed(...) if a result is wrong; what the tally of
//                                                   the kernels of all iterations must be
class PatternBase {
 public:
  std::vector<ArrayPlan> arrays;
  Cut cut;
  // What the kernels of an iteration ask for; of a stencil, each cell once.
  std::uint64_t read_bytes = 0, written_bytes = 0;
  // An iteration's output, the last array, is the next one's first array.
  bool carries = false;

  std::uint64_t managed_bytes() const {
    std::uint64_t sum = 0;
    for (const auto& array : arrays) sum += array.n_bytes;
    return sum;
  }

  std::uint64_t page_bytes() const { return options_.page_bytes; }

  void prepare() {}
  void fill_on_cpu(const Places&) const {}
  void write(const Places&) const {}
  template <class Launch>
  void fill(const Places&, Launch&&) const {}

 protected:
  PatternBase(const Options& options, const char* name, std::uint64_t least_pages) : options_(options), name_(name) {
    const std::uint64_t least = least_pages * options.page_bytes;
    if (options.bytes < least)
      throw usage("--bytes " + std::to_string(options.bytes) + " is too little for --pattern " + name + ": give it " +
                  std::to_string(least) + " or more");
  }

  std::uint64_t array_bytes(std::uint64_t most) const { return nsan::array_bytes(options_, most); }

  // Pages that are touched where one access follows the other at a distance.
  std::uint64_t touched_by_steps(std::uint64_t n, std::uint64_t step_bytes) const {
    const std::uint64_t page = options_.page_bytes;
    return (step_bytes <= page ? (n - 1) * step_bytes / page + 1 : n) * page;
  }

  // A thread for each item, as NVIDIA's first sample has it; as far as a grid goes.
  Grid covering(std::uint64_t n_items) const {
    return {static_cast<unsigned>(std::clamp<std::uint64_t>((n_items + kLanes - 1) / kLanes, 1, 0x7FFFFFFF)),
            static_cast<unsigned>(kLanes)};
  }
  // As many thread blocks as keep the GPU busy.
  Grid busy(std::uint64_t n_items) const {
    return {std::min(covering(n_items).blocks, std::max(options_.n_sms, 1u) * 32), static_cast<unsigned>(kLanes)};
  }

  template <class Number>
  void same(std::uint64_t i, Number got, Number want, double tolerance = 0) const {
    throw_if_interrupted_at(i);
    const double difference = std::abs(static_cast<double>(got) - static_cast<double>(want));
    if (difference <= tolerance && (tolerance > 0 || got == want)) return;  // also refuses NaN
    wrong(i, std::to_string(got), std::to_string(want));
  }

  const Options options_;

 private:
  [[noreturn]] void wrong(std::uint64_t i, const std::string& got, const std::string& want) const {
    throw failed(std::string("--pattern ") + name_ + ": element " + std::to_string(i) + " of the result is " + got +
                 " and must be " + want +
                 ": the GPU, its memory or this program is at fault; try a smaller --bytes, or --prefetch none");
  }

  const char* name_;
};

}  // namespace nsan
