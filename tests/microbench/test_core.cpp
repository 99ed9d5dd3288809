// Asks the host core of the microbenchmark for one thing, and prints what it says.
//
//   values                 lines of the standard input: size|size_text|whole|decimal|choice WORDS...
//   axes FLAGS...          the axes as JSON, or the reason why not
//   footprint              lines: FACTOR ALLOW TENSORS RESERVED FREE HOST|unknown; a footprint as JSON, or why not
//   limit                  lines as of a footprint: how much managed memory may be taken in the end, and why
//   environment ROOT       what the machine below a folder says, as JSON
//   json                   lines of the standard input as a JSON list
#include <cmath>
#include <iostream>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "nsan/axes.hpp"
#include "nsan/environment.hpp"
#include "nsan/footprint.hpp"
#include "nsan/json.hpp"

namespace {

using Words = std::vector<std::string>;

Words rest_of(std::istringstream& line) {
  Words words;
  for (std::string word; line >> word;) words.push_back(word);
  return words;
}

std::string value(const std::string& kind, const Words& words) {
  const std::string last = words.empty() ? "" : words.back();
  if (kind == "size") return std::to_string(nsan::parse_size("--bytes", nsan::joined(words, " ")));
  if (kind == "size_text") return nsan::size_text(std::stoull(last));
  if (kind == "whole") {
    return std::to_string(nsan::parse_whole("--n", last, std::stoull(words.at(0)), std::stoull(words.at(1))));
  }
  if (kind == "decimal") return nsan::json_number(nsan::parse_decimal("--f", last, 0, 1000));
  return nsan::one_of("--pattern", last, {"stream", "stride", "random", "ping-pong"});
}

struct Asked {
  nsan::Axes axes;
  nsan::Footprint plan;
  std::optional<std::uint64_t> host;
};

Asked asked(const Words& words) {
  nsan::Axes axes;
  axes.factor = std::stod(words[0]);
  axes.allow_oversubscription = words[1] == "yes";
  std::optional<std::uint64_t> host;
  if (words[5] != "unknown") host = std::stoull(words[5]);
  const nsan::Demand demand{std::stoull(words[2]), std::stoull(words[3]), "in segments"};
  return {axes, nsan::plan_footprint(axes, demand, std::stoull(words[4]), host), host};
}

std::string footprint(const Words& words) { return nsan::footprint_json(asked(words).plan).text(); }

std::string limit(const Words& words) {
  const Asked what = asked(words);
  const nsan::Limit found = nsan::limit_of(what.axes, what.plan, what.host);
  return std::to_string(found.bytes) + ' ' + found.of;
}

template <class Answer>
void answer_lines(Answer answer) {
  for (std::string text; std::getline(std::cin, text);) {
    std::istringstream line(text);
    try {
      std::cout << answer(line) << '\n';
    } catch (const nsan::Ended& end) {
      std::cout << nsan::status_name(end.status()) << ": " << end.what() << '\n';
    }
  }
}

int print_axes(const Words& flags) {
  const std::vector<nsan::OwnFlag> own = {{"--pattern", "stream", "NAME", "which"},
                                          {"--tape", "", "FILE", "a path"},
                                          {"--layer-ranges", "true", "", "a switch that is on"},
                                          {"--dry-run", "", "", "a switch that is off"},
                                          {"--iterations", "7", "N", "as often as this program does"}};
  try {
    const auto axes = nsan::parse_axes("bench", flags, own);
    if (axes.help) {
      std::cout << nsan::help_text("bench", "Tests.", own);
      return 0;
    }
    auto json = nsan::axes_json(axes, own);
    json.add("out", axes.out).add("tape", axes.own.at("tape"));
    json.add("given", nsan::joined({axes.given.begin(), axes.given.end()}, " "));
    std::cout << json.text() << '\n';
    return 0;
  } catch (const nsan::Ended& end) {
    std::cerr << end.what() << '\n';
    return end.status();
  }
}

void print_environment(const std::string& root) {
  const auto environment = nsan::read_environment(root);
  nsan::Json parameters, json;
  for (const auto& [name, text] : environment.uvm_parameters) parameters.add(name, text);
  json.add("driver_version", environment.driver_version).add("uvm_parameters", parameters);
  const auto& available = environment.host_available_bytes;
  available ? json.add("host_available_bytes", *available) : json.add_null("host_available_bytes");
  json.add("is_wsl", environment.is_wsl).add("is_profiled", environment.is_profiled);
  std::cout << json.text() << '\n';
}

void print_json() {
  auto list = nsan::Json::list();
  for (std::string line; std::getline(std::cin, line);) list.add("", line);
  list.add("", ~std::uint64_t{0}).add("", std::int64_t{-1}).add("", 0.1).add("", 0.1 + 0.2).add("", std::nan(""));
  nsan::Json twice;
  twice.add("a", 1).add("b", 2).add("a", true);
  std::cout << list.add("", twice).text() << '\n';
}

}  // namespace

int main(int argc, char** argv) {
  const Words args(argv + 1, argv + argc);
  const std::string what = args.at(0);
  if (what == "axes") return print_axes({args.begin() + 1, args.end()});
  if (what == "environment") print_environment(args.at(1));
  if (what == "json") print_json();
  if (what == "footprint") answer_lines([](std::istringstream& line) { return footprint(rest_of(line)); });
  if (what == "limit") answer_lines([](std::istringstream& line) { return limit(rest_of(line)); });
  if (what == "values") {
    answer_lines([](std::istringstream& line) {
      std::string kind;
      line >> kind;
      return value(kind, rest_of(line));
    });
  }
}
