// nvcc -ptx -arch=compute_75 vec_add.cu -o vec_add.ptx
__global__ void vecAdd(const float* a, const float* b, float* c, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) c[i] = a[i] + b[i];
}
