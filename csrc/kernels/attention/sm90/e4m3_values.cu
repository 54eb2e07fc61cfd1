// Transposes e4m3 values for sm90/e4m3.cu, since wgmma transposes 16-bit types only, and permutes
// keys to the order of that kernel's weights in registers.
//
// A thread moves 16 keys of 4 columns: words of 16 rows in, and 4 vectors of 16 bytes out.
#include "common/ptx.cuh"
#include "e4m3_layout.cuh"
#include "e4m3_values_params.h"

namespace torch_cubin::TC_KERNEL {

constexpr int kThreads = TC_THREADS;

// 16 keys: their first row in v, and how many of them exist.
struct Keys {
  tc_int64 row;
  int count;
};

// The packed sequence, and its rows, at index `at` of the output.
TC_DEVICE Keys find_packed(const Sm90E4m3ValuesParams& p, int at) {
  if (p.sequences == 0) return {0, 0};
  int low = 0, high = p.sequences;  // the last sequence that begins at or before it
  while (high - low > 1) {
    int middle = (low + high) / 2;
    bool before = sm90::values_place(__ldg(p.cu_seqlens + middle), middle, p.granule) <= at;
    (before ? low : high) = middle;
  }
  // Invalid offsets must not lead outside of v.
  int begin = max(0, min(__ldg(p.cu_seqlens + low), p.total));
  int end = max(begin, min(__ldg(p.cu_seqlens + low + 1), p.total));
  int first = at - sm90::values_place(begin, low, p.granule), rows = min(end - begin, p.seqlen);
  return {tc_int64{begin} + first, first < 0 ? 0 : max(0, min(rows - first, 16))};
}

// Word c gets column c of the four rows, whose bytes are four columns.
TC_DEVICE void transpose_bytes(u32 (&x)[4]) {
  u32 a = __byte_perm(x[0], x[1], 0x5140), b = __byte_perm(x[2], x[3], 0x5140);
  u32 c = __byte_perm(x[0], x[1], 0x7362), d = __byte_perm(x[2], x[3], 0x7362);
  x[0] = __byte_perm(a, b, 0x5410);
  x[1] = __byte_perm(a, b, 0x7632);
  x[2] = __byte_perm(c, d, 0x5410);
  x[3] = __byte_perm(c, d, 0x7632);
}

extern "C" __global__ void __launch_bounds__(kThreads)
    TC_KERNEL(const __grid_constant__ Sm90E4m3ValuesParams p) {
  wait_for_previous_kernel();
  if (blockIdx.x == 0 && threadIdx.x == 0) *p.next = 0;
  // Eight adjacent threads write 128 bytes of a column.
  int words = p.columns / 4, index = blockIdx.x % p.blocks * (kThreads / 8) + threadIdx.x / 8;
  int row = blockIdx.x / p.blocks, batch = row / p.heads, head = row % p.heads;
  int group = index / words * 8 + threadIdx.x % 8, column = index % words * 4;
  if (group >= p.keys / 16) return;
  Keys keys = p.cu_seqlens == nullptr
                  ? Keys{tc_int64{group} * 16, max(0, min(p.seqlen - group * 16, 16))}
                  : find_packed(p, group * 16);
  auto from = p.v + batch * p.stride[0] + head * p.stride[1] + keys.row * p.stride[2] + column;
  u32 x[4][4];  // [thread of a quad][its keys]
#pragma unroll
  for (int place = 0; place < 16; ++place) {
    int key = sm90::e4m3_key(place);
    u32 word = 0;
    if (key < keys.count) word = __ldg(reinterpret_cast<const u32*>(from + key * p.stride[2]));
    x[place / 4][place % 4] = word;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) transpose_bytes(x[i]);
  auto to = p.out + ((tc_int64{batch} * p.heads + head) * p.columns + column) * p.keys + group * 16;
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    *reinterpret_cast<uint4*>(to + tc_int64{c} * p.keys) =
        make_uint4(x[0][c], x[1][c], x[2][c], x[3][c]);
  }
}

}  // namespace torch_cubin::TC_KERNEL
/* torch_cubin kernels
{"virtual_arch": ["90a"],
 "kernels": [
  {"name": "sm90_e4m3_values_attention", "kind": "transpose", "of": "values",
   "dtype": "float8_e4m3fn", "math": "any", "tile": [16, 4, 1], "block": [256, 1, 1],
   "cost": {"k_tile": 0, "fixed": 0}}]}
*/
