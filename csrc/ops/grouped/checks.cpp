// The checks of grouped_matmul's arguments, the same on every device.
#include "ops/matmul/checks.h"

#include <algorithm>
#include <initializer_list>
#include <nlohmann/json.hpp>

#include "cubin/error.h"
#include "ops/common/argument_checks.h"
#include "ops/grouped/grouped.h"
#include "pytorch/described_tensor.h"

namespace torch_cubin {
namespace {

void check_sizes_of(const char* op, const char* name, const TensorView& view,
                    std::initializer_list<int64_t> sizes, const char* what) {
  const auto count = static_cast<int64_t>(sizes.size());
  if (view.dim == count && std::equal(sizes.begin(), sizes.end(), view.sizes)) return;
  fail({"input", argument_text(op, name), "has a wrong shape",
        tuple_text(sizes.begin(), count) + ", " + what, view.shape_text(), ""});
}

// A number for each row.
void check_of_rows(const char* op, const char* name, const std::optional<TensorView>& numbers,
                   int64_t rows, const TensorView& mat_a, ScalarType dtype) {
  if (!numbers) return;
  check_side(op, name, *numbers, "mat_a", mat_a, dtype);
  check_sizes_of(op, name, *numbers, {rows}, "one number for each row");
}

}  // namespace

void check_offs(const char* op, const TensorView& offs, const TensorView& mat_a, int64_t groups) {
  check_device(op, "offs", offs, "mat_a", mat_a);
  if (offs.dtype != ScalarType::Int && offs.dtype != ScalarType::Long) {
    fail_dtype(op, "offs", "int32 or int64", offs);
  }
  if (offs.dim == 1 && (groups < 0 || offs.sizes[0] == groups)) return;
  fail({"input", argument_text(op, "offs"), "has a wrong shape",
        groups < 0 ? "one end for each group"
                   : "(" + std::to_string(groups) + ",), one end for each of mat_b's matrices",
        offs.shape_text(), ""});
}

Shape check_grouped(const TensorView& mat_a, const TensorView& mat_b, const TensorView& offs,
                    const GroupedOptionViews& options) {
  const std::string instead = "torch.nn.functional.grouped_mm";
  check_float_dtype(kGroupedOp, "mat_a", mat_a, instead);
  check_float_dtype(kGroupedOp, "mat_b", mat_b, instead);
  check_like(kGroupedOp, "mat_b", mat_b, "mat_a", mat_a);
  if (mat_a.dim != 2 || mat_b.dim < 2 || mat_b.dim > 3) {
    fail({"input", kGroupedOp, "takes matrices, and batches of matrices", "2 or 3 dimensions each",
          "shapes " + mat_a.shape_text() + " and " + mat_b.shape_text(), ""});
  }
  const int64_t k = mat_a.sizes[1];
  if (mat_b.sizes[mat_b.dim - 2] != k) {
    fail({"input", kGroupedOp,
          "shapes " + mat_a.shape_text() + " and " + mat_b.shape_text() + " cannot be multiplied",
          "mat_b.size(-2) == " + std::to_string(k) + ", the last size of mat_a",
          std::to_string(mat_b.sizes[mat_b.dim - 2]), ""});
  }
  check_offs(kGroupedOp, offs, mat_a, mat_b.dim == 2 ? -1 : mat_b.sizes[0]);
  Shape out;
  if (mat_b.dim == 2) out.append(offs.sizes[0]);
  if (options.bias) check_like(kGroupedOp, "bias", *options.bias, "mat_a", mat_a);
  append_rows_and_columns(kGroupedOp, mat_a, mat_b, options, out);
  return out;
}

void append_rows_and_columns(const char* op, const TensorView& mat_a, const TensorView& mat_b,
                             const GroupedOptionViews& options, Shape& out) {
  const int64_t columns = mat_b.sizes[mat_b.dim - 1];
  const bool gates = check_activation(options.activation, op) != kActivationNone;
  if (options.any() && mat_b.dim == 2) {
    fail({"input", op, "has options of rows for groups of K",
          "a mat_b of 3 dimensions, or no bias, scale, rows, out_rows and activation",
          "shapes " + mat_a.shape_text() + " and " + mat_b.shape_text(), ""});
  }
  if (gates && columns % 2 != 0) {
    fail({"input", argument_text(op, "mat_b"), "has no two halves for an activation",
          "an even number of columns, of gates and of ups", mat_b.shape_text(), ""});
  }
  if (options.rows && options.rows->dim != 1) {
    check_sizes_of(op, "rows", *options.rows, {options.rows->dim > 0 ? options.rows->sizes[0] : 1},
                   "a row of mat_a for each row");
  }
  const int64_t rows = options.rows ? options.rows->sizes[0] : mat_a.sizes[0];
  check_of_rows(op, "rows", options.rows, rows, mat_a, ScalarType::Int);
  check_of_rows(op, "out_rows", options.out_rows, rows, mat_a, ScalarType::Int);
  check_of_rows(op, "scale", options.scale, rows, mat_a, ScalarType::Float);
  if (options.bias) {
    check_sizes_of(op, "bias", *options.bias, {mat_b.sizes[0], columns}, "one bias for each group");
  }
  out.append(rows);
  out.append(gates ? columns / 2 : columns);
}

void check_described_grouped(const nlohmann::json& call) {
  const nlohmann::json& tensors = call.at("tensors");
  DescribedTensors described;
  const auto get = [&](const char* name) { return described.view(tensors.at(name)); };
  const auto find = [&](const char* name) {
    return tensors.contains(name) ? std::optional(get(name)) : std::nullopt;
  };
  check_grouped(get("mat_a"), get("mat_b"), get("offs"),
                {find("bias"), find("scale"), find("rows"), find("out_rows"),
                 call.at("activation").get<std::string>()});
}

}  // namespace torch_cubin
