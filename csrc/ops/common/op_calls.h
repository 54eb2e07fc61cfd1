// How often each op ran since the counts were last cleared, for torch_cubin.report(): in compiled
// code and in backward() no Python runs that could count. Calls are counted where the op's kernel
// is called, so fakes and traces count nothing, and a CUDA graph counts only its capture.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <nlohmann/json.hpp>

namespace torch_cubin {

// The counts of one op on one kind of device.
class OpCalls {
 public:
  static constexpr int kDtypes = 64;  // PyTorch's ScalarType has fewer

  // The slot of a tensor's dtype; negative if it has none, like an undefined tensor, or if this
  // thread's calls are not counted.
  static int slot(AtenTensorHandle tensor) noexcept;
  static void count_in_this_thread(bool on) noexcept;
  void add(int slot) noexcept {
    if (slot >= 0) calls_[slot].fetch_add(1, std::memory_order_relaxed);
  }

 private:
  friend nlohmann::json op_calls(bool clear);
  std::array<std::atomic<int64_t>, kDtypes> calls_{};
};

// Returns the same object for the same names, which must be literals; it is never freed.
OpCalls& op_calls_of(const char* op, const char* device);

// [{"op": "matmul", "device": "cuda", "dtype": "bfloat16", "calls": 3}]; `clear` resets the counts.
nlohmann::json op_calls(bool clear);

}  // namespace torch_cubin
