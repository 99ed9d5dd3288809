// The access patterns of uvm_bench, one class each, but the stencils (stencils.hpp) and those of one read after the
// other (chases.hpp).
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "bodies.hpp"
#include "pattern.hpp"
#include "permutation.hpp"
#include "zipf.hpp"

namespace nsan {

class VectorAddPattern : public PatternBase {
 public:
  static constexpr const char* kName = "vector-add";
  static constexpr const char* kHelp =
      "c = a + b + i of floats in iteration i, from 0, a thread each (three equal arrays)";

  explicit VectorAddPattern(const Options& options) : PatternBase(options, kName, 3) {
    const std::uint64_t each = array_bytes(options.bytes / 3);
    n_ = each / sizeof(float);
    arrays = {input("a", each, sizeof(float)), input("b", each, sizeof(float)), output("c", each, sizeof(float))};
    cut = {n_, options.page_bytes / sizeof(float), true};
    read_bytes = 2 * each;
    written_bytes = each;
  }

  template <class Launch>
  void fill(const Places& at, Launch&& launch) const {
    launch(FillNumbers<float>{at.as<float>(0), n_, options_.seed}, busy(n_));
    launch(FillNumbers<float>{at.as<float>(1), n_, options_.seed + 1}, busy(n_));
  }
  template <class Launch>
  void run(const Places& at, unsigned number, const Part& part, Launch&& launch) const {
    launch(VectorAdd{at.as<float>(0), at.as<float>(1), at.as<float>(2), static_cast<float>(number), part,
                     at.tally},
           covering(part.end - part.begin));
  }
  std::uint64_t check(const Places& at, unsigned n_iterations) const {
    std::uint64_t sum = 0;
    for (std::uint64_t i = 0; i < n_; ++i) {
      const Word value = small_value(options_.seed, i) + small_value(options_.seed + 1, i);
      same(i, at.as<float>(2)[i], static_cast<float>(value + n_iterations - 1));
      sum += value;
    }
    return over_iterations(n_iterations, sum, n_);
  }

 private:
  std::uint64_t n_;
};

class StreamPattern : public PatternBase {
 public:
  static constexpr const char* kName = "stream";
  static constexpr const char* kHelp =
      "a = b + s c of doubles, the triad of STREAM, with s = 3, 4, 5 ... (three equal arrays)";

  explicit StreamPattern(const Options& options) : PatternBase(options, kName, 3) {
    const std::uint64_t each = array_bytes(options.bytes / 3);
    n_ = each / sizeof(double);
    arrays = {input("b", each, sizeof(double)), input("c", each, sizeof(double)), output("a", each, sizeof(double))};
    cut = {n_, options.page_bytes / sizeof(double), true};
    read_bytes = 2 * each;
    written_bytes = each;
  }

  template <class Launch>
  void fill(const Places& at, Launch&& launch) const {
    launch(FillNumbers<double>{at.as<double>(0), n_, options_.seed}, busy(n_));
    launch(FillNumbers<double>{at.as<double>(1), n_, options_.seed + 1}, busy(n_));
  }
  template <class Launch>
  void run(const Places& at, unsigned number, const Part& part, Launch&& launch) const {
    launch(StreamTriad{at.as<double>(2), at.as<double>(0), at.as<double>(1), scalar(number), part, at.tally},
           busy(part.end - part.begin));
  }
  std::uint64_t check(const Places& at, unsigned n_iterations) const {
    std::uint64_t sum = 0, scaled = 0;
    for (std::uint64_t i = 0; i < n_; ++i) {
      const Word b = small_value(options_.seed, i), c = small_value(options_.seed + 1, i);
      same(i, at.as<double>(2)[i], b + scalar(n_iterations - 1) * c);
      sum += b;
      scaled += c;
    }
    return over_iterations(n_iterations, sum + kScalar * scaled, scaled);
  }

 private:
  static constexpr std::uint64_t kScalar = 3;
  static double scalar(unsigned number) { return static_cast<double>(kScalar + number); }

  std::uint64_t n_;
};

// Where the stride is longer than a page the kernel touches some pages only: those migrate, and what the driver's
// prefetcher takes with them is its own affair.
class StridePattern : public PatternBase {
 public:
  static constexpr const char* kName = "stride";
  static constexpr const char* kHelp =
      "one word of every --stride-bytes is read (an array, and one word out for each read)";

