// State of PyTorch's autograd for which the stable ABI has no getter.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

namespace torch_cubin {

// Whether a forward-mode level (forward_ad.dual_level, torch.func.jvp) is open in this process.
// False if this version of PyTorch has no such symbol. Then tangents of dual_level are dropped
// without an error: by the built-in ops under no_grad, by a declared op without a backward in every
// mode.
bool dual_level_is_open();

// Whether a transform of torch.func runs in this thread. True if this version of PyTorch has no
// such symbol.
bool transform_is_active();

// Tensor.requires_grad. True for every tensor if this version of PyTorch has no such symbol.
bool requires_grad(AtenTensorHandle tensor);

// Increments the tensor's version counter before an op mutates it, so that a backward that saved
// the tensor raises instead of computing with the new data. Throws PyTorch's error for an inference
// tensor outside inference mode, and [internal] if this version of PyTorch has no such symbol.
void bump_version(AtenTensorHandle tensor);

}  // namespace torch_cubin
