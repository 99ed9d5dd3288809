// The patterns in which a thread reads one place after the other: where the next one lies it learns from the last one.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "bodies.hpp"
#include "pattern.hpp"
#include "permutation.hpp"

namespace nsan {

class PointerChasePattern : public PatternBase {
 public:
  static constexpr const char* kName = "pointer-chase";
  static constexpr const char* kHelp =
      "one cycle through all nodes, each telling where the next one is (--node-bytes, --chasers; nodes, and a page of "
      "results)";

  explicit PointerChasePattern(const Options& options)
      : PatternBase(options, kName, 2),
        n_(array_bytes(options.bytes - options.page_bytes) / checked_node_bytes(options)),
        order_(std::max<std::uint64_t>(n_, 1), options.seed) {
    const std::uint64_t page = options.page_bytes, most = page / sizeof(Chased);
    const std::string node = "--node-bytes " + std::to_string(options.node_bytes);
    if (n_ == 0) throw usage(node + " is more than --bytes holds: lower it");
    if (options.n_chasers == 0 || options.n_chasers > std::min(most, n_))
      throw usage("--chasers " + std::to_string(options.n_chasers) + ": from 1 to " +
                  std::to_string(std::min(most, n_)));
    arrays = {input("nodes", array_bytes(options.bytes - page), 0), output("result", page, 0)};
    arrays[0].least_touched_bytes = touched_by_steps(n_, options.node_bytes);
    read_bytes = n_ * sizeof(Node);
    written_bytes = options.n_chasers * sizeof(Chased);
  }

  template <class Launch>
  void fill(const Places& at, Launch&& launch) const {
    launch(FillNodes{at.as<char>(0), n_, options_.node_bytes, options_.seed, order_}, busy(n_));
  }
  template <class Launch>
  void run(const Places& at, unsigned number, const Part&, Launch&& launch) const {
    launch(PointerChase{at.as<char>(0), at.as<Chased>(1), n_, options_.node_bytes, options_.n_chasers, order_, number,
                        at.tally},
           Grid{1, static_cast<unsigned>(options_.n_chasers)});
  }
  // Another way round: node after node in memory, not in the order of the cycle.
  std::uint64_t check(const Places& at, unsigned n_iterations) const {
    std::uint64_t sum = 0, got = 0;
    for (std::uint64_t node = 0; node < n_; ++node) {
      throw_if_interrupted_at(node);
      sum += mixed(options_.seed, node);
    }
    for (std::uint64_t i = 0; i < options_.n_chasers; ++i) {
      const Chased& chased = at.as<Chased>(1)[i];
      got += chased.sum;
      same(i, chased.node, order_(share_of(n_, i, options_.n_chasers).end % n_));
    }
    same(0, got, sum + options_.n_chasers * (n_iterations - 1));
    return over_iterations(n_iterations, sum, options_.n_chasers);
  }

 private:
  static std::uint64_t checked_node_bytes(const Options& options) {
    if (options.node_bytes < sizeof(Node) || options.node_bytes % sizeof(Node) != 0)
      throw usage("--node-bytes " + std::to_string(options.node_bytes) + ": give it a multiple of " +
                  std::to_string(sizeof(Node)));
    return options.node_bytes;
  }

  std::uint64_t n_;
  Permutation order_;
};

class SignaturePattern : public PatternBase {
 public:
  static constexpr const char* kName = "signature";
  static constexpr const char* kHelp =
      "a single thread reads page after page: what the driver's prefetcher adds to each fault (--grain; an array, and a "
      "page for the result)";

  explicit SignaturePattern(const Options& options) : PatternBase(options, kName, 2) {
    const std::uint64_t page = options.page_bytes, all = array_bytes(options.bytes - page);
    step_ = options.reads_elements ? 1 : page / sizeof(Word);
    n_ = all / sizeof(Word) / step_;
    arrays = {input("data", all, step_ * sizeof(Word)), output("result", page, 0)};
    cut = {n_, all >= kVaBlock ? kVaBlock / sizeof(Word) / step_ : page / sizeof(Word) / step_, true};
    read_bytes = n_ * sizeof(Word);
    written_bytes = sizeof(std::uint64_t);
  }

  template <class Launch>
  void fill(const Places& at, Launch&& launch) const {
    const std::uint64_t n = arrays[0].n_bytes / sizeof(Word);
    launch(FillWords{at.as<Word>(0), n, options_.seed}, busy(n));
  }
  template <class Launch>
  void run(const Places& at, unsigned number, const Part& part, Launch&& launch) const {
    launch(SignatureRead{at.as<Word>(0), at.as<std::uint64_t>(1), step_, number, part, at.tally}, Grid{1, 1});
  }
  std::uint64_t check(const Places& at, unsigned n_iterations) const {
    std::uint64_t sum = 0;
    for (std::uint64_t i = 0; i < n_; ++i) {
      throw_if_interrupted_at(i);
      sum += word_value(options_.seed, i * step_);
    }
    same(0, *at.as<std::uint64_t>(1), sum + n_iterations - 1);
    return over_iterations(n_iterations, sum, 1);
  }

 private:
  std::uint64_t n_, step_;
};

}  // namespace nsan
