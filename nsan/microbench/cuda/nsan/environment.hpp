// What the machine says about the driver, its host memory, and whether a profiler is at work.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <optional>
#include <sstream>
#include <string>

namespace nsan {

struct Environment {
  std::string driver_version;                         // as 580.65.06; empty: not known
  std::map<std::string, std::string> uvm_parameters;  // of the module nvidia_uvm, as far as they can be read
  std::optional<std::uint64_t> host_available_bytes;  // none: not known
  bool is_wsl = false;
  bool is_profiled = false;
};

// The first line of a file; empty if it cannot be read.
inline std::string first_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

inline std::map<std::string, std::string> read_parameters(const std::string& folder) {
  std::map<std::string, std::string> parameters;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(folder, error)) {
    std::ifstream file(entry.path());
    std::string value;
    if (std::getline(file, value)) parameters[entry.path().filename().string()] = value;
  }
  return parameters;
}

// The number after a key in a file of "key number" lines, as meminfo and memory.stat are.
inline std::optional<std::uint64_t> number_after(const std::string& path, const std::string& key) {
  std::ifstream file(path);
  std::string line;
  while (std::getline(file, line)) {
    std::istringstream words(line);
    std::string name;
    std::uint64_t value = 0;
    if (words >> name >> value && name == key) return value;
  }
  return std::nullopt;
}

// What a control group leaves: its limit less what it uses, of which a cache of files can be given up.
inline std::uint64_t left_in_group(const std::string& folder, const std::string& limit, const std::string& used,
                                   const std::string& cache) {
  constexpr std::uint64_t kNone = ~std::uint64_t{0};
  const std::string most = first_line(folder + "/" + limit);
  if (most.empty() || most.find_first_not_of("0123456789") != std::string::npos) return kNone;  // "max", or no limit
  const std::uint64_t now = std::strtoull(first_line(folder + "/" + used).c_str(), nullptr, 10);
  const std::uint64_t kept = now - std::min(now, number_after(folder + "/memory.stat", cache).value_or(0));
  const std::uint64_t bytes = std::strtoull(most.c_str(), nullptr, 10);
  return bytes - std::min(bytes, kept);
}

// The least that the control groups of this process leave, from its own up to the root, where a container sees its own.
inline std::uint64_t left_in_groups(const std::string& root) {
  std::uint64_t least = ~std::uint64_t{0};
  std::ifstream groups(root + "/proc/self/cgroup");
  std::string line;
  while (std::getline(groups, line)) {
    const std::size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controller = line.substr(first + 1, second - first - 1);
    if (!controller.empty() && controller != "memory") continue;
    const std::string mount = root + (controller.empty() ? "/sys/fs/cgroup" : "/sys/fs/cgroup/memory");
    for (std::string path = line.substr(second + 1);; path.erase(path.find_last_of('/'))) {
      if (path == "/") path.clear();
      least = std::min(least, controller.empty()
                                  ? left_in_group(mount + path, "memory.max", "memory.current", "inactive_file")
                                  : left_in_group(mount + path, "memory.limit_in_bytes", "memory.usage_in_bytes",
                                                  "total_inactive_file"));
      if (path.find('/') == std::string::npos) break;
    }
  }
  return least;
}

inline std::optional<std::uint64_t> host_available(const std::string& root) {
  const auto kib = number_after(root + "/proc/meminfo", "MemAvailable:");
  if (!kib) return std::nullopt;
  return std::min(*kib * 1024, left_in_groups(root));
}

inline bool is_wsl_at(const std::string& root) {
  std::string release = first_line(root + "/proc/sys/kernel/osrelease");
  std::transform(release.begin(), release.end(), release.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return release.find("microsoft") != std::string::npos;
}

// nsys sets these for the process that it profiles.
inline bool is_under_profiler() {
  for (const char* name : {"NSYS_PROFILING_SESSION_ID", "CUDA_INJECTION64_PATH", "NVTX_INJECTION64_PATH"}) {
    const char* value = std::getenv(name);
    if (value && *value) return true;
  }
  return false;
}

// Everything, below a root that is not "" in tests only.
inline Environment read_environment(const std::string& root = "") {
  Environment environment;
  environment.driver_version = first_line(root + "/sys/module/nvidia/version");
  environment.uvm_parameters = read_parameters(root + "/sys/module/nvidia_uvm/parameters");
  environment.host_available_bytes = host_available(root);
  environment.is_wsl = is_wsl_at(root);
  environment.is_profiled = is_under_profiler();
  return environment;
}

}  // namespace nsan
