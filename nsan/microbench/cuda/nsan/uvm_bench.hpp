// uvm_bench: one access pattern over managed arrays. The arrays that stay are allocated and filled; each iteration
// allocates its temporaries, has the CPU write where the pattern says so, runs the kernels and frees the temporaries;
// in the end the CPU checks the result.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "axes.hpp"
#include "caching_allocator.hpp"
#include "chases.hpp"
#include "footprint.hpp"
#include "memory.hpp"
#include "migrations.hpp"
#include "pattern.hpp"
#include "patterns.hpp"
#include "program.hpp"
#include "stencils.hpp"
#include "tally_memory.hpp"

namespace nsan {

template <class... Patterns>
struct PatternList {
  static std::vector<std::string> names() { return {Patterns::kName...}; }

  static std::string help() {
    std::string text;
    ((text += (text.empty() ? "" : "; ") + std::string(Patterns::kName) + ": " + Patterns::kHelp), ...);
    return text;
  }

  // Calls visit with the pattern of that name; there must be one.
  template <class Visit>
  static void with(const std::string& name, const Options& options, Visit&& visit) {
    (void)((name == Patterns::kName && (visit(Patterns(options)), true)) || ...);
  }
};

using UvmPatterns =
    PatternList<StreamPattern, StridePattern, RandomPattern, GatherPattern, Stencil2dPattern, PointerChasePattern,
                PingPongPattern, BroadcastReadPattern, FirstTouchPattern, SignaturePattern, HotspotPattern,
                VectorAddPattern>;

inline std::vector<OwnFlag> uvm_bench_flags() {
  return {
      {"--pattern", "stream", joined(UvmPatterns::names(), "|"),
       "what kernels do; in brackets, how --bytes is divided. " + UvmPatterns::help()},
      {"--init", "cpu", "cpu|gpu", "who fills the arrays before the first iteration"},
      {"--stride-bytes", "8KiB", "SIZE", "stride: from one read to the next; above 4 KiB not every page is touched"},
      {"--zipf-exponent", "1.1", "S", "gather: row of rank k is asked for with a weight of k to the minus S"},
      {"--node-bytes", "4KiB", "SIZE", "pointer-chase: from one node to the next in memory; 4 KiB is a node a page"},
      {"--chasers", "1", "N", "pointer-chase: threads that go round at the same time, each a part of the cycle"},
      {"--grain", "page", "page|element", "signature: one read of each page, or of each element"},
  };
}

inline Options options_of(const Axes& axes, unsigned n_sms) {
  Options options;
  options.bytes = axes.bytes;
  options.page_bytes = static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
  options.seed = axes.seed;
  options.n_sms = n_sms;
  options.stride_bytes = parse_size("--stride-bytes", axes.own.at("stride-bytes"));
  options.node_bytes = parse_size("--node-bytes", axes.own.at("node-bytes"));
  options.n_chasers = parse_whole("--chasers", axes.own.at("chasers"), 1, 1024);
  options.zipf_exponent = parse_decimal("--zipf-exponent", axes.own.at("zipf-exponent"), 0, 10);
  options.reads_elements = one_of("--grain", axes.own.at("grain"), {"page", "element"}) == "element";
  return options;
}

// Before a GPU is asked for: sizes are the same on each.
inline void check_uvm_bench(const Axes& axes) {
  one_of("--pattern", axes.own.at("pattern"), UvmPatterns::names());
  one_of("--init", axes.own.at("init"), {"cpu", "gpu"});
  UvmPatterns::with(axes.own.at("pattern"), options_of(axes, 1), [](const auto&) {});
}

// What an allocator takes for the arrays: they alone, or the segments of a cache. From the second iteration on the
// first one repeats, from the third on also where an output becomes an input.
inline Demand demand_of(const PatternBase& pattern, AllocatorKind kind) {
  const std::uint64_t live = pattern.managed_bytes();  // all arrays, while kernels run
  if (kind == AllocatorKind::kRaw) return {live, live};
  AscendingPlaces places;
  CachingAllocator cache([&places](std::uint64_t n_bytes, bool) { return places(n_bytes); });
  std::vector<std::uint64_t> at(pattern.arrays.size());
  const auto allocate = [&](bool is_temporary) {
    for (std::size_t i = 0; i < at.size(); ++i)
      if (pattern.arrays[i].is_temporary == is_temporary) at[i] = cache.allocate(pattern.arrays[i].n_bytes);
  };
  allocate(false);
  for (int iteration = 0; iteration < 3; ++iteration) {
    allocate(true);
    if (pattern.carries) std::swap(at.front(), at.back());
    for (std::size_t i = 0; i < at.size(); ++i)
      if (pattern.arrays[i].is_temporary) cache.free(at[i]);
  }
  return {live, cache.peak_reserved_bytes(), kCacheReserves};
}

// A pattern on a device, behind one interface: what follows is compiled once, not for each pattern.
template <class Device>
class OnDevice {
 public:
  virtual ~OnDevice() = default;
  virtual const PatternBase& pattern() const = 0;
  virtual void prepare() = 0;
  virtual void fill(const Places& at, bool on_cpu) = 0;
  virtual void write(const Places& at) = 0;
  virtual void run(const Places& at, unsigned iteration, const Part& part) = 0;
  virtual std::uint64_t check(const Places& at, unsigned n_iterations) = 0;
};

template <class Device, class Pattern>
class PatternOnDevice final : public OnDevice<Device> {
 public:
  PatternOnDevice(Device& device, Pattern pattern) : device_(device), pattern_(std::move(pattern)) {}

