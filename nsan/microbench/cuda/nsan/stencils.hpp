// The patterns over grids: an iteration reads one grid and writes another, which the next iteration reads.
#pragma once

#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "bodies.hpp"
#include "pattern.hpp"

namespace nsan {

// Rows and columns of an array of floats: columns a power of two and rows a multiple of the square, as near to each
// other as the number of cells allows.
struct Extent {
  std::uint64_t rows, columns;
};
inline Extent extent_of(std::uint64_t n_bytes) {
  const std::uint64_t n_cells = n_bytes / sizeof(float);
  std::uint64_t columns = kSquare;
  while (n_cells % (2 * columns * kSquare) == 0 && 4 * columns * columns <= n_cells) columns *= 2;
  return {n_cells / columns, columns};
}

// What the mirrored grid's square becomes, cell by cell on the CPU.
template <class Rule>
std::vector<float> square_after(std::vector<float> square, const std::vector<float>& power, unsigned n_iterations) {
  std::vector<float> next(square.size());
  for (unsigned iteration = 0; iteration < n_iterations; ++iteration) {
    throw_if_interrupted();
    for (std::uint64_t i = 0; i < next.size(); ++i)
      next[i] = Rule{}(cross_at(square.data(), kSquare, kSquare, i / kSquare, i % kSquare), power[i]);
    std::swap(square, next);
  }
  return square;
}

inline std::vector<float> square_of(std::uint64_t seed, float base) {
  std::vector<float> square(kSquare * kSquare);
  for (std::uint64_t i = 0; i < square.size(); ++i) square[i] = square_value(seed, i / kSquare, i % kSquare, base);
  return square;
}

class StencilPattern : public PatternBase {
 protected:
  StencilPattern(const Options& options, const char* name, std::uint64_t n_grids)
      : PatternBase(options, name, n_grids),
        each_(array_bytes(options.bytes / n_grids)),
        extent_(extent_of(each_)) {
    cut = {extent_.rows, kSquare, true};
    carries = true;
  }

  std::uint64_t row_bytes() const { return extent_.columns * sizeof(float); }
  std::uint64_t n_cells() const { return extent_.rows * extent_.columns; }

  ArrayPlan grid(const char* name) const {
    ArrayPlan plan = input(name, each_, row_bytes());
    plan.role = "state";
    plan.n_halo = 1;
    plan.is_read_only = false;
    return plan;
  }

  void check_grid(const float* got, const std::vector<float>& square, double tolerance) const {
    for (std::uint64_t row = 0; row < extent_.rows; ++row)
      for (std::uint64_t column = 0; column < extent_.columns; ++column)
        same(row * extent_.columns + column, got[row * extent_.columns + column],
             square[mirrored(row) * kSquare + mirrored(column)], tolerance);
  }

  std::uint64_t each_;
  Extent extent_;
};

class Stencil2dPattern : public StencilPattern {
 public:
  static constexpr const char* kName = "stencil2d";
  static constexpr const char* kHelp = "five-point stencil on a grid of floats, into a second one (two equal grids)";

  explicit Stencil2dPattern(const Options& options) : StencilPattern(options, kName, 2) {
    arrays = {grid("cells"), output("next", each_, row_bytes())};
    read_bytes = written_bytes = each_;
  }

  template <class Launch>
  void fill(const Places& at, Launch&& launch) const {
    launch(FillSquares{at.as<float>(0), n_cells(), extent_.columns, options_.seed, kBase}, busy(n_cells()));
  }
  template <class Launch>
  void run(const Places& at, unsigned number, const Part& part, Launch&& launch) const {
    launch(StencilFivePoint{at.as<float>(0), at.as<float>(1), extent_.rows, extent_.columns, part, number, at.tally},
           busy((part.end - part.begin) * extent_.columns));
  }
  std::uint64_t check(const Places& at, unsigned n_iterations) const {
    const auto square = square_of(options_.seed, kBase);
    check_grid(at.as<float>(1), square_after<Diffusion>(square, square, n_iterations), 0);
    return over_iterations(n_iterations, n_cells(), n_cells());
  }

 private:
  static constexpr float kBase = 1.0f;
};

class HotspotPattern : public StencilPattern {
 public:
  static constexpr const char* kName = "hotspot";
  static constexpr const char* kHelp =
      "Rodinia's hotspot: temperature and power of a chip, a thread block a tile of 16 x 16 (three equal grids)";

  explicit HotspotPattern(const Options& options) : StencilPattern(options, kName, 3) {
    arrays = {grid("temperature"), input("power", each_, row_bytes()), output("result", each_, row_bytes())};
    read_bytes = 2 * each_;
    written_bytes = each_;
  }

  template <class Launch>
  void fill(const Places& at, Launch&& launch) const {
    const std::uint64_t n = n_cells();
    launch(FillSquares{at.as<float>(0), n, extent_.columns, options_.seed, kTemperature}, busy(n));
    launch(FillSquares{at.as<float>(1), n, extent_.columns, options_.seed + 1, 0.0f}, busy(n));
  }
  template <class Launch>
  void run(const Places& at, unsigned number, const Part& part, Launch&& launch) const {
    launch(CalculateTemp{at.as<float>(0), at.as<float>(1), at.as<float>(2), extent_.rows, extent_.columns, part, number,
                         at.tally},
           covering((part.end - part.begin) * extent_.columns));
  }
  // The GPU rounds once where the CPU rounds twice (fused multiply-add), and the difference adds up like a random walk.
  // Power heats a cell by up to 1.4 degrees a step.
  std::uint64_t check(const Places& at, unsigned n_iterations) const {
    const auto temperature = square_of(options_.seed, kTemperature), power = square_of(options_.seed + 1, 0.0f);
    check_grid(at.as<float>(2), square_after<ChipHeat>(temperature, power, n_iterations),
               0.01 * std::sqrt(static_cast<double>(n_iterations)));
    return over_iterations(n_iterations, n_cells(), n_cells());
  }

 private:
  static constexpr float kTemperature = 320.0f;
};

}  // namespace nsan
