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
// What stays free on the GPU beside managed memory that must not be evicted, at least: page tables, code and buffers of
// a profiler come after the free memory was read.
constexpr std::uint64_t kLeastHeadroom = 64 * kMiB;
constexpr std::uint64_t kHeadroomShare = 32;
// What stays free on the host: an eighth, and at least this. The driver's pages there cannot be swapped out.
constexpr std::uint64_t kLeastHostReserve = 512 * kMiB;

// Managed memory of a run, at its peak.
struct Demand {
  std::uint64_t tensor_bytes;    // that live at once
  std::uint64_t reserved_bytes;  // what the allocator takes from the driver for them, which is no less
  const char* reserved_as = "";  // where that may be more: as what
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
  const char* reserved_as = "";
  // GPU memory when all managed memory was freed: less than there was after the ballast is what else came to be used.
  std::optional<std::uint64_t> free_bytes_at_end;
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

// Managed memory that a GPU with so much available holds without evicting.
inline std::uint64_t room_without_eviction(std::uint64_t available_bytes) {
  return available_bytes - std::min(std::max(kLeastHeadroom, available_bytes / kHeadroomShare), available_bytes);
}

// What must be available for so much managed memory to have that room: the other way round, at most 2^64 - 1.
inline std::uint64_t available_for(std::uint64_t managed_bytes) {
  const std::uint64_t headroom = std::max(kLeastHeadroom, managed_bytes / (kHeadroomShare - 1) + 1);
  return managed_bytes + std::min(headroom, ~std::uint64_t{0} - managed_bytes);
}

inline std::uint64_t host_reserve(std::uint64_t host_available_bytes) {
  return std::max(kLeastHostReserve, host_available_bytes / 8);
}

inline std::uint64_t room_on_host(std::uint64_t host_available_bytes) {
  return host_available_bytes - std::min(host_reserve(host_available_bytes), host_available_bytes);
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
  const std::uint64_t reserve = host_reserve(*available), most = room_on_host(*available);
  if (managed_bytes <= most) return;
  throw refused("the host has " + size_text(*available) + " available for " + size_text(managed_bytes) +
                    " of managed memory, of which " + size_text(reserve) + " must stay free" +
                    (most == 0 ? ": end other programs" : ": at most " + std::to_string(most) + " bytes") +
                    (axes.allow_oversubscription ? " (--allow-oversubscription does not change this)" : ""),
                most == 0 ? WayOut::kSaid : WayOut::kLessMemory);
}

// Sizes that look alike as people write them are told apart by their bytes.
inline std::string told_apart(std::uint64_t n_bytes, std::uint64_t from) {
  const std::string text = size_text(n_bytes);
  return text == size_text(from) ? std::to_string(n_bytes) + " B" : text;
}

// The highest factor that needs no flag, where there is one: the GPU must have as much free, and more than as little.
inline std::string safe_factor(const Footprint& plan) {
  const std::uint64_t needed = available_for(plan.managed_bytes);
  if (needed > plan.free_bytes) return "";
  return "; without it, at most --oversubscription-factor " +
         factor_text(factor_of(plan.tensor_bytes, needed), Rounding::kDown);
}

// Evictions make room on a GPU that is full: the driver must have some to work with, whatever is allowed.
inline void check_gpu(const Axes& axes, const Footprint& plan) {
  const std::uint64_t room = room_without_eviction(plan.available_bytes);
  if (plan.managed_bytes <= room) return;
  const std::string available = size_text(plan.available_bytes);
  if (plan.available_bytes < kLeastAvailable && plan.managed_bytes > plan.available_bytes) {
    throw refused("the GPU has " + available + " free, and the driver needs " + size_text(kLeastAvailable) +
                      " to evict: end what else runs there",
                  WayOut::kLessMemory);
  }
  if (axes.allow_oversubscription) return;
  const bool is_more = plan.managed_bytes > plan.tensor_bytes;
  throw refused(told_apart(plan.managed_bytes, room) + " of managed memory" +
                    (is_more ? std::string(", ") + plan.reserved_as + " for " + size_text(plan.tensor_bytes) +
                                   " of tensors,"
                             : "") +
                    " is more than the " + told_apart(room, plan.managed_bytes) + " that fit safely into the " +
                    available + " that the GPU has " + (plan.ballast_bytes ? "left after the ballast" : "free") +
                    ": some drivers can hang the whole machine when they evict; --allow-oversubscription does it all "
                    "the same" +
                    (axes.factor > 0 ? safe_factor(plan) : ""),
                WayOut::kLessMemory);
}

// Managed memory that a run may take, whatever it planned with.
struct Limit {
  std::uint64_t bytes = ~std::uint64_t{0};
  std::string of;  // whose memory it is
};

inline Limit limit_of(const Axes& axes, const Footprint& footprint,
                      std::optional<std::uint64_t> host_available_bytes) {
  Limit limit;
  if (host_available_bytes) limit = {room_on_host(*host_available_bytes), "the host has for it"};
  const bool is_gpu = !axes.allow_oversubscription && footprint.available_bytes < limit.bytes;
  return is_gpu ? Limit{footprint.available_bytes, "the GPU has for it without --allow-oversubscription"} : limit;
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
  plan.reserved_as = demand.reserved_as;
  plan.free_bytes = free_bytes;
  plan.ballast_bytes = ballast_for(axes, demand.tensor_bytes, free_bytes);
  set_available(plan, free_bytes - plan.ballast_bytes);
  check_gpu(axes, plan);
  check_host(axes, plan.managed_bytes, host_available_bytes,
             plan.managed_bytes > room_without_eviction(plan.available_bytes));
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
  const auto& at_end = footprint.free_bytes_at_end;
  at_end ? json.add("free_bytes_at_end", *at_end) : json.add_null("free_bytes_at_end");
  return json;
}

}  // namespace nsan
