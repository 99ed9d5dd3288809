// uvm_bench as it is, over the device layer on the CPU: a program that `nsan bench` can run without a GPU.
#include "host_device.hpp"
// First: it defines what NSAN_KERNEL makes.
#include "nsan/uvm_bench.hpp"

int main(int argc, char** argv) { return nsan::uvm_bench_main<nsan::HostDevice>(argc, argv); }
