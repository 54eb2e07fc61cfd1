// The split of a decode's keys, and the portable kernels behind flash_attention_with_kvcache:
// decode/append.cu writes and rotates new keys and values, decode/decode.cu reads the cache,
// portable/combine.cu combines the parts of split sequences. decode/gather.cu packs the sequences,
// for other kernels.
#include "ops/attention/portable/decode.h"

#include <algorithm>
#include <climits>

#include "ops/common/batch_invariant.h"
#include "ops/common/launch.h"
#include "pytorch/autograd_state.h"

namespace torch_cubin {
namespace {

// Each costs a block 0.15 us of requests. Measured, 2 are best for a kernel alone on its
// multiprocessors; more blocks keep the memory busy without prefetching.
constexpr int kPrefetchedTiles = 2;

}  // namespace

CombineGrid::CombineGrid(const AttentionRow& combine, int64_t splits, int64_t rows,
                         int64_t head_dim_v, bool one_order) {
  while (warps_per_row < combine.rows && (one_order || splits > warps_per_row * kPartsTogether)) {
    warps_per_row *= 2;
  }
  blocks = ceil_div(rows, combine.rows / warps_per_row);
  blocks_per_row = static_cast<int>(
      std::max<int64_t>(1, ceil_div(head_dim_v, static_cast<int64_t>(kCombinedColumns))));
}

void launch_combine(const AttentionRow& combine, const AttentionParams& params, int64_t rows,
                    bool one_order, const Device& device) {
  const CombineGrid grid(combine, params.splits, rows, params.head_dim_v, one_order);
  CombineParams p{};
  static_cast<AttentionParams&>(p) = params;
  p.warps_per_row = grid.warps_per_row;
  launch_attention(*combine.kernel, p, grid.blocks, grid.blocks_per_row, device);
}

DecodeSplit split_decode(const AttentionRow& decode, int64_t blocks, int64_t most,
                         const Device& device) {
  DecodeSplit best;
  const int64_t multiprocessors = device.multiprocessors;
  // All in one wave; combining parts takes time.
  const int64_t fewest =
      std::max<int64_t>(1, ceil_div(9 * decode.saturating * multiprocessors, 10 * blocks));
  double best_score = -1;
  for (int64_t parts = fewest; parts <= std::min(2 * fewest, most); ++parts) {
    const int64_t all = blocks * parts;
    if (all > decode.slots) break;
    const int64_t full = ceil_div(all, multiprocessors) * multiprocessors;
    const double score = static_cast<double>(all) / static_cast<double>(full) -
                         0.01 * static_cast<double>(parts - fewest);
    if (score <= best_score) continue;
    best_score = score;
    best.parts = parts;
  }
  if (best_score < 0 && blocks < decode.slots) {
    best.parts = std::max<int64_t>(1, std::min({fewest, most, decode.slots / blocks}));
  }
  // Blocks of the previous kernel may still occupy some multiprocessors when these are scheduled,
  // and the others would get more than their share.
  const int64_t each = ceil_div(blocks * best.parts, multiprocessors);
  const double share = each == 1 ? 0.52 : each == 2 ? 0.375 : each == 3 ? 0.29 : 0;
  const auto shared = static_cast<int64_t>(share * device.shared_optin) / 1024 * 1024;
  if (shared > decode.dynamic_shared) best.dynamic_shared = shared;
  if (each == 1) best.prefetched = kPrefetchedTiles;
  return best;
}

const AttentionRow* decode_row(const AttentionTable& rows, AttentionDtype dtype, unsigned needs,
                               int64_t head_dim, int64_t blocks, const Device& device) {
  const int64_t busy = device.multiprocessors / std::max<int64_t>(1, blocks) * blocks;
  const bool fills = 10 * busy >= 9 * device.multiprocessors;
  const AttentionRow* best = nullptr;
  rows.for_each(dtype, needs, head_dim, [&](const AttentionRow& row) {
    // Of equal ones the first, as the manifest lists them.
    const bool better =
        best == nullptr || (fills ? row.columns > best->columns : row.columns < best->columns);
    if (better) best = &row;
  });
  return best;
}

namespace {

constexpr int64_t kFewestCachedColumns = 128;               // of a part
constexpr int64_t kGatherThreads = 256, kGatherBlocks = 8;  // of a block; of a multiprocessor
// Under batch_invariant(): the maximal number of parts of a sequence, whatever the batch.
constexpr int64_t kInvariantParts = 32;
// With fewer keys of e4m3 for each multiprocessor, two blocks of four warps are quicker than one of
// eight: 4 x 1024 with 8 heads took 11.4 us for 12.4 (H200).
constexpr int64_t kFewestColumnsOfEightWarps = 384;

const void* data(const OptionalTensor& tensor) { return tensor ? tensor->data_ptr() : nullptr; }

const int* ints(const OptionalTensor& tensor) { return static_cast<const int*>(data(tensor)); }

// The factors of e4m3 caches, (batch, heads_k) of any strides.
const float* descale_of(const OptionalTensor& tensor, tc_int64 (&strides)[2]) {
  if (!tensor) return nullptr;
  const TensorView view(*tensor);
  for (int i = 0; i < 2; ++i) strides[i] = view.strides[i];
  return static_cast<const float*>(view.data());
}

void strides_of(const TensorView& view, std::initializer_list<int> dims, tc_int64* out) {
  for (const int dim : dims) *out++ = view.sizes[dim] > 1 ? view.strides[dim] : 0;
}

// The common parameters of the kernels that write, read and pack the cache.
template <class Params>
void fill_cache(Params& p, const KvCacheCall& call) {
  const KvCacheShape& shape = call.shape;
  p.batch = static_cast<int>(shape.batch);
  p.heads = static_cast<int>(shape.heads);
  p.seqlen_q = static_cast<int>(shape.seqlen_q);
  p.head_dim = static_cast<int>(shape.head_dim);
  p.head_dim_v = static_cast<int>(shape.head_dim_v);
  p.new_columns = static_cast<int>(shape.new_columns);
  p.cache_batch = static_cast<int>(shape.cache_batch);
  p.pages = static_cast<int>(shape.pages);
  p.page_size = static_cast<int>(shape.page_size);
  p.cache_seqlens = ints(call.cache_seqlens);
  p.cache_batch_idx = ints(call.cache_batch_idx);
  p.block_table = ints(call.block_table);
  if (call.block_table) p.block_table_stride = TensorView(*call.block_table).sizes[1];
}

template <class Params>
void fill_descales(Params& p, const KvCacheCall& call) {
  p.k_descale = descale_of(call.k_descale, p.k_descale_stride);
  p.v_descale = descale_of(call.v_descale, p.v_descale_stride);
}

class PortableKvCache : public KvCacheKernels {
 public:
  PortableKvCache(const Device& device, const AttentionEntries& entries)
      : device_(device),
        combine_(entries.table(kCombineStep)),
        gather_(entries.table(kGatherStep)) {
    entries.each(kDecodeStep, [&](const AttentionRow& row) { decode_[row.e4m3].add(row); });
    entries.each(kAppendStep, [&](const AttentionRow& row) { append_[row.e4m3].add(row); });
  }

