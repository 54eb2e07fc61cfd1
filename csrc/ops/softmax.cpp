// The softmax family: check -> fill the parameters -> kernel or reference.
#include "ops/softmax.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>

#include "contract/catalog.h"
#include "cubin/error.h"
#include "kernels/attention_params.h"
#include "runtime/device.h"

namespace torch_cubin {
namespace {

constexpr int64_t kMaxGridX = (int64_t{1} << 31) - 1;
constexpr int64_t kWarpColumns = 4096;  // up to here a warp is quick enough for a row

// A copy where it must be.
OptionalTensor contiguous(const OptionalTensor& tensor) {
  return tensor ? OptionalTensor(torch::stable::contiguous(*tensor)) : std::nullopt;
}

// The catalog's softmax kernels for one device: for rows of a warp, and of a block.
struct SoftmaxTable {
  CatalogKernel* kernels[kSoftmaxKinds][2][2] = {};  // [kind][float64][long rows]
};

constexpr const char* kKindNames[] = {"forward", "backward", "dropout"};

const SoftmaxTable* build(const Device& device) {
  Catalog& catalog = Catalog::get();
  auto table = std::make_unique<SoftmaxTable>();
  const std::string arch = catalog.arch_for(device);
  for (CatalogKernel& kernel : catalog.kernels()) {
    const CatalogEntry& entry = kernel.entry();
    if (entry.family != "softmax" || entry.arch != arch) continue;
    const auto kind = std::find(std::begin(kKindNames), std::end(kKindNames), entry.kind);
    if (kind == std::end(kKindNames)) continue;
    table->kernels[kind - std::begin(kKindNames)][entry.math == "float64"][entry.tile[0] == 1] =
        &kernel;
  }
  for (const auto& kinds : table->kernels) {
    for (const auto& dtypes : kinds) {
      for (const CatalogKernel* kernel : dtypes) {
        if (kernel != nullptr) continue;
        fail({"no_kernel", "the kernel catalog", "lacks kernels of the softmax family",
              "all of rows_softmax.cu for " + arch, "some",
              "Build the library and its kernels from one source tree."});
      }
    }
  }
  return table.release();
}

std::atomic<const SoftmaxTable*> g_tables[kMaxDevices];  // leaked on purpose, as the catalog is
std::mutex g_tables_mutex;                               // guards the making of entries

const SoftmaxTable& softmax_table(const Device& device) {
  const SoftmaxTable* table = g_tables[device.index].load(std::memory_order_acquire);
  if (table != nullptr) return *table;
  std::lock_guard<std::mutex> lock(g_tables_mutex);
  table = g_tables[device.index].load(std::memory_order_relaxed);
  if (table == nullptr) {
    table = build(device);
    g_tables[device.index].store(table, std::memory_order_release);
  }
  return *table;
}

void run(SoftmaxKind kind, const TensorView& scores, const SoftmaxParams& params) {
  if (params.rows == 0) return;
  if (!scores.on_cuda()) return softmax_reference(kind, scores.dtype, params);
  const Device& gpu = device(scores.device_index);
  const bool wide = params.seqlen_k > kWarpColumns;
  CatalogKernel& kernel =
      *softmax_table(gpu).kernels[kind][scores.dtype == ScalarType::Double][wide];
  const CatalogEntry& entry = kernel.entry();
  const int64_t tiles = (params.rows + entry.tile[0] - 1) / entry.tile[0];
  LaunchConfig config;
  config.grid[0] = static_cast<uint32_t>(std::min(tiles, kMaxGridX));
  std::copy(std::begin(entry.block), std::end(entry.block), config.block);
  config.dynamic_shared = entry.dynamic_shared;
  void* pointers[] = {const_cast<SoftmaxParams*>(&params)};
  launch(kernel.kernel(), config, gpu, pointers);
}

tc_int64 bits_of(double value) {
  tc_int64 bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

void* data_of(const Tensor& tensor) { return const_cast<void*>(TensorView(tensor).data()); }

int checked_int(int64_t size, const char* what) {
  if (size < kNoBound) return static_cast<int>(size);
  fail({"input", "attention scores", std::string("have too many ") + what,
        "less than " + std::to_string(kNoBound), std::to_string(size), ""});
}

int mask_kind_of(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Bool:
      return kMaskBool;
    case ScalarType::Half:
      return kMaskFloat16;
    case ScalarType::BFloat16:
      return kMaskBFloat16;
    case ScalarType::Float:
      return kMaskFloat32;
    case ScalarType::Double:
      return kMaskFloat64;
    default:
      fail({"input", "an attention mask", "has an unsupported dtype",
            "bool, float16, bfloat16, float32 or float64", dtype_name(dtype), ""});
  }
}

void same_device(const char* name, const TensorView& view, const TensorView& scores) {
  if (view.device_type == scores.device_type && view.device_index == scores.device_index) return;
  fail({"input", std::string("attention argument '") + name + "'", "is on another device",
        scores.device_text() + " like the scores", view.device_text(),
        "Move it with .to(device)."});
}

void require(bool right, const char* name, const char* expected, const TensorView& got) {
  if (right) return;
  fail({"input", std::string("attention argument '") + name + "'", "is not what it should be",
        expected, dtype_name(got.dtype) + " " + got.shape_text(), ""});
}

bool is_contiguous(const TensorView& view) {
  int64_t step = 1;
  for (int64_t i = view.dim - 1; i >= 0; --i) {
    if (view.sizes[i] == 0) return true;
    if (view.sizes[i] != 1 && view.strides[i] != step) return false;
    step *= view.sizes[i];
  }
  return true;
}

void set_mask(SoftmaxParams& p, const TensorView& mask, const TensorView& scores) {
  same_device("attn_mask", mask, scores);
  bool fits = mask.dim <= 4;
  for (int64_t i = 0; fits && i < mask.dim; ++i) {
    const int64_t at = 4 - mask.dim + i;
    fits = mask.sizes[i] == 1 || mask.sizes[i] == scores.sizes[at];
    p.mask_stride[at] = mask.sizes[i] == 1 ? 0 : mask.strides[i];
  }
  require(fits, "attn_mask", "a shape that broadcasts to the scores'", mask);
  p.mask_kind = mask_kind_of(mask.dtype);
  require(mask.dtype != ScalarType::Double || scores.dtype == ScalarType::Double, "attn_mask",
          "float64 beside float64 scores only", mask);
  p.mask = mask.data();
}

void set_extras(SoftmaxParams& p, const AttentionExtras& extras, const TensorView& scores) {
  if (extras.mask) set_mask(p, TensorView(*extras.mask), scores);
  if (extras.alibi_slopes) {
    const TensorView slopes(*extras.alibi_slopes);
    same_device("alibi_slopes", slopes, scores);
    const bool batched = slopes.dim == 2 && slopes.sizes[0] == scores.sizes[0];
    require(slopes.dtype == ScalarType::Float && (batched || slopes.dim == 1) &&
                slopes.sizes[slopes.dim - 1] == scores.sizes[1] &&
                (slopes.strides[slopes.dim - 1] == 1 || scores.sizes[1] <= 1),
            "alibi_slopes", "float32 (heads,) or (batch, heads), contiguous heads", slopes);
    p.alibi_slopes = static_cast<const float*>(slopes.data());
    p.alibi_stride = batched ? slopes.strides[0] : 0;
  }
  if (extras.sinks) {
    const TensorView sinks(*extras.sinks);
    same_device("sinks", sinks, scores);
    require(sinks.dtype == ScalarType::Float && sinks.dim == 1 &&
                sinks.sizes[0] == scores.sizes[1] && is_contiguous(sinks),
            "sinks", "float32 (heads,), contiguous", sinks);
    p.sinks = static_cast<const float*>(sinks.data());
  }
}

// Everything that follows from the scores' shape and the settings.
SoftmaxParams params_for(const TensorView& scores, const AttentionSettings& settings) {
  const bool fits = scores.dim == 4 && is_contiguous(scores) &&
                    (scores.dtype == ScalarType::Float || scores.dtype == ScalarType::Double);
  require(fits, "scores", "float32 or float64 (batch, heads, rows, columns), contiguous", scores);
  SoftmaxParams p{};
  p.heads = checked_int(scores.sizes[1], "heads");
  p.seqlen_q = checked_int(scores.sizes[2], "rows");
  p.seqlen_k = checked_int(scores.sizes[3], "columns");
  checked_int(scores.sizes[0] * scores.sizes[1], "heads");
  p.rows = scores.sizes[0] * scores.sizes[1] * scores.sizes[2];
  p.scale = bits_of(settings.scale);
  p.softcap = bits_of(settings.softcap);
  p.keep_scale = bits_of(settings.keep_scale);
  const int shift = settings.bottom_right ? p.seqlen_k - p.seqlen_q : 0;
  p.first = settings.first <= -kNoBound ? settings.first : settings.first + shift;
  p.last = settings.last >= kNoBound ? settings.last : settings.last + shift;
  p.all_heads = p.heads;
  return p;
}

void set_dropout(SoftmaxParams& p, const TensorView& seed, const TensorView& scores,
                 int drop_below) {
  same_device("dropout_seed", seed, scores);
  bool one = seed.dtype == ScalarType::Long;
  for (int64_t i = 0; i < seed.dim; ++i) one = one && seed.sizes[i] == 1;
  require(one, "dropout_seed", "int64, one number", seed);
  p.dropout_seed = static_cast<const tc_int64*>(seed.data());
  p.drop_below = drop_below;
}

void set_dropout(SoftmaxParams& p, const AttentionSettings& settings, const AttentionExtras& extras,
                 HeadRange heads, const TensorView& scores) {
  if (settings.drop_below == 0) return;
  p.first_head = checked_int(heads.first, "heads");
  p.all_heads = checked_int(heads.all_heads, "heads");
  set_dropout(p, TensorView(*extras.dropout_seed), scores, settings.drop_below);
}

// A fresh contiguous tensor with the first `dim` sizes of `like`, on its device.
Tensor empty_like_rows(const TensorView& like, int64_t dim) {
  if (like.on_cuda()) return empty_cuda(like.sizes, dim, like.dtype, like.device_index);
  int64_t strides[kMaxDims];
  int64_t step = 1;
  for (int64_t i = dim - 1; i >= 0; --i) {
    strides[i] = step;
    step *= std::max<int64_t>(like.sizes[i], 1);
  }
  AtenTensorHandle handle = nullptr;
  if (aoti_torch_empty_strided(dim, like.sizes, strides, static_cast<int32_t>(like.dtype),
                               like.device_type, like.device_index, &handle) != 0) {
    fail({"oom", "the CPU reference's output", "could not be allocated",
          std::to_string(step) + " elements", "an error", "Free memory."});
  }
  return Tensor(handle);
}

void require_like(const char* name, const TensorView& view, const TensorView& scores, int64_t dim) {
  same_device(name, view, scores);
  const bool same = view.dtype == scores.dtype && view.dim == dim &&
                    std::equal(view.sizes, view.sizes + dim, scores.sizes) && is_contiguous(view);
  require(same, name, "dtype and shape of the scores (of their rows), contiguous", view);
}

}  // namespace

void softmax_forward(const AttentionSettings& settings, const AttentionExtras& extras,
                     HeadRange heads, const Tensor& scores, const Tensor* logsumexp) {
  const TensorView view(scores);
  SoftmaxParams p = params_for(view, settings);
  set_extras(p, extras, view);
  set_dropout(p, settings, extras, heads, view);
  p.scores = view.data();
  p.weights = data_of(scores);
  if (logsumexp != nullptr) p.logsumexp = data_of(*logsumexp);
  run(kSoftmaxForward, view, p);
}

void softmax_backward(const AttentionSettings& settings, const AttentionExtras& extras,
                      HeadRange heads, const Tensor& scores, const Tensor& grad,
                      const Tensor& logsumexp, const Tensor& delta) {
  const TensorView view(scores);
  SoftmaxParams p = params_for(view, settings);
  set_extras(p, extras, view);
  set_dropout(p, settings, extras, heads, view);
  p.scores = view.data();
  p.weights = data_of(scores);
  p.grad = p.grad_scores = data_of(grad);
  p.logsumexp = data_of(logsumexp);
  p.delta = data_of(delta);
  run(kSoftmaxBackward, view, p);
}

std::tuple<Tensor, Tensor> attention_softmax(const Tensor& scores, const OptionalTensor& attn_mask,
                                             const OptionalTensor& alibi_slopes,
                                             const OptionalTensor& sinks, double scale,
                                             double softcap, int64_t first, int64_t last,
                                             bool bottom_right) {
  const Tensor dense = torch::stable::contiguous(scores);
  const TensorView view(dense);
  AttentionSettings settings;
  settings.scale = scale;
  settings.softcap = softcap;
  settings.first = static_cast<int>(std::max<int64_t>(first, -kNoBound));
  settings.last = static_cast<int>(std::min<int64_t>(last, kNoBound));
  settings.bottom_right = bottom_right;
  SoftmaxParams p = params_for(view, settings);
  const AttentionExtras extras = {attn_mask, contiguous(alibi_slopes), contiguous(sinks), {}};
  set_extras(p, extras, view);
  Tensor probs = empty_like_rows(view, 4), logsumexp = empty_like_rows(view, 3);
  p.scores = view.data();
  p.weights = data_of(probs);
  p.logsumexp = data_of(logsumexp);
  run(kSoftmaxForward, view, p);
  return {std::move(probs), std::move(logsumexp)};
}

Tensor attention_softmax_backward(const Tensor& grad, const Tensor& probs,
                                  const OptionalTensor& grad_logsumexp,
                                  const OptionalTensor& scores, double scale, double softcap) {
  const Tensor dense = torch::stable::contiguous(probs);
  const Tensor dense_grad = torch::stable::contiguous(grad);
  const OptionalTensor raw = contiguous(scores), of_rows = contiguous(grad_logsumexp);
  const TensorView view(dense), grad_view(dense_grad);
  AttentionSettings settings;
  settings.scale = scale;
  settings.softcap = softcap;
  SoftmaxParams p = params_for(view, settings);
  require_like("grad", grad_view, view, 4);
  require(softcap == 0 || raw.has_value(), "softcap", "0 without scores", view);
  if (raw) {
    require_like("scores", TensorView(*raw), view, 4);
    p.scores = data_of(*raw);
  }
  if (of_rows) {
    require_like("grad_logsumexp", TensorView(*of_rows), view, 3);
    p.grad_logsumexp = data_of(*of_rows);
  }
  Tensor out = empty_like_rows(view, 4);
  p.probs = view.data();
  p.given_probs = 1;
  p.grad = grad_view.data();
  p.grad_scores = data_of(out);
  run(kSoftmaxBackward, view, p);
  return out;
}

Tensor attention_dropout(const Tensor& probs, const Tensor& seed, int64_t drop_below) {
  const Tensor dense = torch::stable::contiguous(probs);
  const TensorView view(dense);
  AttentionSettings settings;
  settings.drop_below = static_cast<int>(std::clamp<int64_t>(drop_below, 0, 65536));
  settings.keep_scale = settings.drop_below < 65536 ? 65536.0 / (65536 - settings.drop_below) : 0;
  SoftmaxParams p = params_for(view, settings);
  set_dropout(p, TensorView(seed), view, settings.drop_below);
  Tensor out = empty_like_rows(view, 4);
  p.scores = view.data();
  p.weights = data_of(out);
  run(kSoftmaxDropout, view, p);
  return out;
}

}  // namespace torch_cubin
