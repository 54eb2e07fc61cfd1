#include "pytorch/aten_norms.h"

#include <string>

#include "pytorch/internals.h"

namespace torch_cubin {
namespace {

// Stands for at::Tensor, which is one pointer. Neither counts references: as an argument it is a
// borrowed tensor, as a result it owns the reference that own() passes on.
class AtTensor {
 public:
  explicit AtTensor(const Tensor& tensor) : impl_(*slot(tensor)) {}
  AtTensor(const AtTensor&) = delete;
  AtTensor& operator=(const AtTensor&) = delete;
  // NOLINTNEXTLINE(modernize-use-equals-default): not trivial, so that it is returned in memory.
  ~AtTensor() {}

  Tensor own() const {
    Tensor made = undefined_tensor();
    *slot(made) = impl_;  // an undefined tensor's pointer is not counted
    return made;
  }

 private:
  static void** slot(const Tensor& tensor) { return reinterpret_cast<void**>(tensor.get()); }

  void* impl_;
};

// Stands for c10::ArrayRef<int64_t>.
struct AtSizes {
  const int64_t* data;
  size_t count;
};

using Optional = std::optional<AtTensor>;
using Two = std::tuple<AtTensor, AtTensor>;
using Three = std::tuple<AtTensor, AtTensor, AtTensor>;
using LayerNorm = Three (*)(const AtTensor&, AtSizes, const Optional&, const Optional&, double);
using LayerNormBackward = Three (*)(const AtTensor&, const AtTensor&, AtSizes, const AtTensor&,
                                    const AtTensor&, const Optional&, const Optional&,
                                    std::array<bool, 3>);
using RmsNorm = Two (*)(const AtTensor&, AtSizes, const Optional&, std::optional<double>);
using RmsNormBackward = Two (*)(const AtTensor&, const AtTensor&, AtSizes, const AtTensor&,
                                const Optional&, std::array<bool, 2>);

constexpr const char* kLayerNorm =
    "17native_layer_normERKNS_6TensorEN3c108ArrayRefIlEERKSt8optionalIS1_ESA_d";
constexpr const char* kLayerNormBackward =
    "26native_layer_norm_backwardERKNS_6TensorES3_N3c108ArrayRefIlEES3_S3_RKSt8optionalIS1_ESA_"
    "St5arrayIbLm3EE";
constexpr const char* kRmsNorm =
    "15_fused_rms_normERKNS_6TensorEN3c108ArrayRefIlEERKSt8optionalIS1_ES7_IdE";
constexpr const char* kRmsNormBackward =
    "24_fused_rms_norm_backwardERKNS_6TensorES3_N3c108ArrayRefIlEES3_RKSt8optionalIS1_E"
    "St5arrayIbLm2EE";

// A function of at::cpu or at::cuda.
template <class Function>
Function at_function(bool on_cuda, const char* name) {
  const std::string symbol = std::string(on_cuda ? "_ZN2at4cuda" : "_ZN2at3cpu") + name;
  return reinterpret_cast<Function>(pytorch_symbol(symbol.c_str()));
}

struct Functions {
  explicit Functions(bool on_cuda)
      : layer_norm(at_function<LayerNorm>(on_cuda, kLayerNorm)),
        layer_norm_backward(at_function<LayerNormBackward>(on_cuda, kLayerNormBackward)),
        rms_norm(on_cuda ? at_function<RmsNorm>(true, kRmsNorm) : nullptr),
        rms_norm_backward(on_cuda ? at_function<RmsNormBackward>(true, kRmsNormBackward)
                                  : nullptr) {}

  LayerNorm layer_norm;
  LayerNormBackward layer_norm_backward;
  RmsNorm rms_norm;
  RmsNormBackward rms_norm_backward;
};

const Functions& functions(bool on_cuda) {
  static const Functions cpu(false);
  if (!on_cuda) return cpu;
  static const Functions cuda(true);  // at the first call on a GPU
  return cuda;
}

// An std::optional<at::Tensor> for the time of a call.
struct Borrowed {
  explicit Borrowed(const std::optional<Tensor>& tensor) {
    if (tensor && is_defined(*tensor)) optional.emplace(*tensor);
  }
  Optional optional;
};

AtSizes at_sizes(const std::vector<int64_t>& shape) { return {shape.data(), shape.size()}; }

ThreeTensors owned(const Three& made) {
  return {std::get<0>(made).own(), std::get<1>(made).own(), std::get<2>(made).own()};
}
TwoTensors owned(const Two& made) { return {std::get<0>(made).own(), std::get<1>(made).own()}; }

}  // namespace

bool has_aten_layer_norm(bool on_cuda) {
  const Functions& found = functions(on_cuda);
  return found.layer_norm != nullptr && found.layer_norm_backward != nullptr;
}

bool has_aten_rms_norm() {
  const Functions& found = functions(true);
  return found.rms_norm != nullptr && found.rms_norm_backward != nullptr;
}

ThreeTensors aten_native_layer_norm(bool on_cuda, const Tensor& input,
                                    const std::vector<int64_t>& shape,
                                    const std::optional<Tensor>& weight,
                                    const std::optional<Tensor>& bias, double eps) {
  return owned(functions(on_cuda).layer_norm(
      AtTensor(input), at_sizes(shape), Borrowed(weight).optional, Borrowed(bias).optional, eps));
}

ThreeTensors aten_native_layer_norm_backward(bool on_cuda, const Tensor& grad_out,
                                             const Tensor& input, const std::vector<int64_t>& shape,
                                             const Tensor& mean, const Tensor& rstd,
                                             const std::optional<Tensor>& weight,
                                             const std::optional<Tensor>& bias,
                                             std::array<bool, 3> wanted) {
  return owned(functions(on_cuda).layer_norm_backward(
      AtTensor(grad_out), AtTensor(input), at_sizes(shape), AtTensor(mean), AtTensor(rstd),
      Borrowed(weight).optional, Borrowed(bias).optional, wanted));
}

TwoTensors aten_fused_rms_norm(const Tensor& input, const std::vector<int64_t>& shape,
                               const std::optional<Tensor>& weight, std::optional<double> eps) {
  return owned(
      functions(true).rms_norm(AtTensor(input), at_sizes(shape), Borrowed(weight).optional, eps));
}

TwoTensors aten_fused_rms_norm_backward(const Tensor& grad_out, const Tensor& input,
                                        const std::vector<int64_t>& shape, const Tensor& rstd,
                                        const std::optional<Tensor>& weight,
                                        std::array<bool, 2> wanted) {
  return owned(functions(true).rms_norm_backward(AtTensor(grad_out), AtTensor(input),
                                                 at_sizes(shape), AtTensor(rstd),
                                                 Borrowed(weight).optional, wanted));
}

}  // namespace torch_cubin
