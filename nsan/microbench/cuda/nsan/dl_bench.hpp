// dl_bench: training steps of a network, played from a tape on a GPU with managed memory.
//
// Each kernel of the tape becomes one launch that touches exactly its tensors. The host runs ahead of the GPU as a
// training loop does, but waits for it at the end of each phase, so that a phase's time is that of its work: from its
// first call until the GPU is idle. PyTorch waits once a step, so that is three waits more, of microseconds each; and
// without a cache every cudaFree waits anyway.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "axes.hpp"
#include "contents.hpp"
#include "dl_options.hpp"
#include "errors.hpp"
#include "footprint.hpp"
#include "json.hpp"
#include "memory.hpp"
#include "program.hpp"
#include "record.hpp"
#include "tally_memory.hpp"
#include "tape.hpp"
#include "tape_counts.hpp"
#include "touch.hpp"

namespace nsan {

// The range of one operation of the network.
template <class Device>
class InLayer {
 public:
  InLayer(Device& device, const std::string& name, bool is_shown) : device_(device), is_shown_(is_shown) {
    if (is_shown_) device_.push_range(name.c_str());
  }
  InLayer(const InLayer&) = delete;
  InLayer& operator=(const InLayer&) = delete;
  ~InLayer() {
    if (is_shown_) device_.pop_range();
  }

 private:
  Device& device_;
  bool is_shown_;
};

template <class Device>
class Player {
 public:
  // `tally` is made, and the footprint held, before.
  Player(Run<Device>& run, const DlOptions& options, const TallyMemory<Device>& tally)
      : run_(run),
        device_(run.device),
        options_(options),
        tape_(options.tape),
        tally_(tally),
        memory_(run.device, run.record, run.axes.allocator,
                limit_of(run.axes, run.footprint, run.environment.host_available_bytes)),
        tensors_(tape_.tensors.size()),
        contents_(run.axes.seed, tape_.tensors.size()),
        at_cpu_(tape_.tensors.size()),
        is_certain_(is_certain()) {}

  void play() {
    {
      const InPhase<Device> phase(run_, "init", -1);
      play_until_mark();
    }
    while (position_ < tape_.operations.size()) play_step();
    const InPhase<Device> phase(run_, "verify", -1);
    verify();
  }

  const Memory<Device>& memory() const { return memory_; }

 private:
  // Whether what migrates can be told at all: tensors do not share memory, nothing hints, and nothing is evicted. A
  // tenth of the GPU stays out of it, which tables of pages and other programs may take.
  bool is_certain() const {
    const auto& parameters = run_.environment.uvm_parameters;
    const auto forced = parameters.find("uvm_fault_force_sysmem");
    return run_.axes.allocator == AllocatorKind::kRaw && run_.axes.prefetch == Prefetch::kNone &&
           run_.axes.advice == Advice::kNone && peak_block_bytes(tape_) <= run_.footprint.available_bytes / 10 * 9 &&
           (forced == parameters.end() || forced->second == "0");
  }

  // Up to the next step or phase.
  void play_until_mark() {
    for (; position_ < tape_.operations.size(); ++position_) {
      throw_if_interrupted();
      const auto [kind, which] = tape_.operations[position_];
      if (kind == Operation::kStep || kind == Operation::kPhase) return;
      if (kind == Operation::kCreate) create(which);
      if (kind == Operation::kDrop) drop(which);
      if (kind == Operation::kHostWrite) host_write(which);
      if (kind == Operation::kKernel) compute(tape_.kernels[which]);
    }
  }

  // Before the forward pass comes the input: old gradients go, the CPU writes a batch.
  void play_step() {
    const int iteration = static_cast<int>(tape_.operations[position_++].which) - 1;
    const InStep<Device> step(run_, iteration);
    {
      const InPhase<Device> input(run_, "input", iteration);
      play_until_mark();
    }
    while (position_ < tape_.operations.size() && tape_.operations[position_].kind == Operation::kPhase) {
      phase_kind_ = tape_.operations[position_++].which;
      play_phase(iteration);
    }
  }

  void play_phase(int iteration) {
    const InPhase<Device> phase(run_, kPhases[phase_kind_], iteration);
    phase_ = phase.phase();
    is_idle_ = true;
    play_until_mark();
    is_idle_ = true;
  }

  // Advice does not wait for its turn in a stream. Taken back with the tensor, it would be gone before the kernels run
  // that use it, so in a cache it stays with the memory, whoever gets that next.
  void create(std::size_t id) {
    const TapeTensor& what = tape_.tensors[id];
    tensors_[id] = memory_.allocate(what.name, what.role, what.n_bytes);
    if (run_.axes.advice != Advice::kNone && options_.is_hinted(what))
      device_.advise(tensors_[id].at, what.n_bytes, run_.axes.advice);
  }