  const PatternBase& pattern() const override { return pattern_; }
  void prepare() override { pattern_.prepare(); }
  void fill(const Places& at, bool on_cpu) override {
    if (on_cpu) {
      pattern_.fill(at, [](const auto& body, Grid) { body(0, 1); });
    } else {
      pattern_.fill(at, on_gpu());
    }
    pattern_.fill_on_cpu(at);
  }
  void write(const Places& at) override { pattern_.write(at); }
  void run(const Places& at, unsigned iteration, const Part& part) override {
    pattern_.run(at, iteration, part, on_gpu());
  }
  std::uint64_t check(const Places& at, unsigned n_iterations) override { return pattern_.check(at, n_iterations); }

 private:
  auto on_gpu() {
    return [this](const auto& body, Grid grid) { device_.launch(body, grid, Stream::kMain); };
  }

  Device& device_;
  Pattern pattern_;
};

template <class Device>
class UvmBench {
 public:
  UvmBench(Run<Device>& run, OnDevice<Device>& work)
      : run_(run),
        work_(work),
        pattern_(work.pattern()),
        tally_(run),
        memory_(run.device, run.record, run.axes.allocator, held_limit(run, pattern_)),
        at_(pattern_.arrays.size()),
        held_(pattern_.arrays.size()) {
    at_.tally = tally_.tally();
  }

  void measure() {
    work_.prepare();
    tell();
    fill();
    for (unsigned i = 0; i < run_.axes.iterations; ++i) iterate(static_cast<int>(i));
    check();
    if (!run_.axes.out.empty()) memory_.write_history(run_.axes.out);
  }

 private:
  using Phase = InPhase<Device>;
  struct Held {
    Tensor tensor;
    std::optional<Migrations> moves;
  };

  static Limit held_limit(Run<Device>& run, const PatternBase& pattern) {
    hold(run, demand_of(pattern, run.axes.allocator));
    return limit_of(run.axes, run.footprint, run.environment.host_available_bytes);
  }

