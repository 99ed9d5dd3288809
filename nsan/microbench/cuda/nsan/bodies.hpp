// The kernels of uvm_bench. Each is a loop over a part of its items, the threads of the grid beside each other; run by
// one thread of one it is the plain loop on the CPU, which is how the CPU fills arrays.
#pragma once

#include <cstdint>

#include "device.hpp"
#include "interrupt.hpp"
#include "permutation.hpp"
#include "tally.hpp"

namespace nsan {

using Word = std::uint32_t;

// Items of a launch: all, or a part of them where prefetches go ahead of the kernels.
struct Part {
  std::uint64_t begin, end;
};

// Whole numbers below 1024: sums and products of a few are exact in float, with and without fused multiply-add.
NSAN_HD inline Word small_value(std::uint64_t seed, std::uint64_t i) {
  return static_cast<Word>(mixed(seed, i) & 1023);
}
// Below 2^31: what is left of its top bit is 0, which a compiler cannot know.
NSAN_HD inline Word word_value(std::uint64_t seed, std::uint64_t i) {
  return static_cast<Word>(mixed(seed, i) & 0x7FFFFFFF);
}

// The CPU fills for long, too: it looks up now and then.
NSAN_HD inline void look_up_at(std::uint64_t item) {
#ifdef __CUDA_ARCH__
  (void)item;
#else
  throw_if_interrupted_at(item);
#endif
}

// ---- arrays as they are before the first iteration

template <class Number>
struct FillNumbers {
  Number* at;
  std::uint64_t n, seed;
  NSAN_HD void operator()(std::uint64_t thread, std::uint64_t n_threads) const {
    for (std::uint64_t i = thread; i < n; i += n_threads) {
      look_up_at(i);
      at[i] = static_cast<Number>(small_value(seed, i));
    }
  }
};

struct FillWords {
  Word* at;
  std::uint64_t n, seed;
  NSAN_HD void operator()(std::uint64_t thread, std::uint64_t n_threads) const {
    for (std::uint64_t i = thread; i < n; i += n_threads) {
      look_up_at(i);
      at[i] = word_value(seed, i);
    }
  }
};

// A grid that repeats a small square, mirrored at its sides: with a border that repeats the outermost cells it stays so
// under a stencil, so that the small square, computed on the CPU, says what every cell must be.
constexpr std::uint64_t kSquare = 32;
NSAN_HD inline std::uint64_t mirrored(std::uint64_t i) {
  const std::uint64_t place = i % (2 * kSquare);
  return place < kSquare ? place : 2 * kSquare - 1 - place;
}
NSAN_HD inline float square_value(std::uint64_t seed, std::uint64_t row, std::uint64_t column, float base) {
  return base + static_cast<float>(small_value(seed, mirrored(row) * kSquare + mirrored(column))) / 1024.0f;
}

struct FillSquares {
  float* at;
  std::uint64_t n, columns, seed;
  float base;
  NSAN_HD void operator()(std::uint64_t thread, std::uint64_t n_threads) const {
    for (std::uint64_t i = thread; i < n; i += n_threads) {
      look_up_at(i);
      at[i] = square_value(seed, i / columns, i % columns, base);
    }
  }
};

struct Node {
  std::uint64_t next, payload;
};
NSAN_HD inline Node* node_at(char* nodes, std::uint64_t node_bytes, std::uint64_t i) {
  return reinterpret_cast<Node*>(nodes + i * node_bytes);
}

struct FillNodes {
  char* nodes;
  std::uint64_t n, node_bytes, seed;
  Permutation order;
  NSAN_HD void operator()(std::uint64_t thread, std::uint64_t n_threads) const {
    for (std::uint64_t i = thread; i < n; i += n_threads) {
      look_up_at(i);
      const std::uint64_t node = order(i);
      *node_at(nodes, node_bytes, node) = {order(i + 1 == n ? 0 : i + 1), mixed(seed, node)};
    }
  }
};

// ---- what is measured
//
// What is written tells the iteration (`number`, from 0): a cache gives an output the memory of the last one, in which
// a kernel that did not run would leave the right values of the iteration before. And each kernel adds to a tally
// (tally.hpp), by which the CPU knows in the end that those of every iteration ran: what it wrote, as a whole number, or,
// where the next iteration goes on with that, how many cells it wrote, the iteration's number plus 1 for each.

struct VectorAdd {
  const float *a, *b;
  float* c;
  float number;
  Part part;
  Tally tally;
  NSAN_HD void operator()(std::uint64_t thread, std::uint64_t n_threads) const {
    std::uint64_t sum = 0;
    for (std::uint64_t i = part.begin + thread; i < part.end; i += n_threads) {
      const float value = a[i] + b[i] + number;
      c[i] = value;
      sum += static_cast<std::uint64_t>(value);
    }
    tally.add(thread, sum);
  }
};

struct StreamTriad {
  double* a;
  const double *b, *c;
  double scalar;
  Part part;
  Tally tally;
  NSAN_HD void operator()(std::uint64_t thread, std::uint64_t n_threads) const {
    std::uint64_t sum = 0;
    for (std::uint64_t i = part.begin + thread; i < part.end; i += n_threads) {
      const double value = b[i] + scalar * c[i];
      a[i] = value;
      sum += static_cast<std::uint64_t>(value);
    }
    tally.add(thread, sum);
  }
};

struct StridedRead {
  const Word* data;
  Word* out;
  std::uint64_t stride;  // in words
  Word number;
  Part part;
  Tally tally;
  NSAN_HD void operator()(std::uint64_t thread, std::uint64_t n_threads) const {
    std::uint64_t sum = 0;
    for (std::uint64_t i = part.begin + thread; i < part.end; i += n_threads)
      sum += out[i] = data[i * stride] + number;
    tally.add(thread, sum);
  }
};

struct RandomRead {
  const Word* data;
  Word* out;
  Permutation order;
  Word number;
  Part part;
  Tally tally;
  NSAN_HD void operator()(std::uint64_t thread, std::uint64_t n_threads) const {
    std::uint64_t sum = 0;
    for (std::uint64_t i = part.begin + thread; i < part.end; i += n_threads)
      sum += out[i] = data[order(i)] + number;
    tally.add(thread, sum);
  }
};

// Neighbouring threads read neighbouring words of a row, as an embedding lookup does.
constexpr std::uint64_t kRowWords = 64;
struct EmbeddingGather {
  const Word* table;
  const std::uint64_t* rows;
  Word* out;
  Word number;
  Part part;  // of words of `out`
  Tally tally;
  NSAN_HD void operator()(std::uint64_t thread, std::uint64_t n_threads) const {
    std::uint64_t sum = 0;
    for (std::uint64_t i = part.begin + thread; i < part.end; i += n_threads)
      sum += out[i] = table[rows[i / kRowWords] * kRowWords + i % kRowWords] + number;
    tally.add(thread, sum);
  }
};

// A cell and its four neighbours; beyond the border lies the outermost cell again.
struct Cross {
  float centre, north, south, west, east;
};
NSAN_HD inline Cross cross_at(const float* cells, std::uint64_t rows, std::uint64_t columns, std::uint64_t row,
                              std::uint64_t column) {
  const std::uint64_t i = row * columns + column;
  return {cells[i], cells[row == 0 ? i : i - columns], cells[row + 1 == rows ? i : i + columns],
          cells[column == 0 ? i : i - 1], cells[column + 1 == columns ? i : i + 1]};
}

// Powers of two only, so that fused multiply-add changes nothing: the check is exact.
struct Diffusion {
  NSAN_HD float operator()(const Cross& at, float) const {
    return 0.5f * at.centre + 0.125f * (at.north + at.south + at.west + at.east);
  }
};

// One step of the heat of a chip, with the constants that Rodinia's hotspot has for 1024 x 1024 cells.
struct ChipHeat {
  static constexpr float kStepPerCapacity = 1.365f, kPerNeighbour = 0.1f;
  static constexpr float kToAmbient = 1.0f / 20480.0f, kAmbient = 80.0f;
  NSAN_HD float operator()(const Cross& at, float power) const {
    const float flow = (at.north + at.south - 2.0f * at.centre) * kPerNeighbour +
                       (at.west + at.east - 2.0f * at.centre) * kPerNeighbour + (kAmbient - at.centre) * kToAmbient;
    return at.centre + kStepPerCapacity * (power + flow);
  }
};

struct StencilFivePoint {
  const float* cells;
  float* next;
  std::uint64_t rows, columns;
  Part part;  // of rows
  std::uint64_t number;
  Tally tally;
  NSAN_HD void operator()(std::uint64_t thread, std::uint64_t n_threads) const {
    std::uint64_t sum = 0;
    for (std::uint64_t i = part.begin * columns + thread; i < part.end * columns; i += n_threads) {
      next[i] = Diffusion{}(cross_at(cells, rows, columns, i / columns, i % columns), 0.0f);
      sum += number + 1;
    }
    tally.add(thread, sum);
  }
};

// A thread block computes a tile, as in Rodinia's: what a block reads is a square of the grid, not a run of memory.
constexpr std::uint64_t kTile = 16;
struct CalculateTemp {
  const float *temperature, *power;
  float* result;
  std::uint64_t rows, columns;
  Part part;  // of rows, in multiples of the tile
  std::uint64_t number;
  Tally tally;
  NSAN_HD void operator()(std::uint64_t thread, std::uint64_t n_threads) const {
    const std::uint64_t tiles = columns / kTile;
    std::uint64_t sum = 0;
    for (std::uint64_t i = thread; i < (part.end - part.begin) * columns; i += n_threads) {
      const std::uint64_t tile = i / (kTile * kTile), lane = i % (kTile * kTile);
      const std::uint64_t row = part.begin + tile / tiles * kTile + lane / kTile;
      const std::uint64_t column = tile % tiles * kTile + lane % kTile;
      const std::uint64_t cell = row * columns + column;
      result[cell] = ChipHeat{}(cross_at(temperature, rows, columns, row, column), power[cell]);
      sum += number + 1;
    }
    tally.add(thread, sum);
  }
};

// Where a chase ended, and the sum of what it saw.
struct Chased {
  std::uint64_t node, sum;
};
NSAN_HD inline Part share_of(std::uint64_t n, std::uint64_t which, std::uint64_t n_shares) {
  const std::uint64_t each = n / n_shares, rest = n % n_shares;
  const std::uint64_t begin = which * each + (which < rest ? which : rest);
  return {begin, begin + each + (which < rest ? 1 : 0)};
}

struct PointerChase {
  char* nodes;
  Chased* result;
  std::uint64_t n, node_bytes, n_chasers;
  Permutation order;
  std::uint64_t number;
  Tally tally;
  NSAN_HD void operator()(std::uint64_t thread, std::uint64_t n_threads) const {
    for (std::uint64_t which = thread; which < n_chasers; which += n_threads) {
      const Part steps = share_of(n, which, n_chasers);
      Chased chased{order(steps.begin), number};
      for (std::uint64_t i = steps.begin; i < steps.end; ++i) {
        const Node node = *node_at(nodes, node_bytes, chased.node);
        chased.sum += node.payload;
        chased.node = node.next;
      }
      result[which] = chased;
      tally.add(thread, chased.sum);
    }
  }
};

// Both sides write each word in turn; what it holds tells how often.
NSAN_HD inline Word written_by_cpu(Word value) { return 3 * value + 1; }
NSAN_HD inline Word written_by_gpu(Word value) { return 5 * value + 2; }
struct PingPong {
  Word* data;
  Part part;
  std::uint64_t number;
  Tally tally;
  NSAN_HD void operator()(std::uint64_t thread, std::uint64_t n_threads) const {
    std::uint64_t sum = 0;
    for (std::uint64_t i = part.begin + thread; i < part.end; i += n_threads) {
      data[i] = written_by_gpu(data[i]);
      sum += number + 1;
    }
    tally.add(thread, sum);
  }
};

// Each thread block reads all of a small buffer, then writes its share of the output.
constexpr std::uint64_t kLanes = 256;
struct BroadcastRead {
  const Word* buffer;
  Word* out;
  std::uint64_t n_buffer, n_out;
  Tally tally;
  NSAN_HD void operator()(std::uint64_t thread, std::uint64_t n_threads) const {
    const std::uint64_t lane = thread % kLanes;
    Word sum = 0;
    for (std::uint64_t i = lane; i < n_buffer; i += kLanes) sum += buffer[i];
    std::uint64_t read = 0;  // without the place, which would overflow: the sum of each item
    for (std::uint64_t i = thread; i < n_out; i += n_threads) {
      out[i] = sum + static_cast<Word>(i);
      read += sum;
    }
    tally.add(thread, read);
  }
};

struct FirstTouch {
  Word* data;
  std::uint64_t seed;
  Word number;
  Part part;
  Tally tally;
  NSAN_HD void operator()(std::uint64_t thread, std::uint64_t n_threads) const {
    std::uint64_t sum = 0;
    for (std::uint64_t i = part.begin + thread; i < part.end; i += n_threads)
      sum += data[i] = word_value(seed, i) + number;
    tally.add(thread, sum);
  }
};

// One thread, one read after the other: where the next one lies depends on what the last one read (its top bit is 0),
// or several would be on their way at once and fault together.
struct SignatureRead {
  const Word* data;
  std::uint64_t* result;
  std::uint64_t step;  // in words
  std::uint64_t number;
  Part part;  // of reads
  Tally tally;
  NSAN_HD void operator()(std::uint64_t thread, std::uint64_t) const {
    if (thread != 0) return;
    const std::uint64_t before = part.begin == 0 ? 0 : *result;
    std::uint64_t sum = part.begin == 0 ? number : before;
    std::uint64_t at = part.begin * step;
    for (const std::uint64_t end = part.end * step; at < end;) {
      const Word value = data[at];
      sum += value;
      at += step + (value >> 31);
    }
    *result = sum;
    tally.add(thread, sum - before);
  }
};

}  // namespace nsan

NSAN_KERNEL(fill_floats, nsan::FillNumbers<float>);
NSAN_KERNEL(fill_doubles, nsan::FillNumbers<double>);
NSAN_KERNEL(fill_words, nsan::FillWords);
NSAN_KERNEL(fill_squares, nsan::FillSquares);
NSAN_KERNEL(fill_nodes, nsan::FillNodes);
NSAN_KERNEL(vector_add, nsan::VectorAdd);
NSAN_KERNEL(stream_triad, nsan::StreamTriad);
NSAN_KERNEL(strided_read, nsan::StridedRead);
NSAN_KERNEL(random_read, nsan::RandomRead);
NSAN_KERNEL(embedding_gather, nsan::EmbeddingGather);
NSAN_KERNEL(stencil_five_point, nsan::StencilFivePoint);
NSAN_KERNEL(calculate_temp, nsan::CalculateTemp);
NSAN_KERNEL(pointer_chase, nsan::PointerChase);
NSAN_KERNEL(ping_pong, nsan::PingPong);
NSAN_KERNEL(broadcast_read, nsan::BroadcastRead);
NSAN_KERNEL(first_touch, nsan::FirstTouch);
NSAN_KERNEL(signature_read, nsan::SignatureRead);
