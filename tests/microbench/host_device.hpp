// A device layer on the CPU: the same members as CudaDevice, so that the programs run whole without a GPU.
//
// What the "GPU" is and where it fails is set in `host_machine()` before a program starts, or by the environment of the
// process: NSAN_HOST_GPU_BYTES (memory of the GPU), NSAN_HOST_FAIL (as "launch:2": the second launch fails),
// NSAN_HOST_WITHOUT (as "managed_memory" or "driver"), NSAN_HOST_LOG (a file that gets the calls, one a line),
// NSAN_HOST_OVERHEAD_BYTES, NSAN_HOST_MANAGED_BYTES.
// Every call is kept as text in `host_machine().calls`; "leaked N" comes last where N allocations were not freed.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <stdexcept>
#include <string>
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
  std::uint64_t managed_bytes = ~std::uint64_t{0};  // managed memory that the "driver" has in all
  std::string fail_call;                  // name of the call that fails; "": none
  unsigned fail_at = 1;                   // the how manieth of them, from 1
  std::vector<std::string> calls;

  HostMachine() {
    facts.name = "HostDevice";
    facts.major = 8;
    facts.n_sms = 2;
    facts.total_bytes = text("NSAN_HOST_GPU_BYTES").empty() ? 8 * kGiB : std::stoull(text("NSAN_HOST_GPU_BYTES"));
    facts.managed_memory = facts.concurrent_managed_access = true;
    facts.driver_api = facts.runtime_api = 13000;
    const auto failing = text("NSAN_HOST_FAIL");
    fail_call = failing.substr(0, failing.find(':'));
    if (failing.find(':') != std::string::npos) {
      fail_at = static_cast<unsigned>(std::stoul(failing.substr(failing.find(':') + 1)));
    }
    without(text("NSAN_HOST_WITHOUT"));
    if (!text("NSAN_HOST_OVERHEAD_BYTES").empty()) overhead_bytes = std::stoull(text("NSAN_HOST_OVERHEAD_BYTES"));
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
    if (n_bytes > free_bytes()) throw no_memory();
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
    machine_.calls.push_back(std::string("push_range ") + name);
  }
  void pop_range() {
    if (n_open_ranges_-- == 0) throw std::logic_error("a range is popped that was not pushed");
    machine_.calls.push_back("pop_range");
  }

  std::size_t n_live() const { return held_.size(); }  // allocations that are not freed
  unsigned n_open_ranges() const { return n_open_ranges_; }

 private:
  struct Held {
    std::uint64_t n_bytes;
    bool managed;
  };

  static const char* text(Stream stream) { return stream == Stream::kMain ? "main" : "prefetch"; }

  void called(const std::string& call, const std::string& arguments) {
    machine_.calls.push_back(arguments.empty() ? call : call + " " + arguments);
    if (call == machine_.fail_call && --machine_.fail_at == 0) {
      throw failed(call + ": cudaErrorUnknown (HostDevice): told to fail");
    }
  }

  // Aligned as the driver aligns large ones; filled, so that nobody takes it for zeroes. Device memory is only counted:
  // nothing on the host may touch it.
  void* allocate(std::uint64_t n_bytes, bool managed) {
    if (n_bytes == 0) throw failed("cudaErrorInvalidValue (HostDevice): 0 bytes");
    void* at = nullptr;
    if (posix_memalign(&at, 2 * kMiB, managed ? n_bytes : 1) != 0) {
      throw no_memory();
    }
    if (managed) std::memset(at, 0xA5, n_bytes);
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
