// An additive mask in the order in which the backward's `added` and `general` kernels use its
// numbers: a thread loads those of its scores as vectors, where in the mask each is a load of its
// own. Also classifies each step: steps to which the mask adds nothing do not read it, and steps
// that it hides entirely are skipped.
//
// A block has a tile of queries and a work item's keys, 64 or two times 64. In a step, thread t of
// a warpgroup has the numbers of queries 8j + lane % 4 * 2 + c and keys 16 (t / 32) + lane / 4 +
// 8h, in the order j, h, c.
#include "backward_params.h"
#include "mask_numbers.cuh"

namespace torch_cubin::TC_KERNEL {

using namespace sm90;

constexpr int kMostRows = 96, kKeys = 64, kGroup = 128;  // kGroup: threads of a warpgroup
constexpr int kWarps = TC_THREADS / 32;

template <class Type>
constexpr int kRowNumbers =
    kKeys + 16 / sizeof(typename Type::Number);  // adjacent rows in different banks

template <class Type>
TC_DEVICE void lay_out(const Sm90BackwardParams& p, void* memory, u32* found) {
  using Number = typename Type::Number;
  using Pair = typename Type::Pair;
  auto numbers = static_cast<Number(*)[kRowNumbers<Type>]>(memory);
  int key_tile = blockIdx.x % p.key_tiles;
  tc_int64 line = blockIdx.x / p.key_tiles;
  int tile = static_cast<int>(line % p.bits.tiles), plane = static_cast<int>(line / p.bits.tiles);
  int first_row = tile * p.tile_rows, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  // Without a row for each query, all use the first one.
  bool alike = p.mask_stride[2] == 0;
  int rows = alike ? 1 : min(p.lengths.seqlen_q - first_row, p.tile_rows);
  auto from = static_cast<const Number*>(p.mask) + plane / p.bits.heads * p.mask_stride[0] +
              plane % p.bits.heads * p.mask_stride[1] + first_row * p.mask_stride[2];
  bool pairs = p.mask_stride[3] == 1 && p.mask_stride[2] % 2 == 0 &&
               reinterpret_cast<u64>(from) % sizeof(Pair) == 0;
  u32 what = 0, any = 0;
#pragma unroll 1
  for (int half = 0; half < p.tile_keys / kKeys; ++half) {
    int key = key_tile * p.tile_keys + half * kKeys + 2 * lane, left = p.lengths.seqlen_k - key;
    u32 own = 0;
    if (half > 0) __syncthreads();
    if (threadIdx.x == 0) *found = 0;
    __syncthreads();
#pragma unroll 4
    for (int row = warp; row < rows; row += kWarps) {
      Pair pair = 0;
      const Number* at = from + row * p.mask_stride[2] + key * p.mask_stride[3];
      if (pairs && left >= 2) {
        pair = __ldg(reinterpret_cast<const Pair*>(at));
      } else if (left > 0) {
        Number first = __ldg(at);
        pair = Type::join(first, left > 1 ? __ldg(at + p.mask_stride[3]) : first);
      }
      if (left > 0) own |= class_of<Type>(pair, p.minus_infinity);
      *reinterpret_cast<Pair*>(&numbers[row][2 * lane]) = pair;
    }
    own = __reduce_or_sync(~0u, own);
    if (lane == 0) atomicOr(found, own);
    __syncthreads();
    u32 of_half = *found;
    any |= of_half & 1;
    if ((of_half & 2) == 0) continue;
    what |= half == 0 ? kStepHidesInFirst : kStepHidesInSecond;
    // Two threads for each of the warpgroup's, each with half of the vectors.
    constexpr int kVector = 16 / sizeof(Number);
    int thread = threadIdx.x % kGroup, own_key = thread / 32 * 16 + thread % 32 / 4;
    int vectors = p.tile_rows / 2 / kVector, threads = 2 * p.tile_keys;
    auto to = reinterpret_cast<uint4*>(p.bits.words) +
              (line * p.key_tiles + key_tile) * vectors * threads + half * kGroup + thread;
#pragma unroll 1
    for (int v = threadIdx.x / kGroup; v < vectors; v += TC_THREADS / kGroup) {
      union {
        Number number[kVector];
        uint4 vector;
      } out;
#pragma unroll
      for (int n = 0; n < kVector; ++n) {
        int i = v * kVector + n;
        int row = alike ? 0 : min(i / 4 * 8 + thread % 4 * 2 + i % 2, rows - 1);
        out.number[n] = numbers[row][own_key + i / 2 % 2 * 8];
      }
      to[v * threads] = out.vector;
    }
  }
  if (threadIdx.x != 0) return;
  p.bits.steps[(static_cast<tc_int64>(plane) * p.key_tiles + key_tile) * p.bits.tiles + tile] =
      any != 0 ? what : static_cast<u32>(kStepHidesAll);
}

extern "C" __global__ void __launch_bounds__(TC_THREADS, 4)
    TC_KERNEL(const __grid_constant__ Sm90BackwardParams p) {
  __shared__ __align__(16) u32 memory[kMostRows * kRowNumbers<Floats>];
  __shared__ u32 found;
  wait_for_previous_kernel();
  if (p.mask_floats != 0) {
    lay_out<Floats>(p, memory, &found);
  } else {
    lay_out<Halves>(p, memory, &found);
  }
}

}  // namespace torch_cubin::TC_KERNEL
/* torch_cubin kernels
{"virtual_arch": ["90a"],
 "kernels": [
  {"name": "sm90_backward_added_mask_attention", "kind": "mask", "dtype": "any", "math": "any",
   "alignment": 1, "takes": ["added_alone", "added_mask", "float_mask"], "tile": [96, 128, 1],
   "block": [256, 1, 1], "cost": {"k_tile": 0, "fixed": 0}}]}
*/
