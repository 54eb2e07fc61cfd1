// What the portable kernels of decoding and the others share: the launch with AttentionParams, and
// the split of the keys. flash_attention_with_kvcache on these kernels.
#pragma once

#include <cstdint>
#include <memory>

#include "kernels/attention/attention_params.h"
#include "kernels/attention/decode/append_params.h"
#include "kernels/attention/decode/decode_params.h"
#include "kernels/attention/decode/gather_params.h"
#include "kernels/attention/portable/combine_params.h"
#include "ops/attention/plan/plan.h"

namespace torch_cubin {

// The steps of the kernels that a device has for flash_attention_with_kvcache too.
constexpr AttentionStep kDecodeStep{"decode", "attention/decode/decode", sizeof(DecodeParams),
                                    true};
constexpr AttentionStep kCombineStep{"combine", "attention/portable/combine",
                                     sizeof(CombineParams)};
constexpr AttentionStep kAppendStep{"append", "attention/decode/append",
                                    sizeof(DecodeAppendParams)};
constexpr AttentionStep kGatherStep{"gather", "attention/decode/gather",
                                    sizeof(DecodeGatherParams)};

// Launches a kernel, unless there are no blocks. For `dynamic_shared` see Grid.
template <class Params>
void launch_attention(PackageKernel& kernel, const Params& params, int64_t blocks, int splits,
                      const Device& device, int64_t dynamic_shared = -1) {
  if (check_blocks(blocks)) launch(kernel, {blocks, splits, 1, 0, dynamic_shared}, device, params);
}

// Allocates memory for the partial results of `rows` rows and points the parameters to it; none for
// one part. (portable/backends.cpp)
Tensor allocate_parts(AttentionParams& params, int64_t rows, const Device& device);

// The grid that combines the parts of `rows` rows, with as few warps a row as load all of its parts
// at once: its number of blocks decides the time. With `one_order` parts are added in an order that
// does not depend on their number.
struct CombineGrid {
  CombineGrid(const AttentionRow& combine, int64_t splits, int64_t rows, int64_t head_dim_v,
              bool one_order);

  int warps_per_row = 1;
  int64_t blocks;      // of rows
  int blocks_per_row;  // of columns
};

void launch_combine(const AttentionRow& combine, const AttentionParams& params, int64_t rows,
                    bool one_order, const Device& device);

// The kernel for few queries of that head_dim, or null. `blocks`: of 16 rows, without a split. If
// two kernels have the same head_dim, the one with more columns a tile is for blocks whose parts
// can occupy nearly all multiprocessors: it fills one alone, so that there are half as many parts
// to combine.
const AttentionRow* decode_row(const AttentionTable& rows, AttentionDtype dtype, unsigned needs,
                               int64_t head_dim, int64_t blocks, const Device& device);

// The split of a decode's columns among blocks: the number of parts, the shared memory that puts
// equally many blocks on each multiprocessor, and the tiles that a block prefetches (DecodeParams).
struct DecodeSplit {
  int64_t parts = 1;
  int64_t dynamic_shared = -1;
  int prefetched = 0;
};

// `blocks`: without a split; `most`: the parts that the columns allow.
DecodeSplit split_decode(const AttentionRow& decode, int64_t blocks, int64_t most,
                         const Device& device);

// The part of the portable forward's backend that serves flash_attention_with_kvcache.
std::unique_ptr<KvCacheKernels> make_portable_kv_cache(const Device& device,
                                                       const AttentionEntries& entries);

}  // namespace torch_cubin
