#pragma once

namespace torch_cubin {

// Whether calls wait for values and check them: TORCH_CUBIN_CHECK. Throws [input] if the variable
// has an unknown value.
bool checks_values();

}  // namespace torch_cubin
