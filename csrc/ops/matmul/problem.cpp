#include "ops/matmul/problem.h"

#include "ops/common/batch_invariant.h"
#include "ops/matmul/backend.h"
#include "pytorch/settings.h"

namespace torch_cubin {
namespace {

// Adds an outer batch dim, merged with the previous one if the strides of all operands allow it.
void push_batch(MatmulProblem& p, int64_t size, int64_t a_stride, int64_t b_stride,
                int64_t addend_stride) {
  if (size == 1) return;
  if (p.batch_dims > 0) {
    const int last = p.batch_dims - 1;
    if (a_stride == p.a_batch_stride[last] * p.batch_size[last] &&
        b_stride == p.b_batch_stride[last] * p.batch_size[last] &&
        addend_stride == p.addend_batch_stride[last] * p.batch_size[last]) {
      p.batch_size[last] *= size;
      return;
    }
  }
  p.batch_size[p.batch_dims] = size;
  p.a_batch_stride[p.batch_dims] = a_stride;
  p.b_batch_stride[p.batch_dims] = b_stride;
  p.addend_batch_stride[p.batch_dims] = addend_stride;
  ++p.batch_dims;
}

void pop_innermost(MatmulProblem& p) {
  for (int i = 1; i < p.batch_dims; ++i) {
    p.batch_size[i - 1] = p.batch_size[i];
    p.a_batch_stride[i - 1] = p.a_batch_stride[i];
    p.b_batch_stride[i - 1] = p.b_batch_stride[i];
    p.addend_batch_stride[i - 1] = p.addend_batch_stride[i];
  }
  --p.batch_dims;
}

// Batches that share one B become rows of A, if A's rows continue across them (a 3-D input times a
// 2-D weight); so does a batch of single rows. Batches that share one single-row A become columns
// of B. C is contiguous, so its rows continue in both cases; an addend's must, too.
void fold_batch(MatmulProblem& p) {
  while (p.batch_dims > 0) {
    const int64_t size = p.batch_size[0];
    const int64_t addend = p.addend_batch_stride[0];
    if (p.b_batch_stride[0] == 0 && (p.m == 1 || (p.a_batch_stride[0] == p.m * p.a_stride_m &&
                                                  addend == p.m * p.addend_stride_m))) {
      if (p.m == 1) {
        p.a_stride_m = p.a_batch_stride[0];
        p.addend_stride_m = addend;
      }
      p.m *= size;
    } else if (p.m == 1 && p.a_batch_stride[0] == 0 &&
               (p.n == 1 ||
                (p.b_batch_stride[0] == p.n * p.b_stride_n && addend == p.n * p.addend_stride_n))) {
      if (p.n == 1) {
        p.b_stride_n = p.b_batch_stride[0];
        p.addend_stride_n = addend;
      }
      p.n *= size;
    } else {
      return;
    }
    pop_innermost(p);
  }
}

// The stride of a dim of size 1 is never used; 0 is always aligned.
void drop_unused_strides(MatmulProblem& p) {
  if (p.m == 1) p.a_stride_m = p.addend_stride_m = 0;
  if (p.n == 1) p.b_stride_n = p.addend_stride_n = 0;
  if (p.k == 1) p.a_stride_k = p.b_stride_k = 0;
}

Math math_of(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Half:
      return kMathFloat16;
    case ScalarType::BFloat16:
      return kMathBFloat16;
    case ScalarType::Float:
      return tf32_allowed() ? kMathTF32 : kMathFloat32;
    default:
      return kMathFloat64;
  }
}

MatmulProblem problem_of(ScalarType dtype) {
  MatmulProblem p;
  p.input = p.output = dtype;
  p.math = math_of(dtype);
  p.batch_invariant = batch_invariant();
  return p;
}

// Whether the rows of all matrices begin vectors of 16 bytes, by the strides of all dims: also of
// those of size 1, which no address depends on. A row alone must not be summed in parts if a kernel
// without parts serves it beside others.
bool rows_begin_vectors(const TensorView& a) {
  for (int64_t i = 0; i + 1 < a.dim; ++i) {
    if (a.strides[i] * element_size(a.dtype) % kVectorBytes != 0) return false;
  }
  return true;
}

// Before batches are folded into M or N.
void divide_k(MatmulProblem& p, const TensorView& a) {
  if (!p.batch_invariant || keeps_k_whole() || !rows_begin_vectors(a)) return;
  p.k_parts = k_parts_of(p.n, p.k);
}

}  // namespace

