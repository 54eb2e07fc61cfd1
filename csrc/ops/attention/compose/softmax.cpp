// The softmax family: check -> fill the parameters -> launch.
#include "ops/attention/compose/softmax.h"

#include <algorithm>
#include <cstring>
#include <memory>

#include "cubin/error.h"
#include "kernels/attention/attention_params.h"
#include "ops/attention/problem/arguments.h"
#include "ops/attention/problem/operands.h"
#include "ops/common/argument_checks.h"
#include "ops/common/backend.h"
#include "ops/common/device_tables.h"
#include "ops/common/launch.h"
#include "ops/common/shape.h"
#include "ops/common/stable_ops.h"
#include "pytorch/contiguous.h"
#include "runtime/device.h"

namespace torch_cubin {
namespace {

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

void check_same_device(const char* name, const TensorView& view, const TensorView& scores) {
  check_device("attention", name, view, "scores", scores);
}

void require(bool right, const char* name, const char* expected, const TensorView& got) {
  if (right) return;
  fail({"input", argument_text("attention", name), "is not what it should be", expected,
        dtype_name(got.dtype) + " " + got.shape_text() + " with strides " +
            tuple_text(got.strides, got.dim),
        ""});
}

bool is_dense(const TensorView& view) { return is_contiguous(view.sizes, view.strides, view.dim); }

void set_mask(SoftmaxParams& p, const TensorView& mask, const TensorView& scores) {
  check_same_device("attn_mask", mask, scores);
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

void require_per_head(const char* name, const OptionalTensor& given, bool batched,
                      const TensorView& scores) {
  if (!given) return;
  const TensorView view(*given);
  check_same_device(name, view, scores);
  const bool two = batched && view.dim == 2 && view.sizes[0] == scores.sizes[0];
  require(view.dtype == ScalarType::Float && (two || view.dim == 1) &&
              view.sizes[view.dim - 1] == scores.sizes[1] &&
              (view.strides[view.dim - 1] == 1 || scores.sizes[1] <= 1 ||
               !has_elements(view.sizes, view.dim)),
          name,
          batched ? "float32 (heads,) or (batch, heads), contiguous heads"
                  : "float32 (heads,), contiguous",
          view);
}

void set_options(SoftmaxParams& p, const AttentionOptions& options, const TensorView& scores) {
  if (options.attn_mask) set_mask(p, TensorView(*options.attn_mask), scores);
#define TC_REQUIRE(name, batched) require_per_head(#name, options.name, batched, scores);
  TC_PER_HEAD_OPTIONS(TC_REQUIRE)
#undef TC_REQUIRE
  point_to_heads(p, options);
}

// The parameters that follow from the scores' shape and the settings.
SoftmaxParams params_for(const TensorView& scores, const AttentionSettings& settings) {
  const bool fits = scores.dim == 4 && is_dense(scores) &&
                    (scores.dtype == ScalarType::Float || scores.dtype == ScalarType::Double);
  require(fits, "scores", "float32 or float64 (batch, heads, rows, columns), contiguous", scores);
  SoftmaxParams p{};
  p.heads = checked_int(scores.sizes[1], "heads");
  p.seqlen_q = checked_int(scores.sizes[2], "rows");
  p.seqlen_k = checked_int(scores.sizes[3], "columns");
  checked_int(scores.sizes[0] * scores.sizes[1], "heads");
  p.rows = scores.sizes[0] * scores.sizes[1] * scores.sizes[2];
  copy_score_numbers(p, settings, bits_of);
  const int shift = settings.bottom_right ? p.seqlen_k - p.seqlen_q : 0;
  p.first = settings.first <= -kNoBound ? settings.first : settings.first + shift;
  p.last = settings.last >= kNoBound ? settings.last : settings.last + shift;
  p.all_heads = p.heads;
  return p;
}

void set_dropout(SoftmaxParams& p, const TensorView& seed, const TensorView& scores,
                 int drop_below) {
  check_same_device("dropout_seed", seed, scores);
  bool one = seed.dtype == ScalarType::Long;
  for (int64_t i = 0; i < seed.dim; ++i) one = one && seed.sizes[i] == 1;
  require(one, "dropout_seed", "int64, one number", seed);
  p.dropout_seed = static_cast<const tc_int64*>(seed.data());
  p.drop_below = drop_below;
}

// The same for a part of a call, with the extra tensors and dropout.
SoftmaxParams params_for(const TensorView& scores, const AttentionSettings& settings,
                         const AttentionOptions& options, HeadRange heads) {
  SoftmaxParams p = params_for(scores, settings);
  set_options(p, options, scores);
  if (settings.drop_below == 0) return p;
  p.first_head = checked_int(heads.first, "heads");
  p.all_heads = checked_int(heads.all_heads, "heads");
  set_dropout(p, TensorView(*options.dropout_seed), scores, settings.drop_below);
  return p;
}

// Of one of the private ops; without `scale` it is 1.
AttentionSettings settings_of(const AttentionOptions& options) {
  return attention_settings("attention", AttentionShape(), views_of(options));
}

void require_like(const char* name, const TensorView& view, const TensorView& scores, int64_t dim) {
  check_same_device(name, view, scores);
  const bool same = view.dtype == scores.dtype && view.dim == dim &&
                    std::equal(view.sizes, view.sizes + dim, scores.sizes) && is_dense(view);
  require(same, name, "dtype and shape of the scores (of their rows), contiguous", view);
}

}  // namespace

void softmax_forward(const AttentionSettings& settings, const AttentionOptions& options,
                     HeadRange heads, const Tensor& scores, const Tensor* logsumexp) {
  const TensorView view(scores);
  SoftmaxParams p = params_for(view, settings, options, heads);
  p.scores = view.data();
  p.weights = data_of(scores);
  if (logsumexp != nullptr) p.logsumexp = data_of(*logsumexp);
  run_softmax(kSoftmaxForward, view, p);
}

void softmax_backward(const AttentionSettings& settings, const AttentionOptions& options,
                      HeadRange heads, const Tensor& scores, const Tensor& grad,
                      const Tensor& logsumexp, const Tensor& delta) {
  const TensorView view(scores);
  SoftmaxParams p = params_for(view, settings, options, heads);
  p.scores = view.data();
  p.weights = data_of(scores);
  p.grad = p.grad_scores = data_of(grad);
  p.logsumexp = data_of(logsumexp);
  p.delta = data_of(delta);
  run_softmax(kSoftmaxBackward, view, p);
}

std::tuple<Tensor, Tensor> attention_softmax(const Tensor& scores,
                                             const AttentionOptions& options) {
  const Tensor dense = torch::stable::contiguous(scores);
  const TensorView view(dense);
  SoftmaxParams p = params_for(view, settings_of(options));
  AttentionOptions dense_options = options;
  make_heads_contiguous(dense_options);
  set_options(p, dense_options, view);
  Tensor probs = empty_near(view, view.sizes, 4, view.dtype);
  Tensor logsumexp = empty_near(view, view.sizes, 3, view.dtype);
  p.scores = view.data();
  p.weights = data_of(probs);
  p.logsumexp = data_of(logsumexp);
  run_softmax(kSoftmaxForward, view, p);
  return {std::move(probs), std::move(logsumexp)};
}

Tensor attention_softmax_backward(const Tensor& grad, const Tensor& probs,
                                  const OptionalTensor& grad_logsumexp,
                                  const OptionalTensor& scores, const AttentionOptions& options) {
  const Tensor dense = torch::stable::contiguous(probs);
  const Tensor dense_grad = torch::stable::contiguous(grad);
  const OptionalTensor raw = contiguous(scores), of_rows = contiguous(grad_logsumexp);
  const TensorView view(dense), grad_view(dense_grad);
  SoftmaxParams p = params_for(view, settings_of(options));
  require_like("grad", grad_view, view, 4);
  // The derivative of a rule that changes scores depends on them.
  if (changes_scores(p) && !raw) {
    fail({"input", argument_text("attention", "scores"), "is missing",
          "the scores, which these options change", "none", ""});
  }
  if (raw) {
    require_like("scores", TensorView(*raw), view, 4);
    p.scores = data_of(*raw);
  }
  if (of_rows) {
    require_like("grad_logsumexp", TensorView(*of_rows), view, 3);
    p.grad_logsumexp = data_of(*of_rows);
  }
  Tensor out = empty_near(view, view.sizes, 4, view.dtype);
  p.probs = view.data();
  p.given_probs = 1;
  p.grad = grad_view.data();
  p.grad_scores = data_of(out);
  run_softmax(kSoftmaxBackward, view, p);
  return out;
}

Tensor attention_dropout(const Tensor& probs, const AttentionOptions& options) {
  const Tensor dense = torch::stable::contiguous(probs);
  const TensorView view(dense);
  const AttentionSettings settings = settings_of(options);
  SoftmaxParams p = params_for(view, settings);
  if (options.dropout_seed) {
    set_dropout(p, TensorView(*options.dropout_seed), view, settings.drop_below);
  }
  Tensor out = empty_near(view, view.sizes, 4, view.dtype);
  p.scores = view.data();
  p.weights = data_of(out);
  run_softmax(kSoftmaxDropout, view, p);
  return out;
}

// The backend of csrc/kernels/softmax/rows.cu: selects its kernels and launches them.
namespace {

constexpr int64_t kWarpColumns = 4096;  // up to here a warp suffices for a row

constexpr const char* kSoftmaxKindNames[] = {"forward", "backward", "dropout"};

struct SoftmaxRow {
  explicit SoftmaxRow(PackageKernel& entry) : kernel(&entry) {
    const KernelFields fields(entry);
    kind = fields.index("kind", kSoftmaxKindNames);
    is_double = fields.text("math") == "float64";
    int64_t tile[3];
    fields.triple("tile", 1, tile);
    rows = tile[0];
  }
  PackageKernel* kernel;
  int kind;
  bool is_double;
  int64_t rows;  // of a block
};

class SoftmaxRowsBackend : public KernelBackend {
 public:
  SoftmaxRowsBackend() : KernelBackend("softmax") {}
  void check(PackageKernel& kernel) const override {
    check_params(kernel.entry(), "softmax", sizeof(SoftmaxParams));
    SoftmaxRow{kernel};  // throws for an invalid field
  }
};

const SoftmaxRowsBackend g_softmax_rows;

// The kernels for one device: for rows of a warp, and of a block.
struct SoftmaxTable {
  explicit SoftmaxTable(const Device& device) : family("softmax", device) {
    family.for_each_backend<KernelBackend>([&](const KernelBackend&, const auto& kernels) {
      for (PackageKernel* kernel : kernels) {
        const SoftmaxRow row(*kernel);
        rows[row.kind][row.is_double][row.rows == 1] = std::make_unique<SoftmaxRow>(row);
      }
    });
  }
  const SoftmaxRow& find(SoftmaxKind kind, bool is_double, bool long_rows) const {
    const std::unique_ptr<SoftmaxRow>& row = rows[kind][is_double][long_rows];
    if (row == nullptr) family.fail_no_kernel("this softmax");
    return *row;
  }
  FamilyKernels family;
  std::unique_ptr<SoftmaxRow> rows[kSoftmaxKinds][2][2];  // [kind][float64][long rows]
};

DeviceTables<SoftmaxTable> g_softmax_tables;

}  // namespace

void run_softmax(SoftmaxKind kind, const TensorView& scores, const SoftmaxParams& params) {
  if (params.rows == 0) return;
  if (!scores.on_cuda()) return softmax_reference(kind, scores.dtype, params);
  const Device& gpu = device(scores.device_index);
  const bool wide = params.seqlen_k > kWarpColumns;
  const SoftmaxTable& table = g_softmax_tables.get(gpu);
  const SoftmaxRow& row = table.find(kind, scores.dtype == ScalarType::Double, wide);
  launch(*row.kernel, {std::min(ceil_div(params.rows, row.rows), kMaxGrid[0])}, gpu, params);
}

}  // namespace torch_cubin
