// The operands of groups' products as the kernels read them, copied where no tensor map describes
// them.
#pragma once

#include <optional>

#include "ops/grouped/call.h"

namespace torch_cubin {

// Sets the operands' fields of a call, and owns the copies.
class GroupedOperands {
 public:
  // Rows or contraction, by the rank of mat_b. Operands are not empty.
  GroupedOperands(const char* op, const Tensor& mat_a, const Tensor& mat_b, int64_t groups)
      : GroupedOperands(op, mat_a, mat_b, groups, false, kActivationNone) {}

  // The same with the dims of matrices exchanged: for rows the last two of mat_b, which with an
  // activation has two halves of columns; for contraction those of mat_a.
  GroupedOperands(const char* op, const Tensor& mat_a, const Tensor& mat_b, int64_t groups,
                  Activation activation)
      : GroupedOperands(op, mat_a, mat_b, groups, true, activation) {}

  GroupedCall call;

 private:
  GroupedOperands(const char* op, const Tensor& mat_a, const Tensor& mat_b, int64_t groups,
                  bool transposed, Activation activation);

  std::optional<Tensor> a_copy_, b_copy_;
};

}  // namespace torch_cubin
