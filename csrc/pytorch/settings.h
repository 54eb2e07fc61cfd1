// PyTorch's global settings for precision and determinism. The stable ABI has no getter, so they
// are read from at::Context by symbol. If a symbol is missing, the answer is IEEE float32 and
// deterministic.
#pragma once

namespace torch_cubin {

// Whether float32 matrix products on CUDA may use TF32, as set by
// torch.backends.cuda.matmul.fp32_precision, allow_tf32 or set_float32_matmul_precision.
bool tf32_allowed();

// torch.use_deterministic_algorithms(); true if the symbol is missing.
bool deterministic_algorithms();

}  // namespace torch_cubin
