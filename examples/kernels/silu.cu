extern "C" __global__ void silu(const float* x, float* out, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = x[i] / (1 + expf(-x[i]));
}

extern "C" __global__ void silu_backward(const float* grad_out, const float* x, float* grad_x, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  float s = 1 / (1 + expf(-x[i]));
  grad_x[i] = grad_out[i] * s * (1 + x[i] * (1 - s));
}
