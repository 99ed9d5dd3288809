// Managed memory for PyTorch: the two functions that torch.cuda.memory.CUDAPluggableAllocator takes from a library.
// torch_uvm.py loads it: for every tensor (raw), or for the segments of PyTorch's own caching allocator (caching).
#include <cuda_runtime_api.h>
#include <sys/types.h>

#include <cstdio>

namespace {

// PyTorch takes null for "out of memory" where it caches, and does not look at all where it does not: so it is said.
bool is_done(cudaError_t status, const char* call, ssize_t n_bytes) {
  // The runtime is linked into this library (nvcc does so): at the exit of a process this copy may be gone before
  // PyTorch gives its memory back. The driver takes back what a process leaves.
  if (status == cudaSuccess || status == cudaErrorCudartUnloading) return true;
  cudaGetLastError();  // PyTorch must not find this error at a later call of its own
  std::fprintf(stderr, "managed_alloc: %s of %zd byte: %s: %s\n", call, n_bytes, cudaGetErrorName(status),
               cudaGetErrorString(status));
  return false;
}

}  // namespace

extern "C" {

void* nsan_managed_alloc(ssize_t n_bytes, int device, cudaStream_t) {
  if (n_bytes <= 0) return nullptr;
  int before = device;
  void* at = nullptr;
  if (!is_done(cudaGetDevice(&before), "cudaGetDevice", n_bytes)) return nullptr;
  if (before != device && !is_done(cudaSetDevice(device), "cudaSetDevice", n_bytes)) return nullptr;
  const bool is_there = is_done(cudaMallocManaged(&at, static_cast<size_t>(n_bytes), cudaMemAttachGlobal),
                                "cudaMallocManaged", n_bytes);
  if (before != device) is_done(cudaSetDevice(before), "cudaSetDevice", n_bytes);
  return is_there ? at : nullptr;
}

void nsan_managed_free(void* at, ssize_t n_bytes, int, cudaStream_t) {
  if (at != nullptr) is_done(cudaFree(at), "cudaFree", n_bytes);
}

}  // extern "C"
