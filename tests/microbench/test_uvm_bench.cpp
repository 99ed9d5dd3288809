// uvm_bench over the device layer of the host, and what it is made of.
//
//   run FLAGS            uvm_bench with these flags
//   all                  every pattern with every allocator, prefetch and advice: a JSON line each
//   backwards            every pattern with every prefetch, filled by the GPU, whose threads run from last to first
//   lazy                 every pattern with every allocator and prefetch on a GPU that leaves out one launch, and says
//                        nothing: of each launch a line with the axes, its number and the exit status
//   plan PATTERN BYTES PAGE [STRIDE NODE]   of each array name, bytes and those that are touched; then what kernels
//                        read and write. PATTERN may be every
//   rules C N S W E P    what the two stencils make of a cell, its four neighbours and its power
//   permutation N SEED   all of it
//   zipf N S SEED DRAWS  how often each rank was drawn, from rank 1
#include <algorithm>
#include <iomanip>
#include <iostream>
#include <string>
#include <vector>

#include "host_device.hpp"
#include "nsan/uvm_bench.hpp"

namespace {

using Words = std::vector<std::string>;

unsigned left_out = 0;    // number of a launch, from 1; 0: none
unsigned n_launches = 0;  // of the last run
class LazyDevice : public nsan::HostDevice {
 public:
  explicit LazyDevice(int ordinal) : HostDevice(ordinal) { n_launches = 0; }
  template <class Body>
  void launch(const Body& body, nsan::Grid grid, nsan::Stream stream) {
    if (++n_launches != left_out) HostDevice::launch(body, grid, stream);
  }
};

int run(const Words& flags) {
  Words words = {"uvm_bench"};
  words.insert(words.end(), flags.begin(), flags.end());
  std::vector<char*> pointers;
  for (auto& word : words) pointers.push_back(word.data());
  return nsan::uvm_bench_main<LazyDevice>(static_cast<int>(pointers.size()), pointers.data());
}

template <class Value, std::size_t kCount>
Words names(const nsan::Named<Value> (&named)[kCount]) {
  return nsan::names_of(named);
}

int run_one(const Words& axes) {
  nsan::host_machine().calls.clear();
  return run({"--pattern", axes[0], "--allocator", axes[1], "--prefetch", axes[2], "--advice", axes[3], "--init",
              axes[4], "--bytes", "160KiB"});
}

int run_all() {
  for (const auto& pattern : nsan::UvmPatterns::names())
    for (const auto& allocator : names(nsan::kAllocators))
      for (const auto& prefetch : names(nsan::kPrefetches))
        for (const auto& advice : names(nsan::kAdvices))
          if (const int status = run_one({pattern, allocator, prefetch, advice, "cpu"}); status != 0) return status;
  return 0;
}

int run_backwards() {
  nsan::host_machine().backwards = true;
  for (const auto& pattern : nsan::UvmPatterns::names())
    for (const auto& prefetch : names(nsan::kPrefetches))
      if (const int status = run_one({pattern, "raw", prefetch, "none", "gpu"}); status != 0) return status;
  return 0;
}

int run_lazy() {
  for (const auto& pattern : nsan::UvmPatterns::names())
    for (const auto& allocator : names(nsan::kAllocators))
      for (const auto& prefetch : names(nsan::kPrefetches)) {
        const Words axes = {pattern, allocator, prefetch, "none", "cpu"};
        left_out = 0;
        if (const int status = run_one(axes); status != 0) return status;
        const unsigned all = n_launches;
        for (left_out = 1; left_out <= all; ++left_out) {
          const int status = run_one(axes);
          std::cout << pattern << ' ' << allocator << ' ' << prefetch << ' ' << left_out << ' ' << status << std::endl;
        }
      }
  return 0;
}

void print_plan(const std::string& pattern, const nsan::Options& options) {
  nsan::UvmPatterns::with(pattern, options, [](auto work) {
    work.prepare();
    for (const auto& array : work.arrays)
      std::cout << array.name << ' ' << array.n_bytes << ' ' << array.least_touched_bytes << '\n';
    std::cout << "kernels " << work.read_bytes << ' ' << work.written_bytes << '\n';
  });
}

int plan(const Words& words) {
  nsan::Options options;
  options.bytes = std::stoull(words.at(1));
  options.page_bytes = std::stoull(words.at(2));
  options.n_sms = 2;
  if (words.size() > 3) options.stride_bytes = std::stoull(words[3]);
  if (words.size() > 4) options.node_bytes = std::stoull(words[4]);
  for (const auto& pattern : nsan::UvmPatterns::names())
    if (words.at(0) == "every" || words.at(0) == pattern) print_plan(pattern, options);
  return 0;
}

int rules(const Words& words) {
  const auto number = [&words](std::size_t i) { return std::stof(words.at(i)); };
  const nsan::Cross cross{number(0), number(1), number(2), number(3), number(4)};
  std::cout << std::setprecision(9) << nsan::Diffusion{}(cross, number(5)) << ' '
            << nsan::ChipHeat{}(cross, number(5)) << '\n';
  return 0;
}

int permutation(const Words& words) {
  const std::uint64_t n = std::stoull(words.at(0));
  const nsan::Permutation order(n, std::stoull(words.at(1)));
  for (std::uint64_t i = 0; i < n; ++i) std::cout << order(i) << '\n';
  return 0;
}

int zipf(const Words& words) {
  const std::uint64_t n = std::stoull(words.at(0));
  nsan::Zipf draw(n, std::stod(words.at(1)), std::stoull(words.at(2)));
  std::vector<std::uint64_t> counts(n);
  for (std::uint64_t i = 0; i < std::stoull(words.at(3)); ++i) ++counts.at(draw() - 1);
  for (const auto count : counts) std::cout << count << '\n';
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "";
  const Words rest(argv + std::min(argc, 2), argv + argc);
  if (what == "run") return run(rest);
  if (what == "all") return run_all();
  if (what == "backwards") return run_backwards();
  if (what == "lazy") return run_lazy();
  if (what == "plan") return plan(rest);
  if (what == "rules") return rules(rest);
  if (what == "permutation") return permutation(rest);
  if (what == "zipf") return zipf(rest);
  std::cerr << "unknown: " << what << '\n';
  return 2;
}
