// flash_attention_with_kvcache. On CUDA: check -> launch; under batch_invariant() the sequences are
// packed and attended to as packed ones, by the kernels of a prefill, whose bits it then has. On
// the CPU, for development and tests only: plain loops that write, rotate and gather rows as
// decode/append.cu and decode/decode.cu do, then the reference of attention (reference.cpp) for
// each sequence, in float32 for e4m3 caches.
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Float8_e4m3fn.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <tuple>
#include <type_traits>
#include <utility>

#include "cubin/error.h"
#include "ops/attention/api/attention.h"
#include "ops/attention/compose/compose.h"
#include "ops/attention/plan/plan.h"
#include "ops/attention/problem/operands.h"
#include "ops/common/aten.h"
#include "ops/common/batch_invariant.h"
#include "ops/common/stable_ops.h"
#include "pytorch/aten_kernels.h"
#include "pytorch/autograd_state.h"

namespace torch_cubin {
namespace {

// A contiguous tensor's memory with other sizes.
template <size_t kDim>
Tensor with_sizes(const Tensor& tensor, const int64_t (&sizes)[kDim]) {
  int64_t strides[kDim], next = 1;
  for (size_t i = kDim; i-- > 0; next *= sizes[i]) strides[i] = next;
  AtenTensorHandle made = nullptr;
  check_aten(aoti_torch__reinterpret_tensor(tensor.get(), kDim, sizes, strides, 0, &made),
             "flash_attention_with_kvcache");
  return Tensor(made);
}

Tensor attend_packed(const KvCacheCall& call, const PackedKvCache& packed) {
  const KvCacheShape& shape = call.shape;
  const Tensor q = with_sizes(torch::stable::contiguous(packed.q),
                              {shape.batch * shape.seqlen_q, shape.heads, shape.head_dim});
  AttentionOptions options{call.of_attention()};
  options.cu_seqlens_q = packed.cu_seqlens_q;
  options.cu_seqlens_k = packed.cu_seqlens_k;
  options.max_seqlen_q = shape.seqlen_q;
  options.max_seqlen_k = shape.capacity;
  const auto [out, logsumexp] = attention_forward_cuda(
      {"flash_attention_with_kvcache", q, packed.k, packed.v, std::move(options)}, false);
  return with_sizes(torch::stable::contiguous(out),
                    {shape.batch, shape.seqlen_q, shape.heads, shape.head_dim_v});
}

}  // namespace

Tensor flash_attention_with_kvcache_cuda(KvCacheArguments arguments) {
  KvCacheCall call(std::move(arguments));
  const KvCacheShape& shape = call.shape;
  const int64_t sizes[] = {shape.batch, shape.seqlen_q, shape.heads, shape.head_dim_v};
  call.out = empty_cuda(sizes, 4, call.dtype, call.device_index);
  if (shape.batch == 0 || (!shape.has_queries() && shape.new_columns == 0)) return call.out;
  call.q = vector_rows(call.q);
  for (OptionalTensor* rows : {&call.k, &call.v}) {
    if (*rows) *rows = vector_rows(**rows);
  }
  for (OptionalTensor* whole : {&call.rotary_cos, &call.rotary_sin, &call.cache_seqlens,
                                &call.cache_batch_idx, &call.block_table}) {
    *whole = contiguous(*whole);
  }
  make_heads_contiguous(call);
  PackedKvCache packed;
  const bool packs = batch_invariant() && !shape.e4m3 && shape.has_queries() && shape.capacity > 0;
  for (const auto& kernels : attention_kernels(device(call.device_index)).kv_cache) {
    if (kernels->run(call, packs ? &packed : nullptr)) {
      return packs ? attend_packed(call, packed) : call.out;
    }
  }
  const std::string head_dims = "none for head_dim " + std::to_string(shape.head_dim) + " and " +
                                std::to_string(shape.head_dim_v);
  if (shape.e4m3) {
    fail({"no_kernel", "flash_attention_with_kvcache", "has no kernel for caches of float8_e4m3fn",
          "kernels of float8_e4m3fn, which sm_90a has", head_dims,
          "Keep the caches in " + dtype_name(call.dtype) + " on this GPU."});
  }
  fail({"no_kernel", "flash_attention_with_kvcache", "has no kernel for these tensors",
        "kernels of the kind decode for " + dtype_name(call.dtype), head_dims,
        "Build the kernels with the library."});
}

namespace {

// A tensor of (batch or pages, rows, heads, columns) with contiguous columns.
template <class T>
struct Rows {
  explicit Rows(const Tensor& tensor) : view(tensor) {}
  T* at(int64_t first, int64_t row, int64_t head) const {
    auto* data = static_cast<T*>(const_cast<void*>(view.data()));
    return data + first * view.strides[0] + row * view.strides[1] + head * view.strides[2];
  }
  TensorView view;
};

// T: dtype of the query; C: dtype of the caches.
template <class T, class C>
class Reference {
  static constexpr bool kQuantised = !std::is_same_v<T, C>;
  using Gathered = std::conditional_t<kQuantised, float, C>;