  bool run(const KvCacheCall& call, PackedKvCache* packed) const override {
    const KvCacheShape& shape = call.shape;
    const AttentionDtype dtype = attention_dtype(call.dtype);
    if (dtype == kAttendDtypes) return false;
    const AttentionRow* append_row = append_[shape.e4m3].first(dtype);
    const AttentionRow* combine = combine_.first(dtype);
    const AttentionRow* gather_row = gather_.first(dtype);
    if (combine == nullptr || append_row == nullptr) return false;
    if (packed != nullptr && gather_row == nullptr) return false;
    const int64_t blocks = ceil_div(shape.seqlen_q * shape.group(), 16) * shape.kv_heads;
    const bool few = shape.e4m3 && blocks * shape.batch * shape.capacity <
                                       kFewestColumnsOfEightWarps * device_.multiprocessors;
    // Kernels for caches of e4m3 serve queries of both dtypes; theirs is what they multiply in.
    const AttentionRow* decode =
        decode_row(decode_[shape.e4m3], shape.e4m3 ? kAttendFloat16 : dtype, 0,
                   std::max(shape.head_dim, shape.head_dim_v),
                   batch_invariant() || few ? INT64_MAX : blocks * shape.batch, device_);
    if (decode == nullptr) return false;
    Tensor q = call.q;
    if (call.k) append(call, *append_row->kernel, q);
    if (packed != nullptr) {
      gather(call, *gather_row->kernel, q, *packed);
    } else if (shape.has_queries()) {
      attend(call, *decode, *combine, q);
    }
    return true;
  }

