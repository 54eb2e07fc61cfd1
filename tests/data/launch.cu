// The kernels that tests/gpu/test_cuda_module.py launches, one for each thing a launch can pass.
// launch.sm_90a.cuda130.cubin is committed (make_cubins.py).
#include <cstdint>

struct Scale {
  float factor;
  int32_t offset;
  double shift;
  int8_t sign;
};
struct alignas(64) TensorMap {
  char bytes[128];
};

extern "C" __global__ void vec_add(const float* x, const float* y, float* z, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) z[i] = x[i] + y[i];
}

// Every kind of scalar, returned unchanged: out[i] holds the bits of argument i.
extern "C" __global__ void echo(bool flag, int8_t i8, uint8_t u8, int16_t i16, uint16_t half_bits,
                                int32_t i32, uint32_t u32, float f32, int64_t i64, double f64,
                                const void* pointer, int64_t* out) {
  out[0] = flag;
  out[1] = i8;
  out[2] = u8;
  out[3] = i16;
  out[4] = half_bits;
  out[5] = i32;
  out[6] = u32;
  out[7] = __float_as_int(f32);
  out[8] = i64;
  out[9] = __double_as_longlong(f64);
  out[10] = reinterpret_cast<int64_t>(pointer);
}

extern "C" __global__ void scale(Scale by, const float* x, float* out, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = by.sign * (x[i] * by.factor + by.offset + static_cast<float>(by.shift));
}

__constant__ float table[4];
__device__ int counter;

extern "C" __global__ void use_globals(float* out) {
  out[threadIdx.x] = table[threadIdx.x % 4];
  atomicAdd(&counter, 1);
}

extern "C" __global__ void reverse(const float* x, float* out, int n) {
  extern __shared__ float staged[];
  for (int i = threadIdx.x; i < n; i += blockDim.x) staged[i] = x[i];
  __syncthreads();
  for (int i = threadIdx.x; i < n; i += blockDim.x) out[i] = staged[n - 1 - i];
}

// Waits, then writes: whether somebody waited for it shows.
extern "C" __global__ void wait_and_write(int64_t cycles, int* out, int value) {
  const int64_t start = clock64();
  while (clock64() - start < cycles) {
  }
  *out = value;
}

// A barrier over the whole grid, which hangs unless all blocks run at once.
extern "C" __global__ void grid_sum(int* arrived, int* parts, int* out) {
  if (threadIdx.x != 0) return;
  parts[blockIdx.x] = blockIdx.x + 1;
  __threadfence();
  atomicAdd(arrived, 1);
  while (atomicAdd(arrived, 0) < static_cast<int>(gridDim.x)) {
  }
  int sum = 0;
  for (unsigned i = 0; i < gridDim.x; ++i) sum += atomicAdd(&parts[i], 0);
  out[blockIdx.x] = sum;
}

#if __CUDA_ARCH__ >= 900

__device__ unsigned special(int which) {
  unsigned value;
  if (which == 0) {
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(value));
  } else {
    asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(value));
  }
  return value;
}

// Each block tells its rank and the size of its cluster; the cluster is the launch's choice.
extern "C" __global__ void cluster_ranks(int* out) {
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
  if (threadIdx.x == 0) out[blockIdx.x] = special(0) + 100 * special(1);
}

extern "C" __global__ void __cluster_dims__(2, 1, 1) cluster_of_two(int* out) {
  if (threadIdx.x == 0) out[blockIdx.x] = special(0) + 100 * special(1);
}

// The box at (row, column) of a float tensor of two dims, by TMA, written out row after row.
extern "C" __global__ void tma_box(const __grid_constant__ TensorMap map, int row, int column,
                                   int elements, float* out) {
  __shared__ alignas(128) float box[1024];
  __shared__ alignas(8) uint64_t barrier;
  const auto box_at = static_cast<uint32_t>(__cvta_generic_to_shared(box));
  const auto barrier_at = static_cast<uint32_t>(__cvta_generic_to_shared(&barrier));
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier_at) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier_at),
                 "r"(elements * 4)
                 : "memory");
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3}], [%4];" ::"r"(box_at),
        "l"(&map), "r"(column), "r"(row), "r"(barrier_at)
        : "memory");
  }
  __syncthreads();
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "AGAIN:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], 0;\n"
      "@!done bra AGAIN;\n"
      "}\n" ::"r"(barrier_at)
      : "memory");
  for (int i = threadIdx.x; i < elements; i += blockDim.x) out[i] = box[i];
}

#endif
