// Memory for tensors over HostDevice: does what stands on the standard input and prints what the device was asked and
// what the record says.
//
//   test_memory raw|caching FOLDER [LIMIT]
//   a NAME BYTES    allocate, and fill with a pattern
//   f N             free the N-th tensor, from 0; its pattern must still be there
//   w N             where the record has the N-th tensor
//   e               empty the cache
//   h               write the history to FOLDER
#include <iostream>
#include <set>
#include <string>
#include <vector>

#include "host_device.hpp"
#include "nsan/memory.hpp"

namespace {

using Memory = nsan::Memory<nsan::HostDevice>;

unsigned char pattern(const nsan::Tensor& tensor) { return static_cast<unsigned char>(tensor.id * 37 + 1); }

// Every block of the cache has a multiple of this: memory of two tensors cannot meet without sharing such a byte.
constexpr std::uint64_t kStride = 512;

void fill(const nsan::Tensor& tensor) {
  auto* bytes = static_cast<unsigned char*>(tensor.at);
  for (std::uint64_t i = 0; i < tensor.n_bytes; i += kStride) bytes[i] = pattern(tensor);
  bytes[tensor.n_bytes - 1] = pattern(tensor);
}

void check(const nsan::Tensor& tensor) {
  const auto* bytes = static_cast<const unsigned char*>(tensor.at);
  bool is_whole = bytes[tensor.n_bytes - 1] == pattern(tensor);
  for (std::uint64_t i = 0; i < tensor.n_bytes; i += kStride) is_whole = is_whole && bytes[i] == pattern(tensor);
  if (!is_whole) std::cout << "overwritten " << tensor.id << '\n';
}

void run_operation(Memory& memory, const std::string& word, const std::string& folder,
                   std::vector<nsan::Tensor>& tensors) {
  if (word == "e") return memory.empty_cache();
  if (word == "h") return memory.write_history(folder);
  if (word == "a") {
    std::string name;
    std::uint64_t n_bytes = 0;
    std::cin >> name >> n_bytes;
    tensors.push_back(memory.allocate(name, "activation", n_bytes));
    fill(tensors.back());
    return;
  }
  std::size_t number = 0;
  std::cin >> number;
  if (word == "w") {
    std::cout << "where " << memory.allocation_of(tensors.at(number)) << '\n';
    return;
  }
  const nsan::Tensor& tensor = tensors.at(number);
  static std::set<std::size_t> freed;
  if (freed.insert(tensor.id).second) check(tensor);
  memory.free(tensor);
}

void run(nsan::HostDevice& device, nsan::Record& record, nsan::AllocatorKind kind, const std::string& folder,
         const nsan::Limit& limit) {
  Memory memory(device, record, kind, limit);
  std::vector<nsan::Tensor> tensors;
  std::string word;
  while (std::cin >> word) {
    try {
      run_operation(memory, word, folder, tensors);
    } catch (const nsan::Ended& end) {
      std::cout << "error " << end.what() << '\n';
      if (end.status() != nsan::kFailed) std::cout << "status " << nsan::status_name(end.status()) << '\n';
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3 && argc != 4) return 2;
  nsan::HostDevice device(0);
  nsan::Record record;
  const auto kind = std::string(argv[1]) == "raw" ? nsan::AllocatorKind::kRaw : nsan::AllocatorKind::kCaching;
  run(device, record, kind, argv[2], argc > 3 ? nsan::Limit{std::stoull(argv[3]), "the test has"} : nsan::Limit{});
  for (const auto& call : nsan::host_machine().calls) std::cout << "call " << call << '\n';
  for (const auto& a : record.allocations)
    std::cout << "allocation " << a.name << '|' << a.role << '|' << (a.managed ? "managed" : "device") << '|'
              << a.n_bytes << '|' << (a.free_ns >= a.alloc_ns ? "freed" : "lived") << '\n';
  std::cout << "live " << device.n_live() << '\n';
}