  void drop(std::size_t id) {
    memory_.free(tensors_[id]);
    tensors_[id] = {};
  }

  // A cache may give memory that a kernel still uses: there PyTorch would copy in the order of the stream.
  void host_write(std::size_t id) {
    if (!is_idle_) device_.synchronize();
    is_idle_ = true;
    fill_whole(tensors_[id].at, tensors_[id].n_bytes, contents_.write(id));
    at_cpu_.fills(id);
  }

  // Kernels -------------------------------------------------------------------------------------

  void compute(const TapeKernel& kernel) {
    const InLayer<Device> layer(device_, kernel.name, options_.layer_ranges);
    const std::vector<std::size_t> ids = used_by(kernel);
    const Touch touch = touch_of(kernel, ids);
    prefetch_now(ids);
    launch(touch);
    is_idle_ = false;
    prefetch_next();
  }

  void launch(const Touch& touch) {
    const Grid grid = touch_grid(touch.n_quads);
    if (phase_kind_ == 0) return device_.launch(ForwardOp{touch}, grid, Stream::kMain);
    if (phase_kind_ == 1) return device_.launch(BackwardOp{touch}, grid, Stream::kMain);
    return device_.launch(UpdateOp{touch}, grid, Stream::kMain);
  }

  static std::vector<std::size_t> used_by(const TapeKernel& kernel) {
    std::vector<std::size_t> ids;
    for (const Reading& each : kernel.reads) ids.push_back(each.tensor);
    for (const std::size_t id : kernel.writes)
      if (std::find(ids.begin(), ids.end(), id) == ids.end()) ids.push_back(id);
    return ids;
  }

  Touch touch_of(const TapeKernel& kernel, const std::vector<std::size_t>& ids) {
    Touch touch{};
    for (const std::size_t id : ids) {
      const Tensor& tensor = tensors_[id];
      touch.tensors[touch.n_tensors++] = {tensor.at, tensor.n_bytes, 0, 0, contents_.of(id), 0, false, false};
    }
    for (std::size_t i = 0; i < kernel.reads.size(); ++i) {  // the first of the ids, in this order
      const Reading& reading = kernel.reads[i];
      Touched& tensor = touch.tensors[i];
      tensor.reads = true;
      tensor.n_bytes = reading.n_bytes;
      tensor.row_bytes = reading.row_bytes;
      tensor.n_rows = reading.row_bytes > 0 ? tensors_[reading.tensor].n_bytes / reading.row_bytes : 0;
    }
    for (const std::size_t id : kernel.writes) contents_.write(id);
    for (unsigned i = 0; i < touch.n_tensors; ++i) {
      Touched& tensor = touch.tensors[i];
      tensor.writes = std::find(kernel.writes.begin(), kernel.writes.end(), ids[i]) != kernel.writes.end();
      tensor.left = contents_.of(ids[i]);
      touch.n_quads = std::max(touch.n_quads, quads_of(tensor.n_bytes));
      if (at_cpu_.leaves(ids[i])) expect(ids[i], tensor.n_bytes);
    }
    touch.number = ++n_launched_;
    touch.seed = mixed(static_cast<std::uint32_t>(run_.axes.seed), touch.number);
    touch.fmas_per_quad = fmas_per_quad(kernel.flops, options_.flops_scale, touch.n_quads);
    touch.wrong = tally_.wrong();
    touch.tally = tally_.tally();
    wanted_tally_ += touch.tallied();
    return touch;
  }

  // Where only a part is used at first, when the rest comes is not certain, nor what comes of a shared VA block.
  void expect(std::size_t id, std::uint64_t used_bytes) {
    const Tensor& tensor = tensors_[id];
    const std::size_t allocation = memory_.allocation_of(tensor);
    if (is_certain_ && used_bytes == tensor.n_bytes && fills_va_blocks(run_.record.allocations[allocation]))
      run_.record.expect({phase_, allocation, "htod", tensor.n_bytes, tensor.n_bytes});
  }

  // Hints ---------------------------------------------------------------------------------------

  void prefetch(std::size_t id, Stream stream) {
    if (options_.is_hinted(tape_.tensors[id]))
      device_.prefetch(tensors_[id].at, tensors_[id].n_bytes, Place::kGpu, stream);
  }

  // For the kernel that is launched next: all of its tensors, or those that were not there when the one before was.
  void prefetch_now(const std::vector<std::size_t>& ids) {
    if (run_.axes.prefetch == Prefetch::kWhole)
      for (const std::size_t id : ids) prefetch(id, Stream::kMain);
    if (run_.axes.prefetch != Prefetch::kAhead) return;
    for (const std::size_t id : ids)
      if (std::find(prefetched_.begin(), prefetched_.end(), id) == prefetched_.end()) prefetch(id, Stream::kPrefetch);
    device_.follow(Stream::kMain, Stream::kPrefetch);
    device_.follow(Stream::kPrefetch, Stream::kMain);  // what comes next on it runs beside this kernel, not before
  }

