// The operands of groups' products as the kernels read them, copied where no tensor map describes
// them.
#pragma once

#include <optional>

#include "ops/grouped/call.h"

namespace torch_cubin {

// Sets the operands' fields of a call, and owns the copies.
class GroupedOperands {
 public:
  // Rows or contraction, by the rank of mat_b. Operands are not empty. With `transposed` the dims
  // of matrices are exchanged: for rows the last two of mat_b, for contraction those of mat_a. With
  // an activation the columns of mat_b are two halves.
  GroupedOperands(const char* op, const Tensor& mat_a, const Tensor& mat_b, int64_t groups,
                  bool transposed = false, Activation activation = kActivationNone);

  GroupedCall call;

 private:
  std::optional<Tensor> a_copy_, b_copy_;
};

}  // namespace torch_cubin
