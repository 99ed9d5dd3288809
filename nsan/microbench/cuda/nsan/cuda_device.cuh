// The device layer that asks the CUDA runtime (device.hpp says what a device layer is). To be included first: it says
// what NSAN_KERNEL makes of a Body.
#pragma once

#include <cuda_runtime.h>
#include <nvtx3/nvToolsExt.h>

#include <cstdint>
#include <cstdlib>
#include <string>

template <class Body>
struct KernelOf;

#define NSAN_KERNEL(name, ...)                                                                     \
  __global__ void name(__VA_ARGS__ body) {                                                         \
    body(std::uint64_t{blockIdx.x} * blockDim.x + threadIdx.x, std::uint64_t{gridDim.x} * blockDim.x); \
  }                                                                                                \
  template <>                                                                                      \
  struct KernelOf<__VA_ARGS__> {                                                                   \
    static auto at() { return name; }                                                              \
    static const char* text() { return #name; }                                                    \
  }

#include "axes.hpp"
#include "device.hpp"
#include "environment.hpp"
#include "errors.hpp"

// Before a measured kernel runs: what the first launch takes of the GPU is taken then.
__global__ void nsan_warm_up() {}

namespace nsan {

// What to do about an error that has a way out; empty where only the driver knows.
inline const char* advice_for(cudaError_t error) {
  switch (error) {
    case cudaErrorMemoryAllocation: return ": end what else runs on the GPU";
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorUnsupportedPtxVersion: return ": build it for this GPU, with -arch=native";
    case cudaErrorDevicesUnavailable: return ": another process has the GPU for itself: end it, or take another";
    case cudaErrorECCUncorrectable:
    case cudaErrorLaunchTimeout: return ": `nvidia-smi -q` and the kernel log say more";
    default: return "";
  }
}

inline std::string error_text(cudaError_t error) {
  return std::string(cudaGetErrorName(error)) + " (" + cudaGetErrorString(error) + ")" + advice_for(error);
}

inline void check_call(cudaError_t error, const std::string& call, const char* file, int line) {
  if (error == cudaSuccess) return;
  (void)cudaGetLastError();  // told here: the next launch must not find it, where this one is dealt with
  const std::string path = file;
  throw failed(path.substr(path.find_last_of('/') + 1) + ":" + std::to_string(line) + ": " +
                   call.substr(0, call.find('(')) + ": " + error_text(error),
               error == cudaErrorMemoryAllocation ? WayOut::kLessMemory : WayOut::kSaid);
}

#define NSAN_CHECK(call) ::nsan::check_call((call), #call, __FILE__, __LINE__)

inline std::string cuda_version(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

// Why no GPU can be had: no driver at all, one that is too old, or none that it shows to this process.
inline Ended no_gpu(cudaError_t error) {
  int driver = 0;
  if (cudaDriverGetVersion(&driver) != cudaSuccess) driver = 0;
  if (driver == 0)
    return no_driver("no NVIDIA driver is installed here: run it on a Linux machine with an NVIDIA GPU and its driver");
  if (error == cudaErrorInsufficientDriver)
    return no_driver("the NVIDIA driver is made for CUDA " + cuda_version(driver) + ", this program for CUDA " +
                     cuda_version(CUDART_VERSION) + ": update the driver, or build with an older CUDA");
  if (error == cudaSuccess || error == cudaErrorNoDevice)
    return no_driver("the NVIDIA driver shows no GPU: see `nvidia-smi`, and CUDA_VISIBLE_DEVICES");
  return no_driver("the NVIDIA driver cannot be used: " + error_text(error) + "; see `nvidia-smi` and the kernel log");
}

class CudaDevice {
 public:
  explicit CudaDevice(int ordinal) : ordinal_(ordinal) {
    // Lazily, the code of a kernel would take GPU memory at its first launch. Before the first call of CUDA.
    setenv("CUDA_MODULE_LOADING", "EAGER", 1);
    int n_devices = 0;
    const cudaError_t error = cudaGetDeviceCount(&n_devices);
    if (error != cudaSuccess || n_devices == 0) throw no_gpu(error);
    if (ordinal >= n_devices)
      throw usage("--device " + std::to_string(ordinal) + ": there is none of that number; from 0 to " +
                  std::to_string(n_devices - 1));
    NSAN_CHECK(cudaSetDevice(ordinal));
  }
  CudaDevice(const CudaDevice&) = delete;
  CudaDevice& operator=(const CudaDevice&) = delete;

  // The process ends soon: what fails here has been reported, or does not matter any more.
  ~CudaDevice() {
    for (const cudaStream_t stream : streams_)
      if (stream != nullptr) (void)cudaStreamDestroy(stream);
    if (event_ != nullptr) (void)cudaEventDestroy(event_);
    nvtxDomainDestroy(domain_);
  }

  DeviceFacts facts() {
    cudaDeviceProp properties;
    NSAN_CHECK(cudaGetDeviceProperties(&properties, ordinal_));
    DeviceFacts facts;
    facts.ordinal = ordinal_;
    facts.name = properties.name;
    facts.major = properties.major;
    facts.minor = properties.minor;
    facts.n_sms = properties.multiProcessorCount;
    facts.total_bytes = properties.totalGlobalMem;
    facts.free_bytes = free_bytes();
    facts.managed_memory = has(cudaDevAttrManagedMemory);
    facts.concurrent_managed_access = has(cudaDevAttrConcurrentManagedAccess);
    facts.pageable_memory_access = has(cudaDevAttrPageableMemoryAccess);
    facts.uses_host_page_tables = has(cudaDevAttrPageableMemoryAccessUsesHostPageTables);
    facts.is_wsl = is_wsl_at("");
    NSAN_CHECK(cudaDriverGetVersion(&facts.driver_api));
    NSAN_CHECK(cudaRuntimeGetVersion(&facts.runtime_api));
    return facts;
  }

  void warm_up() {
    for (cudaStream_t& stream : streams_)  // neither waits for the other, or for the default one
      if (stream == nullptr) NSAN_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    if (event_ == nullptr) NSAN_CHECK(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming));
    for (const cudaStream_t stream : streams_) {
      nsan_warm_up<<<1, 1, 0, stream>>>();
      check_call(cudaGetLastError(), "launch of nsan_warm_up", __FILE__, __LINE__);
    }
    synchronize();
  }

  std::uint64_t free_bytes() {
    std::size_t n_free = 0, n_total = 0;
    NSAN_CHECK(cudaMemGetInfo(&n_free, &n_total));
    return n_free;
  }

  void* allocate_managed(std::uint64_t n_bytes) {
    void* at = nullptr;
    NSAN_CHECK(cudaMallocManaged(&at, n_bytes, cudaMemAttachGlobal));
    return at;
  }

  void* allocate_device(std::uint64_t n_bytes) {
    void* at = nullptr;
    NSAN_CHECK(cudaMalloc(&at, n_bytes));
    return at;
  }

  void free(void* at) { NSAN_CHECK(cudaFree(at)); }

  // Either may be memory of the GPU: the address says so. To the GPU, cudaMemcpy may return before it is there, and
  // our streams do not wait for its.
  void copy(void* to, const void* from, std::uint64_t n_bytes) {
    NSAN_CHECK(cudaMemcpy(to, from, n_bytes, cudaMemcpyDefault));
    synchronize();
  }

  void prefetch(void* at, std::uint64_t n_bytes, Place place, Stream stream) {
#if CUDART_VERSION >= 13000
    NSAN_CHECK(cudaMemPrefetchAsync(at, n_bytes, location(place), 0, stream_of(stream)));
#else
    NSAN_CHECK(cudaMemPrefetchAsync(at, n_bytes, location(place), stream_of(stream)));
#endif
  }

  void advise(void* at, std::uint64_t n_bytes, Advice advice) {
    switch (advice) {
      case Advice::kNone: return;
      case Advice::kReadMostly:  // of no place: it is not looked at
        NSAN_CHECK(cudaMemAdvise(at, n_bytes, cudaMemAdviseSetReadMostly, location(Place::kGpu)));
        return;
      case Advice::kPreferredCpu:
        NSAN_CHECK(cudaMemAdvise(at, n_bytes, cudaMemAdviseSetPreferredLocation, location(Place::kCpu)));
        return;
      case Advice::kAccessedBy:
        NSAN_CHECK(cudaMemAdvise(at, n_bytes, cudaMemAdviseSetAccessedBy, location(Place::kGpu)));
        return;
    }
  }

  template <class Body>
  void launch(const Body& body, Grid grid, Stream stream) {
    KernelOf<Body>::at()<<<grid.blocks, grid.threads, 0, stream_of(stream)>>>(body);
    check_call(cudaGetLastError(), std::string("launch of ") + KernelOf<Body>::text(), __FILE__, __LINE__);
  }

  // An event holds for what waits for it as it was then: one is enough.
  void follow(Stream follower, Stream leader) {
    NSAN_CHECK(cudaEventRecord(event_, stream_of(leader)));
    NSAN_CHECK(cudaStreamWaitEvent(stream_of(follower), event_, 0));
  }

  void synchronize() { NSAN_CHECK(cudaDeviceSynchronize()); }

  void push_range(const char* name) {
    nvtxEventAttributes_t attributes{};
    attributes.version = NVTX_VERSION;
    attributes.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
    attributes.messageType = NVTX_MESSAGE_TYPE_ASCII;
    attributes.message.ascii = name;
    nvtxDomainRangePushEx(domain_, &attributes);
  }

  void pop_range() { nvtxDomainRangePop(domain_); }

 private:
#if CUDART_VERSION >= 13000
  cudaMemLocation location(Place place) const {
    cudaMemLocation location{};
    location.type = place == Place::kGpu ? cudaMemLocationTypeDevice : cudaMemLocationTypeHost;
    location.id = place == Place::kGpu ? ordinal_ : 0;
    return location;
  }
#else
  int location(Place place) const { return place == Place::kGpu ? ordinal_ : cudaCpuDeviceId; }
#endif

  bool has(cudaDeviceAttr attribute) const {
    int value = 0;
    NSAN_CHECK(cudaDeviceGetAttribute(&value, attribute, ordinal_));
    return value != 0;
  }

  cudaStream_t stream_of(Stream stream) const { return streams_[stream == Stream::kMain ? 0 : 1]; }

  int ordinal_;
  cudaStream_t streams_[2] = {nullptr, nullptr};
  cudaEvent_t event_ = nullptr;
  nvtxDomainHandle_t domain_ = nvtxDomainCreateA("nsan");
};

}  // namespace nsan
