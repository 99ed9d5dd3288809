// The named axes of a run: flags in, one struct out.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "device.hpp"
#include "errors.hpp"
#include "json.hpp"
#include "values.hpp"

namespace nsan {

enum class Prefetch { kNone, kWhole, kAhead };
enum class Advice { kNone, kReadMostly, kPreferredCpu, kAccessedBy };
enum class AllocatorKind { kRaw, kCaching };

// A flag that only one of the programs has. With the name of a common flag it replaces that one's default and help.
struct OwnFlag {
  std::string name;     // as "--pattern"
  std::string value;    // default; of a switch "true" or "false"
  std::string metavar;  // empty: a switch; FILE or FOLDER: a path, which no JSON gets
  std::string help;
  // Not empty: a common flag that this program has no use for, and what to use instead. It is refused, not listed.
  std::string instead = {};
};

inline OwnFlag unused_flag(const std::string& name, const std::string& instead) { return {name, "", "", "", instead}; }

struct Axes {
  std::uint64_t bytes = 64 * kMiB;
  double factor = 0;  // F1: footprint over available GPU memory; 0: as much as there is
  Prefetch prefetch = Prefetch::kNone;
  Advice advice = Advice::kNone;
  AllocatorKind allocator = AllocatorKind::kRaw;
  unsigned iterations = 3;
  std::uint64_t seed = 1;
  int device = 0;
  bool allow_oversubscription = false;
  bool help = false;
  std::string out;  // folder for the truth tables; empty: none
  std::map<std::string, std::string> own;  // by name without dashes
  std::set<std::string> given;             // names of the flags that the command line has, as "--bytes"

  bool is_on(const std::string& own_switch) const { return own.at(own_switch) == "true"; }
};

template <class Value>
struct Named {
  const char* name;
  Value value;
};

constexpr Named<Prefetch> kPrefetches[] = {
    {"none", Prefetch::kNone}, {"whole", Prefetch::kWhole}, {"ahead", Prefetch::kAhead}};
constexpr Named<Advice> kAdvices[] = {{"none", Advice::kNone},
                                      {"read-mostly", Advice::kReadMostly},
                                      {"preferred-cpu", Advice::kPreferredCpu},
                                      {"accessed-by", Advice::kAccessedBy}};
constexpr Named<AllocatorKind> kAllocators[] = {{"raw", AllocatorKind::kRaw},
                                                {"caching", AllocatorKind::kCaching}};

constexpr double kMostFactor = 1000;
constexpr std::uint64_t kMostIterations = 1000000;
constexpr std::uint64_t kMostDevice = 1023;

template <class Value, std::size_t kCount>
const char* name_of(const Named<Value> (&named)[kCount], Value value) {
  for (const auto& one : named) {
    if (one.value == value) return one.name;
  }
  return "?";
}

template <class Value, std::size_t kCount>
std::vector<std::string> names_of(const Named<Value> (&named)[kCount]) {
  std::vector<std::string> names;
  for (const auto& one : named) names.push_back(one.name);
  return names;
}

template <class Value, std::size_t kCount>
Value parse_named(const std::string& flag, const std::string& text, const Named<Value> (&named)[kCount]) {
  const std::string name = one_of(flag, text, names_of(named));
  for (const auto& one : named) {
    if (one.name == name) return one.value;
  }
  throw usage(flag);  // one_of has thrown by then
}

// The flags that both programs have, as --help prints them.
inline std::vector<OwnFlag> common_flags() {
  return {
      {"--bytes", "64MiB", "SIZE", "managed memory in all, as 64MiB, 1.5GiB or 4096"},
      {"--oversubscription-factor", "", "F",
       "bytes of all tensors that live at once over the GPU memory that is left for them (F1; 1 fills it exactly), the "
       "same with every allocator; a ballast of cudaMalloc takes the rest; without it, as much as is free is left"},
      {"--prefetch", "none", joined(names_of(kPrefetches), "|"),
       "cudaMemPrefetchAsync: nothing, the whole before it is used, or the next part while one is used"},
      {"--advice", "none", joined(names_of(kAdvices), "|"), "cudaMemAdvise on what is allocated"},
      {"--allocator", "raw", joined(names_of(kAllocators), "|"),
       "each tensor by cudaMallocManaged and cudaFree, or blocks of a caching allocator over managed segments"},
      {"--iterations", "3", "N", "how often"},
      {"--seed", "1", "N", "of whatever is random"},
      {"--device", "0", "N", "number of the GPU"},
      {"--allow-oversubscription", "false", "",
       "go on where managed memory is more than fits safely into what the GPU has left, a thirty-second of which, and "
       "64 MiB at least, stays free: some drivers can hang the whole machine when they evict"},
      {"--out", "", "FOLDER", "write the truth tables there; the folder must be new, empty, or of a run that failed"},
      {"--help", "false", "", "print this"},
  };
}

// Flags as given, by full name; the last of a repeated one counts.
class FlagParser {
 public:
  FlagParser(const std::string& program, const std::vector<OwnFlag>& flags) : program_(program), flags_(flags) {
    for (const auto& flag : flags) {
      values[flag.name] = flag.metavar.empty() && flag.value.empty() ? "false" : flag.value;
    }
  }