  explicit StridePattern(const Options& options) : PatternBase(options, kName, 3) {
    const std::uint64_t stride = options.stride_bytes, page = options.page_bytes;
    if (stride < sizeof(Word) || stride % sizeof(Word) != 0)
      throw usage("--stride-bytes " + std::to_string(stride) + ": give it a multiple of 4, the size of a word");
    const std::uint64_t out = options.bytes / (stride / sizeof(Word) + 1) + sizeof(Word);
    const std::uint64_t data = array_bytes(options.bytes - (out + page - 1) / page * page);
    n_ = (data + stride - 1) / stride;
    arrays = {input("data", data, stride), output("out", n_ * sizeof(Word), sizeof(Word))};
    arrays[0].least_touched_bytes = touched_by_steps(n_, stride);
    cut = {n_, page, true};
    read_bytes = written_bytes = n_ * sizeof(Word);
  }

  template <class Launch>
  void fill(const Places& at, Launch&& launch) const {
    const std::uint64_t n = arrays[0].n_bytes / sizeof(Word);
    launch(FillWords{at.as<Word>(0), n, options_.seed}, busy(n));
  }
  template <class Launch>
  void run(const Places& at, unsigned number, const Part& part, Launch&& launch) const {
    launch(StridedRead{at.as<Word>(0), at.as<Word>(1), options_.stride_bytes / sizeof(Word), number, part, at.tally},
           busy(part.end - part.begin));
  }
  std::uint64_t check(const Places& at, unsigned n_iterations) const {
    std::uint64_t sum = 0;
    for (std::uint64_t i = 0; i < n_; ++i) {
      const Word value = word_value(options_.seed, i * (options_.stride_bytes / sizeof(Word)));
      same(i, at.as<Word>(1)[i], value + n_iterations - 1);
      sum += value;
    }
    return over_iterations(n_iterations, sum, n_);
  }

 private:
  std::uint64_t n_;
};

class RandomPattern : public PatternBase {
 public:
  static constexpr const char* kName = "random";
  static constexpr const char* kHelp = "every word read once in a shuffled order, written in order (two equal arrays)";

  explicit RandomPattern(const Options& options)
      : PatternBase(options, kName, 2),
        n_(array_bytes(options.bytes / 2) / sizeof(Word)),
        order_(n_, options.seed) {
    const std::uint64_t each = n_ * sizeof(Word);
    arrays = {input("data", each, 0), output("out", each, 0)};
    cut.n_items = n_;
    read_bytes = written_bytes = each;
  }

  template <class Launch>
  void fill(const Places& at, Launch&& launch) const {
    launch(FillWords{at.as<Word>(0), n_, options_.seed}, busy(n_));
  }
  template <class Launch>
  void run(const Places& at, unsigned number, const Part& part, Launch&& launch) const {
    launch(RandomRead{at.as<Word>(0), at.as<Word>(1), order_, number, part, at.tally}, busy(n_));
  }
  std::uint64_t check(const Places& at, unsigned n_iterations) const {
    std::uint64_t sum = 0;
    for (std::uint64_t i = 0; i < n_; ++i) {
      const Word value = word_value(options_.seed, order_(i));
      same(i, at.as<Word>(1)[i], value + n_iterations - 1);
      sum += value;
    }
    return over_iterations(n_iterations, sum, n_);
  }

 private:
  std::uint64_t n_;
  Permutation order_;
};

// Which rows are asked for is known before the run, and so is what migrates at least: the pages that they lie on.
class GatherPattern : public PatternBase {
 public:
  static constexpr const char* kName = "gather";
  static constexpr const char* kHelp =
      "rows of 256 bytes looked up in a table, few of them often (7/8 table; the rest indices, which the CPU writes, "
      "and rows out)";
  static constexpr std::uint64_t kRowBytes = kRowWords * sizeof(Word), kIndexBytes = sizeof(std::uint64_t);

  explicit GatherPattern(const Options& options) : PatternBase(options, kName, 24) {
    const std::uint64_t page = options.page_bytes;
    const std::uint64_t table = array_bytes(options.bytes / 8 * 7);
    constexpr std::uint64_t kPerIndex = kRowBytes / kIndexBytes;
    const std::uint64_t out = array_bytes((options.bytes - table - page) / (kPerIndex + 1) * kPerIndex);
    n_lookups_ = out / kRowBytes;
    n_rows_ = table / kRowBytes;
    const std::uint64_t rows = n_lookups_ * kIndexBytes;
    arrays = {input("table", table, 0), input("rows", rows, 0), output("out", out, 0)};
    arrays[1].is_filled_on_cpu = true;
    cut.n_items = n_lookups_ * kRowWords;
    read_bytes = out + rows;
    written_bytes = out;
  }