 public:
  explicit Reference(const KvCacheCall& call) : call_(call), shape_(call.shape) {
    if (call.cache_seqlens) lengths_ = numbers(*call.cache_seqlens);
    if (call.cache_batch_idx) sequences_ = numbers(*call.cache_batch_idx);
    if (call.block_table) pages_ = numbers(*call.block_table);
  }

  Tensor run() {
    Tensor q = call_.q;
    if (call_.k) {
      append();
      if (shape_.rotary_dim > 0) q = rotate_query();
    }
    Tensor out = torch::stable::new_zeros(
        call_.q, {shape_.batch, shape_.seqlen_q, shape_.heads, shape_.head_dim_v});
    const AttentionOptions options{call_.of_attention()};
    for (int64_t batch = 0; batch < shape_.batch && shape_.seqlen_q > 0; ++batch) {
      const int64_t columns = std::min(length(batch) + shape_.new_columns, shape_.capacity);
      Tensor own_q = torch::stable::narrow(q, 0, batch, 1);
      if (kQuantised) own_q = torch::stable::to(own_q, ScalarType::Float);
      const Tensor computed = std::get<0>(attention_forward_cpu(
          {"flash_attention_with_kvcache", torch::stable::transpose(own_q, 1, 2),
           gathered(call_.k_cache, call_.k_descale, batch, columns),
           gathered(call_.v_cache, call_.v_descale, batch, columns),
           options_of_part(options, batch, 1, 0, shape_.heads)},
          false));
      Tensor place = torch::stable::narrow(out, 0, batch, 1);
      torch::stable::copy_(place, torch::stable::transpose(computed, 1, 2));
    }
    return out;
  }

 private:
  static const int32_t* numbers(const Tensor& tensor) {
    return static_cast<const int32_t*>(TensorView(tensor).data());
  }

  int64_t length(int64_t batch) const {
    if (lengths_ == nullptr) return shape_.capacity;
    return std::min(std::max<int64_t>(lengths_[batch], 0), shape_.capacity);
  }

  // The sequence or page of the cache that has this column of a sequence, and the row in it.
  void find(int64_t batch, int64_t column, int64_t* first, int64_t* row) const {
    if (pages_ == nullptr) {
      *first = sequences_ == nullptr ? batch : sequences_[batch];
      *row = column;
      return;
    }
    const int64_t of_sequence = TensorView(*call_.block_table).sizes[1];
    *first = pages_[batch * of_sequence + column / shape_.page_size];
    *row = column % shape_.page_size;
  }
  int64_t limit() const { return pages_ == nullptr ? shape_.cache_batch : shape_.pages; }

  void append() {
    const Rows<T> k(*call_.k), v(*call_.v);
    const Rows<C> k_cache(call_.k_cache), v_cache(call_.v_cache);
    for (int64_t batch = 0; batch < shape_.batch; ++batch) {
      for (int64_t i = 0; i < shape_.new_columns; ++i) {
        const int64_t position = length(batch) + i;
        if (position >= shape_.capacity) continue;
        int64_t first, row;
        find(batch, position, &first, &row);
        if (first < 0 || first >= limit()) continue;
        for (int64_t head = 0; head < shape_.kv_heads; ++head) {
          rotate(k.at(batch, i, head), k_cache.at(first, row, head), position,
                 descale_of(call_.k_descale, batch, head));
          write(v.at(batch, i, head), v_cache.at(first, row, head), shape_.head_dim_v,
                descale_of(call_.v_descale, batch, head));
        }
      }
    }
  }

  Tensor rotate_query() {
    const Rows<T> q(call_.q);
    const Tensor out = torch::stable::new_empty(
        call_.q, {shape_.batch, shape_.seqlen_q, shape_.heads, shape_.head_dim});
    const Rows<T> rotated(out);
    const bool by_row = call_.rotates_by_row();
    for (int64_t batch = 0; batch < shape_.batch; ++batch) {
      for (int64_t i = 0; i < shape_.seqlen_q; ++i) {
        for (int64_t head = 0; head < shape_.heads; ++head) {
          rotate(q.at(batch, i, head), rotated.at(batch, i, head), length(batch) + (by_row ? i : 0),
                 1.0f);
        }
      }
    }
    return out;
  }

  static float descale_of(const OptionalTensor& descale, int64_t batch, int64_t head) {
    if (!descale) return 1.0f;
    const TensorView view(*descale);
    return static_cast<const float*>(view.data())[batch * view.strides[0] + head * view.strides[1]];
  }

