// Stores an error that occurs while the library is loaded, when nothing may throw, for the first
// call.
#pragma once

#include <atomic>
#include <string>

namespace torch_cubin {

extern std::atomic<bool> g_has_load_error;

// Stores an error that occurred while loading the library, unless one is stored already.
void keep_load_error(const std::string& tag, const std::string& message);

// Returns the error, which the caller must report: raise_load_error() no longer throws it. Returns
// false if there is none.
bool take_load_error(std::string* tag, std::string* message);

void raise_load_error_now();

// Must be called at the entry of users' calls. Throws the stored error, once per process.
inline void raise_load_error() {
  if (g_has_load_error.load(std::memory_order_relaxed)) raise_load_error_now();
}

}  // namespace torch_cubin