  void tell() {
    Json arrays = Json::list();
    for (const auto& array : pattern_.arrays) {
      Json json;
      json.add("name", array.name).add("role", array.role).add("bytes", array.n_bytes);
      json.add("is_temporary", array.is_temporary).add("touched_bytes", array.least_touched_bytes);
      arrays.add("", json);
    }
    run_.about.add("arrays", arrays);
    run_.about.add("kernel_read_bytes", pattern_.read_bytes);
    run_.about.add("kernel_written_bytes", pattern_.written_bytes);
    run_.about.add("host_page_bytes", pattern_.page_bytes());
  }

  // Whether what migrates can be told at all. A tenth of the GPU stays out of it: tables of pages and other programs
  // take some of its memory, and then the driver evicts.
  bool is_certain() const {
    const auto& parameters = run_.environment.uvm_parameters;
    const auto forced = parameters.find("uvm_fault_force_sysmem");
    return run_.axes.allocator == AllocatorKind::kRaw && run_.axes.prefetch == Prefetch::kNone &&
           run_.axes.advice == Advice::kNone && run_.footprint.factor <= 0.9 &&
           (forced == parameters.end() || forced->second == "0");
  }

  void allocate(std::size_t i) {
    const ArrayPlan& plan = pattern_.arrays[i];
    Held& held = held_[i];
    held.tensor = memory_.allocate(plan.name, plan.role, plan.n_bytes);
    held.moves.emplace(run_.record, memory_.allocation_of(held.tensor), is_certain());
    at_[i] = held.tensor.at;
    const Advice advice = run_.axes.advice;
    if (advice == Advice::kNone || (advice == Advice::kReadMostly && !plan.is_read_only)) return;
    run_.device.advise(held.tensor.at, plan.n_bytes, advice);
  }

  void allocate_all(bool is_temporary, int iteration) {
    if (count(is_temporary) == 0) return;
    Phase phase(run_, "allocate", iteration);
    for (std::size_t i = 0; i < held_.size(); ++i)
      if (pattern_.arrays[i].is_temporary == is_temporary) allocate(i);
  }

  std::size_t count(bool is_temporary) const {
    std::size_t n = 0;
    for (const auto& array : pattern_.arrays) n += array.is_temporary == is_temporary;
    return n;
  }

  void fill() {
    allocate_all(false, -1);
    if (count(false) == 0) return;
    const bool on_cpu = run_.axes.own.at("init") == "cpu";
    Phase phase(run_, "init", -1);
    work_.fill(at_, on_cpu);
    for (std::size_t i = 0; i < held_.size(); ++i) {
      const ArrayPlan& plan = pattern_.arrays[i];
      if (!plan.is_filled) continue;
      if (on_cpu || plan.is_filled_on_cpu) {
        held_[i].moves->cpu_writes(phase.phase());
      } else {
        held_[i].moves->kernel_touches(phase.phase(), plan.n_bytes);
      }
    }
  }

  void iterate(int iteration) {
    const InStep<Device> step(run_, iteration);
    allocate_all(true, iteration);
    write(iteration);
    {
      Phase phase(run_, "run", iteration);
      launch(static_cast<unsigned>(iteration));
      for (std::size_t i = 0; i < held_.size(); ++i)
        held_[i].moves->kernel_touches(phase.phase(), pattern_.arrays[i].least_touched_bytes);
    }
    if (iteration + 1 < static_cast<int>(run_.axes.iterations)) free_temporaries(iteration);
  }

  void write(int iteration) {
    const auto is_rewritten = [](const ArrayPlan& array) { return array.is_rewritten; };
    if (std::none_of(pattern_.arrays.begin(), pattern_.arrays.end(), is_rewritten)) return;
    Phase phase(run_, "host-write", iteration);
    work_.write(at_);
    for (std::size_t i = 0; i < held_.size(); ++i)
      if (pattern_.arrays[i].is_rewritten) held_[i].moves->cpu_writes(phase.phase());
  }