 private:
  // Writes new keys and values; `q` becomes the rotated query if it is to be rotated.
  void append(const KvCacheCall& call, PackageKernel& kernel, Tensor& q) const {
    const KvCacheShape& shape = call.shape;
    DecodeAppendParams p{};
    fill_cache(p, call);
    fill_descales(p, call);
    const bool rotates = shape.rotary_dim > 0 && shape.has_queries();
    if (rotates) {
      const int64_t sizes[] = {shape.batch, shape.seqlen_q, shape.heads, shape.head_dim};
      p.q = q.data_ptr();
      strides_of(TensorView(q), {0, 1, 2}, p.q_stride);
      Tensor rotated = empty_cuda(sizes, 4, call.dtype, device_.index);
      p.q_out = rotated.mutable_data_ptr();
      q = rotated;
    }
    p.k = call.k->data_ptr();
    p.v = call.v->data_ptr();
    p.k_cache = call.k_cache.mutable_data_ptr();
    p.v_cache = call.v_cache.mutable_data_ptr();
    p.cos = data(call.rotary_cos);
    p.sin = data(call.rotary_sin);
    p.cos_stride = p.sin_stride = shape.rotary_dim / 2;
    strides_of(TensorView(*call.k), {0, 1, 2}, p.k_stride);
    strides_of(TensorView(*call.v), {0, 1, 2}, p.v_stride);
    strides_of(TensorView(call.k_cache), {0, 1, 2}, p.k_cache_stride);
    strides_of(TensorView(call.v_cache), {0, 1, 2}, p.v_cache_stride);
    p.kv_heads = static_cast<int>(shape.kv_heads);
    p.capacity = static_cast<int>(shape.capacity);
    p.rotary_dim = static_cast<int>(shape.rotary_dim);
    p.positions = static_cast<int>(std::min<int64_t>(shape.positions, INT_MAX));
    p.interleaved = call.rotary_interleaved;
    p.q_one_position = !call.rotates_by_row();
    const int64_t new_rows = shape.batch * shape.new_columns * shape.kv_heads;
    const int64_t q_rows = rotates ? shape.batch * shape.seqlen_q * shape.heads : 0;
    // Head dims are multiples of 8; expanded rows may have more than 2^63 elements.
    const int64_t vectors =
        new_rows * ((shape.head_dim + shape.head_dim_v) / 8) + q_rows * (shape.head_dim / 8);
    if (vectors == 0) return;
    if (vectors > INT_MAX) {
      fail({"input", "flash_attention_with_kvcache", "has too many new rows for one launch",
            "less than 2^34 new elements", std::to_string(vectors) + " vectors of 8", ""});
    }
    // Last, so that a refused call changes nothing; before the launch, because PyTorch throws here
    // for tensors that must not be written: those of inference mode outside of it.
    if (new_rows > 0) {
      bump_version(call.k_cache.get());
      bump_version(call.v_cache.get());
    }
    launch(kernel, {ceil_div(vectors, 256)}, device_, p);
  }

  void gather(const KvCacheCall& call, PackageKernel& kernel, const Tensor& q,
              PackedKvCache& packed) const {
    const KvCacheShape& shape = call.shape;
    const auto empty = [&](int64_t rows, int64_t columns) {
      const int64_t sizes[] = {rows, shape.kv_heads, columns};
      return empty_cuda(sizes, 3, call.dtype, device_.index);
    };
    const int64_t offsets = shape.batch + 1, rows = shape.batch * shape.capacity;
    packed.q = q;
    packed.k = empty(rows, shape.head_dim);
    packed.v = empty(rows, shape.head_dim_v);
    packed.cu_seqlens_q = empty_cuda(&offsets, 1, ScalarType::Int, device_.index);
    packed.cu_seqlens_k = empty_cuda(&offsets, 1, ScalarType::Int, device_.index);
    DecodeGatherParams p{};
    fill_cache(p, call);
    p.k = call.k_cache.data_ptr();
    p.v = call.v_cache.data_ptr();
    p.k_out = packed.k.mutable_data_ptr();
    p.v_out = packed.v.mutable_data_ptr();
    p.cu_q = static_cast<int*>(packed.cu_seqlens_q.mutable_data_ptr());
    p.cu_k = static_cast<int*>(packed.cu_seqlens_k.mutable_data_ptr());
    strides_of(TensorView(call.k_cache), {0, 1, 2}, p.k_stride);
    strides_of(TensorView(call.v_cache), {0, 1, 2}, p.v_stride);
    p.kv_heads = static_cast<int>(shape.kv_heads);
    p.capacity = static_cast<int>(shape.capacity);
    const int64_t vectors =
        shape.capacity * shape.kv_heads * ((shape.head_dim + shape.head_dim_v) / 8);
    if (vectors > INT_MAX) {
      fail({"input", "flash_attention_with_kvcache", "has too long sequences for batch_invariant()",
            "less than 2^34 elements of a sequence", std::to_string(vectors) + " vectors of 8",
            "Use a cache of fewer rows, or pages."});
    }
    const int64_t most = ceil_div(kGatherBlocks * device_.multiprocessors, shape.batch);
    const int64_t blocks = std::clamp<int64_t>(ceil_div(vectors, kGatherThreads), 1, most);
    launch(kernel, {blocks, shape.batch}, device_, p);
  }

