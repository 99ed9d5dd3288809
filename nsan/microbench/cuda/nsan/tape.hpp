// A tape: training steps of a network, one operation a line, as nsan/microbench/tapes.py writes them and says how.
// What cannot be played is refused with the number of its line.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <fstream>
#include <istream>
#include <string>
#include <utility>
#include <vector>

#include "errors.hpp"

namespace nsan {

constexpr int kTapeVersion = 1;
constexpr std::size_t kMostTensors = 12;    // one kernel may use so many different ones
constexpr std::uint64_t kLoadBytes = 16;    // parts of a tensor that are read are multiples of it
constexpr std::uint64_t kMostBytes = std::uint64_t{1} << 48;  // of all that is alive: the address space ends there
constexpr std::array<const char*, 7> kRoles = {"parameter", "gradient", "optimizer", "activation",
                                               "workspace", "input",    "buffer"};
constexpr std::array<const char*, 3> kPhases = {"forward", "backward", "update"};

struct TapeTensor {
  std::string name, role;
  std::uint64_t n_bytes;
};

// What a kernel reads: the first n_bytes of a tensor, or as many in rows of row_bytes anywhere in it.
struct Reading {
  std::size_t tensor;
  std::uint64_t n_bytes, row_bytes;  // row_bytes 0: from the front
};

struct TapeKernel {
  std::string name;
  std::uint64_t flops;
  std::vector<Reading> reads;
  std::vector<std::size_t> writes;
};

struct Operation {
  enum Kind { kCreate, kDrop, kHostWrite, kKernel, kStep, kPhase };
  Kind kind;
  std::size_t which;  // tensor, kernel or phase by position, or the step's number
};

struct Tape {
  std::string network;
  std::vector<std::pair<std::string, std::string>> facts;
  std::vector<TapeTensor> tensors;
  std::vector<TapeKernel> kernels;
  std::vector<Operation> operations;
  std::size_t n_steps = 0;
};

// Reads tapes. Each operation is checked against what lives by then, so that a tape that is read can be played.
class TapeReader {
 public:
  TapeReader(std::istream& in, const std::string& path) : in_(in), path_(path) {}

  Tape read() {
    read_head();
    while (!ended_) {
      if (!next_line()) throw wrong("the tape was cut short: its last line is not `end N`");
      read_line();
    }
    if (next_line()) throw wrong("there is more after the line `end`");
    return std::move(tape_);
  }

 private:
  enum class State { kUnwritten, kWritten, kDropped };

  Ended wrong(const std::string& what) const {
    return usage(path_ + ":" + std::to_string(line_number_) + ": " + what +
                 ". Write the tape anew: `nsan bench run` does");
  }

  bool next_line() {
    std::string line;
    line_number_ += 1;
    if (!std::getline(in_, line)) return false;
    if (in_.eof() && !ended_) throw wrong("the tape was cut short: the line has no end");
    if (!line.empty() && line.back() == '\r') line.pop_back();
    split(line);
    return true;
  }

  void split(const std::string& line) {
    fields_.clear();
    std::size_t start = 0;
    for (std::size_t tab; (tab = line.find('\t', start)) != std::string::npos; start = tab + 1)
      fields_.push_back(line.substr(start, tab - start));
    fields_.push_back(line.substr(start));
    at_ = 0;
  }

  const std::string& field(const char* what) {
    if (at_ == fields_.size() || fields_[at_].empty()) throw wrong(std::string(what) + " is missing");
    return fields_[at_++];
  }

  void end_of_line() const {
    if (at_ != fields_.size()) throw wrong("there is more on the line than belongs there: `" + fields_[at_] + "`");
  }

  std::uint64_t number(const std::string& text, const char* what) const {
    std::uint64_t value = 0;
    bool is_good = !text.empty();
    for (const char c : text) {
      const auto digit = static_cast<std::uint64_t>(c - '0');
      if (c < '0' || c > '9' || value > (UINT64_MAX - digit) / 10) is_good = false;
      value = value * 10 + digit;
    }
    if (!is_good) throw wrong(std::string(what) + " is `" + text + "`, not a number of 0 to 2^64 - 1");
    return value;
  }
  std::uint64_t number(const char* what) { return number(field(what), what); }

