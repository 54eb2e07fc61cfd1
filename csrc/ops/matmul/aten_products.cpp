#include "ops/matmul/aten_products.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "ops/common/argument_checks.h"
#include "ops/common/serving.h"
#include "ops/common/stable_ops.h"
#include "ops/matmul/matmul.h"
#include "pytorch/aten_kernels.h"
#include "pytorch/contiguous.h"
#include "pytorch/overlap.h"
#include "pytorch/torch_error.h"

namespace torch_cubin {
namespace {

constexpr const char* kDtypes = "different dtypes";
constexpr const char* kDevices = "tensors on different devices";
constexpr const char* kShapes = "shapes that it does not take";
constexpr const char* kOutLayout = "out= of another shape, or not contiguous";
constexpr const char* kOutShared = "out= that shares memory with an operand";
constexpr const char* kEmptyMatrix = "an empty matrix, and an addend of another shape";
constexpr const char* kFactors = "beta or alpha that no double holds";

// The ranks of an operator's operands.
struct Ranks {
  int64_t a, b;
};
constexpr Ranks kMatrices{2, 2}, kBatches{3, 3}, kVector{2, 1};

bool have_ranks(Ranks ranks, const TensorView& a, const TensorView& b) {
  return a.dim == ranks.a && b.dim == ranks.b;
}

bool can_multiply(Ranks ranks, const TensorView& a, const TensorView& b) {
  if (!have_ranks(ranks, a, b)) return false;
  if (a.dim == 3 && a.sizes[0] != b.sizes[0]) return false;
  return a.sizes[a.dim - 1] == b.sizes[b.dim == 1 ? 0 : b.dim - 2];
}

// The shape of a product whose operands have these ranks.
struct ProductShape {
  ProductShape(const TensorView& a, const TensorView& b) : dim(a.dim + b.dim - 2 - (a.dim == 3)) {
    std::copy(a.sizes, a.sizes + a.dim - 1, sizes);
    if (b.dim > 1) sizes[dim - 1] = b.sizes[b.dim - 1];
  }
  int64_t dim;
  int64_t sizes[3];
};

const char* why_not_beside(const TensorView& a, const TensorView& b) {
  if (a.dtype != b.dtype) return kDtypes;
  return same_device(a, b) ? nullptr : kDevices;
}

const char* why_not_product(const AtenOp& op, Policy policy, Ranks ranks, const TensorView& a,
                            const TensorView& b) {
  if (const char* reason = why_not_beside(a, b)) return reason;
  if (!can_multiply(ranks, a, b)) return kShapes;
  return why_not_tensor(a, op.kind, policy);
}

// The reason why a kernel cannot write the product of `a` and `b` to `out`.
const char* why_not_into(const TensorView& out, const TensorView& a, const TensorView& b) {
  if (const char* reason = why_not_beside(a, out)) return reason;
  const ProductShape shape(a, b);
  if (out.dim != shape.dim || !std::equal(out.sizes, out.sizes + out.dim, shape.sizes)) {
    return kOutLayout;
  }
  int64_t step = 1;
  for (int64_t i = out.dim; i-- > 0; step *= out.sizes[i]) {
    if (out.sizes[i] != 1 && out.strides[i] != step) return kOutLayout;
  }
  if (step == 0) return kOutLayout;  // no elements: nothing to compute
  const MemoryFacts own = memory_of(out);
  const bool shared = share_memory(own, memory_of(a)) || share_memory(own, memory_of(b));
  return shared ? kOutShared : nullptr;
}

// The output of PyTorch's kernel, which resizes a tensor without elements as it needs.
Tensor empty_for(const TensorView& a, const TensorView& b, bool well_formed) {
  // The same choice as PyTorch's: otherwise the error for different dtypes or devices would be
  // about `out`.
  const TensorView& like = a.dim == 3 ? b : a;
  if (well_formed) {
    const ProductShape shape(a, b);
    return empty_near(like, shape.sizes, shape.dim, like.dtype);
  }
  const int64_t none = 0;
  return empty_near(like, &none, 1, like.dtype);
}

// The C++ type of the elements, as PyTorch's errors name it.
std::string element_type(ScalarType dtype) {
  static constexpr std::pair<ScalarType, const char*> kNames[] = {
      {ScalarType::Float, "float"},
      {ScalarType::Double, "double"},
      {ScalarType::Half, "c10::Half"},
      {ScalarType::BFloat16, "c10::BFloat16"},
      {ScalarType::Float8_e4m3fn, "c10::Float8_e4m3fn"},
      {ScalarType::Float8_e5m2, "c10::Float8_e5m2"},
      {ScalarType::ComplexFloat, "c10::complex<float>"},
      {ScalarType::ComplexDouble, "c10::complex<double>"},
      {ScalarType::Bool, "bool"},
      {ScalarType::Byte, "unsigned char"},
      {ScalarType::Char, "signed char"},
      {ScalarType::Short, "short int"},
      {ScalarType::Int, "int"},
      {ScalarType::Long, "long int"},
  };
  for (const auto& [type, name] : kNames) {
    if (type == dtype) return name;
  }
  return dtype_name(dtype);
}

// PyTorch's error for a malformed call, for a PyTorch whose own text cannot be read. `out` is the
// caller's output, if there is one.
void check_as_aten(const char* name, Ranks ranks, const TensorView& a, const TensorView& b,
                   const TensorView* out) {
  if (has_torch_error()) return;
  const auto check = [](bool holds, const std::string& text) {
    if (!holds) throw std::runtime_error(text);
  };
  const auto size = [](const TensorView& view, int64_t i) { return std::to_string(view.sizes[i]); };
  const bool batched = ranks.a == 3;
  if (batched) {
    check(a.dim == 3, "batch1 must be a 3D tensor");
    check(b.dim == 3, "batch2 must be a 3D tensor");
    check(can_multiply(ranks, a, b),
          "Expected size for first two dimensions of batch2 tensor to be: [" + size(a, 0) + ", " +
              size(a, 2) + "] but got: [" + size(b, 0) + ", " + size(b, 1) + "].");
  } else if (ranks.b == 1) {
    check(have_ranks(ranks, a, b), "vector + matrix @ vector expected, got 1, " +
                                       std::to_string(a.dim) + ", " + std::to_string(b.dim));
    check(can_multiply(ranks, a, b), "size mismatch, got input (" + size(a, 0) + "), mat (" +
                                         size(a, 0) + "x" + size(a, 1) + "), vec (" + size(b, 0) +
                                         ")");
  } else {
    check(a.dim == 2, "self must be a matrix");
    check(b.dim == 2, "mat2 must be a matrix");
    check(can_multiply(ranks, a, b), "mat1 and mat2 shapes cannot be multiplied (" + size(a, 0) +
                                         "x" + size(a, 1) + " and " + size(b, 0) + "x" +
                                         size(b, 1) + ")");
  }
  const auto check_device = [&](const TensorView& other, const char* argument) {
    check(same_device(a, other),
          "Expected all tensors to be on the same device, but found at least two devices, " +
              a.device_text() + " and " + other.device_text() +
              "! (when checking argument for argument " + argument + " in method wrapper_" + name +
              ")");
  };
  check_device(b, "mat2");
  if (out != nullptr) {
    check_device(*out, "out");
    const ScalarType expected = batched ? b.dtype : a.dtype;
    check(out->dtype == expected, "Expected out tensor to have dtype " + element_type(expected) +
                                      ", but got " + element_type(out->dtype) + " instead");
  }
  check(a.dtype == b.dtype, "expected m1 and m2 to have the same dtype, but got: " +
                                dtype_name(a.dtype) + " != " + dtype_name(b.dtype));
}

// PyTorch's own kernel, whose result is stored in `out`. `well`: the operands have the ranks.
using CallAten = AOTITorchError (*)(const TensorView& a, const TensorView& b, Tensor* out,
                                    bool well);

// A product into a new tensor.
Tensor product(const AtenOp& op, Ranks ranks, const Tensor& self, const Tensor& other,
               CallAten call) {
  const TensorView a(self), b(other);
  const Policy policy = serving_policy();
  if (policy != Policy::kOff) {
    const char* const reason = why_not_product(op, policy, ranks, a, b);
    if (reason == nullptr) {
      const ServedCall served;
      Tensor result = a.on_cuda() ? matmul_cuda(self, other) : matmul_cpu(self, other);
      op.count_served(a);
      return result;
    }
    count_declined(op.name, reason);
  }
  check_as_aten(op.name, ranks, a, b, nullptr);
  Tensor out;
  check_aten(call(a, b, &out, have_ranks(ranks, a, b)), op.name);
  return out;
}

// A product into the caller's tensor.
Tensor product_into(const AtenOp& op, Ranks ranks, const Tensor& self, const Tensor& other,
                    Tensor& out, AtenProducts::Product AtenProducts::* aten) {
  const TensorView a(self), b(other), c(out);
  const Policy policy = serving_policy();
  if (policy != Policy::kOff) {
    const char* reason = why_not_product(op, policy, ranks, a, b);
    if (reason == nullptr) reason = why_not_into(c, a, b);
    if (reason == nullptr) {
      const ServedCall served;
      a.on_cuda() ? matmul_out_cuda(self, other, out) : matmul_out_cpu(self, other, out);
      op.count_served(a);
      return out;
    }
    count_declined(op.name, reason);
  }
  check_as_aten(op.name, ranks, a, b, &c);
  const AtenProducts& products = aten_products(c.on_cuda() || a.on_cuda());
  check_aten((products.*aten)(out.get(), self.get(), other.get()), op.name);
  return out;
}

template <AtenProducts::Product AtenProducts::* kOut>
AOTITorchError call_product(const TensorView& a, const TensorView& b, Tensor* out, bool well) {
  *out = empty_for(a, b, well);
  const AtenProducts& products = aten_products(a.on_cuda() || b.on_cuda());
  return (products.*kOut)(out->get(), a.handle, b.handle);
}

// aten::mv is aten::addmv with beta 0, which does not read its addend.
AOTITorchError call_mv(const TensorView& a, const TensorView& b, Tensor* out, bool well) {
  const Tensor unread = empty_for(a, b, well);
  const AtenProducts& products = aten_products(a.on_cuda() || b.on_cuda());
  AtenTensorHandle result = nullptr;
  const AOTITorchError error = products.addmv(unread.get(), a.handle, b.handle, 0, 1, &result);
  if (error == AOTI_TORCH_SUCCESS) *out = Tensor(result);
  return error;
}

// --- sums ---

struct SumInfo {
  const char* names[static_cast<int>(SumForm::kCount)];
  CallKind kind;
  Ranks ranks;
};
constexpr SumInfo kSums[static_cast<int>(SumOp::kCount)] = {
    {{"aten::addmm", "aten::addmm.out", "aten::addmm_"}, CallKind::kProduct, kMatrices},
    {{"aten::baddbmm", "aten::baddbmm.out", "aten::baddbmm_"}, CallKind::kBatched, kBatches},
    {{"aten::addmv", "aten::addmv.out", "aten::addmv_"}, CallKind::kVector, kVector},
};

const AtenOp& sum_op(SumOp op, SumForm form) {
  static auto* const ops = [] {
    auto* const all = new std::vector<AtenOp>;
    for (const SumInfo& info : kSums) {
      for (const char* name : info.names) all->emplace_back(name, info.kind);
    }
    return all;
  }();
  return (*ops)[static_cast<int>(op) * static_cast<int>(SumForm::kCount) + static_cast<int>(form)];
}

bool expands_to(const TensorView& view, const ProductShape& shape) {
  if (view.dim > shape.dim) return false;
  for (int64_t i = 1; i <= view.dim; ++i) {
    const int64_t size = view.sizes[view.dim - i];
    if (size != 1 && size != shape.sizes[shape.dim - i]) return false;
  }
  return true;
}

// The reason why our kernels do not compute the sum. `out` is their output: null for a new tensor.
const char* why_not_sum(const AtenOp& op, Policy policy, Ranks ranks, const SumCall& call,
                        const TensorView& self, const TensorView& a, const TensorView& b) {
  if (const char* reason = why_not_product(op, policy, ranks, a, b)) return reason;
  if (const char* reason = why_not_beside(a, self)) return reason;
  const ProductShape shape(a, b);
  if (!expands_to(self, shape)) return kShapes;
  // PyTorch's addmv then gives the result the addend's shape.
  const bool is_empty = a.sizes[0] == 0 || a.sizes[1] == 0;
  const bool has_shape = self.dim == shape.dim && self.sizes[0] == shape.sizes[0];
  if (call.op == SumOp::kAddmv && is_empty && !has_shape) return kEmptyMatrix;
  if (!call.has_factors) return kFactors;
  if (call.form == SumForm::kNew) return nullptr;
  const TensorView out(call.form == SumForm::kOut ? call.out : call.self);
  if (const char* reason = why_not_into(out, a, b)) return reason;
  if (call.beta == 0) return nullptr;
  if (call.form == SumForm::kInPlace) return nullptr;  // elements are read before written
  return share_memory(memory_of(out), memory_of(self)) ? kOutShared : nullptr;
}

Tensor borrowed(AtenTensorHandle handle) {
  AtenTensorHandle own = nullptr;
  check_aten(aoti_torch_new_tensor_handle(handle, &own), "a sum");
  return Tensor(own);
}

void serve_sum(const SumCall& call, bool on_cuda, AtenTensorHandle* result) {
  const Tensor self = borrowed(call.self), a = borrowed(call.a), b = borrowed(call.b);
  if (call.form == SumForm::kNew) {
    Tensor made = on_cuda ? addmm_cuda(self, a, b, call.beta, call.alpha)
                          : addmm_cpu(self, a, b, call.beta, call.alpha);
    check_aten(aoti_torch_new_tensor_handle(made.get(), result), "a sum");
    return;
  }
  Tensor out = call.form == SumForm::kOut ? borrowed(call.out) : self;
  if (on_cuda) return addmm_out_cuda(self, a, b, call.beta, call.alpha, out);
  torch::stable::copy_(out, addmm_cpu(self, a, b, call.beta, call.alpha));
}

// PyTorch's own kernel through its C shims, for well-formed calls that they support.
bool call_aten_sum(const SumCall& call, Ranks ranks, const TensorView& self, const TensorView& a,
                   const TensorView& b, AtenTensorHandle* result) {
  const bool floating = a.dtype == ScalarType::Half || a.dtype == ScalarType::BFloat16 ||
                        a.dtype == ScalarType::Float || a.dtype == ScalarType::Double;
  if (!floating || !call.has_factors || call.form == SumForm::kInPlace) return false;
  if (why_not_beside(a, b) || why_not_beside(a, self) || !can_multiply(ranks, a, b)) return false;
  if (!expands_to(self, ProductShape(a, b))) return false;
  if (call.form == SumForm::kOut && why_not_beside(a, TensorView(call.out))) return false;
  const AtenProducts& aten = aten_products(a.on_cuda());
  if (call.op == SumOp::kAddmv) {
    if (call.form == SumForm::kOut) return false;
    check_aten(aten.addmv(call.self, call.a, call.b, call.beta, call.alpha, result), "aten::addmv");
    return true;
  }
  const auto sum_out = call.op == SumOp::kAddmm ? aten.addmm_out : aten.baddbmm_out;
  const Tensor out = call.form == SumForm::kOut ? borrowed(call.out) : empty_for(a, b, true);
  check_aten(sum_out(out.get(), call.self, call.a, call.b, call.beta, call.alpha), "a sum");
  if (call.form == SumForm::kNew) {
    check_aten(aoti_torch_new_tensor_handle(out.get(), result), "a sum");
  }
  return true;
}

}  // namespace

Tensor aten_mm(const Tensor& self, const Tensor& mat2) {
  static const AtenOp op("aten::mm", CallKind::kProduct);
  return product(op, kMatrices, self, mat2, &call_product<&AtenProducts::mm_out>);
}

Tensor aten_mm_out(const Tensor& self, const Tensor& mat2, Tensor out) {
  static const AtenOp op("aten::mm.out", CallKind::kProduct);
  return product_into(op, kMatrices, self, mat2, out, &AtenProducts::mm_out);
}

Tensor aten_bmm(const Tensor& self, const Tensor& mat2) {
  static const AtenOp op("aten::bmm", CallKind::kBatched);
  return product(op, kBatches, self, mat2, &call_product<&AtenProducts::bmm_out>);
}

Tensor aten_bmm_out(const Tensor& self, const Tensor& mat2, Tensor out) {
  static const AtenOp op("aten::bmm.out", CallKind::kBatched);
  return product_into(op, kBatches, self, mat2, out, &AtenProducts::bmm_out);
}

Tensor aten_mv(const Tensor& self, const Tensor& vec) {
  static const AtenOp op("aten::mv", CallKind::kVector);
  return product(op, kVector, self, vec, &call_mv);
}

bool aten_sum(const SumCall& call, AtenTensorHandle* result) {
  const Ranks ranks = kSums[static_cast<int>(call.op)].ranks;
  const TensorView self(call.self), a(call.a), b(call.b);
  const Policy policy = serving_policy();
  if (policy != Policy::kOff) {
    const AtenOp& op = sum_op(call.op, call.form);
    const char* const reason = why_not_sum(op, policy, ranks, call, self, a, b);
    if (reason == nullptr) {
      const ServedCall served;
      serve_sum(call, a.on_cuda(), result);
      op.count_served(a);
      return true;
    }
    count_declined(op.name, reason);
  }
  return call_aten_sum(call, ranks, self, a, b, result);
}

}  // namespace torch_cubin
