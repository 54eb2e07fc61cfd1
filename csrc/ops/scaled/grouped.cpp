// scaled_grouped_matmul: its checks, and the reference on the CPU, one scaled_matmul a group.
#include "ops/grouped/grouped.h"

#include <cmath>
#include <nlohmann/json.hpp>

#include "cubin/error.h"
#include "ops/common/argument_checks.h"
#include "ops/common/aten.h"
#include "ops/common/stable_ops.h"
#include "ops/scaled/group_blocks.h"
#include "ops/scaled/scaled.h"
#include "pytorch/described_tensor.h"

namespace torch_cubin {
namespace {

void check_rank(const char* op, const char* name, const TensorView& x, int64_t rank) {
  if (x.dim == rank) return;
  fail({"input", argument_text(op, name), "has a wrong rank", counted(rank, "dimension"),
        x.shape_text(), ""});
}

void check_scales_of_groups(const char* op, const char* name, const TensorView& scale, int64_t rank,
                            int64_t groups) {
  check_rank(op, name, scale, rank);
  if (scale.sizes[0] == groups) return;
  fail({"input", argument_text(op, name), "is of another number of groups",
        std::to_string(groups) + ", as offs and mat_b", std::to_string(scale.sizes[0]), ""});
}

void check_bias_dtype(const char* op, const TensorView& bias, const TensorView& mat_a) {
  check_device(op, "bias", bias, "mat_a", mat_a);
  if (bias.dtype == ScalarType::BFloat16 || bias.dtype == ScalarType::Half ||
      bias.dtype == ScalarType::Float) {
    return;
  }
  fail_dtype(op, "bias", "bfloat16, float16 or float32", bias);
}

Tensor part(const Tensor& tensor, int64_t dim, int64_t start, int64_t size) {
  Tensor own = tensor;
  return torch::stable::narrow(own, dim, start, size);
}

// The blocks of K, with scales, that a group has elements of.
struct BlocksOfK {
  BlocksOfK(int64_t start, int64_t size)
      : first(start / kScaleBlock), before(start % kScaleBlock), count(before + size) {}

  // The operand's part, with zeros for the elements of the groups before.
  Tensor of(const Tensor& operand, int64_t dim) const {
    Tensor own = torch::stable::clone(part(operand, dim, first * kScaleBlock, count));
    Tensor others = part(own, dim, 0, before);
    torch::stable::zero_(others);
    return own;
  }

  Tensor scales(const Tensor& all) const {
    return part(all, 1, first, ceil_div(count, kScaleBlock));
  }

