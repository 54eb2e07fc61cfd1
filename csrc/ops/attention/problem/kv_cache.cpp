// The requirements of flash_attention_with_kvcache on its arguments, checked in the same manner on
// every device and for described calls.
#include "ops/attention/problem/kv_cache.h"

#include <algorithm>
#include <climits>
#include <cstdint>
#include <string>
#include <type_traits>
#include <utility>

#include "cubin/error.h"
#include "ops/attention/problem/arguments.h"
#include "ops/common/argument_checks.h"

namespace torch_cubin {
namespace {

constexpr const char* kCacheOp = "flash_attention_with_kvcache";
constexpr int64_t kCacheVector = 8;  // elements of 16 bits
constexpr int64_t kE4m3CacheVector = 16;
constexpr int64_t kMostHeadDim = 256;

std::string cache_argument(const char* name) { return argument_text(kCacheOp, name); }

[[noreturn]] void fail_cache_shape(const char* name, const std::string& expected,
                                   const TensorView& got) {
  fail({"input", cache_argument(name), "has a wrong shape", expected, got.shape_text(), ""});
}

void check_cache_shape(const char* name, const TensorView& view,
                       std::initializer_list<int64_t> sizes, const std::string& names) {
  const auto dim = static_cast<int64_t>(sizes.size());
  if (view.dim == dim && std::equal(sizes.begin(), sizes.end(), view.sizes)) return;
  fail_cache_shape(name, names + " = " + tuple_text(sizes.begin(), dim), view);
}

// Kernels count rows, pages and sequences in 32 bits.
void check_counts(const char* name, const TensorView& view) {
  if (std::max(view.sizes[0], view.sizes[1]) <= INT_MAX) return;
  fail({"input", cache_argument(name), "has a dimension that is too large", "less than 2^31",
        view.shape_text(), ""});
}

void check_cache_side(const char* name, const TensorView& view, const TensorView& q,
                      ScalarType dtype) {
  check_side(kCacheOp, name, view, "q", q, dtype);
}

// A cache whose layout kernels cannot read is refused, not copied, because it is written to.
void check_cache(const char* name, const TensorView& view, int64_t vector, bool written) {
  bool fits = view.sizes[3] <= 1 || view.strides[3] == 1;
  for (int64_t i = 0; i < 3; ++i) {
    if (view.sizes[i] <= 1) continue;
    fits = fits && view.strides[i] % vector == 0 && view.strides[i] >= 0;
    if (written && view.strides[i] == 0) {
      fail({"input", cache_argument(name), "shares memory between its elements, and is written to",
            "no expanded dimension", tuple_text(view.strides, view.dim) + " as strides", ""});
    }
  }
  const void* data = view.handle == nullptr ? nullptr : view.find_data();
  if (fits && reinterpret_cast<uintptr_t>(data) % 16 == 0) return;
  fail({"input", cache_argument(name), "cannot be read in vectors of 16 bytes",
        "contiguous columns, and every other stride and the address a multiple of 16 bytes",
        tuple_text(view.strides, view.dim) + " as strides", ""});
}

// Blocks run in any order, so the memory of a cache that is written must not be read or written
// through another argument.
void check_caches_apart(const KvCacheViews& views) {
  const TensorView* caches[] = {&views.k_cache, &views.v_cache};
  const char* names[] = {"k_cache", "v_cache"};
  for (int i = 0; i < 2; ++i) {
    const auto check = [&](const char* other, const TensorView& view) {
      check_apart(kCacheOp, names[i], *caches[i], other, view);
    };
    if (i == 0) check("v_cache", views.v_cache);
    check("q", views.q);
    const auto check_option = [&](const char* other, const auto& option) {
      if constexpr (std::is_same_v<std::decay_t<decltype(option)>, std::optional<TensorView>>) {
        if (option) check(other, *option);
      }
    };
#define TC_CHECK(type, name, ...) check_option(#name, views.name);
    TC_KV_CACHE_OPTIONS(TC_CHECK)
#undef TC_CHECK
  }
}

// Caches have the query's dtype or e4m3; only e4m3 has factors.
void check_cache_dtype(const KvCacheViews& views, KvCacheShape& shape) {
  const TensorView &q = views.q, &k_cache = views.k_cache;
  shape.e4m3 = k_cache.dtype == ScalarType::Float8_e4m3fn;
  if (!shape.e4m3 && k_cache.dtype != q.dtype) {
    fail_dtype(kCacheOp, "k_cache", dtype_name(q.dtype) + " or float8_e4m3fn", k_cache);
  }
  check_cache_side("k_cache", k_cache, q, k_cache.dtype);
  check_cache_side("v_cache", views.v_cache, q, k_cache.dtype);
}

void check_descale(const char* name, const std::optional<TensorView>& given, const TensorView& q,
                   const KvCacheShape& shape) {
  if (!given) return;
  if (!shape.e4m3) {
    fail({"input", cache_argument(name), "is given without caches of float8_e4m3fn",
          "none beside caches of " + dtype_name(q.dtype), "a tensor", ""});
  }
  check_cache_side(name, *given, q, ScalarType::Float);
  check_cache_shape(name, *given, {shape.batch, shape.kv_heads}, "(batch, heads_k)");
}

void check_lengths(const char* name, const std::optional<TensorView>& given, const TensorView& q) {
  if (!given) return;
  check_cache_side(name, *given, q, ScalarType::Int);
  check_cache_shape(name, *given, {q.sizes[0]}, "(batch,)");
}

void check_rotary(const KvCacheViews& views, KvCacheShape& shape) {
  if (views.rotary_cos.has_value() != views.rotary_sin.has_value()) {
    fail({"input", kCacheOp, "has one of 'rotary_cos' and 'rotary_sin' alone", "both or none",
          "one", ""});
  }
  if (!views.rotary_cos) return;
  if (!views.k) {
    fail({"input", cache_argument("rotary_cos"), "is given without new keys",
          "'k' and 'v', which are rotated by their positions", "none", ""});
  }
  const TensorView &cos = *views.rotary_cos, &sin = *views.rotary_sin;
  check_cache_side("rotary_cos", cos, views.q, views.q.dtype);
  check_cache_side("rotary_sin", sin, views.q, views.q.dtype);
  const char* wanted =
      "(positions, half of the columns that are rotated), at least one row, a multiple of 8 "
      "columns";
  if (cos.dim != 2 || cos.sizes[0] < 1 || cos.sizes[1] % kCacheVector != 0 || cos.sizes[1] < 1 ||
      2 * cos.sizes[1] > shape.head_dim) {
    fail_cache_shape("rotary_cos", wanted, cos);
  }
  check_cache_shape("rotary_sin", sin, {cos.sizes[0], cos.sizes[1]}, "the shape of 'rotary_cos'");
  shape.positions = cos.sizes[0];
  shape.rotary_dim = 2 * cos.sizes[1];
}

// The sizes of the query and of a row of the caches.
void check_heads(const KvCacheViews& views, KvCacheShape& shape) {
  const TensorView &q = views.q, &k_cache = views.k_cache, &v_cache = views.v_cache;
  const char* layout = views.block_table ? "(pages, page_size, heads_k, head_dim)"
                                         : "(batch, rows, heads_k, head_dim)";
  if (k_cache.dim != 4) fail_cache_shape("k_cache", layout, k_cache);
  if (v_cache.dim != 4 || !std::equal(k_cache.sizes, k_cache.sizes + 3, v_cache.sizes)) {
    fail_cache_shape(
        "v_cache", std::string("the sizes of 'k_cache' but for the last, ") + k_cache.shape_text(),
        v_cache);
  }
  shape.batch = q.sizes[0];
  shape.seqlen_q = q.sizes[1];
  shape.heads = q.sizes[2];
  shape.head_dim = q.sizes[3];
  shape.kv_heads = k_cache.sizes[2];
  shape.head_dim_v = v_cache.sizes[3];
  if (k_cache.sizes[3] != shape.head_dim) {
    fail({"input", cache_argument("k_cache"), "has another head_dim (last size) than 'q'",
          std::to_string(shape.head_dim), std::to_string(k_cache.sizes[3]), ""});
  }
  if (!heads_divide(shape.heads, shape.kv_heads)) {
    fail({"input", cache_argument("k_cache"),
          "has a number of heads that does not divide that of 'q'",
          "a divisor of " + std::to_string(shape.heads), std::to_string(shape.kv_heads), ""});
  }
  const int64_t vector = shape.e4m3 ? kE4m3CacheVector : kCacheVector;
  for (const int64_t size : {shape.head_dim, shape.head_dim_v}) {
    if (size % vector == 0 && size >= vector && size <= kMostHeadDim) continue;
    fail({"input", kCacheOp, "has no kernel for this head_dim",
          "a multiple of " + std::to_string(vector) + " up to 256", std::to_string(size), ""});
  }
  check_cache("k_cache", k_cache, vector, views.k.has_value());
  check_cache("v_cache", v_cache, vector, views.k.has_value());
}

// How many rows the caches have for a sequence.
void check_capacity(const KvCacheViews& views, KvCacheShape& shape) {
  const TensorView& k_cache = views.k_cache;
  if (!views.block_table) {
    shape.cache_batch = k_cache.sizes[0];
    shape.capacity = shape.cache_batch == 0 ? 0 : k_cache.sizes[1];
    if (!views.cache_batch_idx && shape.cache_batch != shape.batch) {
      fail_cache_shape("k_cache",
                       "the batch of 'q', " + std::to_string(shape.batch) +
                           ", where 'cache_batch_idx' is not given",
                       k_cache);
    }
    return;
  }
  const TensorView& table = *views.block_table;
  check_cache_side("block_table", table, views.q, ScalarType::Int);
  if (table.dim != 2 || table.sizes[0] != shape.batch) {
    fail_cache_shape("block_table",
                     "(batch, pages of a sequence), batch " + std::to_string(shape.batch), table);
  }
  if (views.cache_batch_idx) {
    fail({"input", cache_argument("cache_batch_idx"), "cannot go with a block table", "one of both",
          "both", ""});
  }
  shape.pages = k_cache.sizes[0];
  shape.page_size = k_cache.sizes[1];
  if (shape.pages == 0) {
    shape.capacity = 0;
  } else if (__builtin_mul_overflow(table.sizes[1], shape.page_size, &shape.capacity)) {
    shape.capacity = INT64_MAX;  // refused below, like every length from 2^30 on
  }
}

void check_new_rows(const KvCacheViews& views, KvCacheShape& shape) {
  if (views.k.has_value() != views.v.has_value()) {
    fail({"input", kCacheOp, "has one of 'k' and 'v' alone", "both or none", "one", ""});
  }
  if (!views.k) return;
  if (!views.cache_seqlens) {
    fail({"input", cache_argument("k"), "is given without 'cache_seqlens'",
          "the lengths behind which new keys are written", "none", ""});
  }
  check_cache_side("k", *views.k, views.q, views.q.dtype);
  check_cache_side("v", *views.v, views.q, views.q.dtype);
  const char* layout = "(batch, new rows, heads_k, head_dim)";
  if (views.k->dim != 4) fail_cache_shape("k", layout, *views.k);
  shape.new_columns = views.k->sizes[1];
  check_cache_shape("k", *views.k, {shape.batch, shape.new_columns, shape.kv_heads, shape.head_dim},
                    layout);
  check_cache_shape("v", *views.v,
                    {shape.batch, shape.new_columns, shape.kv_heads, shape.head_dim_v}, layout);
}

}  // namespace

KvCacheShape check_kv_cache(const KvCacheViews& views) {
  const TensorView& q = views.q;
  KvCacheShape shape{};
  if (q.dtype != ScalarType::Half && q.dtype != ScalarType::BFloat16) {
    fail({"input", cache_argument("q"), "has an unsupported dtype", "float16 or bfloat16",
          dtype_name(q.dtype), "Convert it with .to(dtype)."});
  }
  if (q.dim != 4) fail_cache_shape("q", "(batch, rows, heads, head_dim)", q);
  check_cache_dtype(views, shape);
  check_heads(views, shape);
  check_descale("k_descale", views.k_descale, q, shape);
  check_descale("v_descale", views.v_descale, q, shape);
  check_capacity(views, shape);
  check_lengths("cache_seqlens", views.cache_seqlens, q);
  check_lengths("cache_batch_idx", views.cache_batch_idx, q);
  check_new_rows(views, shape);
  check_counts("k_cache", views.k_cache);
  if (views.k) check_counts("k", *views.k);
  check_rotary(views, shape);
  if (views.k) check_caches_apart(views);

  // The other checks are those of every attention: keys and values as (batch, heads, rows,
  // head_dim).
  const int64_t sizes[3][4] = {{shape.batch, shape.heads, shape.seqlen_q, shape.head_dim},
                               {shape.batch, shape.kv_heads, shape.capacity, shape.head_dim},
                               {shape.batch, shape.kv_heads, shape.capacity, shape.head_dim_v}};
  const int64_t strides[4] = {0, 0, 0, 1};
  const auto described = [&](int i) {
    return TensorView(sizes[i], strides, 4, q.dtype, q.device_type, q.device_index);
  };
  const AttentionViews same = views.of_attention();
  const AttentionShape as_attention =
      check_attention(kCacheOp, described(0), described(1), described(2), same);
  shape.settings = attention_settings(kCacheOp, as_attention, same);
  return shape;
}

const std::vector<OptionEntry<KvCacheOptions>>& KvCacheOptions::entries() {
  using Options = KvCacheOptions;
  static const std::vector<OptionEntry<Options>> all = {TC_KV_CACHE_OPTIONS(TC_OPTION_ENTRY)};
  return all;
}

KvCacheCall::KvCacheCall(KvCacheArguments arguments) : KvCacheArguments(std::move(arguments)) {
  const KvCacheOptions& options = *this;
  KvCacheViews views{{}, TensorView(q), TensorView(k_cache), TensorView(v_cache)};
  TC_KV_CACHE_OPTIONS(TC_OPTION_OPENED)
  shape = check_kv_cache(views);
  dtype = views.q.dtype;
  device_index = views.q.device_index;
}

}  // namespace torch_cubin