  void attend(const KvCacheCall& call, const AttentionRow& decode, const AttentionRow& combine,
              const Tensor& q) const {
    const KvCacheShape& shape = call.shape;
    DecodeParams p{};
    fill_settings(p, shape.settings);
    fill_cache(p, call);
    fill_descales(p, call);
    p.q = q.data_ptr();
    p.k = call.k_cache.data_ptr();
    p.v = call.v_cache.data_ptr();
    p.out = call.out.mutable_data_ptr();
    point_to_heads(p, call);
    strides_of(TensorView(q), {0, 2, 1}, p.q_stride);
    strides_of(TensorView(call.k_cache), {0, 2, 1}, p.k_stride);
    strides_of(TensorView(call.v_cache), {0, 2, 1}, p.v_stride);
    strides_of(TensorView(call.out), {0, 2, 1}, p.out_stride);
    p.group = static_cast<int>(shape.group());
    p.seqlen_k = p.total_k = static_cast<int>(shape.capacity);
    p.total_q = p.seqlen_q;
    p.cache = 1;
    p.bfloat16 = call.dtype == ScalarType::BFloat16;

    const int64_t tiles = ceil_div(shape.seqlen_q * shape.group(), decode.rows) * shape.kv_heads;
    const int64_t dynamic_shared = split(p, shape, decode, tiles);
    const int64_t rows = shape.batch * shape.heads * shape.seqlen_q;
    const Tensor parts = allocate_parts(p, rows, device_);
    launch_attention(*decode.kernel, p, tiles * shape.batch, p.splits, device_, dynamic_shared);
    if (p.splits > 1) launch_combine(combine, p, rows, batch_invariant(), device_);
  }

  // The maximal number of blocks that share a sequence; the actual number depends on its length,
  // which only the device knows. Returns the shared memory of a block.
  int64_t split(DecodeParams& p, const KvCacheShape& shape, const AttentionRow& decode,
                int64_t tiles) const {
    // The band's columns that the rows of one call can attend to.
    int64_t seen = shape.capacity;
    if (p.first != -kNoBound) {
      seen = std::min<int64_t>(seen, shape.seqlen_q + 16 - static_cast<int64_t>(p.first));
    }
    p.seen_columns = static_cast<int>(seen);
    p.fewest_columns = static_cast<float>(kFewestCachedColumns);
    const int64_t longest = std::max<int64_t>(1, seen / kFewestCachedColumns);
    if (batch_invariant()) {
      // Sinks are added where parts are combined, or else by the decode kernel: here always the
      // former, for any capacity.
      p.splits = static_cast<int>(std::max<int64_t>(std::min(kInvariantParts, longest),
                                                    shape.capacity > 0 && p.sinks ? 2 : 1));
      return -1;
    }
    const DecodeSplit wanted =
        split_decode(decode, std::max<int64_t>(1, tiles * shape.batch),
                     std::min<int64_t>(kMostCombinedParts, longest), device_);
    p.splits = static_cast<int>(wanted.parts);
    p.prefetched = wanted.prefetched;
    // Slightly less than equal lengths need, so that rounding gives them all of the parts.
    p.share = static_cast<float>(0.999 / static_cast<double>(wanted.parts * shape.batch));
    return wanted.dynamic_shared;
  }

  const Device& device_;
  AttentionTable combine_, gather_;
  AttentionTable decode_[2], append_[2];  // for caches of the query's dtype, and of e4m3
};

}  // namespace

std::unique_ptr<KvCacheKernels> make_portable_kv_cache(const Device& device,
                                                       const AttentionEntries& entries) {
  return std::make_unique<PortableKvCache>(device, entries);
}

}  // namespace torch_cubin
