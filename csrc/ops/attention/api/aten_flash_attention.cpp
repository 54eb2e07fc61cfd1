#include <algorithm>

#include "ops/attention/api/aten_attention.h"
#include "ops/common/batch_invariant.h"
#include "ops/common/stable_ops.h"
#include "runtime/device.h"

namespace torch_cubin {
namespace {

// out, logsumexp, rng_state, unused, debug_attn_mask
using FlashResults = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;
using GivenSize = std::optional<int64_t>;

// Below this number of keys in all, PyTorch's kernel of packed sequences was quicker on an H200: it
// needs one launch, ours three. 8 x 200 had 0.70 of its speed, 64 of 32 to 158 (6,080) 1.04,
// 16 x 512 1.38.
constexpr int64_t kFewPackedKeys = 8192;
constexpr int kHopper = 90;

// [batch, heads, rows, head_dim], [batch, rows, heads, head_dim], or, of packed sequences,
// [rows of all, heads, head_dim].
enum class Layout { kHeadsFirst, kRowsFirst, kPacked };

// What forward and backward share.
struct FlashCall {
  FlashCall(Layout layout, const Tensor& query, const Tensor& key, const Tensor& value,
            double dropout_p, bool is_causal, std::optional<double> scale)
      : layout(layout),
        query(query),
        key(key),
        value(value),
        q(query),
        k(key),
        v(value),
        dropout_p(dropout_p),
        is_causal(is_causal),
        scale(scale) {}

  Layout layout;
  const Tensor &query, &key, &value;
  TensorView q, k, v;
  double dropout_p;
  bool is_causal;
  std::optional<double> scale;
  GivenTensor ends_q{}, ends_k{};  // of packed sequences
  int64_t max_q = 0, max_k = 0;
  int64_t window_left = -1, window_right = -1;

