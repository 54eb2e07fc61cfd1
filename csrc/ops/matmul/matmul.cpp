// matmul and linear on CUDA: check -> plan -> launch.
#include "ops/matmul/matmul.h"

#include <algorithm>

#include "cubin/error.h"
#include "ops/common/stable_ops.h"
#include "ops/matmul/checks.h"
#include "ops/matmul/elementwise.h"
#include "ops/matmul/mirror.h"
#include "ops/matmul/plan.h"
#include "ops/matmul/problem.h"
#include "ops/matmul/sm90_map.h"
#include "ops/matmul/sum.h"
#include "pytorch/autograd_state.h"
#include "pytorch/contiguous.h"
#include "runtime/device.h"

namespace torch_cubin {
namespace {

void run(const MatmulProblem& p, const MatmulOperands& operands, const Device& device);

// Runs parts of the outermost batch dim one after the other.
void run_in_parts(const MatmulProblem& p, const MatmulOperands& operands, const Device& device,
                  int64_t part) {
  const int last = p.batch_dims - 1;
  const int64_t bytes = element_size(p.input);
  const int64_t c_stride = p.batch() / p.batch_size[last] * p.m * p.n;
  for (int64_t begin = 0; begin < p.batch_size[last]; begin += part) {
    MatmulProblem inner = p;
    inner.batch_size[last] = std::min(part, p.batch_size[last] - begin);
    if (inner.batch_size[last] == 1) --inner.batch_dims;
    MatmulOperands moved = operands;
    moved.a += begin * p.a_batch_stride[last] * bytes;
    moved.b += begin * p.b_batch_stride[last] * bytes;
    moved.c += begin * c_stride * element_size(p.output);
    if (moved.addend != nullptr) {
      moved.addend += begin * p.addend_batch_stride[last] * element_size(p.output);
    }
    run(inner, moved, device);
  }
}

void run(const MatmulProblem& p, const MatmulOperands& operands, const Device& device) {
  // Unaligned operands must take the copy path (pad.cpp), which supports one batch dim, for every
  // batch size: otherwise the batch size would select another family of kernels for
  // batch-invariant TF32 products. So would more batch dims than a tensor map has where K is in
  // parts.
  const int64_t most_dims = p.math == kMathTF32 ? 1 : p.k_parts > 1 ? kSm90BatchDims : p.batch_dims;
  const bool one_by_one = p.batch_invariant && p.batch_dims > most_dims;
  if (p.batch_dims > kMaxPlannedBatchDims || one_by_one) {
    return run_in_parts(p, operands, device, 1);
  }
  // A copy: a launch may plan other products.
  const MatmulPlan plan = plan_matmul(device, matmul_case(p, operands));
  if (!plan.too_large) {
    launch_plan(plan, p, operands, device);
    return;
  }
  if (p.batch_dims == 0) {
    fail({"input", "this product", "is too large for one launch", "fewer tiles of output",
          std::to_string(p.m) + " x " + std::to_string(p.n), "Multiply it in parts."});
  }
  run_in_parts(p, operands, device, (p.batch_size[p.batch_dims - 1] + 1) / 2);
}

Tensor empty_output(const Shape& shape, const TensorView& like) {
  return empty_cuda(shape.sizes, shape.dim, like.dtype, like.device_index);
}

// K = 0: empty sums, plus the bias. There is no product to compute, only memory to fill.
Tensor empty_sums(Tensor out, const std::optional<Tensor>& bias) {
  if (bias) return torch::stable::copy_(out, *bias);
  return torch::stable::zero_(out);
}

// The element stride of a vector that is added to every row; 0 if it is one number.
int64_t row_stride(const TensorView& bias) {
  return bias.dim > 0 && bias.sizes[bias.dim - 1] != 1 ? bias.strides[bias.dim - 1] : 0;
}

MatmulOperands operands_of(const TensorView& a, const TensorView& b,
                           const std::optional<TensorView>& bias, Tensor& out) {
  MatmulOperands operands;
  operands.a = static_cast<const char*>(a.data());
  operands.b = static_cast<const char*>(b.data());
  operands.c = static_cast<char*>(out.mutable_data_ptr());
  if (bias) {
    operands.bias = static_cast<const char*>(bias->data());
    operands.bias_stride = row_stride(*bias);
  }
  return operands;
}

// `out` is contiguous; `addend`, which may be `out`, is the one that the problem was made with.
void run_matmul(MatmulProblem problem, Tensor& out, const TensorView& a, const TensorView& b,
                const std::optional<TensorView>& bias, const TensorView* addend = nullptr) {
  const Device& gpu = device(a.device_index);
  MatmulOperands operands = operands_of(a, b, bias, out);
  if (addend != nullptr) operands.addend = static_cast<const char*>(addend->data());
  const bool only_product = problem.symmetry == Symmetry::kNone && !bias && addend == nullptr &&
                            problem.activation == kActivationNone;
  if (only_product && is_own_transpose(problem, operands)) {
    problem.symmetry = Symmetry::kProduct;
  }
  run(problem, operands, gpu);
}

// Whether it is added to every row of every batch.
bool is_one_row(const TensorView& addend) {
  for (int64_t i = 0; i + 1 < addend.dim; ++i) {
    if (addend.sizes[i] != 1 && addend.strides[i] != 0) return false;
  }
  return true;
}

// To `to` if it is given: contiguous, of the result's shape and dtype.
Tensor linear_with(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                   Activation activation, const Tensor* to = nullptr) {
  const TensorView a(input);
  const TensorView b(weight);
  const std::optional<TensorView> bias_view = view_of(bias);
  const Shape shape = check_linear(a, b, bias_view);
  Tensor out = to != nullptr ? *to : empty_output(shape, a);
  if (shape.numel() == 0) return out;
  if (a.sizes[a.dim - 1] == 0) {
    const Tensor activated = apply_activation(empty_sums(out, bias), activation);
    return to != nullptr ? torch::stable::copy_(out, activated) : activated;
  }
  MatmulProblem problem = linear_problem(a, b);
  problem.activation = activation;
  run_matmul(problem, out, a, b, bias_view);
  return out;
}

// The lower triangle of the last two dims, which are equal, to the upper one. `out` is contiguous.
void mirror(const Tensor& out, const Shape& shape) {
  const TensorView view(out);
  const int64_t n = shape.sizes[shape.dim - 1];
  mirror_lower(static_cast<char*>(out.mutable_data_ptr()), n, shape.numel() / (n * n),
               element_size(view.dtype), device(view.device_index));
}

// out = beta * addend + alpha * (a @ b), all with elements, and K > 0. `out` is contiguous and has
// the addend's dtype; it may be the addend, and is added to in one pass where it is of a wider type
// than the operands, and alpha and beta are 1.
void run_addmm(Tensor& out, const Shape& shape, const TensorView& addend, const TensorView& a,
               const TensorView& b, double beta, double alpha,
               Symmetry symmetry = Symmetry::kNone) {
  const bool adds = beta != 0;
  MatmulProblem p = matmul_problem(a, b, shape, adds ? &addend : nullptr);
  // Batches of an expanded tensor may have become rows: the problem is then not one of M x M.
  const bool square = symmetry == Symmetry::kLower;
  const int64_t n = square ? shape.sizes[shape.dim - 1] : 0;
  const bool folded = square && (p.m != n || p.n != n);
  p.symmetry = folded ? Symmetry::kNone : symmetry;
  p.output = TensorView(out).dtype;
  p.alpha = alpha;
  if (!adds) {
    run_matmul(p, out, a, b, {});
  } else if (alpha == 1 && beta == 1 && b.dim > 1 && is_one_row(addend) && p.output == p.input) {
    // Made with the addend: without it, batches could become columns, which a row of n does not
    // have.
    run_matmul(p, out, a, b, addend);
  } else {
    p.beta = beta;
    run_matmul(p, out, a, b, {}, &addend);
  }
  if (folded) mirror(out, shape);
}

}  // namespace

Tensor matmul_cuda(const Tensor& self, const Tensor& other) {
  const TensorView a(self);
  const TensorView b(other);
  const Shape shape = check_matmul(a, b);
  Tensor out = empty_output(shape, a);
  if (shape.numel() == 0) return out;
  if (a.sizes[a.dim - 1] == 0) return empty_sums(out, {});
  run_matmul(matmul_problem(a, b, shape), out, a, b, {});
  return out;
}

Tensor linear_cuda(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias) {
  return linear_with(input, weight, bias, kActivationNone);
}

Tensor linear_activation_cuda(const Tensor& input, const Tensor& weight,
                              const std::optional<Tensor>& bias, const std::string& activation) {
  return linear_with(input, weight, bias, check_activation(activation));
}

std::tuple<Tensor, Tensor> linear_both_cuda(const Tensor& input, const Tensor& weight,
                                            const std::optional<Tensor>& bias,
                                            const std::string& activation) {
  const TensorView a(input), b(weight);
  const std::optional<TensorView> bias_view = view_of(bias);
  const Shape shape = check_linear(a, b, bias_view);
  MatmulProblem p = linear_problem(a, b);
  // Products of more dims may run in parts.
  if (shape.numel() > 0 && p.k > 0 && p.batch_dims == 0) {
    const Device& gpu = device(a.device_index);
    Tensor activated = empty_output(shape, a), sums = empty_output(shape, a);
    MatmulOperands operands = operands_of(a, b, bias_view, activated);
    // Copies: planning and launches may plan other products.
    const MatmulPlan plain = plan_matmul(gpu, matmul_case(p, operands));
    p.activation = check_activation(activation);
    const MatmulPlan one = plan_matmul(gpu, matmul_case(p, operands));
    operands.aux = static_cast<char*>(sums.mutable_data_ptr());
    const MatmulPlan both = plan_matmul(gpu, matmul_case(p, operands));
    const bool same_bits = both.sum_order == one.sum_order && both.sum_order == plain.sum_order;
    if (both.kernels != nullptr && same_bits &&
        both.microseconds <= one.microseconds + plain.microseconds) {
      launch_plan(both, p, operands, gpu);
      return {activated, sums};
    }
  }
  return {linear_activation_cuda(input, weight, bias, activation),
          linear_cuda(input, weight, bias)};
}

Tensor sum_cuda(const Tensor& input, const TensorView& a, const TensorView& b, const Shape& shape,
                ScalarType out_dtype, double beta, double alpha, Symmetry symmetry) {
  Tensor out = empty_cuda(shape.sizes, shape.dim, out_dtype, a.device_index);
  if (shape.numel() == 0) return out;
  if (a.sizes[a.dim - 1] == 0 || alpha == 0) {
    out = scaled_addend(empty_sums(out, {}), input, beta);
    if (symmetry == Symmetry::kLower) mirror(out, shape);
    return out;
  }
  const TensorView addend(input);
  // Kernels add to a wider C itself, without a factor; a second kernel does the rest.
  const bool in_place = out_dtype != a.dtype && alpha == 1 && beta == 1;
  if (beta != 0 && (in_place || addend.dtype != out_dtype)) {
    torch::stable::copy_(out, input);
    run_addmm(out, shape, TensorView(out), a, b, beta, alpha, symmetry);
  } else {
    run_addmm(out, shape, addend, a, b, beta, alpha, symmetry);
  }
  return out;
}

Tensor addmm_dtype_cuda(const Tensor& input, const Tensor& mat1, const Tensor& mat2,
                        ScalarType out_dtype, double beta, double alpha) {
  const TensorView a(mat1), b(mat2);
  const Shape shape = check_addmm(TensorView(input), a, b, out_dtype);
  return sum_cuda(input, a, b, shape, out_dtype, beta, alpha, Symmetry::kNone);
}

Tensor addmm_cuda(const Tensor& input, const Tensor& mat1, const Tensor& mat2, double beta,
                  double alpha) {
  const ScalarType dtype = TensorView(mat1).dtype;
  return addmm_dtype_cuda(input, mat1, mat2, dtype, beta, alpha);
}

void addmm_into_cuda(const Tensor& out, const Tensor& mat1, const Tensor& mat2, double beta,
                     double alpha) {
  const TensorView c(out), a(mat1), b(mat2);
  const Shape shape = check_addmm_into(c, a, b);
  bump_version(out.get());
  if (shape.numel() == 0) return;
  Tensor to = out;
  if (a.sizes[a.dim - 1] == 0 || alpha == 0) {
    if (beta == 0) {
      torch::stable::zero_(to);
    } else if (beta != 1) {
      torch::stable::copy_(to, scaled(out, beta));
    }
  } else if (!is_contiguous(c.sizes, c.strides, c.dim)) {
    // Kernels write contiguous outputs.
    torch::stable::copy_(to, addmm_dtype_cuda(out, mat1, mat2, c.dtype, beta, alpha));
  } else {
    run_addmm(to, shape, c, a, b, beta, alpha);
  }
}

void matmul_out_cuda(const Tensor& self, const Tensor& other, const Tensor& out) {
  const TensorView a(self), b(other);
  const Shape shape = check_matmul(a, b);
  Tensor to = out;
  if (shape.numel() == 0) return;
  if (a.sizes[a.dim - 1] == 0) {
    empty_sums(to, {});
  } else {
    run_matmul(matmul_problem(a, b, shape), to, a, b, {});
  }
}

void linear_activation_out_cuda(const Tensor& input, const Tensor& weight,
                                const std::optional<Tensor>& bias, const std::string& activation,
                                const Tensor& out) {
  linear_with(input, weight, bias, check_activation(activation), &out);
}

void addmm_out_cuda(const Tensor& input, const Tensor& mat1, const Tensor& mat2, double beta,
                    double alpha, const Tensor& out) {
  const TensorView addend(input), a(mat1), b(mat2);
  const Shape shape = check_addmm(addend, a, b, a.dtype);
  Tensor to = out;
  if (shape.numel() == 0) return;
  if (a.sizes[a.dim - 1] == 0 || alpha == 0) {
    torch::stable::copy_(to, scaled_addend(empty_sums(empty_output(shape, a), {}), input, beta));
  } else {
    run_addmm(to, shape, addend, a, b, beta, alpha);
  }
}

std::tuple<Tensor, Tensor> weight_and_bias_gradient_cuda(const Tensor& grad, const Tensor& input) {
  const TensorView g(grad), x(input);
  const Shape shape = check_weight_gradient(g, x);
  Tensor weight = empty_cuda(shape.sizes, 2, g.dtype, g.device_index);
  if (shape.numel() == 0 || g.sizes[0] == 0) {
    return {torch::stable::zero_(weight), torch::stable::sum(grad, {{0}}, false)};
  }
  const int64_t sizes[] = {g.sizes[1], g.sizes[0]}, strides[] = {g.strides[1], g.strides[0]};
  TensorView transposed = g;
  transposed.sizes = sizes;
  transposed.strides = strides;
  const MatmulProblem p = matmul_problem(transposed, x, shape);
  Tensor bias = empty_cuda(sizes, 1, g.dtype, g.device_index);
  MatmulOperands operands;
  operands.a = static_cast<const char*>(g.data());
  operands.b = static_cast<const char*>(x.data());
  operands.c = static_cast<char*>(weight.mutable_data_ptr());
  operands.row_sums = static_cast<char*>(bias.mutable_data_ptr());
  const Device& gpu = device(g.device_index);
  const MatmulPlan both = plan_matmul(gpu, matmul_case(p, operands));
  if (both.kernels != nullptr) {
    both.kernels->launch(both, p, operands);
    return {weight, bias};
  }
  operands.row_sums = nullptr;
  run(p, operands, gpu);
  return {weight, torch::stable::sum(grad, {{0}}, false)};
}

}  // namespace torch_cubin