  void parse(const std::vector<std::string>& args) {
    for (std::size_t i = 0; i < args.size(); ++i) {
      const std::size_t equals = std::min(args[i].find('='), args[i].size());
      const std::string name = args[i].substr(0, equals);
      const bool has_value = equals < args[i].size();
      const std::string value = has_value ? args[i].substr(equals + 1) : "";
      if (args[i].compare(0, 2, "--") != 0) throw stray(args[i], args[i] == "-h" ? "--help" : "");
      if (take_switch(name, value, has_value)) continue;
      const OwnFlag& flag = known(name);
      given.insert(name);
      if (has_value) {
        values[name] = value;
      } else if (i + 1 < args.size() && args[i + 1].compare(0, 2, "--") != 0) {
        values[name] = args[++i];
      } else {
        throw usage(name + " needs a value: " + name + " " + flag.metavar);
      }
    }
  }

  std::map<std::string, std::string> values;
  std::set<std::string> given;

 private:
  bool take_switch(const std::string& name, const std::string& value, bool has_value) {
    for (const auto& flag : flags_) {
      if (!flag.metavar.empty()) continue;
      const bool is_off = name == "--no-" + flag.name.substr(2) && !has_value;
      if (name != flag.name && !is_off) continue;
      given.insert(flag.name);
      values[flag.name] = is_off ? "false" : has_value ? one_of(name, value, {"true", "false"}) : "true";
      return true;
    }
    return false;
  }

  const OwnFlag& known(const std::string& name) const {
    std::vector<std::string> names;
    for (const auto& flag : flags_) {
      const bool is_offered = flag.instead.empty();
      if (flag.name == name && !is_offered) throw usage(name + " is not for " + program_ + ": " + flag.instead);
      if (flag.name == name) return flag;
      if (is_offered) names.push_back(flag.name);
    }
    const std::string nearest = did_you_mean(name, names);
    throw usage("unknown flag '" + name + "'" + (nearest.empty() ? ": " + program_ + " --help lists them" : nearest));
  }

  Ended stray(const std::string& argument, const std::string& meant) const {
    const std::string way_out = ": " + program_ + " takes flags only, --help lists them";
    return usage("unexpected '" + argument + "'" + (meant.empty() ? way_out : "; did you mean " + meant + "?"));
  }

