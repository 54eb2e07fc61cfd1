// Attention in the style of a vendor's library of cubins: hundreds of kernels that differ by dtype,
// layout, head size and mask, one struct by value, and a table of them (examples/fmha_library.py).
//
// Simple on purpose: a warp processes one query row at a time, and adds up the keys one by one with
// an online softmax in float32.
//
//   nvcc -cubin -arch=sm_90a -DTYPE=bf16 -DHEAD=64 -DARCH=sm90 fmha.cu
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

struct alignas(64) CUtensorMap {
  unsigned long long opaque[16];
};

#include "fmha_params.h"

namespace {

using bf16 = __nv_bfloat16;
using fp16 = __half;
using e4m3 = __nv_fp8_e4m3;
enum Layout { qkv, kv, paged };
enum Mask { padding, causal, sliding };

constexpr int kWarps = 4;
constexpr int kTile = 32;  // keys

[[maybe_unused]] __device__ float to_float(bf16 x) { return __bfloat162float(x); }
[[maybe_unused]] __device__ float to_float(fp16 x) { return __half2float(x); }
[[maybe_unused]] __device__ float to_float(e4m3 x) { return static_cast<float>(x); }
[[maybe_unused]] __device__ void store(bf16* out, float x) { *out = __float2bfloat16(x); }
[[maybe_unused]] __device__ void store(fp16* out, float x) { *out = __float2half(x); }

template <class T>
struct OutputOf {
  using Type = T;
};
template <>
struct OutputOf<e4m3> {
  using Type = bf16;
};

#if __CUDA_ARCH__ >= 900
// Copies a tile of K or V, of one head, to shared memory and counts its bytes on the barrier.
__device__ void copy_tile(const CUtensorMap& map, void* to, uint64_t* barrier, int head, int which,
                          int key, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(
          static_cast<uint32_t>(__cvta_generic_to_shared(to))),
      "l"(&map), "r"(static_cast<uint32_t>(__cvta_generic_to_shared(barrier))), "r"(0), "r"(head),
      "r"(which), "r"(key), "r"(batch)
      : "memory");
}

__device__ void wait(uint64_t* barrier, uint32_t phase) {
  const auto at = static_cast<uint32_t>(__cvta_generic_to_shared(barrier));
  for (int polls = 0;; ++polls) {
    uint32_t done;
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(at), "r"(phase)
        : "memory");
    if (done != 0) return;
    if (polls > 1 << 22) __trap();  // a copy that never comes must not hang the GPU
  }
}
#endif

