// Values of flags: strictly parsed, with one message that says what is wrong and what would be right.
#pragma once

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <string>
#include <vector>

#include "errors.hpp"

namespace nsan {

// How many letters differ: insertions, deletions, replacements, and neighbours that changed places.
inline std::size_t edit_distance(const std::string& a, const std::string& b) {
  std::vector<std::vector<std::size_t>> cost(a.size() + 1, std::vector<std::size_t>(b.size() + 1));
  for (std::size_t i = 0; i <= a.size(); ++i) cost[i][0] = i;
  for (std::size_t j = 0; j <= b.size(); ++j) cost[0][j] = j;
  for (std::size_t i = 1; i <= a.size(); ++i) {
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t replaced = cost[i - 1][j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1);
      cost[i][j] = std::min({cost[i - 1][j] + 1, cost[i][j - 1] + 1, replaced});
      const bool swapped = i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1];
      if (swapped) cost[i][j] = std::min(cost[i][j], cost[i - 2][j - 2] + 1);
    }
  }
  return cost[a.size()][b.size()];
}

// "; did you mean X?" for a near miss, else nothing.
inline std::string did_you_mean(const std::string& word, const std::vector<std::string>& names) {
  constexpr std::size_t kLongestWord = 64;
  if (word.size() > kLongestWord) return "";
  const std::string* nearest = nullptr;
  std::size_t least = std::max<std::size_t>(1, word.size() / 3) + 1;
  for (const auto& name : names) {
    const std::size_t distance = edit_distance(word, name);
    if (distance < least) {
      least = distance;
      nearest = &name;
    }
  }
  return nearest ? "; did you mean " + *nearest + "?" : "";
}

inline std::string joined(const std::vector<std::string>& names, const std::string& between) {
  std::string out;
  for (const auto& name : names) out += (out.empty() ? "" : between) + name;
  return out;
}

inline Ended bad_value(const std::string& flag, const std::string& text, const std::string& right) {
  return usage(flag + ": '" + text + "' is not " + right);
}

// One of the names, or usage(...) that lists them.
inline std::string one_of(const std::string& flag, const std::string& text, const std::vector<std::string>& names) {
  if (std::find(names.begin(), names.end(), text) != names.end()) return text;
  throw usage(flag + ": '" + text + "' is none of " + joined(names, ", ") + did_you_mean(text, names));
}

inline bool is_digits(const std::string& text) {
  return !text.empty() && std::all_of(text.begin(), text.end(), [](char c) { return c >= '0' && c <= '9'; });
}

// A whole number between two bounds, in decimal digits alone.
inline std::uint64_t parse_whole(const std::string& flag, const std::string& text, std::uint64_t least,
                                 std::uint64_t most = std::numeric_limits<std::uint64_t>::max()) {
  const std::string right = "a whole number from " + std::to_string(least) + " to " + std::to_string(most);
  if (!is_digits(text)) throw bad_value(flag, text, right);
  errno = 0;
  const unsigned long long value = std::strtoull(text.c_str(), nullptr, 10);
  if (errno == ERANGE || value < least || value > most) throw bad_value(flag, text, right);
  return value;
}

// A number with or without a fraction, as 1.25, above one bound and up to another.
inline double parse_decimal(const std::string& flag, const std::string& text, double above, double most) {
  const std::size_t point = std::min(text.find('.'), text.size());
  const std::string fraction = point < text.size() ? text.substr(point + 1) : "0";
  const double value = is_digits(text.substr(0, point)) && is_digits(fraction) ? std::strtod(text.c_str(), nullptr)
                                                                               : std::nan("");
  if (value > above && value <= most) return value;
  char right[80];
  std::snprintf(right, sizeof right, "a number above %g, at most %g, as 1.25", above, most);
  throw bad_value(flag, text, right);
}

// Splits a size into digits, fraction and the power of 1024 of its unit; false if it is none.
inline bool split_size(std::string text, std::string& whole, std::string& fraction, unsigned& power) {
  std::transform(text.begin(), text.end(), text.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  const std::size_t end = std::min(text.find_first_not_of("0123456789."), text.size());
  const std::string number = text.substr(0, end);
  std::string unit = text.substr(std::min(text.find_first_not_of(' ', end), text.size()));
  const std::size_t point = std::min(number.find('.'), number.size());
  whole = number.substr(0, point);
  fraction = point < number.size() ? number.substr(point + 1) : "0";
  if (!is_digits(whole) || !is_digits(fraction) || whole.size() > 15 || fraction.size() > 9) return false;
  if (unit.empty() || unit == "b") unit = "bb";
  const std::size_t found = std::string("bkmgt").find(unit[0]);
  const std::string rest = unit.substr(1);
  power = static_cast<unsigned>(found);
  return found != std::string::npos && (rest.empty() || rest == "b" || (found > 0 && (rest == "i" || rest == "ib")));
}

// Bytes as people write them, by nsan's rules: 64MiB, 1.5GiB, 4096; KB and MB mean KiB and MiB. At least 1.
inline std::uint64_t parse_size(const std::string& flag, const std::string& text) {
  const std::string right = "a size such as 64MiB, 1.5GiB or 4096";
  std::string whole, fraction;
  unsigned power = 0;
  if (!split_size(text, whole, fraction, power)) throw bad_value(flag, text, right);
  std::uint64_t tenths = 1;
  for (std::size_t i = 0; i < fraction.size(); ++i) tenths *= 10;
  // Long division, 10 bits a step: nothing of a fraction of up to nine digits is lost, and nothing overflows.
  std::uint64_t size = std::stoull(whole), rest = std::stoull(fraction);
  for (unsigned i = 0; i < power; ++i) {
    rest *= 1024;
    const std::uint64_t carried = rest / tenths;
    rest %= tenths;
    if (size > (std::numeric_limits<std::uint64_t>::max() - carried) / 1024) {
      throw usage(flag + ": '" + text + "' is more than 64 bits of bytes can say");
    }
    size = size * 1024 + carried;
  }
  if (size == 0) throw bad_value(flag, text, right + ", at least 1 byte");
  return size;
}

// A decimal text without zeroes at the end of its fraction.
inline std::string trimmed(std::string number) {
  if (number.find('.') == std::string::npos) return number;
  while (number.back() == '0') number.pop_back();
  if (number.back() == '.') number.pop_back();
  return number;
}

// A size for people: the largest unit that says it, with at most two digits after the point.
inline std::string size_text(std::uint64_t n_bytes) {
  const char* const units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  std::size_t unit = 0;
  long double value = static_cast<long double>(n_bytes);
  for (; value >= 1024 && unit + 1 < sizeof units / sizeof *units; ++unit) value /= 1024;
  char text[40];
  std::snprintf(text, sizeof text, "%.2Lf", value);
  return trimmed(text) + " " + units[unit];
}

}  // namespace nsan
