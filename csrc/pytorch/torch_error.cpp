// The getter is looked up instead of linked: the oldest supported torch lacks it.
#include "pytorch/torch_error.h"

#include "pytorch/internals.h"

namespace torch_cubin {
namespace {

using GetText = const char* (*)();

GetText text_getter() {
  static const auto getter =
      reinterpret_cast<GetText>(pytorch_symbol("torch_exception_get_what_without_backtrace"));
  return getter;
}

}  // namespace

std::string torch_error() {
  const GetText getter = text_getter();
  const char* text = getter != nullptr ? getter() : nullptr;
  return text != nullptr ? text : "";
}

bool has_torch_error() { return text_getter() != nullptr; }

}  // namespace torch_cubin