  bool packed() const { return layout == Layout::kPacked; }
  // A tensor as our ops take it, and back.
  Tensor heads_first(const Tensor& tensor) const {
    return layout == Layout::kRowsFirst ? torch::stable::transpose(tensor, 1, 2) : tensor;
  }
  AttentionArguments arguments(const char* op) const;
};

bool is_given(const GivenTensor& tensor) { return tensor && is_defined(*tensor); }

Policy flash_policy() { return is_flash_implementation() ? Policy::kAll : serving_policy(); }

// Of aten::_flash_attention_*. PyTorch's own SDPA calls them without offsets, which install() and
// drop_in() leave to it.
Policy flash_policy(const GivenTensor& cum_seq_q, const GivenTensor& cum_seq_k) {
  const bool packed = is_given(cum_seq_q) && is_given(cum_seq_k);
  return packed || is_flash_implementation() ? flash_policy() : Policy::kOff;
}

FlashCall rows_first(const Tensor& query, const Tensor& key, const Tensor& value,
                     const GivenTensor& ends_q, const GivenTensor& ends_k, int64_t max_q,
                     int64_t max_k, double dropout_p, bool is_causal, std::optional<double> scale,
                     GivenSize window_left, GivenSize window_right) {
  const bool packed = is_given(ends_q) && is_given(ends_k);
  FlashCall call(packed ? Layout::kPacked : Layout::kRowsFirst, query, key, value, dropout_p,
                 is_causal, scale);
  call.ends_q = is_given(ends_q) ? ends_q : std::nullopt;
  call.ends_k = is_given(ends_k) ? ends_k : std::nullopt;
  call.max_q = max_q;
  call.max_k = max_k;
  // PyTorch's negative sizes are all -1 here.
  call.window_left = std::max<int64_t>(window_left.value_or(-1), -1);
  call.window_right = std::max<int64_t>(window_right.value_or(-1), -1);
  return call;
}

AttentionArguments FlashCall::arguments(const char* op) const {
  AttentionArguments given = {op, heads_first(query), heads_first(key), heads_first(value), {}};
  AttentionOptions& options = given.options;
  options.is_causal = is_causal;
  options.scale = scale;
  options.enable_gqa = true;
  options.bottom_right = true;
  options.window_left = window_left;
  options.window_right = window_right;
  if (packed()) {
    options.cu_seqlens_q = ends_q;
    options.cu_seqlens_k = ends_k;
    options.max_seqlen_q = max_q;
    options.max_seqlen_k = max_k;
  }
  return given;
}

const char* why_not_offsets(const TensorView& q, const TensorView& ends_q,
                            const TensorView& ends_k) {
  if (ends_q.dtype != ScalarType::Int || ends_k.dtype != ScalarType::Int) {
    return "offsets that are not int32";
  }
  const bool fits = ends_q.dim == 1 && ends_k.dim == 1 && ends_q.sizes[0] == ends_k.sizes[0] &&
                    same_device(q, ends_q) && same_device(q, ends_k);
  if (!fits) return "offsets of other shapes or devices";
  return ends_q.sizes[0] < 2 ? "no sequence" : nullptr;
}

const char* why_not(const FlashCall& call, Policy policy) {
  const TensorView &q = call.q, &k = call.k, &v = call.v;
  const int64_t dims = call.packed() ? 3 : 4, heads = call.layout == Layout::kRowsFirst ? 2 : 1;
  if (call.dropout_p > 0) return kDropoutReason;
  if (!is_16_bit(q.dtype)) return "a dtype that is not float16 or bfloat16";
  if (k.dtype != q.dtype || v.dtype != q.dtype) return "different dtypes";
  if (call.ends_q.has_value() != call.ends_k.has_value()) {
    return "offsets of the queries or of the keys alone";
  }
  if (q.dim != dims || k.dim != dims || v.dim != dims) {
    return "a rank that flash attention does not have";
  }
  if (const char* reason = why_not_tensor(q, CallKind::kAttention, policy)) return reason;
  const int64_t head_dim = q.sizes[dims - 1];
  if (v.sizes[dims - 1] != head_dim) return "another head_dim for values";
  const bool fits = std::equal(k.sizes, k.sizes + dims, v.sizes) && k.sizes[dims - 1] == head_dim &&
                    (call.packed() || k.sizes[0] == q.sizes[0]) &&
                    heads_divide(q.sizes[heads], k.sizes[heads]) && same_device(q, k) &&
                    same_device(q, v);
  if (!fits) return "shapes that it does not take";
  if (head_dim > kFlashHeadDim) return "a head_dim above 256";
  if (!call.packed()) return nullptr;
  if (policy == Policy::kFastest && k.sizes[0] < kFewPackedKeys) {
    return "fewer than 8192 keys, which is not known to be quicker";
  }
  return why_not_offsets(q, TensorView(*call.ends_q), TensorView(*call.ends_k));
}

// num_splits=1 is PyTorch's switch of batch invariance, which packed sequences have where they have
// one kernel: on Hopper, and by the reference.
const char* why_not_one_split(const FlashCall& call, Policy policy) {
  if (batch_invariant()) return nullptr;
  if (policy == Policy::kFastest) return "num_splits=1";
  const bool one = !call.packed() || !call.q.on_cuda() || device(call.q.device_index).sm == kHopper;
  return one ? nullptr
             : "num_splits=1 with packed sequences, which have several kernels on this device";
}

// While it exists, this thread's calls are batch-invariant, if `on`.
class InvariantCall {
 public:
  explicit InvariantCall(bool on) : on_(on), before_(on ? set_batch_invariant(1) : 0) {}
  ~InvariantCall() {
    if (on_) set_batch_invariant(before_);
  }
  InvariantCall(const InvariantCall&) = delete;
  InvariantCall& operator=(const InvariantCall&) = delete;

