// The part of the C ABI that reads files. Never touches the driver.
#include "cubin/inspect.h"

#include <cstdlib>
#include <cstring>

#include "abi/handles.h"

using namespace torch_cubin;

torch_cubin_v1_error* torch_cubin_v1_inspect(const void* data, uint64_t size, const char* origin,
                                             char** out) {
  return guarded([&] {
    *out = nullptr;
    if (data == nullptr && size > 0) {
      fail({"input", "the C API", "was given a null file", "", "", ""});
    }
    const std::string text = inspect_to_json(static_cast<const uint8_t*>(data), size,
                                             origin != nullptr ? origin : "bytes");
    *out = static_cast<char*>(std::malloc(text.size() + 1));
    if (*out == nullptr) throw std::bad_alloc();
    std::memcpy(*out, text.c_str(), text.size() + 1);
  });
}

void torch_cubin_v1_text_free(char* text) { std::free(text); }
