// The arguments of the attention ops besides query, key and value: the one list of options; their
// checks, the same on every device; and the numbers, sizes and layouts that follow from them.
#pragma once

#include <torch/csrc/stable/library.h>

#include <cstdint>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "kernels/common/score_params.h"
#include "ops/common/shape.h"
#include "pytorch/tensor.h"
#include "pytorch/tensor_type.h"

namespace torch_cubin {

// A list of an op's options is a macro over X(type, name, default). It expands to a struct of
// options, and to the entries by which signatures (api/signatures.h) look up options by name.

using OptionalTensor = std::optional<Tensor>;

// The type of an option if tensors are of type T, for example views of them.
template <class T, class Type>
using OptionOf = std::conditional_t<std::is_same_v<Type, OptionalTensor>, std::optional<T>, Type>;

std::string option_schema(const std::string& name, const OptionalTensor& value);
std::string option_schema(const std::string& name, const std::optional<double>& value);
std::string option_schema(const std::string& name, bool value);
std::string option_schema(const std::string& name, int64_t value);
std::string option_schema(const std::string& name, double value);

template <class T>
bool is_other(const T& value, const T& unless) {
  return value != unless;
}
inline bool is_other(const OptionalTensor& value, const OptionalTensor&) {
  return value.has_value();
}

inline std::optional<TensorView> opened(const OptionalTensor& option) { return view_of(option); }
template <class T>
T opened(const T& option) {
  return option;
}

inline AtenTensorHandle handle_of(const OptionalTensor& option) {
  return option ? option->get() : nullptr;
}
template <class T>
AtenTensorHandle handle_of(const T&) {
  return nullptr;
}

template <class Options>
struct OptionEntry {
  const char* name;
  std::string schema;                          // "float softcap=0.0"
  void (*take)(Options&, StableIValue);        // consumes the boxed value
  StableIValue (*give)(const Options&);        // a boxed value that the caller owns
  bool (*given)(const Options&);               // whether it differs from the default
  AtenTensorHandle (*tensor)(const Options&);  // null if it is not a tensor or not given
};

// For use with the lists: a member of a struct template over T; an entry, with Options in scope; an
// option of `options`, opened for `views`; a member's value for `options`.
#define TC_OPTION_MEMBER(type, name, ...) OptionOf<T, type> name = __VA_ARGS__;
#define TC_OPTION_ENTRY(type, name, ...)                                             \
  {#name,                                                                            \
   option_schema(#name, type(__VA_ARGS__)),                                          \
   [](Options& options, StableIValue boxed) {                                        \
     options.name = torch::stable::detail::to<type>(boxed);                          \
   },                                                                                \
   [](const Options& options) { return torch::stable::detail::from(options.name); }, \
   [](const Options& options) { return is_other(options.name, type(__VA_ARGS__)); }, \
   [](const Options& options) { return handle_of(options.name); }},
#define TC_OPTION_OPENED(type, name, ...) views.name = opened(options.name);
#define TC_OPTION_COPIED(type, name, ...) options.name = name;

// The only list of the options. The schemas (signatures.h), the boxed arguments, the struct, calls
// that Python describes and, through the schemas, Python's own Options are derived from it;
// docs/attention.md documents each. A new option is added here and to the signatures of the ops
// that have it.
//
// TC_SHARED_OPTIONS are also options of flash_attention_with_kvcache (kv_cache.h).
#define TC_SHARED_OPTIONS(X)                    \
  X(int64_t, window_left, -1)                   \
  X(int64_t, window_right, -1)                  \
  X(double, softcap, 0.0)                       \
  X(OptionalTensor, alibi_slopes, std::nullopt) \
  X(OptionalTensor, sinks, std::nullopt)

#define TC_ATTENTION_OPTIONS(X)                 \
  TC_SHARED_OPTIONS(X)                          \
  X(OptionalTensor, attn_mask, std::nullopt)    \
  X(double, dropout_p, 0.0)                     \
  X(bool, is_causal, false)                     \
  X(OptionalTensor, dropout_seed, std::nullopt) \
  X(std::optional<double>, scale, std::nullopt) \
  X(bool, enable_gqa, false)                    \
  X(bool, bottom_right, false)                  \
  X(OptionalTensor, q_descale, std::nullopt)    \
  X(OptionalTensor, k_descale, std::nullopt)    \
  X(OptionalTensor, v_descale, std::nullopt)    \
  X(OptionalTensor, cu_seqlens_q, std::nullopt) \
  X(OptionalTensor, cu_seqlens_k, std::nullopt) \
  X(int64_t, max_seqlen_q, 0)                   \
  X(int64_t, max_seqlen_k, 0)

// Those with a float for each head, (heads,), or also for each batch, (batch, heads): X(name,
// whether also for each batch).
#define TC_PER_HEAD_OPTIONS(X) X(alibi_slopes, true) X(sinks, false)

template <class T>
struct AttentionOptionsOf {
  TC_ATTENTION_OPTIONS(TC_OPTION_MEMBER)
  // For ops of float8_e4m3fn: query, key and value have that dtype, and the output is bfloat16.
  // They are multiplied by their descales, float32 (batch, heads of key); default: 1.
  bool e4m3 = false;
};

struct AttentionOptions : AttentionOptionsOf<Tensor> {
  static const std::vector<OptionEntry<AttentionOptions>>& entries();
};

using AttentionViews = AttentionOptionsOf<TensorView>;
AttentionViews views_of(const AttentionOptions& options);

// The arguments of a forward, and most of those of a backward. `op` names the op in errors.
struct AttentionArguments {
  const char* op;
  Tensor query, key, value;
  AttentionOptions options;
};

// The options as numbers for a kernel, with defaults resolved and ranges checked.
struct AttentionSettings {
  double scale = 1;
  double softcap = 0;         // 0: none
  int first = 0, last = 0;    // row i sees columns i + first .. i + last (kNoBound: open)
  bool bottom_right = false;  // the band is shifted by seqlen_k - seqlen_q
  int drop_below = 0;         // dropout: a 16-bit random number below this drops a weight
  double keep_scale = 1;      // 1 / kept fraction; 0 if all are dropped
};

// The numbers of the rule from scores to weights (kernels/common/score_params.h), which are members
// of AttentionSettings and of the parameters of every kernel that applies it.
template <class To, class From, class Convert>
void copy_score_numbers(To& to, const From& from, Convert&& convert) {
#define TC_COPY_NUMBER(name) to.name = convert(from.name);
  TC_SCORE_NUMBERS(TC_COPY_NUMBER)
#undef TC_COPY_NUMBER
}

// Whether a logit is more than its score times the scale, apart from masks.
template <class T>
bool has_score_rule(const AttentionSettings& settings, const AttentionOptionsOf<T>& options) {
  return changes_scores(settings) || options.alibi_slopes.has_value();
}

// The kernels for Hopper compute softcap * tanh by a short formula whose error is up to 2^-22 of
// the softcap: up to this one a logsumexp stays within 2^-15. Models have softcaps of 30 and 50.
constexpr double kMostShortSoftcap = 128;

inline bool has_large_softcap(const AttentionSettings& settings) {
  return settings.softcap > kMostShortSoftcap;
}

// Limit for the rows of all packed sequences: the end of a sequence is an index in its tensor map,
// and kernels count beyond it in 32 bits.
constexpr int64_t kMostPackedRows = 0x7fff0000;

// Whether each head of key or value can serve the same number of heads of query: none serves none.
inline bool heads_divide(int64_t of_query, int64_t heads) {
  return heads == 0 ? of_query == 0 : of_query % heads == 0;
}

// The problem's sizes. With cu_seqlens (`packed`) tensors are (rows of all sequences, heads,
// head_dim): then batch is the number of sequences, and the lengths are upper bounds.
struct AttentionShape {
  Shape batch;             // leading dims before the heads, broadcast
  bool has_heads = false;  // whether the output has a dim of heads
  bool packed = false;
  int64_t heads = 1, kv_heads = 1;  // kv_heads divides heads
  int64_t seqlen_q = 0, seqlen_k = 0;
  int64_t total_q = 0,
          total_k = 0;  // rows of the tensors: of one sequence, or of all packed ones
  int64_t head_dim = 0, head_dim_v = 0;
  Shape out, logsumexp;

  int64_t group() const { return kv_heads > 0 ? heads / kv_heads : 1; }
};

// Throws [input]; `op` names the op in messages.
AttentionShape check_attention(const char* op, const TensorView& query, const TensorView& key,
                               const TensorView& value, const AttentionViews& options);

// Also throws [input] if an option is out of range.
AttentionSettings attention_settings(const char* op, const AttentionShape& shape,
                                     const AttentionViews& options);

// Checks grad_out, out and logsumexp of a backward against the shapes of its forward.
void check_attention_backward(const char* op, const AttentionShape& shape, const TensorView& query,
                              const TensorView& grad_out, const TensorView& out,
                              const TensorView& logsumexp);

// Strides of a fresh tensor of `sizes` whose dims have the same order in memory as those of `like`,
// largest stride first (ties: the order of the dims). Contiguous instead if `like` differs in a
// size other than the last, if its elements overlap (gaps are allowed, as in a part of a packed
// tensor), or if its last dim is not the innermost.
void output_strides(const TensorView& like, const Shape& sizes, int64_t* strides);

}  // namespace torch_cubin
