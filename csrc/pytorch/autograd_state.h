// What PyTorch's autograd is doing in this process, as far as the stable ABI has no getter for it.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

namespace torch_cubin {

// Whether a forward-mode level (forward_ad.dual_level, torch.func.jvp) is open in this process.
// False where this version of PyTorch does not say: a tangent of dual_level is then lost, without an
// error, under no_grad by the built-in ops, and in every mode by a declared op that has no backward.
bool dual_level_is_open();

// Whether autograd follows that tensor: a leaf that requires grad, or the result of one. True for
// every tensor where this version of PyTorch does not say.
bool requires_grad(AtenTensorHandle tensor);

// Tells autograd that the tensor's data is about to change, so that a backward that saved it raises
// instead of computing with the new data. Throws as PyTorch does for an inference tensor outside
// of inference mode, [internal] where this version of PyTorch has no way to tell it.
void bump_version(AtenTensorHandle tensor);

}  // namespace torch_cubin
