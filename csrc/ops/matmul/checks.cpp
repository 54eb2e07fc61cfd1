#include "ops/matmul/checks.h"

#include "cubin/error.h"

namespace torch_cubin {
namespace {

bool supported(ScalarType dtype) {
  return dtype == ScalarType::Half || dtype == ScalarType::BFloat16 || dtype == ScalarType::Float ||
         dtype == ScalarType::Double;
}

std::string text_of(const Shape& shape) {
  std::string text = "(";
  for (int64_t i = 0; i < shape.dim; ++i) {
    text += (i > 0 ? ", " : "") + std::to_string(shape.sizes[i]);
  }
  return text + (shape.dim == 1 ? ",)" : ")");
}

// dtype and device of `other` against those of `first`.
void check_pair(const char* op, const char* first_name, const TensorView& first,
                const char* other_name, const TensorView& other) {
  if (first.device_type != other.device_type || first.device_index != other.device_index) {
    fail({"input", std::string(op) + " argument '" + other_name + "'", "is on another device",
          first.device_text() + " like '" + first_name + "'", other.device_text(),
          "Move one of them with .to(device)."});
  }
  if (first.dtype != other.dtype) {
    fail({"input", std::string(op) + " argument '" + other_name + "'", "has another dtype",
          dtype_name(first.dtype) + " like '" + first_name + "'", dtype_name(other.dtype),
          "Convert one of them with .to(dtype)."});
  }
}

void check_dtype(const char* op, const char* name, const TensorView& tensor) {
  if (supported(tensor.dtype)) return;
  fail({"input", std::string(op) + " argument '" + name + "'", "has an unsupported dtype",
        "float16, bfloat16, float32 or float64", dtype_name(tensor.dtype),
        "Convert it with .to(dtype), or use torch." +
            (op == std::string("linear") ? "nn.functional.linear" : std::string(op)) + "."});
}

// Shape of a product of the op's arguments of these names.
Shape product_shape(const char* op, const char* self_name, const TensorView& self,
                    const char* other_name, const TensorView& other) {
  check_dtype(op, self_name, self);
  check_dtype(op, other_name, other);
  check_pair(op, self_name, self, other_name, other);
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
    out.sizes[out.dim++] = x == 1 ? y : x;
  }
  if (self.dim > 1) out.sizes[out.dim++] = self.sizes[self.dim - 2];
  if (other.dim > 1) out.sizes[out.dim++] = other.sizes[other.dim - 1];
  return out;
}

}  // namespace

Shape check_matmul(const TensorView& self, const TensorView& other) {
  return product_shape("matmul", "self", self, "other", other);
}

Shape check_addmm(const TensorView& input, const TensorView& mat1, const TensorView& mat2) {
  const Shape out = product_shape("addmm", "mat1", mat1, "mat2", mat2);
  check_pair("addmm", "mat1", mat1, "input", input);
  bool expands = input.dim <= out.dim;
  for (int64_t i = 1; expands && i <= input.dim; ++i) {
    const int64_t size = input.sizes[input.dim - i];
    expands = size == 1 || size == out.sizes[out.dim - i];
  }
  if (!expands) {
    fail({"input", "addmm argument 'input'", "does not broadcast to the product", text_of(out),
          input.shape_text(), ""});
  }
  return out;
}

Activation check_activation(const std::string& name) {
  constexpr const char* kNames[] = {"none", "relu", "gelu", "gelu_tanh", "silu"};
  for (int i = 0; i < 5; ++i) {
    if (name == kNames[i]) return static_cast<Activation>(i);
  }
  fail({"input", "linear argument 'activation'", "is not known",
        "'none', 'relu', 'gelu', 'gelu_tanh' or 'silu'", "'" + printable(name) + "'", ""});
}

Shape check_linear(const TensorView& input, const TensorView& weight, const TensorView* bias) {
  check_dtype("linear", "input", input);
  check_dtype("linear", "weight", weight);
  check_pair("linear", "input", input, "weight", weight);
  if (input.dim == 0 || weight.dim == 0 || weight.dim > 2) {
    fail({"input", "linear", "has arguments of a wrong rank",
          "input with at least 1 dimension and weight with 1 or 2",
          "shapes " + input.shape_text() + " and " + weight.shape_text(), ""});
  }
  const int64_t k = input.sizes[input.dim - 1];
  if (weight.sizes[weight.dim - 1] != k) {
    fail({"input", "linear",
          "shapes " + input.shape_text() + " and " + weight.shape_text() + " cannot be multiplied",
          "weight.size(-1) == " + std::to_string(k) + ", the last size of input",
          std::to_string(weight.sizes[weight.dim - 1]), ""});
  }
  Shape out;
  for (int64_t i = 0; i + 1 < input.dim; ++i) out.sizes[out.dim++] = input.sizes[i];
  if (weight.dim == 2) out.sizes[out.dim++] = weight.sizes[0];
  if (bias != nullptr) {
    check_pair("linear", "input", input, "bias", *bias);
    const int64_t n = weight.dim == 2 ? weight.sizes[0] : 1;
    const bool fits = bias->dim == 0 || (bias->dim == 1 && weight.dim == 2 &&
                                         (bias->sizes[0] == n || bias->sizes[0] == 1));
    if (!fits) {
      fail({"input", "linear argument 'bias'", "has a wrong shape",
            weight.dim == 2 ? "(" + std::to_string(n) + ",), (1,) or ()" : "()", bias->shape_text(),
            "Add a bias of another shape after the call."});
    }
  }
  return out;
}

}  // namespace torch_cubin
