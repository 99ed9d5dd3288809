// What the programs of the microbenchmark have in common: from the command line to the tables and the exit status.
#pragma once

#include <cstdint>
#include <cstdio>
#include <exception>
#include <functional>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "axes.hpp"
#include "device.hpp"
#include "environment.hpp"
#include "errors.hpp"
#include "footprint.hpp"
#include "interrupt.hpp"
#include "json.hpp"
#include "record.hpp"
#include "run_json.hpp"
#include "tables.hpp"

namespace nsan {

struct About {
  std::string name, description;
  std::vector<OwnFlag> own;
  std::string size = {};  // what says how much memory a run takes, as it is written after "a smaller"
  // Looks at the axes before a GPU is asked for: throws usage(...).
  std::function<void(const Axes&)> check = {};
  // Does what needs no GPU (as --dry-run) and says so with true: what it adds is printed, and that is all.
  std::function<bool(const Axes&, Json&)> without_gpu = {};
};

// A part of the ballast.
struct Piece {
  void* at;
  std::uint64_t n_bytes;
  std::size_t allocation;
};

// A run while it runs.
template <class Device>
struct Run {
  Device& device;
  const Axes& axes;  // its `out` is where files beside the tables go until these are published; empty: nowhere
  DeviceFacts facts;
  Environment environment;
  Record record;
  Footprint footprint;
  Json about;             // what the program adds to its JSON
  bool verified = false;  // the results were checked, and are right
  std::vector<Piece> ballast = {};
};

// A phase: NVTX range and record. At its end it waits for the device, so that its time is that of its work.
template <class Device>
class InPhase {
 public:
  InPhase(Run<Device>& run, const std::string& name, int iteration)
      : run_(run), n_exceptions_(std::uncaught_exceptions()) {
    throw_if_interrupted();
    run_.device.push_range(name.c_str());
    phase_ = run_.record.begin(name, iteration);
  }
  InPhase(const InPhase&) = delete;
  InPhase& operator=(const InPhase&) = delete;

  // May throw what the device reports of work that came before. A phase that an exception leaves stays open.
  ~InPhase() noexcept(false) {
    if (std::uncaught_exceptions() > n_exceptions_) {
      run_.device.pop_range();
      return;
    }
    try {
      run_.device.synchronize();
    } catch (...) {
      run_.device.pop_range();
      throw;
    }
    run_.record.end(phase_);
    run_.device.pop_range();
    throw_if_interrupted();
  }

  std::size_t phase() const { return phase_; }

 private:
  Run<Device>& run_;
  int n_exceptions_;
  std::size_t phase_ = 0;
};

// An iteration: an NVTX range around its phases, with the name that nsan takes for a step.
template <class Device>
class InStep {
 public:
  InStep(Run<Device>& run, int iteration) : run_(run), iteration_(iteration) { run_.device.push_range("step"); }
  InStep(const InStep&) = delete;
  InStep& operator=(const InStep&) = delete;
  ~InStep() { run_.device.pop_range(); }
  int iteration() const { return iteration_; }

