// An error from a time when nothing may throw, the loading of the library, kept for the first call.
#pragma once

#include <atomic>
#include <string>

namespace torch_cubin {

extern std::atomic<bool> g_has_load_error;

// Keeps an error of the library's loading, unless one is kept already.
void keep_load_error(const std::string& tag, const std::string& message);

// Gives the error, which the caller then reports: raise_load_error() no longer throws it. False where
// there is none.
bool take_load_error(std::string* tag, std::string* message);

void raise_load_error_now();

// To be called where a user's call comes in: throws that error, once a process.
inline void raise_load_error() {
  if (g_has_load_error.load(std::memory_order_relaxed)) raise_load_error_now();
}

}  // namespace torch_cubin
