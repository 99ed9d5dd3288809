// An interrupt ends a run at the next place where its tables can still be written; a second one kills. Where no such
// place comes, as on a GPU that does not answer any more, an alarm ends the process.
#pragma once

#include <signal.h>
#include <unistd.h>

#include <cstdint>
#include <string>

#include "errors.hpp"

namespace nsan {

inline volatile std::sig_atomic_t caught_signal = 0;
// From an interrupt to the next place, and from there to the end of the process: both together are less than the 20 s
// that a device check gives before it kills.
inline unsigned seconds_to_end = 8;

extern "C" inline void nsan_catch_signal(int signal) {
  caught_signal = signal;
  alarm(seconds_to_end);
}

// Not exit(): what it would run may be what hangs.
extern "C" inline void nsan_end_now(int) { _exit(128 + static_cast<int>(caught_signal)); }

inline bool handle(int signal, void (*handler)(int)) {
  struct sigaction old, ours;
  // One that is ignored, as in the background of a shell, stays so.
  if (sigaction(signal, nullptr, &old) != 0 || old.sa_handler == SIG_IGN) return false;
  ours = {};
  ours.sa_handler = handler;
  // Its reset on delivery is what lets a second one kill.
  ours.sa_flags = static_cast<int>(SA_RESETHAND | SA_RESTART);
  sigemptyset(&ours.sa_mask);
  return sigaction(signal, &ours, nullptr) == 0;
}

inline void catch_interrupts() {
  caught_signal = 0;
  struct sigaction anyway = {};  // whoever started this process may have ignored or blocked alarms
  anyway.sa_handler = nsan_end_now;
  sigemptyset(&anyway.sa_mask);
  sigaction(SIGALRM, &anyway, nullptr);
  sigset_t alarms;
  sigemptyset(&alarms);
  sigaddset(&alarms, SIGALRM);
  sigprocmask(SIG_UNBLOCK, &alarms, nullptr);
  for (const int signal : {SIGINT, SIGTERM}) handle(signal, nsan_catch_signal);
}

inline void throw_if_interrupted() {
  if (caught_signal == 0) return;
  const bool is_int = caught_signal == SIGINT;
  alarm(seconds_to_end);  // anew: freeing memory and writing tables takes its time, too
  throw Ended(is_int ? kInterrupted : kTerminated,
              std::string("interrupted by ") + (is_int ? "SIGINT" : "SIGTERM") + ": what was recorded so far is kept");
}

// In long loops of the CPU, over items that are counted from 0.
constexpr std::uint64_t kBetweenLooks = 1ull << 20;
inline void throw_if_interrupted_at(std::uint64_t item) {
  if (item % kBetweenLooks == 0) throw_if_interrupted();
}

}  // namespace nsan
