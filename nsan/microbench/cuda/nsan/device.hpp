// What a program of the microbenchmark asks of a GPU.
//
// The programs are templates over a device layer, so that the logic of the host can be tested without a GPU. A
// device layer is a class with these members; `CudaDevice` (cuda_device.cuh) asks the CUDA runtime, `HostDevice`
// (tests/microbench/host_device.hpp) runs the same bodies of kernels on the CPU.
//
//   DeviceFacts facts()                              what the GPU and its driver are
//   void warm_up()                                   takes what the programs need of the GPU beside allocations: code,
//                                                    streams, events; from then on free_bytes() can be planned with
//   std::uint64_t free_bytes()                       GPU memory that is free now
//   void* allocate_managed(std::uint64_t n_bytes)    cudaMallocManaged, attached globally
//   void* allocate_device(std::uint64_t n_bytes)     cudaMalloc
//   void free(void*)                                 cudaFree: waits for the device
//   void copy(void* to, const void* from, std::uint64_t n_bytes)   between host and GPU, done when it returns
//   void prefetch(void*, std::uint64_t, Place, Stream)
//   void advise(void*, std::uint64_t, Advice)
//   template <class Body> void launch(const Body&, Grid, Stream)
//   void follow(Stream follower, Stream leader)      what comes next in one waits for what is in the other
//   void synchronize()
//   void push_range(const char* name), pop_range()   NVTX, domain "nsan"
//
// A Body is a plain struct with `NSAN_HD void operator()(std::uint64_t thread, std::uint64_t n_threads) const`;
// `NSAN_KERNEL(name, Body)`, at namespace scope, gives it the name that a profiler shows. Here it does so for a device
// layer on the host (`KernelName<Body>::text`); cuda_device.cuh, included first, defines it for CUDA.
#pragma once

#include <cstdint>
#include <string>

#ifdef __CUDACC__
#define NSAN_HD __host__ __device__
#else
#define NSAN_HD
#endif

namespace nsan {

constexpr std::uint64_t kKiB = 1ull << 10;
constexpr std::uint64_t kMiB = 1ull << 20;
constexpr std::uint64_t kGiB = 1ull << 30;
constexpr std::uint64_t kVaBlock = 2 * kMiB;  // of virtual addresses, that the driver of managed memory keeps together

enum class Place { kGpu, kCpu };
enum class Stream { kMain, kPrefetch };

struct Grid {
  unsigned blocks;
  unsigned threads;
};

struct DeviceFacts {
  int ordinal = 0;
  std::string name;
  int major = 0, minor = 0;
  int n_sms = 0;
  std::uint64_t total_bytes = 0, free_bytes = 0;
  bool managed_memory = false;
  bool concurrent_managed_access = false;
  bool pageable_memory_access = false;
  bool uses_host_page_tables = false;  // coherent platform: there are no faults to see
  bool is_wsl = false;
  int driver_api = 0, runtime_api = 0;  // as 13000 for 13.0
};

// What the kernel that runs a Body is called. Only NSAN_KERNEL defines it.
template <class Body>
struct KernelName;

}  // namespace nsan

#ifndef NSAN_KERNEL
#define NSAN_KERNEL(name, ...)              \
  template <>                               \
  struct nsan::KernelName<__VA_ARGS__> {    \
    static constexpr const char* text = #name; \
  }
#endif
