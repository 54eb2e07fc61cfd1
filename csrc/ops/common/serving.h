// Which calls of aten's operators our kernels serve (install(), drop_in()), and what was declined.
//
// Our kernels are registered over aten's once and stay (csrc/c_api_install.cpp): taking a
// registration away while other threads call the operator is a race inside PyTorch's dispatcher.
// The switches here decide call by call.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include "ops/common/op_calls.h"
#include "pytorch/tensor.h"

namespace torch_cubin {

// kFastest serves calls that are known to be as quick as PyTorch's, kAll whatever can be served.
enum class Policy : int { kOff, kFastest, kAll };

// The policy of this thread's calls: its own, else that of the thread that called backward() which
// this one works for, else the process's. kOff inside a call that is being served; kAll for
// kFastest inside batch_invariant().
Policy serving_policy();

void set_process_policy(Policy policy);   // install()
Policy set_thread_policy(Policy policy);  // drop_in(); returns the previous one

// Removes an object that PyTorch hands on to the threads of backward(), if this thread has it.
void forget_thread_object(const char* key) noexcept;

// The policy whose object this thread has.
Policy thread_object_policy();

// Kinds of calls, whose speeds are known separately.
enum class CallKind : int { kProduct, kBatched, kVector, kAttention, kCount };
constexpr int kCallKinds = static_cast<int>(CallKind::kCount);

// The known speed of our kernels: {"rows": [{"gpu", "dtypes", "kinds"}]}, each row a
// promise that no such call is slower than PyTorch's.
void set_known_speed(const nlohmann::json& table);

// The reason to leave a call to PyTorch, whatever its shapes are; null if it can be served.
// Literals, apart from kept ones (which are few): compared and stored as pointers.
const char* why_not_tensor(const TensorView& tensor, CallKind kind, Policy policy);

void count_declined(const char* op, const char* reason);

// [{"op": "aten::mm", "reason": "dtype int64", "calls": 3}]; with `clear` they begin anew.
nlohmann::json declined_calls(bool clear);

// An operator of aten's that our kernels stand over, and how often they served it.
struct AtenOp {
  AtenOp(const char* name, CallKind kind);

  const char* name;  // "aten::mm.out"
  CallKind kind;
  OpCalls &cpu, &cuda;

  void count_served(const TensorView& first) const {
    (first.on_cuda() ? cuda : cpu).add(OpCalls::slot(first.handle));
  }
};

// While one lives, this thread's calls go to PyTorch's kernels: the CPU references are made of
// ATen.
class ServedCall {
 public:
  ServedCall();
  ~ServedCall();
  ServedCall(const ServedCall&) = delete;
  ServedCall& operator=(const ServedCall&) = delete;
};

}  // namespace torch_cubin
