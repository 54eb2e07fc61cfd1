#include "ops/attention/problem/arguments.h"

#include <algorithm>
#include <climits>
#include <cmath>
#include <locale>
#include <numeric>
#include <sstream>
#include <utility>

#include "cubin/error.h"
#include "kernels/attention/attention_params.h"
#include "ops/common/argument_checks.h"

namespace torch_cubin {

std::string option_schema(const std::string& name, const OptionalTensor&) {
  return "Tensor? " + name + "=None";
}

std::string option_schema(const std::string& name, const std::optional<double>&) {
  return "float? " + name + "=None";
}

std::string option_schema(const std::string& name, bool value) {
  return "bool " + name + (value ? "=True" : "=False");
}

std::string option_schema(const std::string& name, int64_t value) {
  return "int " + name + "=" + std::to_string(value);
}

std::string option_schema(const std::string& name, double value) {
  std::ostringstream text;
  text.imbue(std::locale::classic());  // std::to_string writes the process's decimal comma
  text << "float " << name << "=" << value;
  return text.str();
}

const std::vector<OptionEntry<AttentionOptions>>& AttentionOptions::entries() {
  using Options = AttentionOptions;
  static const std::vector<OptionEntry<Options>> all = {TC_ATTENTION_OPTIONS(TC_OPTION_ENTRY)};
  return all;
}

AttentionViews views_of(const AttentionOptions& options) {
  AttentionViews views;
  TC_ATTENTION_OPTIONS(TC_OPTION_OPENED)
  views.e4m3 = options.e4m3;
  return views;
}

namespace {

// Rows, columns and heads must stay below this: kernels add a tile's rows to kNoBound in 32 bits.
constexpr int64_t kMaxLength = kNoBound - 256;

struct Argument {
  const char* name;
  const TensorView* view;
};

void check_dtypes(const char* op, const Argument (&all)[3], bool e4m3) {
  for (const Argument& each : all) {
    if (e4m3) {
      check_side(op, each.name, *each.view, "query", *all[0].view, ScalarType::Float8_e4m3fn);
      continue;
    }
    check_float_dtype(op, each.name, *each.view,
                      "torch.nn.functional.scaled_dot_product_attention");
  }
  for (const Argument& each : all) check_like(op, each.name, *each.view, "query", *all[0].view);
}

// "1e-50", which std::to_string rounds to 0.
std::string short_text(double number) {
  std::ostringstream text;
  text << number;
  return text.str();
}

int64_t size_from_end(const TensorView& view, int64_t i) {
  return i <= view.dim ? view.sizes[view.dim - i] : 1;
}

[[noreturn]] void fail_heads(const char* op, const std::string& expected, const std::string& got,
                             const char* advice) {
  fail({"input", op, "has numbers of heads that do not go together", expected, got, advice});
}

void set_heads(const char* op, AttentionShape& shape, int64_t q, int64_t k, int64_t v,
               bool enable_gqa) {
  const std::string got =
      "query " + std::to_string(q) + ", key " + std::to_string(k) + ", value " + std::to_string(v);
  if (enable_gqa) {
    if (!heads_divide(q, k) || !heads_divide(q, v)) {
      fail_heads(op, "heads of key and value that divide those of query", got, "");
    }
    shape.heads = q;
    shape.kv_heads = k == v ? k : q;  // fewer heads are repeated (repeat_heads)
    return;
  }
  int64_t heads = 1;
  for (const int64_t size : {q, k, v}) {
    if (size == 1) continue;
    if (heads != 1 && heads != size) {
      fail_heads(op, "equal numbers, or 1", got,
                 "Pass enable_gqa=True where several heads of query share one of key and value.");
    }
    heads = size;
  }
  shape.heads = heads;
  // If all heads share one key and value, the kernels read it once.
  shape.kv_heads = k == 1 && v == 1 && q == heads && heads > 0 ? 1 : heads;
}

void set_batch(const char* op, AttentionShape& shape, const Argument (&all)[3]) {
  int64_t dims = 0;
  for (const Argument& each : all) dims = std::max(dims, each.view->dim - 3);
  shape.batch.dim = std::max<int64_t>(dims, 0);
  for (int64_t i = 0; i < shape.batch.dim; ++i) {
    int64_t size = 1;
    for (const Argument& each : all) {
      const int64_t own = size_from_end(*each.view, 3 + shape.batch.dim - i);
      if (own == 1) continue;
      if (size != 1 && size != own) {
        fail({"input", op, "has batch dimensions that do not broadcast",
              "equal sizes or 1 at batch dimension " + std::to_string(i),
              std::to_string(size) + " and " + std::to_string(own), ""});
      }
      size = own;
    }
    shape.batch.sizes[i] = size;
  }
}

void set_packed(const char* op, AttentionShape& shape, const Argument (&all)[3],
                const AttentionViews& options) {
  const TensorView& query = *all[0].view;
  if (!options.cu_seqlens_q || !options.cu_seqlens_k) {
    fail({"input", op, "has one of 'cu_seqlens_q' and 'cu_seqlens_k' alone", "both or none", "one",
          ""});
  }
  for (const Argument& each : all) {
    if (each.view->dim != 3) {
      fail({"input", argument_text(op, each.name), "has a wrong rank for packed sequences",
            "(rows of all sequences, heads, head_dim)", each.view->shape_text(), ""});
    }
  }
  const TensorView &q_offsets = *options.cu_seqlens_q, &k_offsets = *options.cu_seqlens_k;
  check_side(op, "cu_seqlens_q", q_offsets, "query", query, ScalarType::Int);
  check_side(op, "cu_seqlens_k", k_offsets, "query", query, ScalarType::Int);
  if (q_offsets.dim != 1 || k_offsets.dim != 1 || q_offsets.sizes[0] < 1 ||
      q_offsets.sizes[0] != k_offsets.sizes[0]) {
    fail({"input", op, "has 'cu_seqlens_q' and 'cu_seqlens_k' of wrong shapes",
          "(sequences + 1,) each", q_offsets.shape_text() + " and " + k_offsets.shape_text(), ""});
  }
  if (options.attn_mask) {
    fail({"input", argument_text(op, "attn_mask"), "cannot go with packed sequences", "no mask",
          "a mask", ""});
  }
  set_heads(op, shape, query.sizes[1], all[1].view->sizes[1], all[2].view->sizes[1],
            options.enable_gqa);
  if (query.sizes[1] != shape.heads || all[1].view->sizes[1] != shape.kv_heads ||
      all[2].view->sizes[1] != shape.kv_heads) {
    fail_heads(op, "heads of packed sequences that need no broadcasting",
               query.shape_text() + ", " + all[1].view->shape_text(),
               "Pass enable_gqa=True where several heads of query share one of key and value.");
  }
  shape.packed = shape.has_heads = true;
  shape.batch.dim = 1;
  shape.batch.sizes[0] = q_offsets.sizes[0] - 1;
  const int64_t rows_q = shape.total_q = query.sizes[0];
  const int64_t rows_k = shape.total_k = all[1].view->sizes[0];
  // Without a bound, use the rows of all sequences: correct, but some blocks find no work.
  shape.seqlen_q = options.max_seqlen_q > 0 ? std::min(options.max_seqlen_q, rows_q) : rows_q;
  shape.seqlen_k = options.max_seqlen_k > 0 ? std::min(options.max_seqlen_k, rows_k) : rows_k;
  shape.out.append(rows_q);
  shape.out.append(shape.heads);
  shape.out.append(shape.head_dim_v);
  shape.logsumexp.append(shape.heads);
  shape.logsumexp.append(rows_q);
}

void check_mask(const char* op, const AttentionShape& shape, const TensorView& query,
                const TensorView& mask, bool is_causal) {
  if (is_causal) {
    fail({"input", argument_text(op, "attn_mask"), "cannot go with is_causal=True",
          "a mask or is_causal", "both", "Put the causal part into the mask."});
  }
  check_device(op, "attn_mask", mask, "query", query);
  if (mask.dtype != query.dtype && mask.dtype != ScalarType::Float &&
      mask.dtype != ScalarType::Bool) {
    const std::string added =
        query.dtype == ScalarType::Float ? "" : ", " + dtype_name(query.dtype);
    fail_dtype(op, "attn_mask", "bool" + added + " or float32", mask);
  }
  const int64_t scores_dim = shape.out.dim;
  bool fits = mask.dim <= scores_dim;
  for (int64_t i = 1; fits && i <= mask.dim; ++i) {
    const int64_t wanted = i == 1 ? shape.seqlen_k : shape.out.sizes[scores_dim - i];
    const int64_t size = size_from_end(mask, i);
    fits = size == wanted || size == 1;
  }
  if (fits) return;
  Shape scores = shape.out;
  scores.sizes[scores_dim - 1] = shape.seqlen_k;
  fail({"input", argument_text(op, "attn_mask"), "has a wrong shape",
        "one that broadcasts to " + scores.text(), mask.shape_text(), ""});
}

void check_per_head(const char* op, const char* name, const std::optional<TensorView>& given,
                    const AttentionShape& shape, const TensorView& query, bool batched) {
  if (!given) return;
  const TensorView& view = *given;
  check_side(op, name, view, "query", query, ScalarType::Float);
  const bool one = view.dim == 1 && view.sizes[0] == shape.heads;
  const bool two = batched && view.dim == 2 && view.sizes[0] == shape.batch.numel() &&
                   view.sizes[1] == shape.heads;
  if (one || two) return;
  fail({"input", argument_text(op, name), "has a wrong shape",
        "(" + std::to_string(shape.heads) + ",)" + (batched ? ", or (batch, heads)" : ""),
        view.shape_text(), ""});
}

// The additional requirements of float8_e4m3fn. A factor belongs to a head of the keys, which is
// never copied, so broadcasting is not allowed.
void check_e4m3(const char* op, const AttentionShape& shape, const Argument (&all)[3],
                const AttentionViews& options) {
  const TensorView &query = *all[0].view, &key = *all[1].view, &value = *all[2].view;
  for (const Argument& each : all) {
    if (shape.packed || each.view->dim == 4) continue;
    fail({"input", argument_text(op, each.name), "has a wrong rank for float8_e4m3fn",
          "(batch, heads, rows, head_dim)", each.view->shape_text(), ""});
  }
  if (shape.head_dim == 0 || shape.head_dim_v == 0) {
    fail({"input", argument_text(op, shape.head_dim == 0 ? "query" : "value"), "has no columns",
          "a head_dim of 1 to 256", "0", ""});
  }
  for (const Argument& each : {all[1], all[2]}) {
    const int64_t heads = each.view->sizes[1];
    const bool batch = shape.packed || each.view->sizes[0] == query.sizes[0];
    if (heads == shape.kv_heads && heads == key.sizes[1] && batch) continue;
    fail({"input", argument_text(op, each.name),
          "needs broadcasting, which float8_e4m3fn has none of",
          "the batch of query, and as many heads in key and value",
          query.shape_text() + ", " + key.shape_text() + ", " + value.shape_text(), ""});
  }
  const auto check = [&](const char* name, const std::optional<TensorView>& given) {
    if (!given) return;
    check_side(op, name, *given, "query", query, ScalarType::Float);
    const int64_t sizes[] = {shape.batch.sizes[0], shape.kv_heads};
    if (given->dim == 2 && std::equal(sizes, sizes + 2, given->sizes)) return;
    fail({"input", argument_text(op, name), "has a wrong shape",
          "(batch, heads of key) = " + tuple_text(sizes, 2), given->shape_text(), ""});
  };
  check("q_descale", options.q_descale);
  check("k_descale", options.k_descale);
  check("v_descale", options.v_descale);
}

}  // namespace

AttentionShape check_attention(const char* op, const TensorView& query, const TensorView& key,
                               const TensorView& value, const AttentionViews& options) {
  const Argument all[] = {{"query", &query}, {"key", &key}, {"value", &value}};
  check_dtypes(op, all, options.e4m3);
  for (const Argument& each : all) {
    if (each.view->dim < 2) {
      fail({"input", argument_text(op, each.name), "has too few dimensions", "at least 2",
            std::to_string(each.view->dim), ""});
    }
  }
  AttentionShape shape;
  const bool packed = options.cu_seqlens_q || options.cu_seqlens_k;
  const int rows = packed ? 3 : 2;
  shape.head_dim = size_from_end(query, 1);
  shape.head_dim_v = size_from_end(value, 1);
  if (size_from_end(key, 1) != shape.head_dim) {
    fail({"input", argument_text(op, "key"), "has another head_dim (last size) than query",
          std::to_string(shape.head_dim), std::to_string(size_from_end(key, 1)), ""});
  }
  if (size_from_end(key, rows) != size_from_end(value, rows)) {
    fail({"input", argument_text(op, "value"), "has another sequence length than key",
          std::to_string(size_from_end(key, rows)), std::to_string(size_from_end(value, rows)),
          ""});
  }
  if (packed) {
    set_packed(op, shape, all, options);
  } else {
    shape.seqlen_q = shape.total_q = size_from_end(query, 2);
    shape.seqlen_k = shape.total_k = size_from_end(key, 2);
    shape.has_heads = query.dim > 2 || key.dim > 2 || value.dim > 2;
    if (options.enable_gqa && (query.dim < 3 || key.dim < 3 || value.dim < 3)) {
      fail({"input", op, "with enable_gqa=True needs a dimension of heads",
            "(..., heads, rows, head_dim)",
            query.shape_text() + ", " + key.shape_text() + ", " + value.shape_text(), ""});
    }
    set_heads(op, shape, size_from_end(query, 3), size_from_end(key, 3), size_from_end(value, 3),
              options.enable_gqa);
    set_batch(op, shape, all);
    shape.out = shape.batch;
    if (shape.has_heads) shape.out.append(shape.heads);
    shape.out.append(shape.seqlen_q);
    shape.logsumexp = shape.out;
    shape.out.append(shape.head_dim_v);
  }
  if (std::max({shape.seqlen_q, shape.seqlen_k, shape.heads}) >= kMaxLength ||
      std::max(shape.head_dim, shape.head_dim_v) > INT_MAX) {
    fail({"input", op, "has a dimension that is too large",
          "less than " + std::to_string(kMaxLength),
          query.shape_text() + ", " + key.shape_text() + ", " + value.shape_text(), ""});
  }
  // Kernels add a row's index in its sequence to the rows before the sequence.
  if (std::max(shape.total_q, shape.total_k) >= kMostPackedRows ||
      std::max(shape.total_q + shape.seqlen_q, shape.total_k + shape.seqlen_k) > INT_MAX) {
    fail({"input", op, "has too many rows in its packed sequences",
          "less than " + std::to_string(kMostPackedRows) +
              " rows, and less than 2^31 with those of the longest sequence counted twice",
          query.shape_text() + ", " + key.shape_text(), "Split the sequences between calls."});
  }
  if (options.e4m3) check_e4m3(op, shape, all, options);
  if (options.attn_mask) check_mask(op, shape, query, *options.attn_mask, options.is_causal);
#define TC_CHECK_HEADS(name, batched) \
  check_per_head(op, #name, options.name, shape, query, batched);
  TC_PER_HEAD_OPTIONS(TC_CHECK_HEADS)
#undef TC_CHECK_HEADS
  if (options.dropout_seed && options.dropout_p > 0) {
    const TensorView& seed = *options.dropout_seed;
    check_device(op, "dropout_seed", seed, "query", query);  // attention_settings checks the rest
  }
  return shape;
}

AttentionSettings attention_settings(const char* op, const AttentionShape& shape,
                                     const AttentionViews& options) {
  AttentionSettings s;
  // Without columns, scores are 0 for every scale; 1 / sqrt(0) would make them NaN.
  const double root = std::sqrt(static_cast<double>(std::max<int64_t>(shape.head_dim, 1)));
  s.scale = options.scale.value_or(1 / root);
  if (!(options.dropout_p >= 0 && options.dropout_p <= 1)) {
    fail({"input", argument_text(op, "dropout_p"), "is out of range", "0 to 1",
          std::to_string(options.dropout_p), ""});
  }
  if (options.dropout_p > 0) {
    if (!options.dropout_seed) {
      fail({"input", std::string(op) + " with dropout_p > 0", "needs a seed",
            "'dropout_seed', an int64 tensor of one element", "none", ""});
    }
    const TensorView& seed = *options.dropout_seed;
    int64_t count = 1;
    for (int64_t i = 0; i < seed.dim; ++i) count *= seed.sizes[i];
    if (count != 1 || seed.dtype != ScalarType::Long) {
      fail({"input", argument_text(op, "dropout_seed"), "is no seed",
            "an int64 tensor of one element", dtype_name(seed.dtype) + " " + seed.shape_text(),
            ""});
    }
    s.drop_below = static_cast<int>(std::lround(options.dropout_p * 65536));
    s.keep_scale = s.drop_below < 65536 ? 65536.0 / (65536 - s.drop_below) : 0;
  }
  // Kernels take it as a float: a value that rounds to 0 would silently mean no softcap.
  if (!(options.softcap >= 0) || std::isinf(static_cast<float>(options.softcap)) ||
      (options.softcap > 0 && !std::isnormal(static_cast<float>(options.softcap)))) {
    fail({"input", argument_text(op, "softcap"), "is out of range", "0 (none) or 1.2e-38 to 3.4e38",
          short_text(options.softcap), ""});
  }
  if (options.window_left < -1 || options.window_right < -1) {
    fail({"input", op, "has a negative window", "-1 (open) or more columns",
          std::to_string(options.window_left) + " left, " + std::to_string(options.window_right) +
              " right",
          ""});
  }
  s.softcap = options.softcap;
  const int64_t open = kNoBound;
  s.first =
      static_cast<int>(options.window_left < 0 ? -open : -std::min(options.window_left, open));
  int64_t last = options.window_right < 0 ? open : std::min(options.window_right, open);
  if (options.is_causal) last = 0;
  s.last = static_cast<int>(last);
  s.bottom_right = options.bottom_right;
  return s;
}

void check_attention_backward(const char* op, const AttentionShape& shape, const TensorView& query,
                              const TensorView& grad_out, const TensorView& out,
                              const TensorView& logsumexp) {
  const ScalarType out_dtype =
      query.dtype == ScalarType::Float8_e4m3fn ? ScalarType::BFloat16 : query.dtype;
  const auto check = [&](const char* name, const TensorView& view, const Shape& wanted) {
    if (wanted.is_of(view)) return;
    fail({"input", argument_text(op, name), "has a wrong shape", wanted.text(), view.shape_text(),
          ""});
  };
  check("grad_out", grad_out, shape.out);
  check("out", out, shape.out);
  check("logsumexp", logsumexp, shape.logsumexp);
  check_side(op, "grad_out", grad_out, "query", query, out_dtype);
  check_side(op, "out", out, "query", query, out_dtype);
  check_side(op, "logsumexp", logsumexp, "query", query, sums_dtype(query.dtype));
}

void output_strides(const TensorView& like, const Shape& sizes, int64_t* strides) {
  const int64_t dim = sizes.dim;
  int64_t order[kMaxDims];
  std::iota(order, order + dim, 0);
  bool follow = like.dim == dim && std::equal(like.sizes, like.sizes + dim - 1, sizes.sizes);
  if (follow) {
    for (int64_t i = 1; i < dim; ++i) {  // insertion sort: stable, and fast for a few dims
      for (int64_t j = i; j > 0 && like.strides[order[j - 1]] < like.strides[order[j]]; --j) {
        std::swap(order[j - 1], order[j]);
      }
    }
    int64_t reach = 1;  // number of elements that the inner dims span
    for (int64_t i = dim - 1; i >= 0; --i) {
      const int64_t d = order[i];
      if (like.sizes[d] == 1) continue;
      follow = follow && like.sizes[d] != 0 && like.strides[d] >= reach;
      reach = like.strides[d] * like.sizes[d];
    }
    follow = follow && order[dim - 1] == dim - 1;
    if (!follow) std::iota(order, order + dim, 0);
  }
  int64_t step = 1;
  for (int64_t i = dim - 1; i >= 0; --i) {
    strides[order[i]] = step;
    step *= std::max<int64_t>(sizes.sizes[order[i]], 1);
  }
}

}  // namespace torch_cubin