int k_parts_of(int64_t n, int64_t k) {
  // The most columns whose tiles of 64 rows of the weights have a cluster each of as many blocks
  // where rows of the product are few (sm90_skinny.cu): of four blocks 30 run at a time. From
  // kManyColumns on the weights of a long K take longer to load than one chain (H200, 64 rows of
  // 4096 x 14336 31.0, 31.7 us), which spares many rows smaller tiles (2048 rows 328, 311).
  struct Columns {
    int parts;
    int64_t most;
  };
  constexpr Columns kColumns[] = {{4, 30 * 64}, {2, 64 * 64}};
  constexpr int64_t kManyColumns = 3712, kLongK = 8192;
  if (n >= kManyColumns && k >= kLongK) return 1;
  // Of K, in a part: shorter ones gain where columns are few, and cost many rows, which take wider
  // tiles without parts (4096 x 2048 x 2048 in two parts 1.11 of the time on an H200).
  constexpr int64_t kFewColumns = 1024, kLeastPart = 1024, kLeastOfFew = 512, kBlockK = 128;
  const int64_t least = n <= kFewColumns ? kLeastOfFew : kLeastPart;
  for (const auto [parts, most] : kColumns) {
    if (n <= most && k >= least * parts && k % (kBlockK * parts) == 0) return parts;
  }
  return 1;
}

MatmulProblem matmul_problem(const TensorView& self, const TensorView& other, const Shape& out,
                             const TensorView* addend) {
  MatmulProblem p = problem_of(self.dtype);
  // The addend's stride along dim i of the output; 0 if it is broadcast.
  const auto addend_stride = [&](int64_t i) -> int64_t {
    const int64_t own = addend == nullptr ? -1 : i - (out.dim - addend->dim);
    return own < 0 || addend->sizes[own] == 1 ? 0 : addend->strides[own];
  };
  p.k = self.sizes[self.dim - 1];
  p.a_stride_k = self.strides[self.dim - 1];
  if (self.dim > 1) {
    p.m = self.sizes[self.dim - 2];
    p.a_stride_m = self.strides[self.dim - 2];
    p.addend_stride_m = addend_stride(out.dim - (other.dim > 1 ? 2 : 1));
  }
  if (other.dim > 1) {
    p.addend_stride_n = addend_stride(out.dim - 1);
    p.n = other.sizes[other.dim - 1];
    p.b_stride_n = other.strides[other.dim - 1];
    p.b_stride_k = other.strides[other.dim - 2];
  } else {
    p.b_stride_k = other.strides[0];
  }
  drop_unused_strides(p);
  divide_k(p, self);

  const int64_t matrix_dims = (self.dim > 1) + (other.dim > 1);
  const int64_t batch = out.dim - matrix_dims;
  const int64_t self_batch = self.dim > 2 ? self.dim - 2 : 0;
  const int64_t other_batch = other.dim > 2 ? other.dim - 2 : 0;
  for (int64_t i = batch - 1; i >= 0; --i) {
    const int64_t x = i - (batch - self_batch);
    const int64_t y = i - (batch - other_batch);
    const int64_t a_stride = x >= 0 && self.sizes[x] != 1 ? self.strides[x] : 0;
    const int64_t b_stride = y >= 0 && other.sizes[y] != 1 ? other.strides[y] : 0;
    push_batch(p, out.sizes[i], a_stride, b_stride, addend_stride(i));
  }
  fold_batch(p);
  drop_unused_strides(p);
  return p;
}

MatmulProblem linear_problem(const TensorView& input, const TensorView& weight) {
  MatmulProblem p = problem_of(input.dtype);
  p.k = input.sizes[input.dim - 1];
  p.a_stride_k = input.strides[input.dim - 1];
  if (input.dim > 1) {
    p.m = input.sizes[input.dim - 2];
    p.a_stride_m = input.strides[input.dim - 2];
  }
  p.b_stride_k = weight.strides[weight.dim - 1];
  if (weight.dim > 1) {
    p.n = weight.sizes[0];
    p.b_stride_n = weight.strides[0];
  }
  drop_unused_strides(p);
  divide_k(p, input);
  for (int64_t i = input.dim - 3; i >= 0; --i) {
    push_batch(p, input.sizes[i], input.sizes[i] != 1 ? input.strides[i] : 0, 0, 0);
  }
  fold_batch(p);
  drop_unused_strides(p);
  return p;
}

}  // namespace torch_cubin
