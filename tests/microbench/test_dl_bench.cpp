// What a kernel of dl_bench touches, byte by byte: one case by name; says what is not as it must be.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <iostream>
#include <map>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include "nsan/contents.hpp"
#include "nsan/touch.hpp"

namespace {

using nsan::Touch;
using nsan::Touched;

int n_wrong = 0;
std::vector<std::uint64_t> slots(nsan::kTallySlots);  // of the tally

template <class Text>
void expect(bool is_right, const Text& what) {
  if (is_right) return;
  n_wrong += 1;
  std::cout << what << '\n';
}

// Memory as allocators give it, with guards on both sides.
struct Room {
  explicit Room(std::uint64_t n) : n_bytes(n), all(n + 256 + 64) {
    std::memset(all.data(), 0x5A, all.size());
    const auto start = reinterpret_cast<std::uintptr_t>(all.data());
    at = all.data() + (128 - start % 64);
  }
  bool guards_hold() const {
    const auto is_guard = [](std::uint8_t byte) { return byte == 0x5A; };
    const std::uint8_t* end = all.data() + all.size();
    return std::all_of(all.data(), static_cast<const std::uint8_t*>(at), is_guard) &&
           std::all_of(static_cast<const std::uint8_t*>(at) + n_bytes, end, is_guard);
  }
  bool holds_all(std::uint32_t value) const {
    for (std::uint64_t byte = 0; byte < n_bytes; ++byte)
      if (!nsan::holds(at, byte, value)) return false;
    return true;
  }
  std::uint64_t n_bytes;
  std::vector<std::uint8_t> all;
  std::uint8_t* at;
};

Touched reading(Room& room, std::uint32_t value) { return {room.at, room.n_bytes, 0, 0, value, 0, true, false}; }
Touched writing(Room& room, std::uint32_t value) { return {room.at, room.n_bytes, 0, 0, 0, value, false, true}; }

// Number of the kernel that complained, 0 if none did.
std::uint32_t run(const std::vector<Touched>& tensors, std::uint64_t n_fmas = 0, std::uint32_t seed = 9) {
  std::uint32_t flag = 0;
  Touch touch{};
  std::copy(tensors.begin(), tensors.end(), touch.tensors);
  touch.n_tensors = static_cast<unsigned>(tensors.size());
  touch.number = 77;
  touch.seed = seed;
  for (const Touched& each : tensors) touch.n_quads = std::max(touch.n_quads, nsan::quads_of(each.n_bytes));
  touch.fmas_per_quad = n_fmas;
  touch.wrong = &flag;
  touch.tally.slots = slots.data();
  const nsan::Grid grid = nsan::touch_grid(touch.n_quads);
  const std::uint64_t n_threads = std::uint64_t{grid.blocks} * grid.threads;
  for (std::uint64_t thread = 0; thread < n_threads; ++thread) touch(thread, n_threads);
  return flag;
}

void reads_each_byte() {
  for (std::uint64_t size = 1; size <= 70; ++size) {
    Room in(size), out(8);
    nsan::fill_whole(in.at, size, 123);
    expect(run({reading(in, 123), writing(out, 5)}) == 0, "a right input is found wrong");
    expect(out.holds_all(5), "the output of a right input is not what it must be");
    for (std::uint64_t byte = 0; byte < size; ++byte) {
      in.at[byte] ^= 0x10;
      expect(run({reading(in, 123), writing(out, 5)}) == 77,
             "byte " + std::to_string(byte) + " of " + std::to_string(size) + " is not read");
      in.at[byte] ^= 0x10;
    }
  }
}

void writes_each_byte_and_no_other() {
  for (std::uint64_t size = 1; size <= 70; ++size) {
    Room out(size);
    run({writing(out, 0xDEADBEEF)});
    expect(out.holds_all(0xDEADBEEF), "not every byte of " + std::to_string(size) + " is written");
    expect(out.guards_hold(), "something beside " + std::to_string(size) + " byte is written");
  }
  Room out(3 * 4096 + 5);  // more than one thread block
  run({writing(out, 1)});
  expect(out.holds_all(1) && out.guards_hold(), "not the whole of several thread blocks is written");
}

void a_wrong_word_goes_into_the_output() {
  Room in(64), out(64);
  nsan::fill_whole(in.at, 64, 4);
  in.at[33] ^= 1;
  run({reading(in, 4), writing(out, 6)});
  expect(!out.holds_all(6), "the output does not show that the input was wrong");
}

void changes_in_place() {
  Room both(1000), other(5000);
  nsan::fill_whole(both.at, 1000, 10);
  nsan::fill_whole(other.at, 5000, 20);
  Touched changed = reading(both, 10);
  changed.writes = true;
  changed.left = 11;
  expect(run({changed, reading(other, 20)}) == 0, "what is changed in place is read after it was written");
  expect(both.holds_all(11), "what is changed in place is not written whole");
  expect(other.holds_all(20), "what is only read is changed");
}

void reads_the_front_only() {
  Room table(4096), out(64);
  nsan::fill_whole(table.at, 4096, 8);
  std::memset(table.at + 1024, 0, 4096 - 1024);
  Touched part = reading(table, 8);
  part.n_bytes = 1024;
  expect(run({part, writing(out, 1)}) == 0, "more than the part is read");
  table.at[1023] ^= 1;
  expect(run({part, writing(out, 1)}) == 77, "the end of the part is not read");
}

// Rows that a lookup reads: those in which a wrong byte is found.
std::set<std::uint64_t> rows_read(std::uint64_t n_read, std::uint32_t seed) {
  constexpr std::uint64_t kRow = 48, kRows = 100;
  Room table(kRow * kRows), out(64);
  nsan::fill_whole(table.at, table.n_bytes, 8);
  Touched part = reading(table, 8);
  part.n_bytes = n_read * kRow;
  part.row_bytes = kRow;
  part.n_rows = kRows;
  std::set<std::uint64_t> rows;
  for (std::uint64_t row = 0; row < kRows; ++row) {
    unsigned n_found = 0;
    for (const std::uint64_t byte : {row * kRow, row * kRow + 20, row * kRow + kRow - 1}) {
      table.at[byte] ^= 1;
      n_found += run({part, writing(out, 1)}, 0, seed) == 77;
      table.at[byte] ^= 1;
    }
    expect(n_found == 0 || n_found == 3, "a row is read in part");
    if (n_found) rows.insert(row);
  }
  return rows;
}

void reads_rows_anywhere() {
  const auto rows = rows_read(30, 1);
  // 30 draws of 100 rows: 26 different ones are expected, with a standard deviation below 2.
  expect(rows.size() > 18 && rows.size() <= 30, std::to_string(rows.size()) + " rows are read");
  expect(*rows.begin() < 40 && *rows.rbegin() > 60, "the rows do not lie all over the table");
  expect(rows == rows_read(30, 1), "the same seed reads other rows");
  expect(rows != rows_read(30, 2), "another seed reads the same rows");
}

void computes_without_changing_anything() {
  Room in(64), out(64);
  nsan::fill_whole(in.at, 64, 4);
  for (const std::uint64_t n_fmas : {0, 1, 2, 3, 100, 100000})
    expect(run({reading(in, 4), writing(out, 6)}, n_fmas) == 0 && out.holds_all(6), "computing changes the result");
}

// 2 FLOPs are one multiply-add; a quad is 16 byte; thread blocks of 256 threads, each of one quad.
void sizes_follow_the_arithmetic() {
  expect(nsan::fmas_per_quad(2000, 1, 10) == 100, "2000 FLOPs over 10 quads are not 100 multiply-adds each");
  expect(nsan::fmas_per_quad(2000, 0.5, 10) == 50, "half the scale is not half the work");
  expect(nsan::fmas_per_quad(2000, 0, 10) == 0, "scale 0 computes");
  expect(nsan::fmas_per_quad(UINT64_MAX, 1000, 1) == UINT64_MAX, "more than can be counted is not the most");
  expect(nsan::quads_of(1) == 1 && nsan::quads_of(16) == 1 && nsan::quads_of(17) == 2, "quads are not of 16 byte");
  expect(nsan::touch_grid(1).blocks == 1 && nsan::touch_grid(1).threads == 256, "the least grid is not one block");
  expect(nsan::touch_grid(257).blocks == 2, "257 quads are not two blocks");
  expect(nsan::touch_grid(std::uint64_t{1} << 50).blocks == 0x7FFFFFFF, "the grid is larger than CUDA allows");
}

// The number of the kernel, which is 77 here, for each quad and once more.
void what_it_did_is_added_up() {
  for (const std::uint64_t n_quads : {1, 3, 4, 9}) {
    Room out(16 * n_quads);
    slots.assign(nsan::kTallySlots, 0);
    run({writing(out, 6)});
    const auto sum = std::accumulate(slots.begin(), slots.end(), std::uint64_t{0});
    expect(sum == (n_quads + 1) * 77, std::to_string(n_quads) + " quads add up to " + std::to_string(sum));
  }
}

const std::map<std::string, void (*)()> kCases = {
    {"reads_each_byte", reads_each_byte},
    {"writes_each_byte_and_no_other", writes_each_byte_and_no_other},
    {"a_wrong_word_goes_into_the_output", a_wrong_word_goes_into_the_output},
    {"changes_in_place", changes_in_place},
    {"reads_the_front_only", reads_the_front_only},
    {"reads_rows_anywhere", reads_rows_anywhere},
    {"computes_without_changing_anything", computes_without_changing_anything},
    {"sizes_follow_the_arithmetic", sizes_follow_the_arithmetic},
    {"what_it_did_is_added_up", what_it_did_is_added_up},
};

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    for (const auto& [name, test] : kCases) std::cout << name << '\n';
    return 0;
  }
  const auto found = kCases.find(argv[1]);
  if (found == kCases.end()) return 2;
  found->second();
  return n_wrong == 0 ? 0 : 1;
}
