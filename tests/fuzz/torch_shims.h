// What the declared ops need of PyTorch and of the CUDA driver, made of plain memory, so that they
// are fuzzed with sanitizers and without either.
#pragma once

#include <torch/csrc/stable/library.h>

#include <cstdint>
#include <string>
#include <vector>

namespace torch_cubin {
class Contract;
}

namespace fuzz {

struct FakeTensor {
  const bool* requires_grad;  // the first word, as an at::Tensor's is its TensorImpl
  std::vector<int64_t> sizes, strides;
  int32_t dtype = 6;  // float32
  int32_t device_type = 1, device_index = 0;
  void* data = nullptr;
  int64_t offset = 0;
};

FakeTensor* new_tensor();
AtenTensorHandle handle_of(FakeTensor* tensor);

StableListHandle new_list(const std::vector<AtenTensorHandle>& tensors);
StringHandle new_string(const std::string& text);

// How many tensors, lists and strings are alive.
int64_t objects_alive();

void set_grad_mode(bool enabled);

// Tells the driver of the fuzzer the kernels of an image, as their parameters' sizes.
void declare_kernels(const std::vector<uint8_t>& image);

// Called by each load of an image into the driver, whose result it gives: 0 for success.
using LoadHook = int (*)();
void set_load_hook(LoadHook hook);

// The op that a tuned table is for: no op is registered here. Null: none.
void set_tuned_contract(const torch_cubin::Contract* contract);

int64_t launches();  // so far; each has read every byte of its parameters

}  // namespace fuzz