  // Converts to e4m3 for the cache: rounds to nearest even, clamps to 448 in magnitude, keeps NaN.
  template <class To>
  static To rounded(float x, float descale) {
    if constexpr (std::is_same_v<To, torch::headeronly::Float8_e4m3fn>) {
      x /= descale;
      return static_cast<To>(x > 448.0f ? 448.0f : x < -448.0f ? -448.0f : x);
    } else {
      return static_cast<To>(x);
    }
  }

  template <class To>
  static void write(const T* from, To* to, int64_t columns, float descale) {
    for (int64_t i = 0; i < columns; ++i) {
      if constexpr (std::is_same_v<To, T>) {
        to[i] = from[i];
      } else {
        to[i] = rounded<To>(static_cast<float>(from[i]), descale);
      }
    }
  }

  template <class To>
  void rotate(const T* from, To* to, int64_t position, float descale) const {
    write(from, to, shape_.head_dim, descale);
    if (shape_.rotary_dim == 0) return;
    const int64_t half = shape_.rotary_dim / 2;
    position = std::min(position, shape_.positions - 1);
    const T* cos = static_cast<const T*>(TensorView(*call_.rotary_cos).data()) + position * half;
    const T* sin = static_cast<const T*>(TensorView(*call_.rotary_sin).data()) + position * half;
    for (int64_t i = 0; i < half; ++i) {
      const int64_t a = call_.rotary_interleaved ? 2 * i : i;
      const int64_t b = call_.rotary_interleaved ? 2 * i + 1 : i + half;
      const auto x = static_cast<float>(from[a]), y = static_cast<float>(from[b]);
      const auto c = static_cast<float>(cos[i]), s = static_cast<float>(sin[i]);
      to[a] = rounded<To>(x * c - y * s, descale);
      to[b] = rounded<To>(y * c + x * s, descale);
    }
  }

  // (1, heads, columns, head_dim) of one sequence of a cache.
  Tensor gathered(const Tensor& cache, const OptionalTensor& descale, int64_t batch,
                  int64_t columns) const {
    const Rows<C> from(cache);
    const int64_t width = from.view.sizes[3];
    Tensor out = torch::stable::new_empty(cache, {1, shape_.kv_heads, columns, width},
                                          kQuantised ? ScalarType::Float : TensorView(cache).dtype);
    if (columns == 0 || shape_.kv_heads == 0) return out;
    auto* to = static_cast<Gathered*>(out.mutable_data_ptr());
    for (int64_t head = 0; head < shape_.kv_heads; ++head) {
      const float factor = descale_of(descale, batch, head);
      for (int64_t column = 0; column < columns; ++column, to += width) {
        int64_t first, row;
        find(batch, column, &first, &row);
        // On the GPU an unsigned minimum turns a negative page into the last one.
        if (pages_ == nullptr) first = std::max<int64_t>(first, 0);
        first = first < 0 ? limit() - 1 : std::min(first, limit() - 1);
        const C* source = from.at(first, row, head);
        for (int64_t i = 0; i < width; ++i) {
          if constexpr (kQuantised) {
            to[i] = static_cast<float>(source[i]) * factor;
          } else {
            to[i] = source[i];
          }
        }
      }
    }
    return out;
  }

  const KvCacheCall& call_;
  const KvCacheShape& shape_;
  const int32_t *lengths_ = nullptr, *sequences_ = nullptr, *pages_ = nullptr;
};

}  // namespace

Tensor flash_attention_with_kvcache_cpu(KvCacheArguments arguments) {
  KvCacheCall call(std::move(arguments));
  const auto plain = [](const Tensor& tensor) { return torch::stable::contiguous(detach(tensor)); };
  call.q = plain(call.q);
  const auto make_plain = [&](auto& option) {
    if constexpr (std::is_same_v<std::decay_t<decltype(option)>, OptionalTensor>) {
      if (option) option = plain(*option);
    }
  };
#define TC_PLAIN(type, name, ...) make_plain(call.name);
  TC_KV_CACHE_OPTIONS(TC_PLAIN)
#undef TC_PLAIN
  if (call.k) {  // after the copies, which may run out of memory
    bump_version(call.k_cache.get());
    bump_version(call.v_cache.get());
  }
  using torch::headeronly::BFloat16;
  using torch::headeronly::Float8_e4m3fn;
  using torch::headeronly::Half;
  if (call.dtype == ScalarType::Half) {
    return call.shape.e4m3 ? Reference<Half, Float8_e4m3fn>(call).run()
                           : Reference<Half, Half>(call).run();
  }
  return call.shape.e4m3 ? Reference<BFloat16, Float8_e4m3fn>(call).run()
                         : Reference<BFloat16, BFloat16>(call).run();
}

}  // namespace torch_cubin
