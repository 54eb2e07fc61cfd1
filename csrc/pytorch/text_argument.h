// How TORCH_BOX reads a str argument. To be included wherever kernels with such arguments are
// boxed.
//
// NOTE: until torch 2.13 the header's own conversion leaks a copy of the string in every call
// (pytorch#191340). The same code inside PyTorch, which converts the arguments of
// torch_call_dispatcher(), still does.
#pragma once

#include <torch/csrc/stable/library.h>

#include <memory>
#include <string>

namespace torch_cubin {

struct TextArgument : std::string {
  using std::string::string;
};

}  // namespace torch_cubin

namespace torch::stable::detail {

template <>
struct UnboxType<std::string> {
  using type = torch_cubin::TextArgument;
};

// Deletes the handle, as conversions do.
template <>
struct ToImpl<torch_cubin::TextArgument> {
  static torch_cubin::TextArgument call(StableIValue value, uint64_t, bool) {
    const auto handle = to<StringHandle>(value);
    size_t length = 0;
    const char* text = nullptr;
    STD_TORCH_CHECK(torch_string_length(handle, &length) == AOTI_TORCH_SUCCESS &&
                        torch_string_c_str(handle, &text) == AOTI_TORCH_SUCCESS,
                    "torch_cubin: a str argument could not be read");
    torch_cubin::TextArgument own(text, length);
    torch_delete_string(handle);
    return own;
  }
};

}  // namespace torch::stable::detail
