// Looked up, not linked: the getter is newer than the oldest torch that we run on.
#include "pytorch/torch_error.h"

#include "driver/dl.h"

namespace torch_cubin {
namespace {

using GetText = const char* (*)();

GetText find_text_getter() {
  void* library = dl_loaded("libtorch_cpu.so");
  return library == nullptr ? nullptr
                            : reinterpret_cast<GetText>(
                                  dl_symbol(library, "torch_exception_get_what_without_backtrace"));
}

}  // namespace

std::string torch_error() {
  static const GetText getter = find_text_getter();
  const char* text = getter != nullptr ? getter() : nullptr;
  return text != nullptr ? text : "";
}

}  // namespace torch_cubin
