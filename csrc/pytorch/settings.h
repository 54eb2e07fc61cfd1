// PyTorch's global settings that change what a kernel may do. The stable ABI has no getter for
// them, so they are read from at::Context by symbol; where a symbol is missing the answer is the
// safe one (IEEE float32).
#pragma once

namespace torch_cubin {

// Whether float32 matrix products on CUDA may use TF32: the answer on which
// torch.backends.cuda.matmul.fp32_precision, allow_tf32 and set_float32_matmul_precision agree.
bool tf32_allowed();

}  // namespace torch_cubin
