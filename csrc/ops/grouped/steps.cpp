// The options of products of rows as steps of ATen's: the reference, and what CUDA runs for dtypes
// whose kernels do not have them.
#include "ops/common/aten.h"
#include "ops/common/dispatch.h"
#include "ops/common/stable_ops.h"
#include "ops/grouped/grouped.h"
#include "ops/matmul/checks.h"
#include "ops/matmul/elementwise.h"

namespace torch_cubin {
namespace {

Tensor numbers_near(const Tensor& like, int64_t count, double value) {
  Tensor out = empty_near(TensorView(like), &count, 1, ScalarType::Long);
  torch::stable::fill_(out, value);
  return out;
}

// The numbers as int64; those that are no rows of `count` become `count`.
Tensor known_rows(const Tensor& numbers, int64_t count) {
  const Tensor own = narrow_to(detach(numbers), ScalarType::Long);
  const int64_t size = TensorView(own).sizes[0];
  const Tensor end = numbers_near(own, size, static_cast<double>(count));
  const Tensor falls = call_aten_overload("aten::lt", "Tensor", own, numbers_near(own, size, 0));
  return call_aten_overload("aten::where", "self", falls, end,
                            call_aten("aten::minimum", own, end));
}

// x with one more row, of zeros.
Tensor with_zero_row(const Tensor& x) {
  const TensorView view(x);
  const int64_t sizes[] = {view.sizes[0] + 1, view.sizes[1]};
  Tensor out = empty_near(view, sizes, 2, view.dtype);
  torch::stable::zero_(out);
  Tensor own = torch::stable::narrow(out, 0, 0, view.sizes[0]);
  torch::stable::copy_(own, x);
  return out;
}

// The ends, none below an earlier one: those up to a wrong one stay, and can be searched.
Tensor ascending(const Tensor& ends) {
  using torch::stable::detail::from;
  using torch::stable::detail::to;
  StableIValue stack[] = {from(ends), from(int64_t{0})};
  call_op("aten::cummax", "", stack);
  Tensor most = to<Tensor>(stack[0]);
  to<Tensor>(stack[1]);  // where they stand
  return most;
}

// The group of each row before a wrong end; that of rows past the last end is the number of groups.
Tensor groups_of_rows(const Tensor& offs, int64_t rows) {
  const Tensor ends = ascending(narrow_to(detach(offs), ScalarType::Long));
  const Tensor counted = call_aten("aten::cumsum", numbers_near(ends, rows, 1), int64_t{0},
                                   std::optional<ScalarType>());
  // The first group whose end is at least a row's number, counted from 1.
  return call_aten_overload("aten::searchsorted", "Tensor", as_contiguous(ends), counted, false,
                            false, std::optional<std::string>(), std::optional<Tensor>());
}

// Whether each row belongs to a group; if an end is wrong all rows do, so that their NaN is stored.
Tensor belongs_to_group(const Tensor& offs, int64_t rows) {
  const int64_t groups = TensorView(offs).sizes[0];
  Tensor ends = numbers_near(offs, groups + 1, 0);
  Tensor own = torch::stable::narrow(ends, 0, 1, groups);
  torch::stable::copy_(own, detach(offs));
  const Tensor wrong = call_aten(
      "aten::any",
      call_aten_overload("aten::lt", "Tensor", own, torch::stable::narrow(ends, 0, 0, groups)));
  const Tensor counted = call_aten("aten::cumsum", numbers_near(ends, rows, 1), int64_t{0},
                                   std::optional<ScalarType>());
  const Tensor before =
      call_aten_overload("aten::le", "Tensor", counted, torch::stable::select(ends, 0, groups));
  return call_aten("aten::logical_or", before, wrong);
}

Tensor half(const Tensor& rows, int64_t number) {
  Tensor own = rows;
  const int64_t size = TensorView(rows).sizes[1] / 2;
  return torch::stable::contiguous(torch::stable::narrow(own, 1, number * size, size));
}

// To the largest numbers of float8_e4m3fn; NaN stays.
Tensor saturated(const Tensor& x) {
  const int64_t size = 1;
  const auto limit = [&](double value) {
    Tensor out = empty_near(TensorView(x), &size, 1, TensorView(x).dtype);
    torch::stable::fill_(out, value);
    return out;
  };
  constexpr double kLargest = 448;
  return call_aten("aten::minimum", call_aten("aten::maximum", x, limit(-kLargest)),
                   limit(kLargest));
}

}  // namespace

Tensor rows_by_number(const Tensor& x, const Tensor& numbers) {
  const int64_t count = TensorView(x).sizes[0];
  return call_aten("aten::index_select", with_zero_row(x), int64_t{0}, known_rows(numbers, count));
}

Tensor grouped_by_steps(decltype(&grouped_product_cpu) product, const Tensor& mat_a,
                        const Tensor& mat_b, const Tensor& offs, const GroupedOptions& options) {
  const ScalarType dtype = TensorView(mat_a).dtype;
  const Tensor a = options.rows ? rows_by_number(wide(mat_a), *options.rows) : wide(mat_a);
  return options_by_steps(product(a, wide(mat_b), offs, true, {}), offs, options, dtype);
}

Tensor options_by_steps(const Tensor& product, const Tensor& offs, const GroupedOptions& options,
                        ScalarType dtype) {
  Tensor out = product;
  const int64_t rows = TensorView(out).sizes[0];
  if (options.bias) {
    const Tensor own = narrow_to(detach(*options.bias), TensorView(out).dtype);
    const Tensor bias = rows_by_number(own, groups_of_rows(offs, rows));
    out = scaled_addend(out, bias, 1);
  }
  if (options.activation != "none") {
    const Activation activation = check_activation(options.activation);
    out = multiplied(apply_activation(half(out, 0), activation), half(out, 1));
  }
  if (options.scale) {
    const Tensor scale = narrow_to(detach(*options.scale), TensorView(out).dtype);
    out = multiplied(out, torch::stable::view(torch::stable::contiguous(scale), {rows, 1}));
  }
  if (options.out_rows) {
    Tensor all = with_zero_row(out);
    torch::stable::zero_(all);
    const Tensor nowhere = numbers_near(offs, rows, static_cast<double>(rows));
    const Tensor places = call_aten_overload("aten::where", "self", belongs_to_group(offs, rows),
                                             known_rows(*options.out_rows, rows), nowhere);
    all = call_aten("aten::index_copy", all, int64_t{0}, places, out);
    out = torch::stable::narrow(all, 0, 0, rows);
  }
  return narrow_to(dtype == ScalarType::Float8_e4m3fn ? saturated(out) : out, dtype);
}

}  // namespace torch_cubin
