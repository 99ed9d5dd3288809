// An interrupt ends a run between two phases, so that its tables can still be written; a second one kills.
#pragma once

#include <csignal>
#include <string>

#include "errors.hpp"

namespace nsan {

inline volatile std::sig_atomic_t caught_signal = 0;

extern "C" inline void nsan_catch_signal(int signal) { caught_signal = signal; }

// A signal that is ignored, as in the background of a shell, stays so.
inline void catch_interrupts() {
  caught_signal = 0;
  for (const int signal : {SIGINT, SIGTERM}) {
    struct sigaction old, ours;
    if (sigaction(signal, nullptr, &old) != 0 || old.sa_handler == SIG_IGN) continue;
    ours = {};
    ours.sa_handler = nsan_catch_signal;
    // Its reset on delivery is what lets a second one kill.
    ours.sa_flags = static_cast<int>(SA_RESETHAND | SA_RESTART);
    sigemptyset(&ours.sa_mask);
    sigaction(signal, &ours, nullptr);
  }
}

inline void throw_if_interrupted() {
  if (caught_signal == 0) return;
  const bool is_int = caught_signal == SIGINT;
  throw Ended(is_int ? kInterrupted : kTerminated,
              std::string("interrupted by ") + (is_int ? "SIGINT" : "SIGTERM") + ": what was recorded so far is kept");
}

}  // namespace nsan