 private:
  Run<Device>& run_;
  int iteration_;
};

// A piece of the ballast that leaves what is wanted; or nothing, and how much smaller the next one to try is.
template <class Device>
std::uint64_t too_large_by(Run<Device>& run, std::uint64_t n_bytes, std::uint64_t wanted) {
  void* at = nullptr;
  try {
    at = run.device.allocate_device(n_bytes);
  } catch (const Ended& end) {
    if (end.way_out() != WayOut::kLessMemory) throw;
    return (n_bytes / 2 + kGranule - 1) / kGranule * kGranule;  // fragmented: pieces of half the size
  }
  const std::uint64_t available = run.device.free_bytes();
  if (available >= wanted) {
    run.ballast.push_back({at, n_bytes, run.record.allocated("ballast", "ballast", false, at, n_bytes)});
    run.footprint.ballast_bytes += n_bytes;
    return 0;
  }
  run.device.free(at);  // cudaMalloc took more than it was asked for
  return (wanted - available + kGranule - 1) / kGranule * kGranule;
}

// What may be missing of a ballast: the factor is that much lower.
inline std::uint64_t tolerance_of(std::uint64_t wanted) { return std::max(4 * kGranule, wanted / kHeadroomShare); }

template <class Device>
Ended no_ballast(const Run<Device>& run, std::uint64_t planned, std::uint64_t available) {
  return refused("of a ballast of " + size_text(planned) + " the GPU gives " + size_text(run.footprint.ballast_bytes) +
                 ", in pieces: its memory is fragmented, or it is a part of a card, as MIG makes them. End what else "
                 "runs there, or take --oversubscription-factor " +
                 factor_text(factor_of(run.footprint.tensor_bytes, available), Rounding::kDown));
}

// Takes the ballast, in pieces if need be, and never so much that less than is wanted would be left.
template <class Device>
void take_ballast(Run<Device>& run, std::uint64_t planned, std::uint64_t wanted) {
  constexpr int kMostTries = 1024;
  std::uint64_t size = planned, available = run.device.free_bytes();
  run.footprint.ballast_bytes = 0;
  for (int i = 0; i < kMostTries && size > 0 && available >= wanted + kGranule; ++i) {
    throw_if_interrupted();
    size = std::min(size, (available - wanted) / kGranule * kGranule);
    size -= std::min(size, too_large_by(run, size, wanted));
    available = run.device.free_bytes();
  }
  if (available < wanted)
    throw failed("the free memory of the GPU changes while the ballast is taken: end what else runs there");
  if (available > wanted + tolerance_of(wanted)) throw no_ballast(run, planned, available);
}

// Plans the footprint and makes it so. To be called before the first managed allocation.
template <class Device>
void hold(Run<Device>& run, const Demand& demand) {
  for (const auto& one : run.record.allocations) {
    if (one.managed) throw std::logic_error("hold() comes before the first managed allocation");
  }
  Footprint& footprint = run.footprint;
  footprint = plan_footprint(run.axes, demand, run.device.free_bytes(), run.environment.host_available_bytes);
  if (footprint.ballast_bytes == 0) return;
  take_ballast(run, footprint.ballast_bytes, wanted_bytes(footprint.tensor_bytes, run.axes.factor));
  set_available(footprint, run.device.free_bytes());
  check_gpu(run.axes, footprint);
}

template <class Device>
void release_ballast(Run<Device>& run) {
  while (!run.ballast.empty()) {
    const Piece piece = run.ballast.back();
    run.ballast.pop_back();
    run.device.free(piece.at);
    run.record.freed(piece.allocation);
  }
}

// Throws skipped(...) where a trace of this machine would not show what the programs are for.
inline void check_machine(const DeviceFacts& facts, const Environment& environment) {
  const std::string gpu = "device " + std::to_string(facts.ordinal) + " (" + facts.name + ")";
  if (facts.is_wsl || environment.is_wsl) {
    throw skipped("under WSL a GPU does not fault on managed memory: run on Linux itself");
  }
  if (facts.uses_host_page_tables) {
    throw skipped(gpu + " uses the page tables of the host (a coherent platform): there are no GPU page faults to see; "
                        "run on a GPU behind PCIe");
  }
  if (!facts.managed_memory) {
    throw skipped(gpu + " has no managed memory (as some virtual GPUs): take another with --device");
  }
  if (!facts.concurrent_managed_access) {
    throw skipped(gpu + " has no concurrent managed access: managed memory moves whole at each launch, without faults; "
                        "it takes a GPU of compute capability 6.0 or newer on Linux");
  }
}

// One line: control characters, which a terminal would obey, become blanks.
inline std::string one_line(const std::string& text) {
  std::string line = valid_utf8(text);
  for (std::size_t i = 0; i < line.size(); ++i) {
    const auto byte = static_cast<unsigned char>(line[i]);
    const auto next = static_cast<unsigned char>(i + 1 < line.size() ? line[i + 1] : 0);
    if (byte < 0x20 || byte == 0x7F) line[i] = ' ';
    if (byte == 0xC2 && next < 0xA0) line.replace(i, 2, "  ");  // U+0080 to U+009F
  }
  return line;
}

// How a program takes less memory, or more, where that would do: `size` is About's.
inline std::string with_way_out(const std::string& reason, WayOut way_out, const std::string& size) {
  if (way_out == WayOut::kSaid || size.empty()) return reason;
  const bool is_less = way_out == WayOut::kLessMemory;
  return reason + (is_less ? "; a smaller " : "; a larger ") + size + " takes " + (is_less ? "less" : "more");
}

// Whatever happens, as a status and a reason of one line.
template <class Work>
End end_of(const std::string& size, Work work) {
  try {
    work();
    return {};
  } catch (const Ended& end) {
    return {end.status(), one_line(with_way_out(end.what(), end.way_out(), size))};
  } catch (const std::bad_alloc&) {
    return {kFailed, with_way_out("the host has no memory left for it", WayOut::kLessMemory, size)};
  } catch (const std::exception& error) {
    return {kFailed, one_line(std::string("unexpected error: ") + error.what())};
  } catch (...) {
    return {kFailed, "unexpected error of an unknown kind"};
  }
}

template <class Device>
void keep(Run<Device>& run, Told& told) {
  told.record = std::move(run.record);
  told.footprint = run.footprint;
  told.about = std::move(run.about);
  told.verified = run.verified;
}

// Runs the body on the GPU; what it recorded is told also when it throws.
template <class Device, class Body>
void run_body(const Axes& axes, Told& told, Body& body) {
  Device device(axes.device);
  told.facts = device.facts();
  check_machine(told.facts, told.environment);
  device.warm_up();
  Run<Device> run{device, axes, told.facts, told.environment, std::move(told.record), {}, {}};
  try {
    body(run);
    device.synchronize();
    if (run.footprint.managed_bytes > 0) run.footprint.free_bytes_at_end = device.free_bytes();
    release_ballast(run);
  } catch (...) {
    end_of("", [&run] { release_ballast(run); });  // what the first error was is what counts
    keep(run, told);
    throw;
  }
  keep(run, told);
}

inline End print_line(const std::string& text) {
  if (std::fprintf(stdout, "%s\n", text.c_str()) >= 0 && std::fflush(stdout) == 0) return {};
  return {kFailed, "cannot write the JSON line to stdout: is the disk full?"};
}

inline int ended(const std::string& program, const End& end) {
  if (end.status != kDone) std::fprintf(stderr, "%s: %s\n", program.c_str(), end.reason.c_str());
  return end.status;
}

// A run from its axes on: the tables and, where all went well, the JSON line.
template <class Device, class Body>
End run_program(const About& about, const Axes& asked, Body& body, const std::string& root) {
  std::optional<TableFolder> folder;
  if (!asked.out.empty()) folder.emplace(asked.out);
  Axes axes = asked;
  if (folder) axes.out = folder->scratch();
  Told told;
  told.environment = read_environment(root);
  catch_interrupts();
  End end = end_of(about.size, [&] { run_body<Device>(axes, told, body); });
  const std::string json = run_json(about.name, axes_json(axes, about.own), told, end);
  // A command line that has to be written anew leaves nothing behind.
  if (folder && end.status != kUsage) {
    const End written = end_of("", [&] { folder->publish(told.record, json); });
    if (end.status == kDone) end = written;
    else if (written.status != kDone) end.reason += "; the tables could not be written either";
  }
  return end.status == kDone ? print_line(json) : end;
}

template <class Device, class Body>
int main_of(const About& about, int argc, char** argv, Body body, const std::string& root = "") {
  Axes axes;
  Json told;
  bool is_done = false;
  const End parsed = end_of(about.size, [&] {
    axes = parse_axes(about.name, std::vector<std::string>(argv + (argc > 0), argv + argc), about.own);
    if (!axes.help && about.check) about.check(axes);
    if (!axes.help && about.without_gpu) is_done = about.without_gpu(axes, told);
  });
  if (parsed.status != kDone) return ended(about.name, parsed);
  if (axes.help) {
    std::fputs(help_text(about.name, about.description, about.own).c_str(), stdout);
    return ended(about.name, std::fflush(stdout) == 0 ? End{} : End{kFailed, "cannot write to stdout"});
  }
  if (is_done) return ended(about.name, print_line(told.text()));
  End end;
  const End outer = end_of(about.size, [&] { end = run_program<Device>(about, axes, body, root); });
  return ended(about.name, outer.status == kDone ? end : outer);
}

}  // namespace nsan
