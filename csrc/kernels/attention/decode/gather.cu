// Copies the sequences of a cache one behind the other, so that the kernels of packed sequences can
// read them: under batch_invariant(), where decoding must give the bits of a prefill.
//
// grid.y is the batch; any grid.x is correct. A thread copies vectors of 16 bytes.
#include "common/dtype.cuh"
#include "gather_params.h"

namespace torch_cubin::TC_KERNEL {

constexpr int kThreads = TC_THREADS, kVector = 8;  // elements

TC_DEVICE int columns_of(const DecodeGatherParams& p, int batch) {
  if (p.cache_seqlens == nullptr) return p.capacity;
  int cached = min(max(p.cache_seqlens[batch], 0), p.capacity);
  return min(cached + p.new_columns, p.capacity);
}

// The columns of all sequences before this block's.
TC_DEVICE int columns_before(const DecodeGatherParams& p) {
  __shared__ int total;
  if (threadIdx.x == 0) total = 0;
  __syncthreads();
  int own = 0;
  for (u32 batch = threadIdx.x; batch < blockIdx.y; batch += kThreads) own += columns_of(p, batch);
  own = __reduce_add_sync(~0u, own);
  if (threadIdx.x % 32 == 0 && own != 0) atomicAdd(&total, own);  // integers: any order
  __syncthreads();
  return total;
}

// The offset of a cache's row.
TC_DEVICE tc_int64 row_of(const DecodeGatherParams& p, int column, const tc_int64 (&stride)[3]) {
  int sequence = blockIdx.y, row = column, limit = p.cache_batch;
  if (p.block_table != nullptr) {
    int page = column / p.page_size;
    row -= page * p.page_size;
    sequence = p.block_table[sequence * p.block_table_stride + page];
    limit = p.pages;
  } else if (p.cache_batch_idx != nullptr) {
    sequence = p.cache_batch_idx[sequence];
  }
  return min(max(sequence, 0), limit - 1) * stride[0] + row * stride[1];
}

// Copies the vector with this number of a column.
TC_DEVICE void copy(const DecodeGatherParams& p, const void* from, void* to, tc_int64 row,
                    const tc_int64 (&stride)[3], int head_dim, int first, int column, u32 vector) {
  u32 vectors = head_dim / kVector, head = vector / vectors,
      at = (vector - head * vectors) * kVector;
  tc_int64 out = (static_cast<tc_int64>(first + column) * p.kv_heads + head) * head_dim + at;
  auto source = static_cast<const u16*>(from) + row + head * stride[2] + at;
  *reinterpret_cast<uint4*>(static_cast<u16*>(to) + out) = *reinterpret_cast<const uint4*>(source);
}

extern "C" __global__ void __launch_bounds__(kThreads)
    TC_KERNEL(const __grid_constant__ DecodeGatherParams p) {
  wait_for_previous_kernel();
  int batch = blockIdx.y, first = columns_before(p), columns = columns_of(p, batch);
  if (blockIdx.x == 0 && threadIdx.x < 2) {  // where this sequence begins, and the next one
    p.cu_q[batch + threadIdx.x] = (batch + threadIdx.x) * p.seqlen_q;
    p.cu_k[batch + threadIdx.x] = first + (threadIdx.x == 0 ? 0 : columns);
  }
  u32 k_vectors = p.kv_heads * (p.head_dim / kVector);
  u32 vectors = k_vectors + p.kv_heads * (p.head_dim_v / kVector);
  for (u32 i = blockIdx.x * kThreads + threadIdx.x; i < columns * vectors;
       i += gridDim.x * kThreads) {
    u32 column = i / vectors, vector = i - column * vectors;
    if (vector < k_vectors) {
      copy(p, p.k, p.k_out, row_of(p, column, p.k_stride), p.k_stride, p.head_dim, first, column,
           vector);
    } else {
      copy(p, p.v, p.v_out, row_of(p, column, p.v_stride), p.v_stride, p.head_dim_v, first, column,
           vector - k_vectors);
    }
  }
}

}  // namespace torch_cubin::TC_KERNEL
/* torch_cubin kernels
{"kernels": [
  {"name": "decode_gather_attention_{d.short}", "kind": "gather", "tile": [1, 1, 256],
   "block": [256, 1, 1], "cost": {"k_tile": 0, "fixed": 1000}, "for": {"d": "f16 bf16"}}]}
*/