  // While a kernel runs: what the next one of the step uses, as far as it is there.
  void prefetch_next() {
    prefetched_.clear();
    if (run_.axes.prefetch != Prefetch::kAhead) return;
    for (std::size_t i = position_ + 1; i < tape_.operations.size(); ++i) {
      const auto [kind, which] = tape_.operations[i];
      if (kind == Operation::kStep) return;
      if (kind != Operation::kKernel) continue;
      for (const std::size_t id : used_by(tape_.kernels[which])) {
        if (!tensors_[id].at) continue;
        prefetch(id, Stream::kPrefetch);
        prefetched_.push_back(id);
      }
      return;
    }
  }

  // The end -------------------------------------------------------------------------------------

  // No kernel found what it must not, and what is left holds what was computed last. Three bytes of each tensor tell
  // that its last kernel ran; the kernels themselves have looked at every byte.
  void verify() {
    const auto [total, number] = tally_.read();
    if (number != 0)
      throw wrong("kernel " + std::to_string(number) + " (" + launched(number) + ") did not find what was written");
    if (total != wanted_tally_)
      throw wrong("of the kernels, whose tally is " + std::to_string(total) + " and must be " +
                  std::to_string(wanted_tally_) + ", one did not run");
    for (std::size_t id = 0; id < tensors_.size(); ++id) {
      const Tensor& tensor = tensors_[id];
      if (!tensor.at || !contents_.is_written(id)) continue;
      for (const std::uint64_t byte : {std::uint64_t{0}, tensor.n_bytes / 2, tensor.n_bytes - 1})
        if (!holds(tensor.at, byte, contents_.of(id)))
          throw wrong(tape_.tensors[id].name + " does not hold what was computed");
    }
    run_.verified = true;
  }

  static Ended wrong(const std::string& what) {
    return failed(what + ": the results are wrong. Run it again; if that repeats, something is wrong with this GPU");
  }

  std::string launched(std::uint32_t number) const { return tape_.kernels.at(number - 1).name; }

  Run<Device>& run_;
  Device& device_;
  const DlOptions& options_;
  const Tape& tape_;
  const TallyMemory<Device>& tally_;
  Memory<Device> memory_;
  std::vector<Tensor> tensors_;  // by id; nowhere while they do not live
  Contents contents_;
  AtCpu at_cpu_;
  const bool is_certain_;                // what must migrate
  std::vector<std::size_t> prefetched_;  // for the next kernel, while the one before runs
  std::size_t position_ = 0, phase_ = 0, phase_kind_ = 0;
  std::uint32_t n_launched_ = 0;
  std::uint64_t wanted_tally_ = 0;
  bool is_idle_ = true;
};

inline Demand demand_of(const Tape& tape, AllocatorKind kind) {
  const std::uint64_t live = peak_tensor_bytes(tape);
  if (kind == AllocatorKind::kRaw) return {live, peak_whole_blocks_bytes(tape), "which are whole blocks of 2 MiB"};
  return {live, peak_reserved_bytes(tape), kCacheReserves};
}

template <class Device>
void dl_bench(Run<Device>& run) {
  const DlOptions options = parse_dl_options(run.axes);
  add_counts(run.about, options.tape);
  const TallyMemory<Device> tally(run);
  hold(run, demand_of(options.tape, run.axes.allocator));
  Player<Device> player(run, options, tally);
  player.play();
  if (run.axes.allocator == AllocatorKind::kCaching)
    run.about.add("peak_reserved_bytes", player.memory().cache().peak_reserved_bytes());
  if (!run.axes.out.empty()) player.memory().write_history(run.axes.out);
}

inline About dl_about() {
  About about;
  about.name = "dl_bench";
  about.description =
      "Plays training steps of a network on a GPU with managed memory: tensors come and go, and each operation is a "
      "kernel that touches exactly its tensors. Without a cache, what must fit counts each tensor in whole blocks of 2 "
      "MiB: whether the driver packs small managed allocations into one is not known; the column va of allocations.csv "
      "shows it. run.json has the factor of the tensors and that of what must fit.";
  about.own = dl_flags();
  about.size = "batch (" + std::string(kWritesTape) + " --batch N)";
  about.check = [](const Axes& axes) { parse_dl_options(axes); };
  about.without_gpu = [](const Axes& axes, Json& json) {
    if (!axes.is_on("dry-run")) return false;
    const Tape tape = parse_dl_options(axes).tape;
    json.add("program", "dl_bench").add("dry_run", true);
    add_counts(json, tape);
    json.add("peak_block_bytes", peak_whole_blocks_bytes(tape));
    json.add("peak_reserved_bytes", peak_reserved_bytes(tape));
    return true;
  };
  return about;
}

}  // namespace nsan
