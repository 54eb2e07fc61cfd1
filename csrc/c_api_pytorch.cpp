// The C API of the PyTorch symbols outside its stable ABI, for `doctor`.
#include "c_answer.h"
#include "pytorch/internals.h"

using namespace torch_cubin;

// {"symbols": [...]}: csrc/pytorch/internals.h. Never touches the driver.
TORCH_CUBIN_API char* torch_cubin_pytorch_symbols() {
  return answer([] { return pytorch_symbols_json(); });
}
