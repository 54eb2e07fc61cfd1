#include "ops/matmul/checks.h"

#include "cubin/error.h"
#include "ops/common/argument_checks.h"

namespace torch_cubin {
namespace {

void check_operands(const char* op, const char* self_name, const TensorView& self,
                    const char* other_name, const TensorView& other) {
  const std::string instead =
      op == std::string("linear") ? "torch.nn.functional.linear" : std::string("torch.") + op;
  check_float_dtype(op, self_name, self, instead);
  check_float_dtype(op, other_name, other, instead);
  check_like(op, other_name, other, self_name, self);
}

// Shape of a product of the op's arguments with these names.
Shape product_shape(const char* op, const char* self_name, const TensorView& self,
                    const char* other_name, const TensorView& other) {
  check_operands(op, self_name, self, other_name, other);
  if (self.dim == 0 || other.dim == 0) {
    fail({"input", op, "takes no 0-dimensional tensor", "at least 1 dimension each",
          "shapes " + self.shape_text() + " and " + other.shape_text(),
          "Multiply with * instead."});
  }
  const int64_t k = self.sizes[self.dim - 1];
  const int64_t k_dim = other.dim == 1 ? 0 : other.dim - 2;
  if (other.sizes[k_dim] != k) {
    fail({"input", op,
          "shapes " + self.shape_text() + " and " + other.shape_text() + " cannot be multiplied",
          std::string(other_name) + ".size(" + (other.dim == 1 ? "0" : "-2") +
              ") == " + std::to_string(k) + ", the last size of " + self_name,
          std::to_string(other.sizes[k_dim]), ""});
  }

  Shape out;
  const int64_t self_batch = self.dim > 2 ? self.dim - 2 : 0;
  const int64_t other_batch = other.dim > 2 ? other.dim - 2 : 0;
  const int64_t batch = self_batch > other_batch ? self_batch : other_batch;
  for (int64_t i = 0; i < batch; ++i) {
    const int64_t x = i < batch - self_batch ? 1 : self.sizes[i - (batch - self_batch)];
    const int64_t y = i < batch - other_batch ? 1 : other.sizes[i - (batch - other_batch)];
    if (x != y && x != 1 && y != 1) {
      fail({"input", op,
            "batch dimensions of shapes " + self.shape_text() + " and " + other.shape_text() +
                " do not broadcast",
            "equal sizes or 1 at output dimension " + std::to_string(i),
            std::to_string(x) + " and " + std::to_string(y), ""});
    }
    out.append(x == 1 ? y : x);
  }
  if (self.dim > 1) out.append(self.sizes[self.dim - 2]);
  if (other.dim > 1) out.append(other.sizes[other.dim - 1]);
  return out;
}

// `what` names the argument that gives the dtype of a product's output.
void check_out_dtype(const std::string& what, ScalarType out_dtype, const TensorView& operand) {
  const bool widens = out_dtype == ScalarType::Float && element_size(operand.dtype) == 2;
  if (out_dtype == operand.dtype || widens) return;
  const std::string own = dtype_name(operand.dtype);
  fail({"input", what, "is no output's dtype of this product",
        element_size(operand.dtype) == 2 ? own + " or float32" : own, dtype_name(out_dtype), ""});
}

// An addend has the output's dtype or the operand's, and broadcasts to the output.
void check_addend(const char* op, const char* name, const TensorView& addend,
                  const char* operand_name, const TensorView& operand, ScalarType out_dtype,
                  const Shape& out) {
  if (addend.dtype == out_dtype) {
    check_device(op, name, addend, operand_name, operand);
  } else {
    check_like(op, name, addend, operand_name, operand);
  }
  bool expands = addend.dim <= out.dim;
  for (int64_t i = 1; expands && i <= addend.dim; ++i) {
    const int64_t size = addend.sizes[addend.dim - i];
    expands = size == 1 || size == out.sizes[out.dim - i];
  }
  if (!expands) {
    fail({"input", argument_text(op, name), "does not broadcast to the product", out.text(),
          addend.shape_text(), ""});
  }
}

// Shape of input @ weight.t() of an op with arguments of these names; the weight is a matrix, or,
// as in F.linear, a vector.
Shape layer_shape(const char* op, const TensorView& input, const char* weight_name,
                  const TensorView& weight, const char* bias_name,
                  const std::optional<TensorView>& bias, bool takes_vector) {
  check_operands(op, "input", input, weight_name, weight);
  if (input.dim == 0 || weight.dim > 2 || weight.dim < (takes_vector ? 1 : 2)) {
    fail({"input", op, "has arguments of a wrong rank",
          std::string("input with at least 1 dimension and ") + weight_name +
              (takes_vector ? " with 1 or 2" : " with 2"),
          "shapes " + input.shape_text() + " and " + weight.shape_text(), ""});
  }
  const int64_t k = input.sizes[input.dim - 1];
  if (weight.sizes[weight.dim - 1] != k) {
    fail({"input", op,
          "shapes " + input.shape_text() + " and " + weight.shape_text() + " cannot be multiplied",
          std::string(weight_name) + ".size(-1) == " + std::to_string(k) +
              ", the last size of input",
          std::to_string(weight.sizes[weight.dim - 1]), ""});
  }
  Shape out;
  for (int64_t i = 0; i + 1 < input.dim; ++i) out.append(input.sizes[i]);
  if (weight.dim == 2) out.append(weight.sizes[0]);
  if (bias) {
    check_like(op, bias_name, *bias, "input", input);
    const int64_t n = weight.dim == 2 ? weight.sizes[0] : 1;
    const bool fits = bias->dim == 0 || (bias->dim == 1 && weight.dim == 2 &&
                                         (bias->sizes[0] == n || bias->sizes[0] == 1));
    if (!fits) {
      fail({"input", argument_text(op, bias_name), "has a wrong shape",
            weight.dim == 2 ? "(" + std::to_string(n) + ",), (1,) or ()" : "()", bias->shape_text(),
            "Add a bias of another shape after the call."});
    }
  }
  return out;
}

}  // namespace

Shape check_matmul(const TensorView& self, const TensorView& other) {
  return product_shape("matmul", "self", self, "other", other);
}

Shape check_addmm(const TensorView& input, const TensorView& mat1, const TensorView& mat2,
                  ScalarType out_dtype) {
  const Shape out = product_shape("addmm", "mat1", mat1, "mat2", mat2);
  check_out_dtype("addmm argument 'out_dtype'", out_dtype, mat1);
  check_addend("addmm", "input", input, "mat1", mat1, out_dtype, out);
  return out;
}

Shape check_symmetric_product(const std::string& op, const TensorView& operand,
                              const std::optional<TensorView>& c, ScalarType out_dtype) {
  const bool squares = op == "symm_square";
  const char* const name = squares ? "a" : "x";
  check_float_dtype(op.c_str(), name, operand, "torch.matmul");
  if (operand.dim < 2) {
    fail({"input", argument_text(op.c_str(), name), "is no matrix", "at least 2 dimensions",
          "shape " + operand.shape_text(), ""});
  }
  const int64_t n = operand.sizes[operand.dim - 2];
  if (squares && operand.sizes[operand.dim - 1] != n) {
    fail({"input", argument_text(op.c_str(), name), "is not square", "as many columns as rows",
          "shape " + operand.shape_text(), "Call syrk for a matrix times its transpose."});
  }
  check_out_dtype(op + " argument 'out_dtype'", out_dtype, operand);
  Shape out;
  for (int64_t i = 0; i + 1 < operand.dim; ++i) out.append(operand.sizes[i]);
  out.append(n);
  if (c) check_addend(op.c_str(), "c", *c, name, operand, out_dtype, out);
  return out;
}

Shape check_addmm_into(const TensorView& out, const TensorView& mat1, const TensorView& mat2) {
  constexpr const char* kOp = "addmm_into";
  const std::string argument = argument_text(kOp, "out");
  const Shape shape = product_shape(kOp, "mat1", mat1, "mat2", mat2);
  check_out_dtype(argument, out.dtype, mat1);
  check_device(kOp, "out", out, "mat1", mat1);
  if (!shape.is_of(out)) {
    fail({"input", argument, "has not the product's shape", shape.text(), out.shape_text(), ""});
  }
  for (int64_t i = 0; i < out.dim; ++i) {
    if (out.sizes[i] <= 1 || out.strides[i] != 0) continue;
    fail({"input", argument, "shares memory between its elements, and is written to",
          "no expanded dimension", tuple_text(out.strides, out.dim) + " as strides", ""});
  }
  check_apart(kOp, "out", out, "mat1", mat1);
  check_apart(kOp, "out", out, "mat2", mat2);
  return shape;
}

Shape check_weight_gradient(const TensorView& grad, const TensorView& input) {
  constexpr const char* kOp = "_weight_and_bias_gradient";
  check_float_dtype(kOp, "grad", grad, "torch.matmul");
  check_like(kOp, "input", input, "grad", grad);
  if (grad.dim != 2 || input.dim != 2 || grad.sizes[0] != input.sizes[0]) {
    fail({"input", kOp, "has arguments of wrong shapes", "(rows, outputs) and (rows, inputs)",
          grad.shape_text() + " and " + input.shape_text(), ""});
  }
  Shape out;
  out.append(grad.sizes[1]);
  out.append(input.sizes[1]);
  return out;
}

Activation check_activation(const std::string& name, const char* op) {
  constexpr const char* kNames[] = {"none", "relu", "gelu", "gelu_tanh", "silu"};
  for (int i = 0; i < 5; ++i) {
    if (name == kNames[i]) return static_cast<Activation>(i);
  }
  fail({"input", argument_text(op, "activation"), "is not known",
        "'none', 'relu', 'gelu', 'gelu_tanh' or 'silu'", "'" + printable(name) + "'", ""});
}

Shape check_linear(const TensorView& input, const TensorView& weight,
                   const std::optional<TensorView>& bias) {
  return layer_shape("linear", input, "weight", weight, "bias", bias, true);
}

Shape check_linear_glu(const TensorView& input, const TensorView& gate, const TensorView& up) {
  constexpr const char* kOp = "_linear_glu";
  const Shape out = layer_shape(kOp, input, "gate", gate, "", {}, false);
  const Shape other = layer_shape(kOp, input, "up", up, "", {}, false);
  if (out.sizes[out.dim - 1] != other.sizes[other.dim - 1]) {
    fail({"input", argument_text(kOp, "up"), "has another shape than 'gate'", gate.shape_text(),
          up.shape_text(), ""});
  }
  return out;
}

Shape check_linears(const TensorView& input, const TensorView& weight,
                    const std::optional<TensorView>& bias, int64_t index) {
  const std::string number = "[" + std::to_string(index) + "]";
  const std::string weight_name = "weights" + number, bias_name = "biases" + number;
  return layer_shape("_linears", input, weight_name.c_str(), weight, bias_name.c_str(), bias,
                     false);
}

void check_linears_counts(int64_t weights, int64_t biases) {
  if (weights > 0 && (biases == 0 || biases == weights)) return;
  fail({"input", "_linears", "has wrong numbers of weights and biases",
        "at least one weight, and as many biases or none",
        std::to_string(weights) + " and " + std::to_string(biases), ""});
}

Shape check_linear_activation_backward(const TensorView& grad, const TensorView& weight,
                                       const TensorView& aux) {
  constexpr const char* kOp = "_linear_activation_backward";
  if (weight.dim != 2) {
    fail({"input", argument_text(kOp, "weight"), "has a wrong rank", "2 dimensions",
          weight.shape_text(), ""});
  }
  const Shape out = product_shape(kOp, "grad", grad, "weight", weight);
  check_like(kOp, "aux", aux, "grad", grad);
  if (!out.is_of(aux)) {
    fail({"input", argument_text(kOp, "aux"), "has not the product's shape", out.text(),
          aux.shape_text(), ""});
  }
  return out;
}

}  // namespace torch_cubin
