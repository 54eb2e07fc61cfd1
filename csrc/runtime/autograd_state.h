// What PyTorch's autograd is doing in this process, as far as the stable ABI has no getter for it.
#pragma once

namespace torch_cubin {

// Whether a forward-mode level (forward_ad.dual_level, torch.func.jvp) is open in this process.
// False where this version of PyTorch does not say: tangents are then lost under no_grad alone.
bool dual_level_is_open();

}  // namespace torch_cubin
