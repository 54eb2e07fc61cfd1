// The operands of groups' products as the kernels read them, copied where no tensor map describes
// them.
#pragma once

#include <optional>

#include "ops/grouped/call.h"

namespace torch_cubin {

// Throws [no_kernel] for sizes that kernels, which count in 32 bits, do not take.
void check_kernel_sizes(const char* op, int64_t m, int64_t n, int64_t k, int64_t groups);

// Sets the operands' fields of a call, and owns the copies.
class GroupedOperands {
 public:
  // Rows or contraction, by the rank of mat_b. Operands are not empty. With `transposed` the dims
  // of matrices are exchanged: for rows the last two of mat_b, for contraction those of mat_a. With
  // a gate mat_b has gates' and ups' columns.
  GroupedOperands(const char* op, const Tensor& mat_a, const Tensor& mat_b, int64_t groups,
                  bool transposed = false, Gating gating = {});

  GroupedCall call;

 private:
  std::optional<Tensor> a_copy_, b_copy_;
};

}  // namespace torch_cubin
