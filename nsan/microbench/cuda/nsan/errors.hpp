// How a program of the microbenchmark ends when it does not do what it was asked, and with which exit status.
#pragma once

#include <csignal>
#include <stdexcept>
#include <string>

namespace nsan {

// Exit statuses. 0 to 2 are as everywhere; the others tell a sweep what it may go on with.
enum Status : int {
  kDone = 0,
  kFailed = 1,    // a CUDA call failed, or a result is wrong
  kUsage = 2,     // the command line cannot be understood
  kNoDriver = 5,  // no NVIDIA driver, or no GPU
  kSkipped = 6,   // this machine cannot do it: the reason says why
  kRefused = 7,   // it could leave the machine without memory
  kInterrupted = 128 + SIGINT,
  kTerminated = 128 + SIGTERM,
};

// Beside what the text says, another amount of managed memory may be a way out: how to get it, the program adds.
enum class WayOut { kSaid, kLessMemory, kMoreMemory };

// Any end that the program foresees. The text is one line for the user, with the way out.
class Ended : public std::runtime_error {
 public:
  Ended(Status status, const std::string& reason, WayOut way_out = WayOut::kSaid)
      : std::runtime_error(reason), status_(status), way_out_(way_out) {}
  Status status() const { return status_; }
  WayOut way_out() const { return way_out_; }

 private:
  Status status_;
  WayOut way_out_;
};

inline Ended failed(const std::string& reason, WayOut way_out = WayOut::kSaid) {
  return Ended(kFailed, reason, way_out);
}
inline Ended usage(const std::string& reason) { return Ended(kUsage, reason); }
inline Ended no_driver(const std::string& reason) { return Ended(kNoDriver, reason); }
inline Ended skipped(const std::string& reason) { return Ended(kSkipped, reason); }
inline Ended refused(const std::string& reason, WayOut way_out = WayOut::kSaid) {
  return Ended(kRefused, reason, way_out);
}

inline const char* status_name(Status status) {
  switch (status) {
    case kDone: return "ok";
    case kUsage: return "usage";
    case kNoDriver: return "no_driver";
    case kSkipped: return "skipped";
    case kRefused: return "refused";
    case kInterrupted:
    case kTerminated: return "interrupted";
    case kFailed: break;
  }
  return "failed";
}

}  // namespace nsan
