// A device layer on the CPU: the same members as CudaDevice, so that the programs run whole without a GPU.
//
// What the "GPU" is and where it fails is set in `host_machine()` before a program starts, or by the environment of the
// process: NSAN_HOST_GPU_BYTES (memory of the GPU), NSAN_HOST_FAIL (as "launch:2": the second launch fails),
// NSAN_HOST_WITHOUT (as "managed_memory" or "driver"), NSAN_HOST_LOG (a file that gets the calls, one a line),
// NSAN_HOST_OVERHEAD_BYTES, NSAN_HOST_MANAGED_BYTES, NSAN_HOST_LARGEST_BYTES, NSAN_HOST_CODE_BYTES,
// NSAN_HOST_INTERRUPT (as "push_range check:2": SIGINT comes at the second call that begins so).
// Every call is kept as text in `host_machine().calls`; "leaked N" comes last where N allocations were not freed.
#pragma once

#include <algorithm>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "nsan/axes.hpp"
#include "nsan/device.hpp"
#include "nsan/errors.hpp"

namespace nsan {

struct HostMachine {
  DeviceFacts facts;
  bool has_driver = true;
  bool backwards = false;                 // threads of a launch run from the last to the first
  std::uint64_t used_elsewhere_bytes = 0;  // GPU memory that other processes hold
  std::uint64_t overhead_bytes = 0;        // what each cudaMalloc takes beside what was asked for
  std::uint64_t largest_bytes = ~std::uint64_t{0};  // that one cudaMalloc can have, as in memory that is fragmented
  std::uint64_t code_bytes = 0;                     // what warm_up takes
  std::uint64_t managed_bytes = ~std::uint64_t{0};  // managed memory that the "driver" has in all
  std::string fail_call;                  // name of the call that fails; "": none
  unsigned fail_at = 1;                   // the how manieth of them, from 1
  std::string interrupt_call;             // start of the call at which SIGINT comes; "": none
  unsigned interrupt_at = 1;              // at the how manieth of them, from 1
  std::vector<std::string> calls;

  HostMachine() {
    facts.name = "HostDevice";
    facts.major = 8;
    facts.n_sms = 2;
    facts.total_bytes = text("NSAN_HOST_GPU_BYTES").empty() ? 8 * kGiB : std::stoull(text("NSAN_HOST_GPU_BYTES"));
    facts.managed_memory = facts.concurrent_managed_access = true;
    facts.driver_api = facts.runtime_api = 13000;
    std::tie(fail_call, fail_at) = counted(text("NSAN_HOST_FAIL"));
    std::tie(interrupt_call, interrupt_at) = counted(text("NSAN_HOST_INTERRUPT"));
    without(text("NSAN_HOST_WITHOUT"));
    if (!text("NSAN_HOST_OVERHEAD_BYTES").empty()) overhead_bytes = std::stoull(text("NSAN_HOST_OVERHEAD_BYTES"));
    if (!text("NSAN_HOST_LARGEST_BYTES").empty()) largest_bytes = std::stoull(text("NSAN_HOST_LARGEST_BYTES"));
    if (!text("NSAN_HOST_CODE_BYTES").empty()) code_bytes = std::stoull(text("NSAN_HOST_CODE_BYTES"));
    if (!text("NSAN_HOST_MANAGED_BYTES").empty()) managed_bytes = std::stoull(text("NSAN_HOST_MANAGED_BYTES"));
  }

  void without(const std::string& what) {
    if (what == "driver") has_driver = false;
    if (what == "managed_memory") facts.managed_memory = false;
    if (what == "concurrent_managed_access") facts.concurrent_managed_access = false;
    if (what == "gpu_page_tables") facts.uses_host_page_tables = true;
    if (what == "linux") facts.is_wsl = true;
  }

  // How many calls begin so.
  std::size_t n_calls(const std::string& start) const {
    std::size_t n = 0;
    for (const auto& call : calls) n += call.compare(0, start.size(), start) == 0;
    return n;
  }

 private:
  // Of "call:2".
  static std::pair<std::string, unsigned> counted(const std::string& text) {
    const std::size_t colon = text.find(':');
    if (colon == std::string::npos) return {text, 1};
    return {text.substr(0, colon), static_cast<unsigned>(std::stoul(text.substr(colon + 1)))};
  }

  static std::string text(const char* name) {
    const char* found = std::getenv(name);
    return found ? found : "";
  }
};

inline HostMachine& host_machine() {
  static HostMachine machine;
  return machine;
}

// As a GPU's runtime: made with an ordinal, throws no_driver where there is none.
class HostDevice {
 public:
  explicit HostDevice(int ordinal) : machine_(host_machine()) {
    if (!machine_.has_driver) {
      throw no_driver("no NVIDIA driver was found (HostDevice): install one, or run on a machine with a GPU");
    }
    if (ordinal != 0) throw usage("--device " + std::to_string(ordinal) + ": there is only device 0 (HostDevice)");
  }
  HostDevice(const HostDevice&) = delete;
  HostDevice& operator=(const HostDevice&) = delete;
  ~HostDevice() {
    if (!held_.empty()) machine_.calls.push_back("leaked " + std::to_string(held_.size()));
    for (const auto& [at, held] : held_) release(at, held);
    if (const char* path = std::getenv("NSAN_HOST_LOG")) {
      std::ofstream log(path);
      for (const auto& call : machine_.calls) log << call << '\n';
    }
  }

