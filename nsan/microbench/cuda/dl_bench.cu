// dl_bench: training steps of a network as kernels over managed memory. What it does is in nsan/dl_bench.hpp.
#include "nsan/cuda_device.cuh"
#include "nsan/dl_bench.hpp"

int main(int argc, char** argv) {
  return nsan::main_of<nsan::CudaDevice>(nsan::dl_about(), argc, argv, nsan::dl_bench<nsan::CudaDevice>);
}