  void prepare() {
    std::vector<bool> touched(arrays[0].n_bytes / options_.page_bytes);
    each_row([&](std::uint64_t, std::uint64_t row) { touched[row * kRowBytes / options_.page_bytes] = true; });
    const auto n_touched = std::count(touched.begin(), touched.end(), true);
    arrays[0].least_touched_bytes = static_cast<std::uint64_t>(n_touched) * options_.page_bytes;
  }

  // Rows in the order in which they are looked up: ranks of a Zipf distribution, shuffled over the table.
  template <class Take>
  void each_row(Take&& take) const {
    Zipf rank(n_rows_, options_.zipf_exponent, options_.seed);
    const Permutation row_of(n_rows_, options_.seed);
    for (std::uint64_t i = 0; i < n_lookups_; ++i) {
      throw_if_interrupted_at(i);
      take(i, row_of(rank() - 1));
    }
  }

  template <class Launch>
  void fill(const Places& at, Launch&& launch) const {
    const std::uint64_t n = n_rows_ * kRowWords;
    launch(FillWords{at.as<Word>(0), n, options_.seed}, busy(n));
  }
  // The indices come from the CPU, as a data loader's do, whoever filled the table.
  void fill_on_cpu(const Places& at) const {
    each_row([&](std::uint64_t i, std::uint64_t row) { at.as<std::uint64_t>(1)[i] = row; });
  }
  template <class Launch>
  void run(const Places& at, unsigned number, const Part& part, Launch&& launch) const {
    launch(EmbeddingGather{at.as<Word>(0), at.as<std::uint64_t>(1), at.as<Word>(2), number, part, at.tally},
           busy(cut.n_items));
  }
  std::uint64_t check(const Places& at, unsigned n_iterations) const {
    std::uint64_t sum = 0;
    each_row([&](std::uint64_t i, std::uint64_t row) {
      for (std::uint64_t word = 0; word < kRowWords; ++word) {
        const Word value = word_value(options_.seed, row * kRowWords + word);
        same(i * kRowWords + word, at.as<Word>(2)[i * kRowWords + word], value + n_iterations - 1);
        sum += value;
      }
    });
    return over_iterations(n_iterations, sum, cut.n_items);
  }

 private:
  std::uint64_t n_lookups_, n_rows_;
};

// From the second iteration on the driver may take it for thrashing, and throttle or map instead of migrating.
class PingPongPattern : public PatternBase {
 public:
  static constexpr const char* kName = "ping-pong";
  static constexpr const char* kHelp = "CPU and GPU write the same pages in turn (one array)";

  explicit PingPongPattern(const Options& options) : PatternBase(options, kName, 1) {
    const std::uint64_t all = array_bytes(options.bytes);
    n_ = all / sizeof(Word);
    arrays = {input("data", all, sizeof(Word))};
    arrays[0].role = "state";
    arrays[0].is_read_only = false;
    arrays[0].is_rewritten = arrays[0].is_checked = true;
    cut = {n_, options.page_bytes / sizeof(Word), true};
    read_bytes = written_bytes = all;
  }

  template <class Launch>
  void fill(const Places& at, Launch&& launch) const {
    launch(FillWords{at.as<Word>(0), n_, options_.seed}, busy(n_));
  }
  void write(const Places& at) const {
    for (std::uint64_t i = 0; i < n_; ++i) {
      throw_if_interrupted_at(i);
      at.as<Word>(0)[i] = written_by_cpu(at.as<Word>(0)[i]);
    }
  }
  template <class Launch>
  void run(const Places& at, unsigned number, const Part& part, Launch&& launch) const {
    launch(PingPong{at.as<Word>(0), part, number, at.tally}, busy(part.end - part.begin));
  }
  // 5 (3 x + 1) + 2 so often, as one factor and one summand.
  std::uint64_t check(const Places& at, unsigned n_iterations) const {
    Word factor = 1, summand = 0;
    for (unsigned i = 0; i < n_iterations; ++i) {
      factor *= 15;
      summand = 15 * summand + 7;
    }
    for (std::uint64_t i = 0; i < n_; ++i)
      same(i, at.as<Word>(0)[i], factor * word_value(options_.seed, i) + summand);
    return over_iterations(n_iterations, n_, n_);
  }

