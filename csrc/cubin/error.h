// The one error type of the library and the one function that throws it.
//
// Lowest layer: includes neither torch nor cuda.h. Every message follows one template, so that a
// reader always finds the same five facts in the same order:
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

// What an error says. Empty parts are omitted from the message.
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

  // The parts of the message, its `tag` left empty; null where the message was given as a text.
  const Fault* fault() const { return fault_.get(); }

 private:
  std::string tag_;
  std::shared_ptr<const Fault> fault_;
};

// Throws Error, and keeps the message in this thread's last_error().
[[noreturn]] void fail(const Fault& fault);

// As fail(), with a finished message (allocation failures must begin as PyTorch's do).
[[noreturn]] void fail_with_text(std::string_view tag, const std::string& message);

// `text` as it may stand in a message: control characters and bytes that are not UTF-8 become
// \xNN, and what passes `limit` bytes is cut. For names that come from a file.
std::string printable(std::string_view text, size_t limit = 200);

// "1 kernel", "3 kernels".
std::string counted(uint64_t count, const std::string& noun);

// Throws [oom] with a text that begins as PyTorch's does, so that retry helpers know it. `what` is
// a clause: "an output of 8192 bytes on cuda:0 could not be allocated".
[[noreturn]] void fail_out_of_memory(const std::string& what);

// The text of the last error thrown on this thread since clear_last_error(). Below torch 2.13 an
// error that crosses a dispatcher call of the C API arrives as "API call failed": the caller
// clears this before such a call and rethrows from it afterwards.
const std::string& last_error();
void clear_last_error();

}  // namespace torch_cubin
