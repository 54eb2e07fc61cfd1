// Pattern::match: the check of a tensor in every call of a declared op.
#include <algorithm>

#include "cubin/error.h"
#include "declared/pattern.h"
#include "pytorch/contiguous.h"
#include "pytorch/tensor_type.h"

namespace torch_cubin {
namespace {

std::string strides_text(const TensorView& view) {
  return "strides " + tuple_text(view.strides, view.dim) + " of shape " + view.shape_text();
}

bool has_rows(const TensorView& view) {
  return view.dim == 0 || view.sizes[view.dim - 1] == 1 || view.strides[view.dim - 1] == 1;
}

// Whether the tensor has no gaps and no overlaps, in any order of dims: starting from the
// innermost, each dim's stride must equal the extent of the previous ones.
bool is_dense(const TensorView& view) {
  uint64_t left = 0;  // bit mask of the remaining dims; kMaxDims is 64
  for (int64_t i = 0; i < view.dim; ++i) {
    if (view.sizes[i] != 1) left |= uint64_t{1} << i;
  }
  for (uint64_t step = 1; left != 0;) {
    int64_t next = 0;
    while (next < view.dim &&
           ((left >> next & 1) == 0 || static_cast<uint64_t>(view.strides[next]) != step)) {
      ++next;
    }
    if (next == view.dim) return false;
    left &= ~(uint64_t{1} << next);
    step *= static_cast<uint64_t>(view.sizes[next]);
  }
  return true;
}

// PyTorch's test from as_strided's backward, for a tensor with elements: sorted by stride, each dim
// must step over the span of the previous ones. Some layouts without overlaps fail it, such as
// sizes (2, 3) with strides (3, 2); they do not occur in practice.
bool overlaps_itself(const TensorView& view) {
  uint64_t left = 0;
  for (int64_t i = 0; i < view.dim; ++i) {
    if (view.sizes[i] > 1) left |= uint64_t{1} << i;
  }
  for (int64_t span = 0; left != 0;) {  // of the elements from the first to the last
    int64_t next = -1;
    for (int64_t i = 0; i < view.dim; ++i) {
      if ((left >> i & 1) != 0 && (next < 0 || view.strides[i] < view.strides[next])) next = i;
    }
    if (view.strides[next] <= span) return true;
    left &= ~(uint64_t{1} << next);
    int64_t more = 0;
    if (__builtin_mul_overflow(view.strides[next], view.sizes[next] - 1, &more) ||
        __builtin_add_overflow(span, more, &span)) {
      return true;  // larger than any memory
    }
  }
  return false;
}

}  // namespace

void Pattern::refuse(int item, const std::string& problem, const std::string& expected,
                     const std::string& got, const std::string& advice) const {
  const char* what = role_ == Role::kArgument ? " argument '"
                     : role_ == Role::kOutput ? " output '"
                                              : " scratch '";
  fail({"input", op_ + what + name_ + "'" + (item < 0 ? "" : " item " + std::to_string(item)),
        problem, expected, got, advice});
}

void Pattern::refuse_overlap(const std::string& other) const {
  refuse(-1, "shares memory with argument '" + other + "', and the op writes to it",
         "memory of its own", "",
         "Call .clone() on one of them, or write 'may_overlap' in the pattern of '" + name_ +
             "' if the kernel can take it. Where torch.compile dropped a clone() that the program "
             "makes (pytorch#198031), make the copy outside of the compiled function.");
}

std::string Pattern::expected_shape() const {
  std::string text = "(";
  for (size_t i = 0; i < shape_text_.size(); ++i) text += (i > 0 ? ", " : "") + shape_text_[i];
  return text + (shape_text_.size() == 1 ? ",)" : ")");
}

void Pattern::check_dtype(ScalarType found, int item, CallState& state) const {
  if (variable_ < 0) {
    if (found == dtype_) return;
    refuse(item, "has a wrong dtype", dtype_name(dtype_), dtype_name(found),
           "Convert it with .to(dtype).");
  }
  ScalarType& bound = state.dtypes[static_cast<size_t>(variable_)];
  if (bound == found) return;
  if (bound != kUnboundDtype) {
    refuse(item, "has another dtype than the arguments before it",
           dtype_name(bound) + " (" + variable_name_ + ")", dtype_name(found),
           "Convert one of them with .to(dtype).");
  }
  if (std::find(allowed_.begin(), allowed_.end(), found) == allowed_.end()) {
    std::string expected;
    for (const ScalarType dtype : allowed_) {
      expected += (expected.empty() ? "" : ", ") + dtype_name(dtype);
    }
    refuse(item, "has a wrong dtype", expected, dtype_name(found), "Convert it with .to(dtype).");
  }
  bound = found;
}

void Pattern::check_layout(const TensorView& view, int item) const {
  switch (layout_) {
    case Layout::kContiguous:
      if (is_contiguous(view.sizes, view.strides, view.dim)) return;
      refuse(item, "is not contiguous", "a contiguous tensor", strides_text(view),
             "Call .contiguous() on it.");
    case Layout::kRows:
      if (has_rows(view)) return;
      refuse(item, "has rows with gaps", "stride 1 in the last dim", strides_text(view),
             "Call .contiguous() on it.");
    case Layout::kDense:
      if (is_dense(view)) return;
      refuse(item, "has gaps or overlaps", "a dense tensor, in any order of dims",
             strides_text(view), "Call .contiguous() on it.");
    case Layout::kStrided:
      return;
  }
}

void Pattern::check_device(const TensorView& view, int item, CallState& state) const {
  const bool first = state.device == kNoDevice;
  if (first) {
    if (state.device_type < 0) state.device_type = view.device_type;
    state.device = view.device_index;
  }
  if (view.device_index != state.device || view.device_type != state.device_type) {
    if (first) {
      refuse(item, "is not on a GPU", "a CUDA tensor", view.device_text(),
             "Move it with .to(\"cuda\").");
    }
    refuse(item, "is on another device than the arguments before it",
           device_text(state.device_type, state.device), view.device_text(),
           "Move it with .to(device).");
  }
}

void Pattern::match_sizes(const TensorView& view, int item, CallState& state) const {
  // Sizes before a "*s" match from the front, those after it from the back.
  const auto count = static_cast<int64_t>(sizes_.size());
  const int64_t extra = view.dim - count + 1;  // dims that the "*s" matches
  if (!any_shape_ && (group_at_ < 0 ? view.dim != count : extra < 0)) {
    refuse(item, "has a wrong number of dims",
           (group_at_ < 0 ? std::to_string(count) : "at least " + std::to_string(count - 1)) +
               ", shape " + expected_shape(),
           "shape " + view.shape_text());
  }
  for (int64_t i = 0; i < count; ++i) {
    const Size& size = sizes_[static_cast<size_t>(i)];
    const auto index = static_cast<size_t>(size.index);
    const int64_t dim = group_at_ >= 0 && i > group_at_ ? i + extra - 1 : i;
    int64_t wanted = size.value;
    switch (size.kind) {
      case Size::kBind:
        state.numbers[index] = Value::of(view.sizes[dim]);
        continue;
      case Size::kBindShifted:
        if (view.sizes[dim] >= size.value) {
          state.numbers[index] = Value::of(view.sizes[dim] - size.value);
          continue;
        }
        refuse(item, "has a wrong size in dim " + std::to_string(dim),
               std::to_string(size.value) + " or more in shape " + expected_shape(),
               std::to_string(view.sizes[dim]) + ", shape " + view.shape_text());
      case Size::kExpression:
        continue;
      case Size::kBindGroup:
        state.groups[index] = {view.sizes + dim, extra};
        continue;
      case Size::kSameGroup: {
        const DimGroup& group = state.groups[index];
        if (group.count == extra &&
            std::equal(group.sizes, group.sizes + extra, view.sizes + dim)) {
          continue;
        }
        std::string dims;
        for (int64_t j = 0; j < group.count; ++j) {
          dims += (j > 0 ? ", " : "") + std::to_string(group.sizes[j]);
        }
        refuse(item, "has another shape than the arguments before it",
               shape_text_[static_cast<size_t>(i)] + " = (" + dims + ") in " + expected_shape(),
               "shape " + view.shape_text());
      }
      case Size::kSame:
        wanted = state.numbers[index].integer;
        break;
      case Size::kConstant:
        break;
    }
    if (view.sizes[dim] == wanted) continue;
    const std::string& name = shape_text_[static_cast<size_t>(i)];
    refuse(item, "has a wrong size in dim " + std::to_string(dim),
           std::to_string(wanted) + (size.kind == Size::kSame ? " (" + name + ")" : "") +
               " in shape " + expected_shape(),
           std::to_string(view.sizes[dim]) + ", shape " + view.shape_text());
  }
}

bool Pattern::match(const TensorView& view, size_t place, int item, CallState& state) const {
  check_device(view, item, state);
  check_dtype(view.dtype, item, state);
  match_sizes(view, item, state);
  const bool any = has_elements(view.sizes, view.dim);
  if (any) {
    check_layout(view, item);
    if (mutated_ && layout_ != Layout::kContiguous && layout_ != Layout::kDense &&
        overlaps_itself(view)) {
      refuse(item, "overlaps itself, and the op writes to it",
             "a tensor no two of whose elements share memory", strides_text(view),
             "Call .contiguous() on it.");
    }
  }
  TensorFacts& facts = state.facts[place];
  facts.sizes = view.sizes;
  facts.strides = view.strides;
  facts.dim = view.dim;
  facts.itemsize = element_size(view.dtype);
  facts.dtype = dtype_text(view.dtype);
  facts.defined = true;
  return any;
}

void Pattern::check_address(const void* address, const TensorView& view, int item) const {
  if (address == nullptr) {
    refuse(item, "has elements but no memory", "a tensor whose storage is allocated",
           tensor_type_text(view.handle) + " with a null address", "Pass what a wrapper wraps.");
  }
  const uintptr_t past = reinterpret_cast<uintptr_t>(address) & static_cast<uintptr_t>(align_ - 1);
  if (past == 0) return;
  refuse(item, "is not aligned",
         "an address that is a multiple of " + std::to_string(align_) + " bytes",
         counted(past, "byte") + " past one", "Call .clone() on it.");
}

void Pattern::check_expressions(size_t place, int item, const CallState& state) const {
  const TensorFacts& facts = state.facts[place];
  const int64_t extra = facts.dim - static_cast<int64_t>(sizes_.size()) + 1;
  for (size_t i = 0; i < sizes_.size(); ++i) {
    const Size& size = sizes_[i];
    if (size.kind != Size::kExpression) continue;
    const auto at = static_cast<int64_t>(i);
    const int64_t dim = group_at_ >= 0 && at > group_at_ ? at + extra - 1 : at;
    const int64_t wanted =
        expressions_[static_cast<size_t>(size.index)].evaluate(state.arguments()).integer;
    if (facts.sizes[dim] == wanted) continue;
    refuse(item, "has a wrong size in dim " + std::to_string(dim),
           std::to_string(wanted) + " (" + shape_text_[i] + ") in shape " + expected_shape(),
           std::to_string(facts.sizes[dim]));
  }
}

}  // namespace torch_cubin
