// The C ABI of errors, and the error handling that all other functions use.
#include "abi/handles.h"
#include "abi/structs.h"
#include "driver/dl.h"

namespace torch_cubin {

torch_cubin_v1_error* no_memory_for_errors() {
  static torch_cubin_v1_error* const error =
      new torch_cubin_v1_error{"oom", "torch_cubin [oom]: the host is out of memory.", {}};
  return error;
}

torch_cubin_v1_error* handled_error() {
  try {
    try {
      throw;
    } catch (const Error& error) {
      const Fault* fault = error.fault();
      auto made = std::make_unique<torch_cubin_v1_error>();
      made->tag = error.tag();
      made->message = error.what();
      if (fault != nullptr) made->fault = *fault;
      return made.release();
    } catch (const std::bad_alloc&) {
      return no_memory_for_errors();
    } catch (const std::exception& error) {
      return new torch_cubin_v1_error{
          "internal", std::string("torch_cubin [internal]: ") + error.what(), {}};
    }
  } catch (...) {
    return no_memory_for_errors();
  }
}

void check_struct(uint64_t size, uint64_t least, const char* name) {
  if (size >= least) return;
  fail({"internal", std::string("the struct ") + name, "is not one of this library",
        "at least " + std::to_string(least) + " bytes in its size", std::to_string(size),
        "Set its size, and compile with the headers of this library."});
}

namespace {
// Allocates the error for lack of memory when the library is loaded, while there is memory.
[[maybe_unused]] torch_cubin_v1_error* const g_no_memory = no_memory_for_errors();
}  // namespace

}  // namespace torch_cubin

using namespace torch_cubin;

uint32_t torch_cubin_v1_level(void) { return TORCH_CUBIN_V1_LEVEL; }

const char* torch_cubin_v1_library_path(void) {
  static const std::string* const path =
      new std::string(dl_path_of(reinterpret_cast<const void*>(&torch_cubin_v1_level)));
  return path->c_str();
}

const char* torch_cubin_v1_error_part(const torch_cubin_v1_error* error, uint32_t part) {
  switch (part) {
    case TORCH_CUBIN_V1_TAG:
      return error->tag.c_str();
    case TORCH_CUBIN_V1_MESSAGE:
      return error->message.c_str();
    case TORCH_CUBIN_V1_OBJECT:
      return error->fault.object.c_str();
    case TORCH_CUBIN_V1_PROBLEM:
      return error->fault.problem.c_str();
    case TORCH_CUBIN_V1_EXPECTED:
      return error->fault.expected.c_str();
    case TORCH_CUBIN_V1_GOT:
      return error->fault.got.c_str();
    case TORCH_CUBIN_V1_ADVICE:
      return error->fault.advice.c_str();
    default:
      return "";
  }
}

torch_cubin_v1_error* torch_cubin_v1_error_make(const char* tag, const char* object,
                                                const char* problem, const char* expected,
                                                const char* got, const char* advice) {
  const auto text = [](const char* given) { return std::string(given != nullptr ? given : ""); };
  return guarded([&] {
    const std::string kind = text(tag);
    fail({kind, text(object), text(problem), text(expected), text(got), text(advice)});
  });
}

void torch_cubin_v1_error_free(torch_cubin_v1_error* error) {
  if (error != no_memory_for_errors()) delete error;
}
