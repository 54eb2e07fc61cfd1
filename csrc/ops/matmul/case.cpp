// matmul_case: the facts about a problem and its operands' addresses that plans depend on.
#include <algorithm>

#include "ops/matmul/backend.h"

namespace torch_cubin {
namespace {

constexpr int64_t kMaxMapStride = int64_t{1} << 40;  // bytes; hardware limit
constexpr int64_t kMaxMapSize = int64_t{1} << 32;

// One operand: its own dim (M of A, N of B) and K.
struct OperandLayout {
  const void* data;
  int64_t element_bytes;
  int64_t own_size, k;
  int64_t own_stride, k_stride;  // elements
  const int64_t* batch_strides;
  int batch_dims;

  bool is_aligned(int64_t stride) const { return stride * element_bytes % kVectorBytes == 0; }
};

Access access_of(const OperandLayout& x) {
  bool vectors = reinterpret_cast<uintptr_t>(x.data) % kVectorBytes == 0;
  for (int i = 0; i < x.batch_dims; ++i) vectors = vectors && x.is_aligned(x.batch_strides[i]);
  const bool along_k = (x.k_stride == 1 || x.k == 1) && x.is_aligned(x.own_stride);
  const bool along_own = (x.own_stride == 1 || x.own_size == 1) && x.is_aligned(x.k_stride);
  if (vectors && along_k && (x.k > 1 || !along_own)) return kKVectors;
  if (vectors && along_own) return kOwnVectors;
  return x.own_stride <= x.k_stride && x.own_size > 1 ? kOwnElements : kKElements;
}

bool is_mappable(const OperandLayout& x, Access access) {
  if (!is_vectors(access)) return false;
  const bool along_k = access == kKVectors;
  const int64_t row = along_k ? x.k : x.own_size;
  const int64_t rows = along_k ? x.own_size : x.k;
  const int64_t step = along_k ? x.own_stride : x.k_stride;
  bool fits = row <= kMaxMapSize && rows <= kMaxMapSize;
  fits = fits && (rows == 1 || (step >= row && step * x.element_bytes < kMaxMapStride));
  for (int i = 0; i < x.batch_dims; ++i) {
    const int64_t stride = x.batch_strides[i];
    fits = fits && stride >= 0 && stride * x.element_bytes < kMaxMapStride;
  }
  return fits;
}

bool begins_lines(const OperandLayout& x, Access access) {
  const int64_t step = access == kKVectors ? x.own_stride : x.k_stride;
  bool lines = is_vectors(access) && reinterpret_cast<uintptr_t>(x.data) % kLineBytes == 0 &&
               step * x.element_bytes % kLineBytes == 0;
  for (int i = 0; i < x.batch_dims; ++i) {
    lines = lines && x.batch_strides[i] * x.element_bytes % kLineBytes == 0;
  }
  return lines;
}

bool is_unit(const OperandLayout& x, Access access) {
  return is_along_k(access) ? x.k_stride == 1 || x.k == 1 : x.own_stride == 1 || x.own_size == 1;
}

// MatmulCase::a_apart.
bool is_apart(const OperandLayout& x, Access access) {
  constexpr int64_t kMost = (int64_t{1} << 31) / (kVectorBytes / 2);  // bytes
  const bool along_k = is_along_k(access);
  const int64_t row = along_k ? x.k : x.own_size, rows = along_k ? x.own_size : x.k;
  const int64_t step = along_k ? x.own_stride : x.k_stride;
  bool apart = rows == 1 || (step >= row && step * x.element_bytes < kMost);
  for (int i = 0; i < x.batch_dims; ++i) {
    const int64_t stride = x.batch_strides[i];
    apart = apart && (stride == 0 || stride == rows * step);
  }
  return apart;
}

// MatmulCase::out_vectors.
bool begins_vectors(const MatmulProblem& p, const void* c) {
  return reinterpret_cast<uintptr_t>(c) % kVectorBytes == 0 &&
         p.n * element_size(p.output) % kVectorBytes == 0;
}

// MatmulCase::accumulates, of an addend.
bool adds_to_output(const MatmulProblem& p, const MatmulOperands& operands) {
  bool same = operands.addend == operands.c && p.beta == 1 && p.addend_stride_n == 1 &&
              (p.m == 1 || p.addend_stride_m == p.n);
  int64_t stride = p.m * p.n;
  for (int i = 0; i < p.batch_dims; ++i) {
    same = same && p.addend_batch_stride[i] == stride;
    stride *= p.batch_size[i];
  }
  return same && begins_vectors(p, operands.c);
}

bool is_broadcast(const OperandLayout& x) {
  for (int i = 0; i < x.batch_dims; ++i) {
    if (x.batch_strides[i] == 0) return true;
  }
  return false;
}

}  // namespace

bool is_own_transpose(const MatmulProblem& p, const MatmulOperands& operands) {
  return operands.a == operands.b && p.m == p.n && p.a_stride_m == p.b_stride_n &&
         p.a_stride_k == p.b_stride_k &&
         std::equal(p.a_batch_stride, p.a_batch_stride + p.batch_dims, p.b_batch_stride);
}

MatmulCase matmul_case(const MatmulProblem& p, const MatmulOperands& operands) {
  const int64_t bytes = element_size(p.input);
  const OperandLayout a = {operands.a,       bytes,       p.m, p.k, p.a_stride_m, p.a_stride_k,
                           p.a_batch_stride, p.batch_dims};
  const OperandLayout b = {operands.b,       bytes,       p.n, p.k, p.b_stride_n, p.b_stride_k,
                           p.b_batch_stride, p.batch_dims};
  MatmulCase c;
  c.m = p.m;
  c.n = p.n;
  c.k = p.k;
  c.batch = p.batch();
  c.batch_dims = p.batch_dims;
  c.input = p.input;
  c.output = p.output;
  c.math = p.math;
  c.a = access_of(a);
  c.b = access_of(b);
  c.a_mappable = is_mappable(a, c.a);
  c.b_mappable = is_mappable(b, c.b);
  c.a_lines = begins_lines(a, c.a);
  c.b_lines = begins_lines(b, c.b);
  c.a_unit = is_unit(a, c.a);
  c.b_unit = is_unit(b, c.b);
  c.a_apart = is_apart(a, c.a);
  c.b_apart = is_apart(b, c.b);
  c.a_broadcast = is_broadcast(a);
  c.b_broadcast = is_broadcast(b);
  c.has_bias = operands.bias != nullptr;
  c.activation = p.activation;
  c.scaled = p.alpha != 1;
  c.has_addend = operands.addend != nullptr;
  c.accumulates = c.has_addend && adds_to_output(p, operands);
  c.out_vectors = begins_vectors(p, operands.c);
  c.batch_invariant = p.batch_invariant;
  c.split_sums = p.split_sums;
  const bool along_k = c.a == kKVectors && c.b == kKVectors && c.a_mappable && c.b_mappable;
  const bool short_types = p.math == kMathFloat16 || p.math == kMathBFloat16;
  const bool in_parts = along_k && short_types && p.symmetry != Symmetry::kLower;
  c.k_parts = in_parts ? p.k_parts : 1;
  c.row_parts = p.row_parts;
  c.symmetric =
      p.symmetry != Symmetry::kNone && reinterpret_cast<uintptr_t>(operands.c) % kVectorBytes == 0;
  c.needs_mirror = p.symmetry == Symmetry::kLower;
  c.own_transpose = c.symmetric && is_own_transpose(p, operands);
  c.row_sums = operands.row_sums != nullptr && !p.row_parts;
  c.aux = operands.aux != nullptr;
  return c;
}

}  // namespace torch_cubin
