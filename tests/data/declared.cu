// The kernels that tests/gpu/test_cuda_define_op.py declares as ops, one for each thing that a
// declaration can say. declared.sm_90a.cuda130.cubin is committed (make_cubins.py).
#include <cstdint>

namespace {

__device__ int64_t place() { return blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; }

}  // namespace

// A dtype variable: copies the bits of x. Two kernels, chosen by the size of an item.
extern "C" __global__ void copy_16(const uint16_t* x, uint16_t* out, int64_t n) {
  if (place() < n) out[place()] = x[place()];
}
extern "C" __global__ void copy_32(const uint32_t* x, uint32_t* out, int64_t n) {
  if (place() < n) out[place()] = x[place()];
}

// y += alpha * x, in place.
extern "C" __global__ void axpy(float alpha, const float* x, float* y, int n) {
  if (place() < n) y[place()] += alpha * x[place()];
}

// out = x * factor + bias, relu if asked; every kind of argument that may be missing.
extern "C" __global__ void affine(const float* x, const float* bias, float* out, float factor,
                                  int offset, bool relu, int mode, int n) {
  if (place() >= n) return;
  float value = x[place()] * factor + static_cast<float>(offset);
  if (bias != nullptr) value += bias[place()];
  if (mode == 1) value = -value;
  out[place()] = relu && value < 0 ? 0 : value;
}

// The least and the largest of each row, whose rows may lie apart.
extern "C" __global__ void row_limits(const float* x, int64_t stride, float* least, float* largest,
                                      int rows, int columns) {
  if (place() >= rows) return;
  const float* row = x + place() * stride;
  float low = row[0], high = row[0];
  for (int i = 1; i < columns; ++i) {
    low = row[i] < low ? row[i] : low;
    high = row[i] > high ? row[i] : high;
  }
  least[place()] = low;
  largest[place()] = high;
}

// A sum in two steps by one block: through memory that the op brings along.
extern "C" __global__ void sum_through(const float* x, float* partial, float* out, int n) {
  float sum = 0;
  for (int i = threadIdx.x; i < n; i += blockDim.x) sum += x[i];
  partial[threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.x != 0) return;
  sum = 0;
  for (unsigned i = 0; i < blockDim.x; ++i) sum += partial[i];
  *out = sum;
}

// The sum of two or three tensors of a list.
extern "C" __global__ void add_two(const float* a, const float* b, float* out, int n) {
  if (place() < n) out[place()] = a[place()] + b[place()];
}
extern "C" __global__ void add_three(const float* a, const float* b, const float* c, float* out,
                                     int n) {
  if (place() < n) out[place()] = a[place()] + b[place()] + c[place()];
}

// Every second dim doubled: out[m, 2 k] of x[m, k].
extern "C" __global__ void repeat_columns(const float* x, float* out, int columns, int n) {
  if (place() >= n) return;
  const int64_t row = place() / columns, column = place() % columns;
  out[row * 2 * columns + column] = x[place()];
  out[row * 2 * columns + columns + column] = x[place()];
}

// A function and its derivative.
extern "C" __global__ void cube(const float* x, float* out, int n) {
  if (place() < n) out[place()] = x[place()] * x[place()] * x[place()];
}
extern "C" __global__ void cube_backward(const float* grad_out, const float* x, float* grad_x,
                                         int n) {
  if (place() < n) grad_x[place()] = 3 * x[place()] * x[place()] * grad_out[place()];
}

// A kernel whose binary demands its block.
extern "C" __global__ void __block_size__((64, 1, 1)) fill_64(float* out, int n) {
  if (place() < n) out[place()] = 64;
}
