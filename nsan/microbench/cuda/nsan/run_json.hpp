// run.json: what a run was, on one line. It holds no name of a host or user, no path, no environment, no serial number.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "axes.hpp"
#include "device.hpp"
#include "environment.hpp"
#include "errors.hpp"
#include "footprint.hpp"
#include "json.hpp"
#include "record.hpp"

namespace nsan {

// How a run ended.
struct End {
  Status status = kDone;
  std::string reason;
};

// All that is told of a run.
struct Told {
  DeviceFacts facts;
  Environment environment;
  Record record;
  Footprint footprint;
  Json about;
  bool verified = false;
};

// The text with absolute paths cut down to their last name: they tell where somebody's home is.
inline std::string without_paths(const std::string& text) {
  std::string out;
  for (std::size_t at = 0; at < text.size();) {
    const bool begins = text[at] == '/' && (at == 0 || std::string(" '\"(=:").find(text[at - 1]) != std::string::npos);
    if (!begins) {
      out += text[at++];
      continue;
    }
    const std::size_t end = std::min(text.find_first_of(" '\"()", at), text.size());
    const std::string path = text.substr(at, end - at);
    out += path.substr(path.find_last_of('/') + 1);
    at = end;
  }
  return out;
}

inline Json device_json(const DeviceFacts& facts) {
  Json json;
  json.add("ordinal", facts.ordinal);
  json.add("name", facts.name);
  json.add("compute_capability", std::to_string(facts.major) + "." + std::to_string(facts.minor));
  json.add("n_sms", facts.n_sms);
  json.add("total_bytes", facts.total_bytes);
  json.add("free_bytes", facts.free_bytes);
  json.add("managed_memory", facts.managed_memory);
  json.add("concurrent_managed_access", facts.concurrent_managed_access);
  json.add("pageable_memory_access", facts.pageable_memory_access);
  json.add("uses_host_page_tables", facts.uses_host_page_tables);
  json.add("is_wsl", facts.is_wsl);
  return json;
}

inline Json driver_json(const DeviceFacts& facts, const Environment& environment) {
  Json parameters;
  for (const auto& [name, value] : environment.uvm_parameters) parameters.add(name, value);
  Json json;
  environment.driver_version.empty() ? json.add_null("version") : json.add("version", environment.driver_version);
  facts.driver_api ? json.add("cuda_driver_api", facts.driver_api) : json.add_null("cuda_driver_api");
  facts.runtime_api ? json.add("cuda_runtime_api", facts.runtime_api) : json.add_null("cuda_runtime_api");
  json.add("uvm_parameters", parameters);
  return json;
}

inline Json phases_json(const Record& record) {
  Json list = Json::list();
  for (const auto& phase : record.phases) {
    Json one;
    one.add("name", phase.name);
    phase.iteration < 0 ? one.add_null("iteration") : one.add("iteration", phase.iteration);
    phase.end_ns < 0 ? one.add_null("ns") : one.add("ns", phase.end_ns - phase.start_ns);
    list.add("", one);
  }
  return list;
}

inline std::string run_json(const std::string& program, const Json& axes, const Told& told, const End& end) {
  Json json;
  json.add("nsan_microbench", 1);
  json.add("program", program);
  json.add("status", status_name(end.status));
  end.reason.empty() ? json.add_null("reason") : json.add("reason", without_paths(end.reason));
  json.add("pid", static_cast<std::int64_t>(getpid()));
  json.add("start_utc_ns", told.record.start_utc_ns);
  json.add("profiled", told.environment.is_profiled);
  json.add("axes", axes);
  // Of a GPU that was not reached nothing is known: null, not zeroes.
  const bool is_known = told.facts.total_bytes > 0;
  is_known ? json.add("device", device_json(told.facts)) : json.add_null("device");
  json.add("driver", driver_json(told.facts, told.environment));
  told.footprint.managed_bytes ? json.add("footprint", footprint_json(told.footprint)) : json.add_null("footprint");
  json.add("phases", phases_json(told.record));
  json.add("verified", told.verified);
  return json.merge(told.about).text();
}

}  // namespace nsan