  // Ahead: while the kernel of a part runs, the next part comes on a stream of its own, and no sooner: each prefetch
  // waits for the kernel before that one, each kernel for its prefetch.
  void launch(unsigned iteration) {
    const auto parts = parts_of(pattern_.cut, run_.axes.prefetch == Prefetch::kAhead);
    if (run_.axes.prefetch == Prefetch::kWhole) prefetch(parts[0], true, Stream::kMain);
    if (run_.axes.prefetch == Prefetch::kAhead) prefetch(parts[0], true, Stream::kPrefetch);
    for (std::size_t i = 0; i < parts.size(); ++i) {
      throw_if_interrupted();
      if (run_.axes.prefetch == Prefetch::kAhead) run_.device.follow(Stream::kMain, Stream::kPrefetch);
      if (i + 1 < parts.size()) {
        run_.device.follow(Stream::kPrefetch, Stream::kMain);
        prefetch(parts[i + 1], false, Stream::kPrefetch);
      }
      work_.run(at_, iteration, parts[i]);
    }
  }

  void prefetch(const Part& part, bool is_first, Stream stream) {
    for (std::size_t i = 0; i < held_.size(); ++i) {
      if (!is_first && pattern_.arrays[i].item_bytes == 0) continue;
      const Part bytes = bytes_of(pattern_.arrays[i], part);
      run_.device.prefetch(at_.as<char>(i) + bytes.begin, bytes.end - bytes.begin, Place::kGpu, stream);
    }
  }

  void free_temporaries(int iteration) {
    if (count(true) == 0) return;
    Phase phase(run_, "free", iteration);
    if (pattern_.carries) {
      std::swap(held_.front(), held_.back());
      std::swap(at_[0], at_[held_.size() - 1]);
    }
    for (std::size_t i = 0; i < held_.size(); ++i)
      if (pattern_.arrays[i].is_temporary) memory_.free(held_[i].tensor);
  }

  void check() {
    Phase phase(run_, "check", -1);
    const std::uint64_t wanted = work_.check(at_, run_.axes.iterations);
    if (const std::uint64_t total = tally_.read().total; total != wanted)
      throw failed("--pattern " + run_.axes.own.at("pattern") + ": what the kernels of all iterations added up is " +
                   std::to_string(total) + " and must be " + std::to_string(wanted) +
                   ": one did not run, or found other data; run it again, and if that repeats, something is wrong "
                   "with this GPU");
    for (std::size_t i = 0; i < held_.size(); ++i)
      if (pattern_.arrays[i].is_checked) held_[i].moves->cpu_reads(phase.phase());
    run_.verified = true;
  }

  Run<Device>& run_;
  OnDevice<Device>& work_;
  const PatternBase& pattern_;
  TallyMemory<Device> tally_;
  Memory<Device> memory_;
  Places at_;
  std::vector<Held> held_;
};

template <class Device>
int uvm_bench_main(int argc, char** argv, const std::string& root = "") {
  About about;
  about.name = "uvm_bench";
  about.description =
      "One access pattern over managed memory: makes a trace whose bytes are known. --bytes is that of all arrays "
      "together, rounded down; large arrays are multiples of 2 MiB. Outputs are allocated and freed in every iteration. "
      "With --prefetch ahead an iteration runs in up to 8 parts; random, gather, pointer-chase and broadcast-read cannot "
      "be cut, and take it as whole, on another stream. --advice read-mostly goes to the arrays that nobody writes once "
      "they are filled.";
  about.own = uvm_bench_flags();
  about.size = "--bytes";
  about.check = check_uvm_bench;
  const auto body = [](Run<Device>& run) {
    const auto n_sms = static_cast<unsigned>(std::max(run.facts.n_sms, 1));
    UvmPatterns::with(run.axes.own.at("pattern"), options_of(run.axes, n_sms), [&run](auto pattern) {
      PatternOnDevice<Device, decltype(pattern)> work(run.device, std::move(pattern));
      UvmBench<Device>(run, work).measure();
    });
  };
  return main_of<Device>(about, argc, argv, body, root);
}

}  // namespace nsan
