// What dl_bench is told besides the common axes, and the tape that results.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "axes.hpp"
#include "errors.hpp"
#include "tape.hpp"
#include "values.hpp"

namespace nsan {

constexpr double kMostFlopsScale = 1000;
constexpr const char* kWritesTape = "nsan bench run dl_bench --network NAME";
constexpr std::uint64_t kLeastHintedBytes = kMiB;  // smaller tensors get no hint: a call costs more than it can save

struct DlOptions {
  Tape tape;  // only the steps that are to be played
  std::vector<std::string> hinted_roles;
  double flops_scale = 1;
  bool layer_ranges = true;

  bool is_hinted(const TapeTensor& tensor) const {
    return tensor.n_bytes >= kLeastHintedBytes &&
           std::find(hinted_roles.begin(), hinted_roles.end(), tensor.role) != hinted_roles.end();
  }
};

inline std::vector<std::string> role_names() { return {kRoles.begin(), kRoles.end()}; }

inline std::vector<OwnFlag> dl_flags() {
  const std::string writes = kWritesTape;
  return {
      {"--tape", "", "FILE", "the training steps to play: `" + writes + "` writes them and plays them"},
      {"--steps", "", "N", "play only the first N steps of the tape"},
      {"--roles", joined(role_names(), "+"), "ROLE+ROLE",
       "--prefetch and --advice are for tensors of these roles, and of 1 MiB or more; in a cache, advice stays with the "
       "memory when a tensor is freed"},
      {"--flops-scale", "1", "F", "compute F times as long as the tape's FLOPs would take; 0: touch memory only"},
      {"--layer-ranges", "true", "", "an NVTX range around each operation, with its name"},
      {"--dry-run", "false", "", "count what the tape does and print that; no GPU is used"},
      unused_flag("--bytes", "the tape decides how much memory it takes; `" + writes + " --batch N` writes another"),
      unused_flag("--iterations", "the tape decides how many steps there are; --steps N plays the first N"),
  };
}

inline std::vector<std::string> parse_roles(const std::string& text) {
  std::vector<std::string> roles;
  for (std::size_t start = 0; start <= text.size();) {
    const std::size_t plus = std::min(text.find('+', start), text.size());
    roles.push_back(one_of("--roles", text.substr(start, plus - start), role_names()));
    start = plus + 1;
  }
  return roles;
}

inline Tape tape_of(const std::string& path, const std::string& steps) {
  if (path.empty())
    throw usage("--tape FILE is missing: `" + std::string(kWritesTape) + "` writes a tape and plays it");
  Tape tape = read_tape(path);
  if (steps.empty()) return tape;
  const std::uint64_t n_steps = parse_whole("--steps", steps, 1);
  if (n_steps > tape.n_steps)
    throw usage("--steps " + steps + ": the tape has " + std::to_string(tape.n_steps) +
                ". Write a longer one, or leave --steps out");
  return first_steps(std::move(tape), static_cast<std::size_t>(n_steps));
}

inline DlOptions parse_dl_options(const Axes& axes) {
  const auto of = [&axes](const char* name) { return axes.own.at(name); };
  DlOptions options;
  options.hinted_roles = parse_roles(of("roles"));
  const std::string scale = of("flops-scale");
  options.flops_scale = scale == "0" ? 0 : parse_decimal("--flops-scale", scale, 0, kMostFlopsScale);
  options.layer_ranges = axes.is_on("layer-ranges");
  options.tape = tape_of(of("tape"), of("steps"));
  return options;
}

}  // namespace nsan
