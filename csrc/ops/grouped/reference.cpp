// grouped_matmul on the CPU: one product a group, by the reference of matmul.
#include <cmath>

#include "ops/common/aten.h"
#include "ops/common/stable_ops.h"
#include "ops/grouped/grouped.h"
#include "ops/matmul/matmul.h"

namespace torch_cubin {
namespace {

Tensor part_of(Tensor tensor, int64_t dim, int64_t start, int64_t size) {
  return torch::stable::narrow(tensor, dim, start, size);
}

void fill_part(Tensor to, double value) { torch::stable::fill_(to, value); }

void copy_product(Tensor to, const Tensor& a, const Tensor& b) {
  torch::stable::copy_(to, matmul_cpu(a, b));
}

}  // namespace

Tensor grouped_product_cpu(const Tensor& mat_a, const Tensor& mat_b, const Tensor& offs,
                           bool zero_rest, const GroupedOptions& options) {
  const TensorView a(mat_a), b(mat_b);
  const Shape shape = check_grouped(a, b, TensorView(offs), views_of(options));
  if (options.any()) return grouped_by_steps(grouped_product_cpu, mat_a, mat_b, offs, options);
  const bool contraction = b.dim == 2;
  const int64_t limit = contraction ? a.sizes[1] : a.sizes[0];
  check_ends(kGroupedOp, offs, limit);
  const Tensor rows = detach(mat_a), matrices = detach(mat_b);
  const Tensor out = empty_near(a, shape.sizes, shape.dim, a.dtype);
  int64_t start = 0, group = 0;
  bool wrong = false;
  for (const int64_t end : ends_on_host(offs)) {
    wrong = wrong || end < start || end > limit;
    if (contraction) {
      const Tensor own = torch::stable::select(out, 0, group);
      if (wrong) {
        fill_part(own, NAN);
      } else {
        copy_product(own, part_of(rows, 1, start, end - start),
                     part_of(matrices, 0, start, end - start));
      }
    } else if (wrong) {
      fill_part(part_of(out, 0, start, limit - start), NAN);
      return out;
    } else {
      copy_product(part_of(out, 0, start, end - start), part_of(rows, 0, start, end - start),
                   torch::stable::select(matrices, 0, group));
    }
    if (!wrong) start = end;
    ++group;
  }
  if (!contraction && zero_rest) fill_part(part_of(out, 0, start, limit - start), 0);
  return out;
}

Tensor grouped_matmul_cpu(const Tensor& mat_a, const Tensor& mat_b, const Tensor& offs,
                          bool zero_rest, const std::optional<Tensor>& bias,
                          const std::optional<Tensor>& scale, const std::optional<Tensor>& rows,
                          const std::optional<Tensor>& out_rows, const std::string& activation) {
  return grouped_product_cpu(mat_a, mat_b, offs, zero_rest,
                             {bias, scale, rows, out_rows, activation});
}

}  // namespace torch_cubin
