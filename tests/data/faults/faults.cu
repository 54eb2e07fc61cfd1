// Kernels that fault, and kernels at the limits of what a launch may pass, for
// tests/gpu/test_cuda_faults.py. faults.sm_90a.cuda130.cubin and, with -DLARGE_TABLE,
// large_table.sm_90a.cuda130.cubin are committed (make_cubins.py).
#include <cassert>
#include <cstdint>

extern "C" __global__ void set(int* out, int value) { out[threadIdx.x] = value; }

extern "C" __global__ void illegal_address(int* out) { out[int64_t{1} << 40] = 1; }

extern "C" __global__ void misaligned_address(int* out) {
  *reinterpret_cast<volatile int*>(reinterpret_cast<char*>(out) + 1) = 1;
}

extern "C" __global__ void trap(int* out) {
  if (out != nullptr) asm volatile("trap;");
}

extern "C" __global__ void assertion(int* out) { assert(out == nullptr); }

// All that a launch can pass: 32,764 bytes.
struct Parameters {
  int32_t values[8189];
};
extern "C" __global__ void most_parameters(int64_t* out, Parameters given) {
  int64_t sum = 0;
  for (int i = 0; i < 8189; ++i) sum += given.values[i];
  *out = sum;
}

// Gives back what each thread wrote, through the last bytes of the dynamic shared memory.
extern "C" __global__ void static_and_dynamic(const int* x, int* out, int bytes) {
  __shared__ int fixed[256];
  extern __shared__ int dynamic[];
  int* last = dynamic + bytes / 4 - 256;
  fixed[threadIdx.x] = x[threadIdx.x];
  last[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = fixed[255 - threadIdx.x] + last[threadIdx.x ^ 1];
}

#ifdef LARGE_TABLE  // 1 GiB, which the load itself must allocate
__device__ int table[1 << 28];
extern "C" __global__ void use_table(int* out) { out[threadIdx.x] = table[threadIdx.x] + 7; }
#endif
