// An error from a time when nothing may throw, the loading of the library, kept for the first call.
#pragma once

#include <atomic>
#include <string>

namespace torch_cubin {

extern std::atomic<bool> g_error_kept;

// The first error counts.
void keep_error(const std::string& tag, const std::string& message);

// False where there is none. Whoever asks tells it: raise_kept_error() will not.
bool take_kept_error(std::string* tag, std::string* message);

void raise_kept_error_now();

// To be called where a user's call comes in: throws the kept error, once a process.
inline void raise_kept_error() {
  if (g_error_kept.load(std::memory_order_relaxed)) raise_kept_error_now();
}

}  // namespace torch_cubin