 private:
  bool on_;
  int before_;
};

FlashResults forward(const AtenOp& op, const FlashCall& call, bool one_split = false) {
  const InvariantCall invariant(one_split);
  auto [out, sums] = serve_forward(op, call.arguments("attention_forward"));
  const int64_t at = call.layout == Layout::kHeadsFirst ? 2 : 1;  // the dim of rows
  const int64_t right = call.is_causal ? 0 : call.window_right;
  const bool may_be_empty = call.packed() || call.k.sizes[at] == 0 ||
                            (right >= 0 && call.q.sizes[at] > call.k.sizes[at] + right);
  if (may_be_empty) mark_empty_rows(sums);
  return {laid_out_as(call.heads_first(out), call.query), sums,
          vector(call.q, 2, ScalarType::UInt64), scalar(call.q, ScalarType::UInt64),
          vector(call.q, 0, call.q.dtype)};
}

// [batch, heads, rows], or [heads, rows] of packed sequences.
const char* why_not_logsumexp(const FlashCall& call, const Tensor& logsumexp) {
  constexpr const char* kOther = "a logsumexp of another layout";
  if (!is_defined(logsumexp)) return kOther;
  const TensorView &q = call.q, sums(logsumexp);
  if (sums.dim != q.dim - 1 || sums.dtype != ScalarType::Float) return kOther;
  const int64_t heads = call.layout == Layout::kRowsFirst ? 2 : 1,
                rows = call.packed() ? 0 : 3 - heads;
  const bool fits = (call.packed() || sums.sizes[0] == q.sizes[0]) &&
                    sums.sizes[sums.dim - 2] == q.sizes[heads] &&
                    sums.sizes[sums.dim - 1] == q.sizes[rows];
  return fits ? nullptr : kOther;
}

// Nothing if PyTorch's kernel serves the call.
std::optional<ThreeTensors> backward(const AtenOp& op, const FlashCall& call, Policy policy,
                                     const Tensor& grad_out, const Tensor& out,
                                     const Tensor& logsumexp, const char* reason = nullptr) {
  if (reason == nullptr) reason = why_not(call, policy);
  if (reason == nullptr) reason = why_not_logsumexp(call, logsumexp);
  if (!serves_attention(op, reason)) return std::nullopt;
  const auto [dq, dk, dv] =
      serve_backward(op, call.arguments("attention_backward"), call.heads_first(grad_out),
                     call.heads_first(out), logsumexp);
  return ThreeTensors(laid_out_as(call.heads_first(dq), call.query),
                      laid_out_as(call.heads_first(dk), call.key),
                      laid_out_as(call.heads_first(dv), call.value));
}

AtenAttentionResults aten_sdpa(const Tensor& query, const Tensor& key, const Tensor& value,
                               double dropout_p, bool is_causal, bool return_debug_mask,
                               std::optional<double> scale) {
  static const AtenOp op("aten::_scaled_dot_product_flash_attention", CallKind::kAttention);
  const Policy policy = flash_policy();
  if (policy != Policy::kOff) {
    const FlashCall call(Layout::kHeadsFirst, query, key, value, dropout_p, is_causal, scale);
    const char* const reason = return_debug_mask ? "return_debug_mask" : why_not(call, policy);
    if (serves_attention(op, reason)) {
      auto [out, sums, seed, unused, mask] = forward(op, call);
      return {out,
              sums,
              undefined_tensor(),
              undefined_tensor(),
              call.q.sizes[2],
              call.k.sizes[2],
              seed,
              unused,
              mask};
    }
  }
  return results_of_pytorch(op, aten_attentions().flash, query, key, value, dropout_p, is_causal,
                            return_debug_mask, scale);
}

ThreeTensors aten_sdpa_backward(const Tensor& grad_out, const Tensor& query, const Tensor& key,
                                const Tensor& value, const Tensor& out, const Tensor& logsumexp,
                                const Tensor& cum_seq_q, const Tensor& cum_seq_k, int64_t max_q,
                                int64_t max_k, double dropout_p, bool is_causal, const Tensor& seed,
                                const Tensor& offset, std::optional<double> scale) {
  static const AtenOp op("aten::_scaled_dot_product_flash_attention_backward",
                         CallKind::kAttention);
  const Policy policy = flash_policy();
  if (policy != Policy::kOff && is_defined(grad_out)) {
    const FlashCall call(Layout::kHeadsFirst, query, key, value, dropout_p, is_causal, scale);
    const char* const reason = is_defined(cum_seq_q) ? "packed sequences" : nullptr;
    if (auto served = backward(op, call, policy, grad_out, out, logsumexp, reason)) return *served;
  }
  return tensors_of_pytorch<3>(op, aten_attentions().flash_backward, grad_out, query, key, value,
                               out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p,
                               is_causal, seed, offset, scale);
}

// aten::_flash_attention_forward as our kernels serve it; nothing if PyTorch's kernel does.
std::optional<FlashResults> serve_rows_first(
    const AtenOp& op, const Tensor& query, const Tensor& key, const Tensor& value,
    const GivenTensor& cum_seq_q, const GivenTensor& cum_seq_k, int64_t max_q, int64_t max_k,
    double dropout_p, bool is_causal, bool return_debug_mask, std::optional<double> scale,
    GivenSize window_left, GivenSize window_right, const GivenTensor& seqused_k,
    const GivenTensor& alibi_slopes, const GivenTensor& block_table = {},
    GivenSize num_splits = {}) {
  const Policy policy = flash_policy(cum_seq_q, cum_seq_k);
  if (policy == Policy::kOff) return std::nullopt;
  const FlashCall call = rows_first(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k,
                                    dropout_p, is_causal, scale, window_left, window_right);
  const bool one_split = num_splits.value_or(0) == 1;
  const char* reason = why_not(call, policy);
  if (return_debug_mask) reason = "return_debug_mask";
  if (seqused_k || alibi_slopes || block_table) reason = "seqused_k, alibi_slopes or block_table";
  if (reason == nullptr && one_split) reason = why_not_one_split(call, policy);
  if (!serves_attention(op, reason)) return std::nullopt;
  return forward(op, call, one_split);
}

// The results of our kernels, or of PyTorch's function.
template <class Function, class... Args>
FlashResults flash_forward(const AtenOp& op, Function pytorchs, const Args&... args) {
  if (auto served = serve_rows_first(op, args...)) return *served;
  return tensors_of_pytorch<5>(op, pytorchs, args...);
}

// Before torch 2.12.
FlashResults aten_flash_forward_15(const Tensor& query, const Tensor& key, const Tensor& value,
                                   const GivenTensor& cum_seq_q, const GivenTensor& cum_seq_k,
                                   int64_t max_q, int64_t max_k, double dropout_p, bool is_causal,
                                   bool return_debug_mask, std::optional<double> scale,
                                   GivenSize window_left, GivenSize window_right,
                                   const GivenTensor& seqused_k, const GivenTensor& alibi_slopes) {
  static const AtenOp op("aten::_flash_attention_forward", CallKind::kAttention);
  return flash_forward(op, aten_attentions().packed, query, key, value, cum_seq_q, cum_seq_k, max_q,
                       max_k, dropout_p, is_causal, return_debug_mask, scale, window_left,
                       window_right, seqused_k, alibi_slopes);
}

FlashResults aten_flash_forward_17(const Tensor& query, const Tensor& key, const Tensor& value,
                                   const GivenTensor& cum_seq_q, const GivenTensor& cum_seq_k,
                                   int64_t max_q, int64_t max_k, double dropout_p, bool is_causal,
                                   bool return_debug_mask, std::optional<double> scale,
                                   GivenSize window_left, GivenSize window_right,
                                   const GivenTensor& seqused_k, const GivenTensor& alibi_slopes,
                                   const GivenTensor& block_table, GivenSize num_splits) {
  static const AtenOp op("aten::_flash_attention_forward", CallKind::kAttention);
  return flash_forward(op, aten_attentions().paged, query, key, value, cum_seq_q, cum_seq_k, max_q,
                       max_k, dropout_p, is_causal, return_debug_mask, scale, window_left,
                       window_right, seqused_k, alibi_slopes, block_table, num_splits);
}

// PyTorch's kernel raises for these outputs, into which a copy would broadcast or convert.
const char* why_not_output(const TensorView& out, const TensorView& query) {
  const bool fits = out.dtype == query.dtype && out.dim == query.dim && same_device(out, query) &&
                    std::equal(out.sizes, out.sizes + out.dim, query.sizes);
  if (!fits) return "an output of another shape, dtype or device";
  return out.dim > 0 && out.strides[out.dim - 1] == 1
             ? nullptr
             : "an output whose last dim is not contiguous";
}

// Into `out`; returns the logsumexp.
Tensor aten_flash_forward_into(const Tensor& out, const Tensor& query, const Tensor& key,
                               const Tensor& value, const GivenTensor& cum_seq_q,
                               const GivenTensor& cum_seq_k, int64_t max_q, int64_t max_k,
                               double dropout_p, bool is_causal, bool return_debug_mask,
                               std::optional<double> scale, GivenSize window_left,
                               GivenSize window_right, const GivenTensor& seqused_k,
                               const GivenTensor& alibi_slopes, const GivenTensor& block_table,
                               GivenSize num_splits) {
  static const AtenOp op("aten::_flash_attention_forward_no_dropout_inplace", CallKind::kAttention);
  if (const char* reason = why_not_output(TensorView(out), TensorView(query))) {
    if (flash_policy(cum_seq_q, cum_seq_k) != Policy::kOff) serves_attention(op, reason);
  } else if (auto served =
                 serve_rows_first(op, query, key, value, cum_seq_q, cum_seq_k, max_q, max_k,
                                  dropout_p, is_causal, return_debug_mask, scale, window_left,
                                  window_right, seqused_k, alibi_slopes, block_table, num_splits)) {
    Tensor result = out;
    torch::stable::copy_(result, std::get<0>(*served));
    return std::get<1>(*served);
  }
  return std::get<0>(tensors_of_pytorch<1>(op, aten_attentions().into, out, query, key, value,
                                           cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal,
                                           return_debug_mask, scale, window_left, window_right,
                                           seqused_k, alibi_slopes, block_table, num_splits));
}

ThreeTensors aten_flash_backward(const Tensor& grad_out, const Tensor& query, const Tensor& key,
                                 const Tensor& value, const Tensor& out, const Tensor& logsumexp,
                                 const Tensor& cum_seq_q, const Tensor& cum_seq_k, int64_t max_q,
                                 int64_t max_k, double dropout_p, bool is_causal,
                                 const Tensor& rng_state, const Tensor& unused,
                                 std::optional<double> scale, GivenSize window_left,
                                 GivenSize window_right) {
  static const AtenOp op("aten::_flash_attention_backward", CallKind::kAttention);
  const Policy policy = flash_policy(cum_seq_q, cum_seq_k);
  if (policy != Policy::kOff && is_defined(grad_out)) {
    const FlashCall call = rows_first(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k,
                                      dropout_p, is_causal, scale, window_left, window_right);
    if (auto served = backward(op, call, policy, grad_out, out, logsumexp)) return *served;
  }
  return tensors_of_pytorch<3>(op, aten_attentions().packed_backward, grad_out, query, key, value,
                               out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p,
                               is_causal, rng_state, unused, scale, window_left, window_right);
}

}  // namespace

void register_aten_flash_attention(StableLibrary& library, bool on_cuda, int arguments, int into) {
  const AtenAttentions& aten = aten_attentions();
  if (!on_cuda || (aten.flash && aten.flash_backward)) {
    library.impl("_scaled_dot_product_flash_attention", TC_OVER_ATEN(aten_sdpa));
    library.impl("_scaled_dot_product_flash_attention_backward", TC_OVER_ATEN(aten_sdpa_backward));
  }
  const bool has_forward = arguments == 15 ? aten.packed != nullptr : aten.paged != nullptr;
  if (on_cuda && !(has_forward && aten.packed_backward)) return;
  if (arguments == 15) {
    library.impl("_flash_attention_forward", TC_OVER_ATEN(aten_flash_forward_15));
  } else if (arguments == 17) {
    library.impl("_flash_attention_forward", TC_OVER_ATEN(aten_flash_forward_17));
  } else {
    return;
  }
  library.impl("_flash_attention_backward", TC_OVER_ATEN(aten_flash_backward));
  if (into == 18 && (!on_cuda || aten.into)) {
    library.impl("_flash_attention_forward_no_dropout_inplace",
                 TC_OVER_ATEN(aten_flash_forward_into));
  }
}

}  // namespace torch_cubin
