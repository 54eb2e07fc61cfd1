// Which calls of aten's operators our kernels serve (install(), drop_in()), and the counts of
// declined calls.
//
// Our kernels are registered for aten's operators once and permanently (csrc/c_api_install.cpp):
// removing a registration while other threads call the operator is a race inside PyTorch's
// dispatcher. The switches here decide for each call.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include "ops/common/op_calls.h"
#include "pytorch/tensor.h"

namespace torch_cubin {

// kFastest serves calls that are known to be at least as fast as PyTorch's, kAll all that can be
// served.
enum class Policy : int { kOff, kFastest, kAll };

// The policy of this thread's calls: its own; else, in a thread of backward(), that of the calling
// thread; else the process's. kOff inside a call that is being served; kAll instead of kFastest
// inside batch_invariant().
Policy serving_policy();

void set_process_policy(Policy policy);   // install()
Policy set_thread_policy(Policy policy);  // drop_in(); returns the previous one

// Whether this thread's calls of PyTorch's flash attention are served whatever the policy: its
// implementation "cubin" is active in the process.
bool is_flash_implementation();
void set_flash_implementation(bool on);

// A thread that measures: its calls run PyTorch's kernels or ours, whatever the policy, and are not
// counted.
enum class Measuring : int { kNo, kPyTorchs, kOurs };
void set_measuring(Measuring state);

// The policy whose object this thread has.
Policy thread_object_policy();

// Kinds of calls whose speed is recorded separately.
enum class CallKind : int { kProduct, kBatched, kVector, kAttention, kScaled, kSum, kNorm, kCount };
constexpr int kCallKinds = static_cast<int>(CallKind::kCount);

// The known speed of our kernels: {"rows": [{"gpu", "dtypes", "kinds"}]}, each row a promise that
// calls of these kinds are not slower than PyTorch's in the geometric mean.
void set_known_speed(const nlohmann::json& table);

// Measures a GPU that the known speeds do not name, at its first call under kFastest, and passes
// the result to set_calibrated_speed(). Returns 0 if it must be asked again at a later call.
// Deterministic algorithms use no such measurement.
using Calibrate = int (*)(int device);
void set_calibrate(Calibrate calibrate);

// {"rows": [{"dtypes", "kinds"}]}
void set_calibrated_speed(int device, const nlohmann::json& table);

// The reason to leave a call to PyTorch for any shape; null if it can be served. Reasons are
// compared and stored as pointers: they are literals, or texts that are kept forever (there are
// few).
const char* why_not_tensor(const TensorView& tensor, CallKind kind, Policy policy);

inline bool same_device(const TensorView& a, const TensorView& b) {
  return a.device_type == b.device_type && a.device_index == b.device_index;
}

void count_declined(const char* op, const char* reason);

// [{"op": "aten::mm", "reason": "dtype int64", "calls": 3}]; `clear` resets the counts.
nlohmann::json declined_calls(bool clear);

// The number of calls that were served in this thread, for audit().
int64_t& calls_served();

// An operator of aten that our kernels serve, with the number of calls served.
struct AtenOp {
  AtenOp(const char* name, CallKind kind);

  const char* name;  // "aten::mm.out"
  CallKind kind;
  OpCalls &cpu, &cuda;

  void count_served(const TensorView& first) const {
    (first.on_cuda() ? cuda : cpu).add(OpCalls::slot(first.handle));
    ++calls_served();
  }
};

// While an instance exists, this thread's calls go to PyTorch's kernels: the CPU references are
// made of ATen.
class ServedCall {
 public:
  ServedCall();
  ~ServedCall();
  ServedCall(const ServedCall&) = delete;
  ServedCall& operator=(const ServedCall&) = delete;
};

}  // namespace torch_cubin
