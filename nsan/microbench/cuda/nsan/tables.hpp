// The truth tables of a run, as files that a reader of its trace finds complete or not at all.
#pragma once

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "errors.hpp"
#include "json.hpp"
#include "record.hpp"

namespace nsan {

// A cell by RFC 4180, in valid UTF-8. An empty text is quoted: what is empty without quotes is missing.
inline std::string csv_text(const std::string& text) {
  const std::string valid = valid_utf8(text);
  if (!valid.empty() && valid.find_first_of(",\"\r\n") == std::string::npos) return valid;
  std::string out = "\"";
  for (const char c : valid) out += c == '"' ? std::string("\"\"") : std::string(1, c);
  return out + '"';
}

// A number of which -1 says that there is none.
inline std::string csv_optional(std::int64_t value) { return value < 0 ? "" : std::to_string(value); }

inline std::string allocations_csv(const Record& record) {
  std::ostringstream out;
  out << "allocation,name,role,kind,va,bytes,alloc_ns,free_ns\n";
  std::size_t i = 0;
  for (const auto& one : record.allocations) {
    out << i++ << ',' << csv_text(one.name) << ',' << csv_text(one.role) << ',' << (one.managed ? "managed" : "device")
        << ',' << one.va << ',' << one.n_bytes << ',' << one.alloc_ns << ',' << csv_optional(one.free_ns) << '\n';
  }
  return out.str();
}

inline std::string phases_csv(const Record& record) {
  std::ostringstream out;
  out << "phase,name,iteration,start_ns,end_ns\n";
  std::size_t i = 0;
  for (const auto& one : record.phases) {
    out << i++ << ',' << csv_text(one.name) << ',' << csv_optional(one.iteration) << ',' << one.start_ns << ','
        << csv_optional(one.end_ns) << '\n';
  }
  return out.str();
}

inline std::string expected_csv(const Record& record) {
  std::ostringstream out;
  out << "phase,allocation,direction,least_bytes,most_bytes\n";
  for (const auto& one : record.expected) {
    out << one.phase << ',' << one.allocation << ',' << one.direction << ',' << one.least_bytes << ','
        << one.most_bytes << '\n';
  }
  return out.str();
}

// A folder that gets the tables of one run: written beside first, moved to their names in the end, run.json last.
// Whoever finds run.json finds the rest. A folder that is new or empty will do, or one of a run that did not end well.
class TableFolder {
 public:
  explicit TableFolder(const std::string& folder) : folder_(folder), scratch_(folder_ / ".partial") {
    namespace fs = std::filesystem;
    std::error_code error;
    if (fs::exists(folder_, error)) check_replaceable();
    is_new_ = fs::create_directories(folder_, error);
    const bool is_first = !error && fs::create_directory(scratch_, error);
    if (!is_first && !error) error = std::make_error_code(std::errc::file_exists);
    if (!error) return;
    std::error_code ignored;
    if (is_new_) fs::remove(folder_, ignored);
    throw usage("--out " + folder + ": cannot write there: " + error.message());
  }
  TableFolder(const TableFolder&) = delete;
  TableFolder& operator=(const TableFolder&) = delete;

  // Nothing of a run that was not published stays.
  ~TableFolder() {
    std::error_code error;
    std::filesystem::remove_all(scratch_, error);
    if (is_new_ && !is_published_) std::filesystem::remove(folder_, error);
  }

  // Where a program may write files of its own until the tables are published: history.csv, blocks.csv.
  std::string scratch() const { return scratch_.string(); }

  void publish(const Record& record, const std::string& run_json) {
    write("allocations.csv", allocations_csv(record));
    write("phases.csv", phases_csv(record));
    write("expected.csv", expected_csv(record));
    write("run.json", run_json + "\n");
    try {
      move_all();
    } catch (const std::filesystem::filesystem_error& error) {
      throw failed("--out " + folder_.string() + ": cannot move the tables there: " + error.code().message());
    }
    is_published_ = true;
  }

 private:
  static const std::vector<std::string>& names() {
    static const std::vector<std::string> all = {"allocations.csv", "phases.csv", "expected.csv",
                                                 "history.csv",     "blocks.csv", "run.json"};
    return all;
  }

  void check_replaceable() const {
    namespace fs = std::filesystem;
    const std::string flag = "--out " + folder_.string();
    std::error_code error;
    if (!fs::is_directory(folder_, error)) throw usage(flag + " is no folder: name a new or an empty one");
    for (const auto& entry : fs::directory_iterator(folder_, error)) {
      const std::string name = entry.path().filename().string();
      if (name == ".partial") {
        throw usage(flag + " is being written by another run, or one was killed there: remove it, or name another "
                           "folder");
      }
      if (std::find(names().begin(), names().end(), name) == names().end()) {
        throw usage(flag + " holds something else (" + name + "): name a new or an empty folder");
      }
    }
    if (error) throw usage(flag + ": cannot read it: " + error.message());
    if (fs::exists(folder_ / "run.json", error) && !is_failed_run()) {
      throw usage(flag + " holds the tables of a run that ended well: remove it, or name another folder");
    }
  }

  bool is_failed_run() const {
    std::ifstream file(folder_ / "run.json");
    std::string line;
    std::getline(file, line);
    return line.compare(0, 20, "{\"nsan_microbench\": ") == 0 && line.find("\"status\": \"ok\"") == std::string::npos;
  }

  void write(const std::string& name, const std::string& text) const {
    std::ofstream file(scratch_ / name, std::ios::binary);
    file << text;
    file.close();
    if (!file) throw failed("--out " + folder_.string() + ": cannot write " + name + ": is the disk full?");
  }

  // run.json goes first when tables are replaced and comes last: a reader that finds it finds a whole set.
  void move_all() const {
    for (auto name = names().rbegin(); name != names().rend(); ++name) std::filesystem::remove(folder_ / *name);
    for (const auto& name : names()) {
      if (std::filesystem::exists(scratch_ / name)) std::filesystem::rename(scratch_ / name, folder_ / name);
    }
  }

  std::filesystem::path folder_, scratch_;
  bool is_new_ = false, is_published_ = false;
};

inline void write_tables(const std::string& folder, const Record& record, const std::string& run_json) {
  TableFolder(folder).publish(record, run_json);
}

}  // namespace nsan
