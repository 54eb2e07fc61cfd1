// A matrix product in canonical form, to which every argument layout of matmul and linear is
// reduced.
//
// C[batch, m, n] = activation(alpha * sum_k A[batch, m, k] * B[batch, k, n] + bias[n])
//                  + beta * addend[batch, m, n]
// C is contiguous, and rounded once. Only integer work on sizes and strides; no tensor is copied.
#pragma once

#include <cstdint>

#include "kernels/matmul/activation_params.h"
#include "ops/matmul/checks.h"
#include "pytorch/tensor.h"

namespace torch_cubin {

// The type of the multiplications. float32 tensors have two.
enum Math { kMathFloat16, kMathBFloat16, kMathTF32, kMathFloat32, kMathFloat64, kMathCount };

// A fact about the output, which is M x M unless it is kNone.
enum class Symmetry : uint8_t {
  kNone,
  kProduct,  // a matrix times its transpose: kernels may compute the lower triangle alone
  kLower,    // the op is defined as the lower triangle and its mirror image
};

struct MatmulProblem {
  ScalarType input = ScalarType::Float;   // of A and B
  ScalarType output = ScalarType::Float;  // of C and the bias
  Math math = kMathFloat32;
  bool split_sums = false;       // see MatmulCase
  bool row_parts = false;        // see MatmulCase
  bool batch_invariant = false;  // see MatmulCase
  int k_parts = 1;               // see MatmulCase; 1 without batch_invariant
  Symmetry symmetry = Symmetry::kNone;
  int64_t m = 1, n = 1, k = 1;
  int64_t a_stride_m = 0, a_stride_k = 0;  // elements; 0 if the size is 1
  int64_t b_stride_k = 0, b_stride_n = 0;
  int batch_dims = 0;  // innermost first, none of size 1, merged wherever both operands allow it
  int64_t batch_size[kMaxDims];
  int64_t a_batch_stride[kMaxDims];  // 0 broadcasts
  int64_t b_batch_stride[kMaxDims];
  Activation activation = kActivationNone;
  double alpha = 1, beta = 1;
  // 0 broadcasts, or there is none.
  int64_t addend_stride_m = 0, addend_stride_n = 0;
  int64_t addend_batch_stride[kMaxDims];

  int64_t batch() const {
    int64_t product = 1;
    for (int i = 0; i < batch_dims; ++i) product *= batch_size[i];
    return product;
  }
};

// The number of parts of K of a batch-invariant product of 16-bit operands whose rows lie along K.
// It depends on the weights alone: N is the number of columns of one matrix of the batch.
int k_parts_of(int64_t n, int64_t k);

// Uses the math that PyTorch's settings allow. `out` is the result of check_matmul or check_linear
// for the same arguments; it has elements. `addend` (null: none) broadcasts to it.
MatmulProblem matmul_problem(const TensorView& self, const TensorView& other, const Shape& out,
                             const TensorView* addend = nullptr);
MatmulProblem linear_problem(const TensorView& input, const TensorView& weight);

}  // namespace torch_cubin
