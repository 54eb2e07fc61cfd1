// Quantisation to 8-bit floats with the scales of scaled_matmul's recipes
// (csrc/kernels/quantize/quantize_params.h defines numbers; ops/scaled/scaled.h the recipes).
//
// x is a matrix (rows, K); `transpose` quantises its transpose, whose rows are x's columns. With
// gate "silu" the operand is silu(x[:, :K]) * x[:, K:], in float32, of an x with 2K columns.
// Results, for an operand of (rows, K):
//   data (rows, K), contiguous
//   scales: kScaleRow (rows, 1); kScaleBlock1x128 (rows, ceil(K / 128)), contiguous along rows;
//     kScaleBlock128x128 (ceil(K / 128), ceil(rows / 128)), contiguous along K
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <tuple>

#include "ops/common/shape.h"
#include "ops/scaled/group_blocks.h"
#include "ops/scaled/scaled.h"
#include "pytorch/tensor.h"

namespace torch_cubin {

constexpr const char* kQuantizeOp = "quantize";

struct QuantizeCall {
  int64_t recipe;
  bool transpose, power_of_two, gated;
  ScalarType dtype;
  int64_t rows, k;  // of the operand
  Shape scale;
  int64_t scale_strides[2];

  // Sets the scales' layout for the rows, and as many blocks of K as `k` has or is given.
  void lay_out_scales(std::optional<int64_t> blocks = {});

  int64_t scale_at(int64_t row, int64_t column) const {
    switch (recipe) {
      case kScaleRow:
        return row;
      case kScaleBlock1x128:
        return row * scale_strides[0] + column / kScaleBlock * scale_strides[1];
      default:
        return column / kScaleBlock * scale_strides[0] + row / kScaleBlock * scale_strides[1];
    }
  }
};

// Throws [input] for arguments that are wrong on every device.
QuantizeCall check_quantize(const TensorView& x, int64_t recipe, bool transpose, bool power_of_two,
                            const std::string& gate, std::optional<ScalarType> dtype);

// The same for a tensor that Python describes: {"x": tensor, "recipe": 4, "transpose": false,
// "power_of_two": false, "gate": "none", "dtype": "float8_e4m3fn"}.
void check_described_quantize(const nlohmann::json& call);

Quantized quantize_cpu(const Tensor& x, int64_t recipe, bool transpose, bool power_of_two,
                       const std::string& gate, std::optional<ScalarType> dtype);
decltype(quantize_cpu) quantize_cuda;

// ---- experts' rows, to e4m3 with scales of 1x128 ------------------------------------------------
//
// Row i is x[numbers[i]], zeros for numbers that x does not have; without numbers x[i].

// The rows, (rows, columns).
Quantized quantize_rows_cpu(const Tensor& x, const std::optional<Tensor>& numbers);
Quantized quantize_rows_cuda(const Tensor& x, const std::optional<Tensor>& numbers);

// Their transpose, (columns, blocks.k), whose blocks belong to one group each. Rows of no group
// have no part in it; nor has what follows the last group, which is not written.
Quantized quantize_groups_cpu(const Tensor& x, const std::optional<Tensor>& numbers,
                              const GroupBlocks& blocks);
decltype(quantize_groups_cpu) quantize_groups_cuda;

// Both, for which x is read once. Rows of no group are not written.
struct QuantizedBoth {
  Quantized rows, columns;
};
QuantizedBoth quantize_both_cuda(const Tensor& x, const std::optional<Tensor>& numbers,
                                 const GroupBlocks& blocks);

// x and its transpose, by 128x128, for which x is read once.
QuantizedBoth quantize_weight_cpu(const Tensor& x);
QuantizedBoth quantize_weight_cuda(const Tensor& x);

}  // namespace torch_cubin
