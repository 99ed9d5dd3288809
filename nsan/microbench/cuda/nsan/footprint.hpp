// How much managed memory a run may use, and how much of the GPU a ballast takes away from it. Arithmetic only.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <optional>
#include <string>

#include "axes.hpp"
#include "errors.hpp"
#include "json.hpp"

namespace nsan {

// The granule in which cudaMalloc takes GPU memory for large allocations.
constexpr std::uint64_t kGranule = 2 * kMiB;
// What stays available on the GPU whatever the factor: the driver holds eight VA blocks at least.
constexpr std::uint64_t kLeastAvailable = 8 * kGranule;
// What stays free on the host: an eighth, and at least this. The driver's pages there cannot be swapped out.
constexpr std::uint64_t kLeastHostReserve = 512 * kMiB;

// Managed memory of a run, at its peak.
struct Demand {
  std::uint64_t tensor_bytes;    // that live at once
  std::uint64_t reserved_bytes;  // what the allocator takes from the driver for them, which is no less
};

// The factor counts tensors, as that of the driver model does: whatever the allocator, the GPU has the same memory
// left. What must fit, so that the machine is not left without memory, is what the allocator takes.
struct Footprint {
  std::uint64_t tensor_bytes = 0;
  std::uint64_t managed_bytes = 0;    // taken from the driver
  std::uint64_t free_bytes = 0;       // GPU memory before the ballast
  std::uint64_t ballast_bytes = 0;    // taken by cudaMalloc
  std::uint64_t available_bytes = 0;  // GPU memory after the ballast
  double tensor_factor = 0;           // F1 of the tensors: the one that is asked for
  double factor = 0;                  // F1: managed over available
};

enum class Rounding { kUp, kDown };

// A factor of four digits, rounded to the side on which it may be given as a flag.
inline std::string factor_text(double factor, Rounding rounding) {
  const int decimals = std::max(0, 3 - static_cast<int>(std::floor(std::log10(factor))));
  const double scale = std::pow(10.0, decimals);
  const double scaled = factor * scale;
  char text[64];
  std::snprintf(text, sizeof text, "%.*f", decimals,
                (rounding == Rounding::kUp ? std::ceil(scaled) : std::floor(scaled)) / scale);
  return trimmed(text);
}

// GPU memory that a factor leaves for managed memory: at most 2^64 - 1, which no card gives.
inline std::uint64_t wanted_bytes(std::uint64_t managed_bytes, double factor) {
  const long double wanted = std::ceil(static_cast<long double>(managed_bytes) / static_cast<long double>(factor));
  constexpr long double kTop = 18446744073709551616.0L;
  return wanted >= kTop ? ~std::uint64_t{0} : static_cast<std::uint64_t>(wanted);
}

inline double factor_of(std::uint64_t n_bytes, std::uint64_t available_bytes) {
  return static_cast<double>(n_bytes) / static_cast<double>(available_bytes);
}

inline void set_available(Footprint& footprint, std::uint64_t available_bytes) {
  footprint.available_bytes = available_bytes;
  footprint.tensor_factor = factor_of(footprint.tensor_bytes, available_bytes);
  footprint.factor = factor_of(footprint.managed_bytes, available_bytes);
}

inline std::uint64_t host_reserve(std::uint64_t host_available_bytes) {
  return std::max(kLeastHostReserve, host_available_bytes / 8);
}

// Every page may come to lie on the host, when the CPU writes or checks it or when the GPU evicts it.
inline void check_host(const Axes& axes, std::uint64_t managed_bytes, std::optional<std::uint64_t> available,
                       bool is_oversubscribed) {
  if (!available) {
    if (!is_oversubscribed) return;
    throw refused("what the GPU evicts needs memory on the host, and how much is available there is not known "
                  "(MemAvailable in /proc/meminfo): stay below what the GPU has free",
                  WayOut::kLessMemory);
  }
  const std::uint64_t reserve = host_reserve(*available);
  const std::uint64_t most = *available - std::min(reserve, *available);
  if (managed_bytes <= most) return;
  throw refused("the host has " + size_text(*available) + " available for " + size_text(managed_bytes) +
                    " of managed memory, of which " + size_text(reserve) + " must stay free" +
                    (most == 0 ? ": end other programs" : ": at most " + std::to_string(most) + " bytes") +
                    (axes.allow_oversubscription ? " (--allow-oversubscription does not change this)" : ""),
                most == 0 ? WayOut::kSaid : WayOut::kLessMemory);
}

// Evictions make room on a GPU that is full: the driver must have some to work with, whatever is allowed.
inline void check_gpu(const Axes& axes, const Footprint& plan) {
  if (plan.managed_bytes <= plan.available_bytes) return;
  const std::string available = size_text(plan.available_bytes);
  if (plan.available_bytes < kLeastAvailable) {
    throw refused("the GPU has " + available + " free, and the driver needs " + size_text(kLeastAvailable) +
                      " to evict: end what else runs there",
                  WayOut::kLessMemory);
  }
  if (axes.allow_oversubscription) return;
  // Sizes that look alike as people write them are told apart by their bytes.
  const bool is_close = size_text(plan.managed_bytes) == available;
  const bool has_cache = plan.managed_bytes > plan.tensor_bytes;
  throw refused((is_close ? std::to_string(plan.managed_bytes) + " B" : size_text(plan.managed_bytes)) +
                    " of managed memory" +
                    (has_cache ? ", reserved for " + size_text(plan.tensor_bytes) + " of tensors," : "") +
                    " is more than the " +
                    (is_close ? std::to_string(plan.available_bytes) + " B" : available) + " that the GPU has " +
                    (plan.ballast_bytes ? "left after the ballast" : "free") +
                    ": some drivers can hang the whole machine when they evict; --allow-oversubscription does it all "
                    "the same",
                WayOut::kLessMemory);
}

// The ballast is rounded down, so that the factor is never above what was asked for.
inline std::uint64_t ballast_for(const Axes& axes, std::uint64_t tensor_bytes, std::uint64_t free_bytes) {
  if (axes.factor == 0) return 0;
  const std::uint64_t wanted = wanted_bytes(tensor_bytes, axes.factor);
  const std::string asked = "--oversubscription-factor " + json_number(axes.factor);
  if (wanted > free_bytes) {
    const long double given = static_cast<long double>(free_bytes) * static_cast<long double>(axes.factor);
    const auto most = static_cast<std::uint64_t>(given);
    throw refused(asked + " needs " + size_text(wanted) + " of free GPU memory for " + size_text(tensor_bytes) +
                      ", and " + size_text(free_bytes) + " are free: at least factor " +
                      factor_text(factor_of(tensor_bytes, free_bytes), Rounding::kUp) + ", or at most " +
                      std::to_string(most) + " bytes of managed memory",
                  WayOut::kLessMemory);
  }
  if (wanted < kLeastAvailable) {
    throw refused(asked + " would leave " + size_text(wanted) + " on the GPU, and the driver needs " +
                      size_text(kLeastAvailable) + ": at most factor " +
                      factor_text(factor_of(tensor_bytes, kLeastAvailable), Rounding::kDown) +
                      ", or more managed memory",
                  WayOut::kMoreMemory);
  }
  return (free_bytes - wanted) / kGranule * kGranule;
}

inline Footprint plan_footprint(const Axes& axes, const Demand& demand, std::uint64_t free_bytes,
                                std::optional<std::uint64_t> host_available_bytes) {
  if (demand.tensor_bytes == 0) throw usage("a run needs managed memory, at least 1 byte");
  if (free_bytes == 0) throw refused("the GPU has no memory free: end what else runs there");
  Footprint plan;
  plan.tensor_bytes = demand.tensor_bytes;
  plan.managed_bytes = std::max(demand.tensor_bytes, demand.reserved_bytes);
  plan.free_bytes = free_bytes;
  plan.ballast_bytes = ballast_for(axes, demand.tensor_bytes, free_bytes);
  set_available(plan, free_bytes - plan.ballast_bytes);
  check_gpu(axes, plan);
  check_host(axes, plan.managed_bytes, host_available_bytes, plan.managed_bytes > plan.available_bytes);
  return plan;
}

inline Json footprint_json(const Footprint& footprint) {
  Json json;
  json.add("tensor_bytes", footprint.tensor_bytes);
  json.add("managed_bytes", footprint.managed_bytes);
  json.add("free_bytes", footprint.free_bytes);
  json.add("ballast_bytes", footprint.ballast_bytes);
  json.add("available_bytes", footprint.available_bytes);
  json.add("tensor_oversubscription_factor", footprint.tensor_factor);
  json.add("oversubscription_factor", footprint.factor);
  return json;
}

}  // namespace nsan
