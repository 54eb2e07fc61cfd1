// Layers of experts whose products are of 8-bit floats, for both devices: of weights that are
// (torch_cubin.moe with scales), and of those that are quantised in the call (its recipe "block").
//
// `ends` are the experts' ends, and rows are in their order; those of no expert come last, and are
// not written.
#pragma once

#include <optional>
#include <vector>

#include "ops/quantize/quantize.h"
#include "ops/scaled/group_blocks.h"
#include "ops/scaled/scaled.h"
#include "pytorch/tensor.h"

namespace torch_cubin {

// The ops on one device.
struct Float8Steps {
  decltype(&quantize_cpu) quantize;
  decltype(&scaled_gated_matmul_cpu) gated;
  decltype(&scaled_grouped_product_cpu) product;
  decltype(&quantize_rows_cpu) rows;
  decltype(&group_blocks_product_cpu) weight_gradient;
  decltype(&quantize_weight_cpu) weight;
};

constexpr Float8Steps kFloat8OnHost{
    quantize_cpu,      scaled_gated_matmul_cpu,  scaled_grouped_product_cpu,
    quantize_rows_cpu, group_blocks_product_cpu, quantize_weight_cpu};
constexpr Float8Steps kFloat8OnCuda{
    quantize_cuda,      scaled_gated_matmul_cuda,  scaled_grouped_product_cuda,
    quantize_rows_cuda, group_blocks_product_cuda, quantize_weight_cuda};

struct Float8Weight {
  Tensor data;   // (experts, outputs, inputs)
  Tensor scale;  // (experts, ceil(outputs / 128), ceil(inputs / 128))
};

// The first product of rows, in a dtype, with its gate and quantised.
Quantized float8_gated_rows(const Float8Steps& steps, const Quantized& rows,
                            const Float8Weight& first, const Tensor& ends, ScalarType dtype);

// The product of rows that are quantised, in a dtype.
Tensor float8_product(const Float8Steps& steps, const Quantized& rows, const Float8Weight& weight,
                      const Tensor& ends, ScalarType dtype);

// ---- of weights of x's dtype --------------------------------------------------------------------

// A weight, and its matrices' transposes: (experts, inputs, outputs), which derivatives need.
struct Float8Copies {
  Float8Weight own, transposed;
};
Float8Copies float8_copies(const Float8Steps& steps, const Tensor& weight);

// Those copies that a call need not make: weights in the forward, their transposes in the backward.
struct Float8Given {
  // `copies`: none, or data and scale of w13's and then of w2's, which `transposed` are transposes.
  Float8Given(const std::optional<std::vector<Tensor>>& copies, bool transposed,
              const TensorView& w13, const TensorView& w2);

  std::optional<Float8Weight> w13, w2;
};

// The second product's rows, in the weights' dtype. `before`, where given, gets the first one's;
// bits are the same.
Tensor float8_results(const Float8Steps& steps, const Quantized& rows, const Tensor& w13,
                      const Tensor& w2, const Float8Given& given, const Tensor& ends,
                      Tensor* before);

// grad @ weight, of each row by its expert's. `given`: the transposes' copy.
Tensor float8_input_gradient(const Float8Steps& steps, const Quantized& grad, const Tensor& weight,
                             const std::optional<Float8Weight>& given, const Tensor& ends);

// Each expert's grad.t() @ input of its rows, in the weight's dtype and layout, of both's columns.
Tensor float8_weight_gradient(const Float8Steps& steps, const Quantized& grad,
                              const Quantized& input, const TensorView& weight,
                              const GroupBlocks& blocks);

}  // namespace torch_cubin