  void read_head() {
    const std::string magic = "nsan-tape ";
    if (!next_line() || fields_[0].compare(0, magic.size(), magic) != 0) throw wrong("this is no tape of nsan");
    if (fields_[0] != magic + std::to_string(kTapeVersion) || fields_.size() > 1)
      throw wrong("this tape is of version `" + fields_[0].substr(magic.size()) + "`, and this program reads version " +
                  std::to_string(kTapeVersion));
    if (!next_line() || field("what the line is") != "network") throw wrong("the line `network NAME` is missing");
    tape_.network = field("the name of the network");
    end_of_line();
  }

  void read_line() {
    const std::string& kind = field("what the line is");
    if (kind == "end") return read_end();
    if (kind == "fact") {
      const std::string& key = field("the name of the fact");
      tape_.facts.emplace_back(key, field("the value of the fact"));
    } else if (kind == "c") {
      read_create();
    } else if (kind == "d") {
      const std::size_t tensor = alive(field("the id"), "dropped");
      live_bytes_ -= tape_.tensors[tensor].n_bytes;
      states_[tensor] = State::kDropped;
      add(Operation::kDrop, tensor);
    } else if (kind == "h") {
      const std::size_t tensor = alive(field("the id"), "written by the CPU");
      states_[tensor] = State::kWritten;
      add(Operation::kHostWrite, tensor);
    } else if (kind == "k") {
      read_kernel();
    } else if (kind == "s") {
      read_step();
    } else if (kind == "p") {
      read_phase();
    } else {
      throw wrong("`" + kind + "` is no operation: there are c, d, h, k, s, p and end");
    }
    end_of_line();
  }

  void add(Operation::Kind kind, std::size_t which) { tape_.operations.push_back({kind, which}); }

  void read_create() {
    const std::uint64_t id = number("the id");
    if (id != tape_.tensors.size())
      throw wrong("the id is " + std::to_string(id) + ", and " + std::to_string(tape_.tensors.size()) + " is due");
    const std::uint64_t n_bytes = number("the size");
    if (n_bytes < 1 || n_bytes > kMostBytes - live_bytes_)
      throw wrong(std::to_string(n_bytes) + " B cannot be: a tensor has 1 or more, and all that live at most 2^48");
    const std::string& role = field("the role");
    if (std::find(kRoles.begin(), kRoles.end(), role) == kRoles.end()) throw wrong("there is no role `" + role + "`");
    tape_.tensors.push_back({field("the name"), role, n_bytes});
    states_.push_back(State::kUnwritten);
    live_bytes_ += n_bytes;
    add(Operation::kCreate, tape_.tensors.size() - 1);
  }

  std::size_t alive(const std::string& text, const char* how) const {
    const std::uint64_t id = number(text, "the id");
    const std::string subject = "tensor " + std::to_string(id) + " is " + how;
    if (id >= tape_.tensors.size()) throw wrong(subject + " before it is created");
    const auto tensor = static_cast<std::size_t>(id);
    if (states_[tensor] == State::kDropped)
      throw wrong(subject + " after its drop (" + tape_.tensors[tensor].name + ")");
    return tensor;
  }

  void read_kernel() {
    if (tape_.n_steps == 0 || n_phases_ == 0) throw wrong("a kernel is outside of all phases");
    TapeKernel kernel;
    kernel.flops = number("the FLOPs");
    for (std::uint64_t left = n_tensors("the number of reads"); left > 0; --left) kernel.reads.push_back(reading());
    for (std::uint64_t left = n_tensors("the number of writes"); left > 0; --left)
      kernel.writes.push_back(alive(field("the id"), "written"));
    kernel.name = field("the name");
    check(kernel);
    for (const std::size_t tensor : kernel.writes) states_[tensor] = State::kWritten;
    tape_.kernels.push_back(std::move(kernel));
    add(Operation::kKernel, tape_.kernels.size() - 1);
  }

  std::uint64_t n_tensors(const char* what) {
    const std::uint64_t count = number(what);
    if (count > kMostTensors)
      throw wrong(std::string(what) + " is " + std::to_string(count) + ", of at most " + std::to_string(kMostTensors));
    return count;
  }

