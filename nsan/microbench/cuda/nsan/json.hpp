// JSON on one line, in the order in which it is added; text is made valid UTF-8.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace nsan {

// Length of the valid UTF-8 sequence at a place of a text; 0 if there is none.
inline std::size_t utf8_length(const std::string& text, std::size_t at) {
  const auto byte = [&text](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned first = byte(at);
  if (first < 0x80) return 1;
  const std::size_t length = first >= 0xF0 ? 4 : first >= 0xE0 ? 3 : 2;
  if (first < 0xC2 || first > 0xF4 || at + length > text.size()) return 0;
  for (std::size_t i = 1; i < length; ++i) {
    if ((byte(at + i) & 0xC0u) != 0x80) return 0;
  }
  const unsigned second = byte(at + 1);
  const bool is_overlong = (first == 0xE0 && second < 0xA0) || (first == 0xF0 && second < 0x90);
  const bool is_surrogate = first == 0xED && second > 0x9F;
  const bool is_too_high = first == 0xF4 && second > 0x8F;
  return is_overlong || is_surrogate || is_too_high ? 0 : length;
}

// The text with U+FFFD for each byte that is not UTF-8.
inline std::string valid_utf8(const std::string& text) {
  std::string out;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t length = utf8_length(text, at);
    out += length ? text.substr(at, length) : "\xEF\xBF\xBD";
    at += length ? length : 1;
  }
  return out;
}

inline std::string json_text(const std::string& text) {
  std::string out = "\"";
  for (const char c : valid_utf8(text)) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (byte < 0x20 || byte == 0x7F) {
      char escaped[8];
      std::snprintf(escaped, sizeof escaped, "\\u%04x", byte);
      out += escaped;
    } else {
      out += c;
    }
  }
  return out + '"';
}

// The shortest of the decimal texts that give the same double again.
inline std::string json_number(double value) {
  if (!std::isfinite(value)) return "null";
  char text[32];
  for (int digits = 15; digits <= 17; ++digits) {
    std::snprintf(text, sizeof text, "%.*g", digits, value);
    if (std::strtod(text, nullptr) == value) break;
  }
  return text;
}

// An object, or a list. A key that is added again gets the new value, at its old place.
class Json {
 public:
  static Json list() { return Json('[', ']'); }
  Json() : Json('{', '}') {}

  Json& add(const std::string& key, const std::string& value) { return raw(key, json_text(value)); }
  Json& add(const std::string& key, const char* value) { return raw(key, json_text(value)); }
  Json& add(const std::string& key, bool value) { return raw(key, value ? "true" : "false"); }
  Json& add(const std::string& key, double value) { return raw(key, json_number(value)); }
  Json& add(const std::string& key, const Json& value) { return raw(key, value.text()); }
  template <class Integer, std::enable_if_t<std::is_integral_v<Integer>, int> = 0>
  Json& add(const std::string& key, Integer value) {
    return raw(key, std::to_string(value));
  }
  Json& add_null(const std::string& key) { return raw(key, "null"); }

  // Everything of another object.
  Json& merge(const Json& other) {
    for (const auto& [key, value] : other.inside_) raw(key, value);
    return *this;
  }

  std::string text() const {
    std::string out(1, open_);
    for (const auto& [key, value] : inside_) {
      if (out.size() > 1) out += ", ";
      if (open_ == '{') out += json_text(key) + ": ";
      out += value;
    }
    return out + close_;
  }

 private:
  Json(char open, char close) : open_(open), close_(close) {}
  Json& raw(const std::string& key, const std::string& value) {
    for (auto& [known, old] : inside_) {
      if (open_ == '{' && known == key) {
        old = value;
        return *this;
      }
    }
    inside_.emplace_back(key, value);
    return *this;
  }
  char open_, close_;
  std::vector<std::pair<std::string, std::string>> inside_;
};

}  // namespace nsan
