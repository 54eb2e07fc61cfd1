// Results of the C API: a malloc'd JSON object; {"error": {"tag": ..., "message": ...}} for a
// failure. No exception crosses it.
#pragma once

#include <cstdlib>
#include <cstring>
#include <new>
#include <nlohmann/json.hpp>
#include <string>
#include <type_traits>

#include "cubin/error.h"
#include "cubin/json_facts.h"

#define TORCH_CUBIN_API extern "C" __attribute__((visibility("default")))

namespace torch_cubin {

inline char* copy_text(const std::string& text) {
  auto* copy = static_cast<char*>(std::malloc(text.size() + 1));
  if (copy != nullptr) std::memcpy(copy, text.c_str(), text.size() + 1);
  return copy;
}

inline std::string error_json(const std::string& tag, const std::string& message) {
  return dump({{"error", {{"tag", tag}, {"message", message}}}});
}

// The exception that is being handled, as JSON. Null only if memory runs out twice.
inline char* error_answer() {
  try {
    try {
      throw;
    } catch (const Error& error) {
      return copy_text(error_json(error.tag(), error.what()));
    } catch (const std::bad_alloc&) {
      return copy_text(error_json("oom", "torch_cubin [oom]: the host is out of memory."));
    } catch (const std::exception& error) {
      return copy_text(
          error_json("internal", std::string("torch_cubin [internal]: ") + error.what()));
    }
  } catch (...) {
    return nullptr;
  }
}

// The caller's pointer; throws [input] if it is null.
template <class T>
T* given(T* pointer, const char* what) {
  if (pointer == nullptr) {
    fail({"input", "the C API", std::string("was given a null ") + what, "", "", ""});
  }
  return pointer;
}

// The result of `make` as text: a JSON object, a string that already is one, or {} for void.
template <class Make>
char* answer(Make make) {
  try {
    if constexpr (std::is_void_v<decltype(make())>) {
      make();
      return copy_text("{}");
    } else if constexpr (std::is_same_v<decltype(make()), nlohmann::json>) {
      return copy_text(dump(make()));
    } else {
      return copy_text(make());
    }
  } catch (...) {
    return error_answer();
  }
}

}  // namespace torch_cubin