template <class T, int D, Layout L, Mask M>
__device__ void fmha(const FmhaParams& p) {
  constexpr int kEach = D / 32;  // elements of a row in each lane
  extern __shared__ __align__(128) unsigned char shared[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  T* const tile_k = reinterpret_cast<T*>(shared) + warp * 2 * kTile * D;
  T* const tile_v = tile_k + kTile * D;
  [[maybe_unused]] uint64_t* const barrier =
      reinterpret_cast<uint64_t*>(shared + kWarps * 2 * kTile * D * sizeof(T)) + warp;
  [[maybe_unused]] uint32_t phase = 0;
#if __CUDA_ARCH__ >= 900
  if constexpr (L == kv) {
    if (lane == 0) {
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(
                       static_cast<uint32_t>(__cvta_generic_to_shared(barrier)))
                   : "memory");
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncwarp();
  }
#endif
  const float scale = __uint_as_float(p.scale_bits);
  while (true) {
    int item = lane == 0 ? atomicAdd(p.counter, 1) : 0;
    item = __shfl_sync(~0u, item, 0);
    if (item >= p.total_q * p.heads) return;
    const int token = item / p.heads, head = item % p.heads;
    const int head_kv = head / (p.heads / p.heads_kv);
    int batch = 0;
    while (p.cu_seqlens_q[batch + 1] <= token) ++batch;
    const int length_q = p.cu_seqlens_q[batch + 1] - p.cu_seqlens_q[batch];
    const int length = L == qkv ? length_q : p.seqlens_kv[batch];
    const int diagonal = token - p.cu_seqlens_q[batch] + length - length_q;
    const int end = M == padding ? length : min(length, diagonal + 1);
    const int begin = M == sliding ? max(0, diagonal - p.window + 1) : 0;

    const T* const q = static_cast<const T*>(p.q) + token * p.q_stride + head * D;
    float query[kEach], sum[kEach] = {}, total = 0, most = -INFINITY;
    for (int i = 0; i < kEach; ++i) query[i] = to_float(q[i * 32 + lane]) * scale;
    for (int first = begin / kTile * kTile; first < end; first += kTile) {
#if __CUDA_ARCH__ >= 900
      if constexpr (L == kv) {
        __syncwarp();  // all lanes have read the tile before
        if (lane == 0) {
          asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(
                           static_cast<uint32_t>(__cvta_generic_to_shared(barrier))),
                       "r"(static_cast<uint32_t>(2 * kTile * D * sizeof(T)))
                       : "memory");
          copy_tile(p.kv_map, tile_k, barrier, head_kv, 0, first, batch);
          copy_tile(p.kv_map, tile_v, barrier, head_kv, 1, first, batch);
        }
        wait(barrier, phase);
        phase ^= 1;
      }
#endif
      for (int key = max(first, begin); key < min(first + kTile, end); ++key) {
        const T* k = tile_k + (key - first) * D;
        const T* v = tile_v + (key - first) * D;
        if constexpr (L == qkv) {
          const int64_t at = (p.cu_seqlens_q[batch] + key) * p.kv_stride + head_kv * D;
          k = static_cast<const T*>(p.k) + at;
          v = static_cast<const T*>(p.v) + at;
        }
        if constexpr (L == paged) {
          const int page = p.block_offsets[batch * p.pages_per_sequence + key / p.page_size];
          const int64_t at = page * p.kv_stride +
                             (static_cast<int64_t>(head_kv) * p.page_size + key % p.page_size) * D;
          k = static_cast<const T*>(p.k) + at;
          v = static_cast<const T*>(p.v) + at;
        }
        float score = 0;
        for (int i = 0; i < kEach; ++i) score += query[i] * to_float(k[i * 32 + lane]);
        for (int step = 16; step > 0; step /= 2) score += __shfl_xor_sync(~0u, score, step);
        const float above = fmaxf(most, score);
        const float old = __expf(most - above), weight = __expf(score - above);
        most = above;
        total = total * old + weight;
        for (int i = 0; i < kEach; ++i) {
          sum[i] = sum[i] * old + weight * to_float(v[i * 32 + lane]);
        }
      }
    }
    using Out = typename OutputOf<T>::Type;
    Out* const out = static_cast<Out*>(p.out) + static_cast<int64_t>(item) * D;
    for (int i = 0; i < kEach; ++i) {
      store(out + i * 32 + lane, total > 0 ? sum[i] / total : 0.0f);
    }
  }
}

}  // namespace

#define NAME3(type, layout, head, mask, arch) fmha_##type##_##layout##_d##head##_##mask##_##arch
#define NAME2(type, layout, head, mask, arch) NAME3(type, layout, head, mask, arch)
#define KERNEL(layout, mask)                                                             \
  extern "C" __global__ void __launch_bounds__(kWarps * 32)                              \
      NAME2(TYPE, layout, HEAD, mask, ARCH)(const __grid_constant__ FmhaParams params) { \
    fmha<TYPE, HEAD, layout, mask>(params);                                              \
  }
#define MASKS(layout)     \
  KERNEL(layout, padding) \
  KERNEL(layout, causal)  \
  KERNEL(layout, sliding)

MASKS(qkv)
MASKS(paged)
#ifdef TMA
MASKS(kv)
#endif