 private:
  std::uint64_t n_;
};

class BroadcastReadPattern : public PatternBase {
 public:
  static constexpr const char* kName = "broadcast-read";
  static constexpr const char* kHelp =
      "every thread block reads all of a small buffer, which the CPU writes anew for each iteration (1/8 buffer, at "
      "most 2 MiB; the rest output)";

  explicit BroadcastReadPattern(const Options& options) : PatternBase(options, kName, 2) {
    const std::uint64_t buffer = std::max(array_bytes(std::min(options.bytes / 8, kVaBlock)), options.page_bytes);
    const std::uint64_t out = array_bytes(options.bytes - buffer);
    n_buffer_ = buffer / sizeof(Word);
    n_out_ = out / sizeof(Word);
    arrays = {input("buffer", buffer, 0), output("out", out, 0)};
    arrays[0].is_read_only = false;
    arrays[0].is_rewritten = true;
    read_bytes = busy(n_out_).blocks * buffer;
    written_bytes = out;
  }

  template <class Launch>
  void fill(const Places& at, Launch&& launch) const {
    launch(FillWords{at.as<Word>(0), n_buffer_, options_.seed}, busy(n_buffer_));
  }
  void write(const Places& at) const {
    for (std::uint64_t i = 0; i < n_buffer_; ++i) {
      throw_if_interrupted_at(i);
      at.as<Word>(0)[i] = written_by_cpu(at.as<Word>(0)[i]);
    }
  }
  template <class Launch>
  void run(const Places& at, unsigned, const Part&, Launch&& launch) const {
    launch(BroadcastRead{at.as<Word>(0), at.as<Word>(1), n_buffer_, n_out_, at.tally}, busy(n_out_));
  }
  // The threads of a grid are a multiple of the lanes: an item's lane is its own.
  std::uint64_t check(const Places& at, unsigned n_iterations) const {
    std::vector<Word> values(n_buffer_), sums(kLanes);
    for (std::uint64_t i = 0; i < n_buffer_; ++i) values[i] = word_value(options_.seed, i);
    std::uint64_t read = 0;
    for (unsigned iteration = 0; iteration < n_iterations; ++iteration) {
      throw_if_interrupted();
      std::fill(sums.begin(), sums.end(), 0);
      for (std::uint64_t i = 0; i < n_buffer_; ++i) sums[i % kLanes] += values[i] = written_by_cpu(values[i]);
      for (std::uint64_t lane = 0; lane < std::min(kLanes, n_out_); ++lane)
        read += (n_out_ - lane + kLanes - 1) / kLanes * sums[lane];
    }
    for (std::uint64_t i = 0; i < n_out_; ++i) same(i, at.as<Word>(1)[i], sums[i % kLanes] + static_cast<Word>(i));
    return read;
  }

 private:
  std::uint64_t n_buffer_, n_out_;
};

class FirstTouchPattern : public PatternBase {
 public:
  static constexpr const char* kName = "first-touch";
  static constexpr const char* kHelp = "the GPU writes memory that nobody touched, new in each iteration (one array)";

  explicit FirstTouchPattern(const Options& options) : PatternBase(options, kName, 1) {
    const std::uint64_t all = array_bytes(options.bytes);
    n_ = all / sizeof(Word);
    arrays = {output("data", all, sizeof(Word))};
    cut = {n_, options.page_bytes / sizeof(Word), true};
    written_bytes = all;
  }

  template <class Launch>
  void run(const Places& at, unsigned number, const Part& part, Launch&& launch) const {
    launch(FirstTouch{at.as<Word>(0), options_.seed, number, part, at.tally}, busy(part.end - part.begin));
  }
  std::uint64_t check(const Places& at, unsigned n_iterations) const {
    std::uint64_t sum = 0;
    for (std::uint64_t i = 0; i < n_; ++i) {
      const Word value = word_value(options_.seed, i);
      same(i, at.as<Word>(0)[i], value + n_iterations - 1);
      sum += value;
    }
    return over_iterations(n_iterations, sum, n_);
  }

 private:
  std::uint64_t n_;
};

}  // namespace nsan
