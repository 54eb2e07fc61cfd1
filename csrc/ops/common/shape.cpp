#include "ops/common/shape.h"

#include "cubin/error.h"

namespace torch_cubin {

int64_t Shape::numel() const {
  int64_t product = 1;
  bool overflow = false;
  for (int64_t i = 0; i < dim; ++i) {
    if (sizes[i] == 0) return 0;
    overflow = __builtin_mul_overflow(product, sizes[i], &product) || overflow;
  }
  if (overflow) {
    fail({"input", "the output", "is too large", "at most 2^63 - 1 elements", "more", ""});
  }
  return product;
}

}  // namespace torch_cubin
