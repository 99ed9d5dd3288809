// dl_bench as it is, on a GPU that the CPU plays (host_device.hpp), with what the environment of a test adds:
//   DL_BENCH_SKIP=N    the N-th launch does nothing
//   DL_BENCH_FLIP=N    after the N-th launch one bit of the last tensor that it writes is another
//   DL_BENCH_ROOT      where /proc and /sys are
#include <cstdint>
#include <cstdlib>
#include <string>

#include "host_device.hpp"
#include "nsan/dl_bench.hpp"

namespace {

std::string text(const char* name) {
  const char* found = std::getenv(name);
  return found ? found : "";
}

std::uint64_t number(const char* name) { return text(name).empty() ? 0 : std::stoull(text(name)); }

class FaultyDevice : public nsan::HostDevice {
 public:
  using HostDevice::HostDevice;

  template <class Body>
  void launch(const Body& body, nsan::Grid grid, nsan::Stream stream) {
    ++n_launched_;
    if (n_launched_ == skip_) return;
    HostDevice::launch(body, grid, stream);
    if (n_launched_ != flip_) return;
    const nsan::Touched& last = body.tensors[body.n_tensors - 1];
    static_cast<std::uint8_t*>(last.at)[last.n_bytes / 3] ^= 0x20;
  }

 private:
  std::uint64_t skip_ = number("DL_BENCH_SKIP"), flip_ = number("DL_BENCH_FLIP"), n_launched_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
  return nsan::main_of<FaultyDevice>(nsan::dl_about(), argc, argv, nsan::dl_bench<FaultyDevice>, text("DL_BENCH_ROOT"));
}