  Reading reading() {
    const std::string text = field("the id");
    const std::size_t colon = text.find(':');
    const std::size_t tensor = alive(text.substr(0, colon), "read");
    const TapeTensor& what = tape_.tensors[tensor];
    if (states_[tensor] == State::kUnwritten) throw wrong("nothing has written " + what.name + ", which is read");
    Reading found{tensor, what.n_bytes, 0};
    if (colon == std::string::npos) return found;
    const std::size_t slash = text.find('/', colon);
    found.n_bytes = number(text.substr(colon + 1, slash == std::string::npos ? slash : slash - colon - 1), "the part");
    if (slash != std::string::npos) {
      found.row_bytes = number(text.substr(slash + 1), "the row");
      if (found.row_bytes == 0 || found.row_bytes % kLoadBytes != 0 || found.row_bytes > what.n_bytes)
        throw wrong("rows of " + std::to_string(found.row_bytes) + " B cannot be read of " + what.name);
    }
    if (found.n_bytes == 0 || found.n_bytes % kLoadBytes != 0 || found.n_bytes > what.n_bytes)
      throw wrong(std::to_string(found.n_bytes) + " B cannot be read of " + what.name + ", which has " +
                  std::to_string(what.n_bytes));
    return found;
  }

  void check(const TapeKernel& kernel) const {
    std::vector<std::size_t> used = kernel.writes;
    for (const Reading& each : kernel.reads) used.push_back(each.tensor);
    const std::size_t n_reads = kernel.reads.size();
    for (std::size_t i = 0; i < n_reads; ++i) {
      const Reading& each = kernel.reads[i];
      for (std::size_t j = 0; j < i; ++j)
        if (kernel.reads[j].tensor == each.tensor) throw wrong(kernel.name + " reads a tensor twice");
      const bool is_written =
          std::find(kernel.writes.begin(), kernel.writes.end(), each.tensor) != kernel.writes.end();
      if (is_written && (each.row_bytes > 0 || each.n_bytes < tape_.tensors[each.tensor].n_bytes))
        throw wrong(kernel.name + " changes a tensor in place of which it reads a part");
    }
    auto writes = kernel.writes;
    std::sort(writes.begin(), writes.end());
    if (std::adjacent_find(writes.begin(), writes.end()) != writes.end())
      throw wrong(kernel.name + " writes a tensor twice");
    std::sort(used.begin(), used.end());
    used.erase(std::unique(used.begin(), used.end()), used.end());
    if (used.empty() || used.size() > kMostTensors)
      throw wrong(kernel.name + " uses " + std::to_string(used.size()) + " tensors, of 1 to " +
                  std::to_string(kMostTensors));
  }

  void read_step() {
    const std::uint64_t step = number("the step");
    if (step != tape_.n_steps + 1)
      throw wrong("step " + std::to_string(step) + " where " + std::to_string(tape_.n_steps + 1) + " is due");
    end_of_step();
    tape_.n_steps += 1;
    n_phases_ = 0;
    add(Operation::kStep, static_cast<std::size_t>(step));
  }

  void end_of_step() const {
    if (tape_.n_steps > 0 && n_phases_ < kPhases.size())
      throw wrong(std::string("the step ends before its phase ") + kPhases[n_phases_]);
  }

  void read_phase() {
    const std::string& name = field("the phase");
    if (tape_.n_steps == 0 || n_phases_ == kPhases.size() || name != kPhases[n_phases_])
      throw wrong("phase `" + name + "` where " +
                  (tape_.n_steps == 0 || n_phases_ == kPhases.size() ? "a step" : kPhases[n_phases_]) + " is due");
    add(Operation::kPhase, n_phases_++);
  }

  void read_end() {
    const std::uint64_t count = number("the number of operations");
    end_of_line();
    end_of_step();
    if (count != tape_.operations.size())
      throw wrong("the tape has " + std::to_string(tape_.operations.size()) + " operations, of " +
                  std::to_string(count));
    if (tape_.n_steps == 0) throw wrong("the tape has no step");
    ended_ = true;
  }

  std::istream& in_;
  std::string path_;
  Tape tape_;
  std::vector<State> states_;
  std::vector<std::string> fields_;
  std::size_t at_ = 0, line_number_ = 0, n_phases_ = 0;
  std::uint64_t live_bytes_ = 0;
  bool ended_ = false;
};

inline Tape read_tape(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) throw usage(path + ": this tape cannot be read. Check the path (`nsan bench run` writes tapes)");
  return TapeReader(in, path).read();
}

// The tape up to the end of one of its steps.
inline Tape first_steps(Tape tape, std::size_t n_steps) {
  const auto is_beyond = [n_steps](const Operation& operation) {
    return operation.kind == Operation::kStep && operation.which > n_steps;
  };
  tape.operations.erase(std::find_if(tape.operations.begin(), tape.operations.end(), is_beyond),
                        tape.operations.end());
  tape.n_steps = std::min(tape.n_steps, n_steps);
  return tape;
}

}  // namespace nsan
