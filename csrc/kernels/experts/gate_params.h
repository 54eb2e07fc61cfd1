// The parameter of gate.cu, shared by host and device code.
//
// `before` has two halves of `inner` columns, a gate's g and an up's u, or they are interleaved.
// For each slot s of `places`, its row r = places[s], which rows that `before` does not have, such
// as -1, are not:
//   forward: inside[r, i] = round(activation(g) * u)
//   backward, of grad[r, i], the gradient with respect to inside[r, i] before the slot's weight w:
//     before_grad[r] = round(w * grad * u * activation'(g)), round(w * grad * activation(g)), in the
//       columns of g and of u
//     inside[r, i] = round(w * activation(g) * u)
//     weights_grad[s] = the sum over i of grad[r, i] * activation(g) * u; 0 without a row
// in float32. All are contiguous.
#pragma once

namespace torch_cubin {

enum ExpertActivation { kGateNone, kGateRelu, kGateGelu, kGateGeluTanh, kGateSilu };

struct ExpertGateParams {
  const void* before;
  const int* places;
  void* inside;
  // Backward only.
  const void* grad;
  const void* weights;
  void* before_grad;
  float* weights_grad;
  int slots, row_count, inner;
  int elements;      // of a thread: of 16 bytes where `inner` is a multiple of them, else 1
  int activation;    // ExpertActivation
  int interleaved;   // g in even columns of `before` and before_grad, u in odd ones
  int weights_type;  // ExpertWeights of weights.h
};

}  // namespace torch_cubin
