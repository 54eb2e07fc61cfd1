// The activations that a product's epilogue can apply: values of a parameter, shared by host and
// device code.
#pragma once

namespace torch_cubin {

enum Activation {
  kActivationNone = 0,
  kActivationRelu = 1,
  kActivationGelu = 2,  // by erf
  kActivationGeluTanh = 3,
  kActivationSilu = 4,
};

}  // namespace torch_cubin
