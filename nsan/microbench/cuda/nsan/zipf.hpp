// Ranks from 1 to n, rank k with a weight of k to the minus exponent: as words, users and rows of embedding tables are
// asked for. Exact for every exponent above 0, by rejection-inversion (Hoermann and Derflinger 1996): a draw from the
// integral of the density, kept if it lies under the histogram.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "permutation.hpp"

namespace nsan {

class Zipf {
 public:
  Zipf(std::uint64_t n, double exponent, std::uint64_t seed)
      : n_(n),
        seed_(seed),
        exponent_(exponent),
        area_of_first_(integral(1.5) - 1),
        area_(integral(static_cast<double>(n) + 0.5)),
        always_kept_(2 - inverse(integral(2.5) - weight(2))) {}

  std::uint64_t operator()() {
    for (;;) {
      const double area = area_ + uniform() * (area_of_first_ - area_);
      const double x = inverse(area);
      const double rank = std::clamp(std::floor(x + 0.5), 1.0, static_cast<double>(n_));
      if (rank - x <= always_kept_ || area >= integral(rank + 0.5) - weight(rank))
        return static_cast<std::uint64_t>(rank);
    }
  }

 private:
  double uniform() { return static_cast<double>(mixed(seed_, n_drawn_++) >> 11) * 0x1p-53; }
  double weight(double x) const { return std::exp(-exponent_ * std::log(x)); }

  // Of the weight, up to x; written so that an exponent of 1 (a logarithm) needs no case of its own.
  double integral(double x) const {
    const double log_x = std::log(x), power = (1 - exponent_) * log_x;
    return (std::abs(power) > 1e-8 ? std::expm1(power) / power : 1 + power / 2) * log_x;
  }
  double inverse(double area) const {
    const double power = std::max(area * (1 - exponent_), -1.0);
    return std::exp((std::abs(power) > 1e-8 ? std::log1p(power) / power : 1 - power / 2) * area);
  }

  std::uint64_t n_, seed_, n_drawn_ = 0;
  double exponent_, area_of_first_, area_, always_kept_;
};

}  // namespace nsan
