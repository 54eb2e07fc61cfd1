// The getter is looked up instead of linked: the oldest supported torch lacks it. So are the parts
// of c10::OutOfMemoryError, which is outside the stable ABI.
#include "pytorch/torch_error.h"

#include <cxxabi.h>

#include <exception>
#include <memory>
#include <typeinfo>

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

void throw_torch_out_of_memory(const std::string& text) {
  constexpr size_t kMostBytes = 1024;  // of a c10::Error, which has 128 in torch 2.13
  // c10::Error(std::string message, Backtrace, const void* caller): a shared pointer to a
  // backtrace.
  using Construct = void (*)(void* self, std::string text, std::shared_ptr<const void> backtrace,
                             const void* caller);
  static const auto construct = reinterpret_cast<Construct>(pytorch_symbol(
      "_ZN3c105ErrorC1ENSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEESt10shared_ptrIKNS_"
      "9LazyValueIS6_EEEPKv"));
  static auto* const type =
      static_cast<std::type_info*>(pytorch_symbol("_ZTIN3c1016OutOfMemoryErrorE"));
  if (construct == nullptr || type == nullptr) return;
  void* const error = abi::__cxa_allocate_exception(kMostBytes);
  construct(error, text, nullptr, nullptr);
  abi::__cxa_throw(error, type, [](void* thrown) {
    static_cast<std::exception*>(thrown)->~exception();  // c10::Error's, a virtual function
  });
}

}  // namespace torch_cubin
