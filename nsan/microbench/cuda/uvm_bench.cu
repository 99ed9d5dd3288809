// One access pattern over managed memory, to make a trace of: `uvm_bench --help` says which, and with what.
//
//   nvcc -std=c++17 -O3 -lineinfo -arch=native -o uvm_bench uvm_bench.cu
#include "nsan/cuda_device.cuh"
// First: it defines what NSAN_KERNEL makes.
#include "nsan/uvm_bench.hpp"

int main(int argc, char** argv) { return nsan::uvm_bench_main<nsan::CudaDevice>(argc, argv); }