  int64_t first, before, count;
};

}  // namespace

TensorView group_of(const TensorView& all) {
  return {all.sizes + 1, all.strides + 1, all.dim - 1,
          all.dtype,     all.device_type, all.device_index};
}

Shape check_scaled_grouped(const ScaledGroupedArguments& x) {
  check_rank(x.op, "mat_a", x.mat_a, 2);
  const bool of_k = x.mat_b.dim == 2;
  if (!of_k) check_rank(x.op, "mat_b", x.mat_b, 3);
  const bool rows = x.recipe_a == kScaleRow && x.recipe_b == kScaleRow;
  const bool blocks = x.recipe_a == kScaleBlock1x128 &&
                      x.recipe_b == (of_k ? kScaleBlock1x128 : kScaleBlock128x128);
  if (!rows && !blocks) {
    fail({"input", x.op, "does not have these recipes",
          of_k ? "two of rows (1), or two of 1x128 (4), for groups that divide K"
               : "two of rows (1), or 1x128 (4) of mat_a with 128x128 (5) of mat_b",
          std::to_string(x.recipe_a) + " and " + std::to_string(x.recipe_b), ""});
  }
  check_offs(x.op, x.offs, x.mat_a, of_k ? -1 : x.mat_b.sizes[0]);
  const int64_t groups = x.offs.sizes[0];
  // Blocks of K may belong to several groups.
  const bool a_of_groups = of_k && rows, b_of_groups = !of_k || rows;
  if (a_of_groups) check_scales_of_groups(x.op, "scale_a", x.scale_a, 2, groups);
  if (b_of_groups) check_scales_of_groups(x.op, "scale_b", x.scale_b, rows ? 2 : 3, groups);
  const Shape one = check_scaled({x.op, x.mat_a, of_k ? x.mat_b : group_of(x.mat_b),
                                  a_of_groups ? group_of(x.scale_a) : x.scale_a,
                                  b_of_groups ? group_of(x.scale_b) : x.scale_b, x.recipe_a,
                                  x.recipe_b, std::nullopt, x.out_dtype, false});
  Shape out;
  const GroupedOptionViews& options = x.options;
  if (!of_k || options.any()) {
    if (options.bias) check_bias_dtype(x.op, *options.bias, x.mat_a);
    append_rows_and_columns(x.op, x.mat_a, x.mat_b, options, out);
    return out;
  }
  out.append(groups);
  out.append(one.sizes[0]);
  out.append(one.sizes[1]);
  return out;
}

void check_described_scaled_grouped(const nlohmann::json& call) {
  const nlohmann::json& named = call.at("tensors");
  DescribedTensors tensors;
  const auto get = [&](const char* name) { return tensors.view(named.at(name)); };
  ScalarType out_dtype = ScalarType::BFloat16;
  find_dtype(call.at("output_dtype").get<std::string>(), &out_dtype);
  check_scaled_grouped(
      {kScaledGroupedOp,
       get("mat_a"),
       get("mat_b"),
       get("scale_a"),
       get("scale_b"),
       get("offs"),
       call.at("recipe_a").get<int64_t>(),
       call.at("recipe_b").get<int64_t>(),
       out_dtype,
       {tensors.find(named, "bias"), tensors.find(named, "scale"), tensors.find(named, "rows"),
        tensors.find(named, "out_rows"), call.at("activation").get<std::string>()}});
}

Tensor scaled_grouped_product_cpu(const Tensor& mat_a, const Tensor& mat_b, const Tensor& scale_a,
                                  int64_t recipe_a, const Tensor& scale_b, int64_t recipe_b,
                                  const Tensor& offs, std::optional<ScalarType> out_dtype,
                                  bool use_fast_accum) {
  const TensorView a(mat_a);
  const ScalarType dtype = out_dtype.value_or(ScalarType::BFloat16);
  const Shape shape =
      check_scaled_grouped({kScaledGroupedOp, a, TensorView(mat_b), TensorView(scale_a),
                            TensorView(scale_b), TensorView(offs), recipe_a, recipe_b, dtype});
  const bool of_k = shape.dim == 3;
  const int64_t limit = a.sizes[of_k ? 1 : 0];
  check_ends(kScaledGroupedOp, offs, limit);
  const Tensor out = empty_near(a, shape.sizes, shape.dim, dtype);
  const Tensor x = detach(mat_a), y = detach(mat_b), y_scale = detach(scale_b);
  Tensor x_scale = detach(scale_a);
  if (!of_k) {
    const int64_t k_scales = is_block(recipe_a) ? ceil_div(a.sizes[1], kScaleBlock) : 1;
    x_scale = call_aten("aten::reshape", x_scale, std::vector<int64_t>{limit, k_scales});
  }
  const auto product = [&](int64_t group, int64_t start, int64_t size) {
    if (of_k && is_block(recipe_a)) {
      const BlocksOfK blocks(size == 0 ? 0 : start, size);
      return scaled_matmul_cpu(blocks.of(x, 1), blocks.of(y, 0), blocks.scales(x_scale), recipe_a,
                               blocks.scales(y_scale), recipe_b, std::nullopt, dtype,
                               use_fast_accum);
    }
    const Tensor b_scale = torch::stable::select(y_scale, 0, group);
    if (of_k) {
      return scaled_matmul_cpu(part(x, 1, start, size), part(y, 0, start, size),
                               torch::stable::select(x_scale, 0, group), recipe_a, b_scale,
                               recipe_b, std::nullopt, dtype, use_fast_accum);
    }
    return scaled_matmul_cpu(part(x, 0, start, size), torch::stable::select(y, 0, group),
                             part(x_scale, 0, start, size), recipe_a, b_scale, recipe_b,
                             std::nullopt, dtype, use_fast_accum);
  };
  int64_t start = 0, group = 0;
  for (const int64_t end : ends_on_host(offs)) {
    if (end < start || end > limit) {
      const int64_t first = of_k ? group : start;
      Tensor rest = part(out, 0, first, shape.sizes[0] - first);
      torch::stable::fill_(rest, NAN);
      break;
    }
    Tensor to = of_k ? torch::stable::select(out, 0, group) : part(out, 0, start, end - start);
    torch::stable::copy_(to, product(group, start, end - start));
    start = end;
    ++group;
  }
  return out;
}

GroupBlocks find_group_blocks_cpu(const Tensor& ends, int64_t rows) {
  const TensorView view(ends);
  const Tensor in_k = empty_near(view, view.sizes, 1, ScalarType::Int);
  auto* to = static_cast<int32_t*>(in_k.mutable_data_ptr());
  int64_t start = 0, blocks = 0;
  for (const int64_t end : ends_on_host(ends)) {
    blocks += ceil_div(end - start, kScaleBlock);
    *to++ = static_cast<int32_t>(blocks * kScaleBlock);
    start = end;
  }
  return {ends, view.sizes[0], rows, blocks, blocks * kScaleBlock, in_k};
}

Tensor group_blocks_product_cpu(const Quantized& a, const Quantized& b, const GroupBlocks& blocks,
                                ScalarType dtype) {
  const auto& [mat_a, scale_a] = a;
  const auto& [mat_b, scale_b] = b;
  return scaled_grouped_product_cpu(mat_a, matrices_transposed(mat_b), scale_a, kScaleBlock1x128,
                                    scale_b, kScaleBlock1x128, blocks.tables, dtype, false);
}

}  // namespace torch_cubin