  DeviceFacts facts() {
    auto facts = machine_.facts;
    facts.free_bytes = free_bytes();
    return facts;
  }
  void warm_up() { device_bytes_ += machine_.code_bytes; }
  // Managed memory counts when a GPU populates it, not when it is allocated.
  std::uint64_t free_bytes() const {
    return machine_.facts.total_bytes - machine_.used_elsewhere_bytes - device_bytes_;
  }
  void* allocate_managed(std::uint64_t n_bytes) {
    called("allocate_managed", std::to_string(n_bytes));
    if (n_bytes > machine_.managed_bytes - managed_bytes_) throw no_memory();
    return allocate(n_bytes, true);
  }
  void* allocate_device(std::uint64_t n_bytes) {
    called("allocate_device", std::to_string(n_bytes));
    if (n_bytes > std::min(free_bytes(), machine_.largest_bytes)) throw no_memory();
    device_bytes_ += std::min(n_bytes + machine_.overhead_bytes, free_bytes());
    return allocate(n_bytes, false);
  }
  void free(void* at) {
    const auto found = held_.find(at);
    if (found == held_.end()) throw failed("cudaFree: cudaErrorInvalidValue (HostDevice): not allocated");
    called("free", std::to_string(found->second.n_bytes));
    release(at, found->second);
    held_.erase(found);
  }
  void copy(void* to, const void* from, std::uint64_t n_bytes) {
    called("copy", std::to_string(n_bytes));
    std::memcpy(to, from, n_bytes);
  }
  void prefetch(void* at, std::uint64_t n_bytes, Place place, Stream stream) {
    called("prefetch", std::to_string(n_bytes) + (place == Place::kGpu ? " gpu " : " cpu ") + text(stream));
    inside(at, n_bytes);
  }
  void advise(void* at, std::uint64_t n_bytes, Advice advice) {
    called("advise", std::to_string(n_bytes) + " " + name_of(kAdvices, advice));
    inside(at, n_bytes);
  }
  template <class Body>
  void launch(const Body& body, Grid grid, Stream stream) {
    called("launch", std::string(KernelName<Body>::text) + " " + std::to_string(grid.blocks) + "x" +
                         std::to_string(grid.threads) + " " + text(stream));
    if (grid.blocks == 0 || grid.threads == 0 || grid.threads > 1024) {
      throw failed("launch: cudaErrorInvalidConfiguration (HostDevice)");
    }
    const std::uint64_t n_threads = std::uint64_t{grid.blocks} * grid.threads;
    for (std::uint64_t i = 0; i < n_threads; ++i) body(machine_.backwards ? n_threads - 1 - i : i, n_threads);
  }
  void follow(Stream follower, Stream leader) {
    called("follow", std::string(text(follower)) + " " + text(leader));
  }
  void synchronize() { called("synchronize", ""); }
  void push_range(const char* name) {
    ++n_open_ranges_;
    note(std::string("push_range ") + name);
  }
  void pop_range() {
    if (n_open_ranges_-- == 0) throw std::logic_error("a range is popped that was not pushed");
    note("pop_range");
  }

  std::size_t n_live() const { return held_.size(); }  // allocations that are not freed
  unsigned n_open_ranges() const { return n_open_ranges_; }

 private:
  struct Held {
    std::uint64_t n_bytes;
    bool managed;
  };

  static const char* text(Stream stream) { return stream == Stream::kMain ? "main" : "prefetch"; }

  void note(const std::string& call) {
    machine_.calls.push_back(call);
    const std::string& at = machine_.interrupt_call;
    if (!at.empty() && call.compare(0, at.size(), at) == 0 && --machine_.interrupt_at == 0) std::raise(SIGINT);
  }

  void called(const std::string& call, const std::string& arguments) {
    note(arguments.empty() ? call : call + " " + arguments);
    if (call == machine_.fail_call && --machine_.fail_at == 0) {
      throw failed(call + ": cudaErrorUnknown (HostDevice): told to fail");
    }
  }

  // Aligned as the driver aligns large ones; filled, so that nobody takes it for zeroes. Of the GPU's own memory, which
  // only kernels may touch, there is the front: more than a tally has is a ballast.
  void* allocate(std::uint64_t n_bytes, bool managed) {
    if (n_bytes == 0) throw failed("cudaErrorInvalidValue (HostDevice): 0 bytes");
    void* at = nullptr;
    const std::uint64_t there = managed ? n_bytes : std::min(n_bytes, kMiB);
    if (posix_memalign(&at, 2 * kMiB, there) != 0) {
      throw no_memory();
    }
    std::memset(at, 0xA5, there);
    if (managed) managed_bytes_ += n_bytes;
    held_[at] = {n_bytes, managed};
    return at;
  }
  void release(void* at, const Held& held) {
    if (held.managed) managed_bytes_ -= held.n_bytes;
    else device_bytes_ -= std::min(device_bytes_, held.n_bytes + machine_.overhead_bytes);
    std::free(at);
  }
  static Ended no_memory() {
    return failed("cudaErrorMemoryAllocation (HostDevice): out of memory", WayOut::kLessMemory);
  }
  void inside(const void* at, std::uint64_t n_bytes) const {
    const auto* start = static_cast<const char*>(at);
    for (const auto& [begin, held] : held_) {
      const auto* first = static_cast<const char*>(begin);
      if (held.managed && first <= start && start + n_bytes <= first + held.n_bytes) return;
    }
    throw failed("cudaErrorInvalidValue (HostDevice): not inside managed memory");
  }

  HostMachine& machine_;
  std::uint64_t device_bytes_ = 0, managed_bytes_ = 0;
  unsigned n_open_ranges_ = 0;
  std::map<void*, Held> held_;
};

}  // namespace nsan
