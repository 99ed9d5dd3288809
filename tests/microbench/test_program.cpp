// A program of the microbenchmark over a GPU on the host, that ends as --mode says: what main_of makes of it.
//
// The machine is what NSAN_TEST_ROOT names, if set. With "tables FOLDER" it writes a record with hostile names instead.
#include <unistd.h>

#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>

#include "host_device.hpp"
#include "nsan/program.hpp"

namespace {

struct Fill {
  std::uint32_t* to;
  std::uint64_t n;
  void operator()(std::uint64_t thread, std::uint64_t n_threads) const {
    for (std::uint64_t i = thread; i < n; i += n_threads) to[i] = 7;
  }
};

}  // namespace

NSAN_KERNEL(fill, Fill);

namespace {

using Device = nsan::HostDevice;

void end_as(const std::string& mode) {
  if (mode == "failed") {
    throw nsan::failed("cudaLaunchKernel: cudaErrorIllegalAddress: in /home/alice/src/uvm_bench.cu:7\nand more\x1b[31m");
  }
  if (mode == "skipped") throw nsan::skipped("this GPU cannot do that: take another");
  if (mode == "usage") throw nsan::usage("--mode: these two do not go together");
  if (mode == "runtime") throw std::runtime_error("a library's own");
  if (mode == "int") throw 7;
  if (mode == "memory") throw std::bad_alloc();
  if (mode == "sigint") std::raise(SIGINT);
  if (mode == "stuck" || mode == "stuck-term") {  // as in a wait for a GPU that does not answer any more
    nsan::seconds_to_end = 1;
    std::raise(mode == "stuck" ? SIGINT : SIGTERM);
    for (;;) pause();
  }
  if (mode == "sigterm") std::raise(SIGTERM);
  if (mode == "twice") {
    std::raise(SIGINT);
    std::raise(SIGINT);
  }
}

void body(nsan::Run<Device>& run) {
  const std::string& mode = run.axes.own.at("mode");
  nsan::hold(run, {run.axes.bytes, run.axes.bytes});
  void* const at = run.device.allocate_managed(run.axes.bytes);
  const auto id = run.record.allocated("weights, \"first\"", "parameter", true, at, run.axes.bytes);
  if (mode == "late-hold") nsan::hold(run, {run.axes.bytes, run.axes.bytes});
  run.about.add("pattern", "fill").add("kernel_written_bytes", run.axes.bytes);
  for (int i = 0; i < static_cast<int>(run.axes.iterations); ++i) {
    const nsan::InStep step(run, i);
    const nsan::InPhase phase(run, "run", i);
    run.device.launch(Fill{static_cast<std::uint32_t*>(at), run.axes.bytes / 4}, {2, 32}, nsan::Stream::kMain);
    run.record.expect({phase.phase(), id, "htod", 0, run.axes.bytes});
    if (i == 1) end_as(mode);
  }
  {
    const nsan::InPhase check(run, "check", -1);
    if (mode == "sigint-last") std::raise(SIGINT);
    run.verified = static_cast<std::uint32_t*>(at)[run.axes.bytes / 4 - 1] == 7;
  }
  if (!run.axes.out.empty()) std::ofstream(run.axes.out + "/history.csv") << "sequence\n";
  if (mode == "no-tables") std::filesystem::create_directories(run.axes.out + "/../phases.csv/in-the-way");
  run.device.free(at);
  run.record.freed(id);
}

int write_hostile_tables(const std::string& folder) {
  nsan::Record record;
  std::uint64_t at = 0x7f0000000000;
  for (const std::string name :
       {"a,b", "say \"hi\"", "two\nlines", "cr\r", "", "gr\xfcn", "../../etc/passwd", "=1+1"}) {
    record.allocated(name, "r,ole", true, reinterpret_cast<const void*>(at), ~std::uint64_t{0});
    at += 2 * nsan::kMiB;
  }
  record.allocations[0].alloc_ns = 5;
  record.allocations[0].free_ns = 0;
  record.begin("ph,ase", -1);
  try {
    nsan::write_tables(folder, record, "{}");
  } catch (const nsan::Ended& end) {
    std::fprintf(stderr, "%s\n", end.what());
    return end.status();
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 3 && std::string(argv[1]) == "tables") return write_hostile_tables(argv[2]);
  nsan::About about{"tester",
                    "A program of the tests.",
                    {{"--mode", "well", "NAME", "how it ends"}, {"--tape", "", "FILE", "a path"}}};
  about.size = "--bytes";
  about.check = [](const nsan::Axes& axes) {
    if (axes.own.at("mode") == "checked") throw nsan::usage("--mode: 'checked' is refused before a GPU is asked for");
  };
  about.without_gpu = [](const nsan::Axes& axes, nsan::Json& json) {
    json.add("n", 3);
    return axes.own.at("mode") == "dry";
  };
  const char* root = std::getenv("NSAN_TEST_ROOT");
  return nsan::main_of<Device>(about, argc, argv, body, root ? root : "");
}
