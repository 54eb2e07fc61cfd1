// The getter is looked up instead of linked: the oldest supported torch lacks it.
#include "pytorch/torch_error.h"

#include "pytorch/internals.h"

namespace torch_cubin {
namespace {

using GetText = const char* (*)();

GetText find_text_getter() {
  return reinterpret_cast<GetText>(pytorch_symbol("torch_exception_get_what_without_backtrace"));
}

}  // namespace

std::string torch_error() {
  static const GetText getter = find_text_getter();
  const char* text = getter != nullptr ? getter() : nullptr;
  return text != nullptr ? text : "";
}

}  // namespace torch_cubin