  std::string program_;
  const std::vector<OwnFlag>& flags_;
};

inline bool has_flag(const std::vector<OwnFlag>& flags, const std::string& name) {
  return std::any_of(flags.begin(), flags.end(), [&name](const OwnFlag& flag) { return flag.name == name; });
}

inline std::string instead_of(const std::vector<OwnFlag>& flags, const std::string& name) {
  for (const auto& flag : flags) {
    if (flag.name == name) return flag.instead;
  }
  return "";
}

inline std::vector<OwnFlag> with_common(const std::vector<OwnFlag>& own) {
  std::vector<OwnFlag> flags;
  for (const auto& flag : own) {
    if (flag.instead.empty()) flags.push_back(flag);
  }
  for (auto flag : common_flags()) {
    flag.instead = instead_of(own, flag.name);
    if (!has_flag(own, flag.name) || !flag.instead.empty()) flags.push_back(flag);
  }
  return flags;
}

// Throws usage(...) at the first thing that is wrong. With --help nothing else is looked at.
inline Axes parse_axes(const std::string& program, const std::vector<std::string>& args,
                       const std::vector<OwnFlag>& own) {
  Axes axes;
  axes.help = std::find(args.begin(), args.end(), "--help") != args.end();
  if (axes.help) return axes;
  const auto flags = with_common(own);
  FlagParser parser(program, flags);
  parser.parse(args);
  const auto& values = parser.values;
  const auto of = [&values](const char* name) { return values.at(name); };
  axes.bytes = parse_size("--bytes", of("--bytes"));
  axes.given = parser.given;
  if (axes.given.count("--oversubscription-factor")) {
    axes.factor = parse_decimal("--oversubscription-factor", of("--oversubscription-factor"), 0, kMostFactor);
  }
  axes.prefetch = parse_named("--prefetch", of("--prefetch"), kPrefetches);
  axes.advice = parse_named("--advice", of("--advice"), kAdvices);
  axes.allocator = parse_named("--allocator", of("--allocator"), kAllocators);
  axes.iterations = static_cast<unsigned>(parse_whole("--iterations", of("--iterations"), 1, kMostIterations));
  axes.seed = parse_whole("--seed", of("--seed"), 0);
  axes.device = static_cast<int>(parse_whole("--device", of("--device"), 0, kMostDevice));
  axes.allow_oversubscription = of("--allow-oversubscription") == "true";
  axes.out = of("--out");
  if (axes.out.empty() && axes.given.count("--out")) throw usage("--out needs a folder: --out FOLDER");
  for (const auto& flag : own) axes.own[flag.name.substr(2)] = values.at(flag.name);
  return axes;
}

// Words of a text in lines of a width, each with so many blanks before it.
inline std::string folded(const std::string& text, std::size_t indent, std::size_t width) {
  std::string out, line;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t end = std::min(text.find(' ', at), text.size());
    const std::string word = text.substr(at, end - at);
    if (!line.empty() && indent + line.size() + 1 + word.size() > width) {
      out += std::string(indent, ' ') + line + "\n";
      line.clear();
    }
    line += (line.empty() ? "" : " ") + word;
    at = end + 1;
  }
  return line.empty() ? out : out + std::string(indent, ' ') + line + "\n";
}

inline std::string flag_help(const OwnFlag& flag) {
  const bool is_switch = flag.metavar.empty();
  const bool is_on = is_switch && flag.value == "true";
  std::string note;
  if (is_on) note = " (default: on; --no-" + flag.name.substr(2) + " turns it off)";
  if (!is_switch && !flag.value.empty()) note = " (default: " + flag.value + ")";
  return "  " + flag.name + (is_switch ? "" : " " + flag.metavar) + "\n" + folded(flag.help + note, 6, 100);
}

inline std::string help_text(const std::string& program, const std::string& description,
                             const std::vector<OwnFlag>& own) {
  std::string out = "usage: " + program + " [FLAGS]\n\n" + folded(description, 0, 100) + "\nflags:\n";
  for (const auto& flag : with_common(own)) {
    if (flag.instead.empty()) out += flag_help(flag);
  }
  return out +
         "\nOne JSON line on stdout when it is done. Otherwise one line on stderr, and the exit status says why:\n"
         "  1 a CUDA call failed or a result is wrong, 2 the command line, 5 no driver or no GPU, 6 this machine\n"
         "  cannot do it, 7 it could leave the machine without memory, 130 or 143 interrupted.\n";
}

// What of the axes may stand in a table: no path.
inline Json axes_json(const Axes& axes, const std::vector<OwnFlag>& own) {
  Json json;
  if (instead_of(own, "--bytes").empty()) json.add("bytes", axes.bytes);
  axes.factor > 0 ? json.add("oversubscription_factor", axes.factor) : json.add_null("oversubscription_factor");
  json.add("prefetch", name_of(kPrefetches, axes.prefetch));
  json.add("advice", name_of(kAdvices, axes.advice));
  json.add("allocator", name_of(kAllocators, axes.allocator));
  if (instead_of(own, "--iterations").empty()) json.add("iterations", axes.iterations);
  json.add("seed", axes.seed);
  json.add("device", axes.device);
  json.add("allow_oversubscription", axes.allow_oversubscription);
  const auto common = common_flags();
  for (const auto& flag : own) {
    if (flag.metavar == "FILE" || flag.metavar == "FOLDER" || has_flag(common, flag.name)) continue;
    std::string key = flag.name.substr(2);
    std::replace(key.begin(), key.end(), '-', '_');
    const std::string& value = axes.own.at(flag.name.substr(2));
    flag.metavar.empty() ? json.add(key, value == "true") : json.add(key, value);
  }
  return json;
}

}  // namespace nsan
