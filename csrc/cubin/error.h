// The one error type of the library and the one function that throws it.
//
// Lowest layer: includes neither torch nor cuda.h. Every message follows one template:
//
//   torch_cubin [tag]: <object> <what is wrong>: expected X, got Y. <what to do>
//
// The tags are public contract (README, "Errors"): file hash image arch driver no_device no_kernel
// params input launch capture fork oom fault closed internal.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

namespace torch_cubin {

// The parts of an error. Empty parts are omitted from the message.
struct Fault {
  std::string_view tag;
  std::string object;    // "cubin 'vec_add.cubin'"
  std::string problem;   // "is truncated"
  std::string expected;  // "3848 bytes"
  std::string got;       // "2000 bytes"
  std::string advice;    // "Copy the file again."
};

class Error : public std::runtime_error {
 public:
  Error(std::string tag, const std::string& message, std::shared_ptr<const Fault> fault = nullptr)
      : std::runtime_error(message), tag_(std::move(tag)), fault_(std::move(fault)) {}
  const std::string& tag() const { return tag_; }

  // The parts of the message, with an empty `tag`; null if it was created from a text.
  const Fault* fault() const { return fault_.get(); }

 private:
  std::string tag_;
  std::shared_ptr<const Fault> fault_;
};

// Throws Error, and stores the message as this thread's last_error().
[[noreturn]] void fail(const Fault& fault);

// Like fail(), with a finished message (allocation failures must begin like PyTorch's).
[[noreturn]] void fail_with_text(std::string_view tag, const std::string& message);

// Escapes control characters and invalid UTF-8 as \xNN, and truncates to about `limit` bytes. For
// names that come from a file.
std::string printable(std::string_view text, size_t limit = 200);

// "1 kernel", "3 kernels".
std::string counted(uint64_t count, const std::string& noun);

// Throws [oom] with a text that begins like PyTorch's, so that retry helpers recognise it. `what`
// is a clause: "an output of 8192 bytes on cuda:0 could not be allocated".
[[noreturn]] void fail_out_of_memory(const std::string& what);

// The text of the last error thrown on this thread since clear_last_error(). Before torch 2.13 an
// error that crosses a dispatcher call of the C API becomes "API call failed"; callers clear this
// text before such a call and rethrow it afterwards.
const std::string& last_error();
void clear_last_error();

}  // namespace torch_cubin
