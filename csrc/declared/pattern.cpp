#include "declared/pattern.h"

#include <algorithm>
#include <cstdlib>
#include <nlohmann/json.hpp>

#include "cubin/error.h"
#include "package/fields.h"
#include "pytorch/contiguous.h"

namespace torch_cubin {

using nlohmann::json;

namespace {

constexpr const char* kLayoutNames[] = {"contiguous", "rows", "dense", "strided"};
constexpr int64_t kOutputAlign = 256;  // minimal alignment of PyTorch's allocator

}  // namespace

int64_t read_align(Fields& fields, int64_t otherwise) {
  if (fields.find("align") == nullptr) return otherwise;
  const int64_t align = fields.integer("align", 1, kMaxAlign);
  if ((align & (align - 1)) != 0) {
    refuse_json(fields.at("align"), "a power of two", fields.get("align"));
  }
  return align;
}

Pattern::Pattern(const std::string& name, Role role, const json& entry, Names& names)
    : op_(names.op()), name_(name), role_(role) {
  Fields fields(entry, op_ + ": " + (role == Role::kScratch ? "scratch." : "tensors.") + name);
  if (role != Role::kArgument) zeroed_ = fields.truth("zeroed", false);
  if (role == Role::kScratch) {
    fields.text("name");
  } else {
    if (const json* layout = fields.find("layout")) {
      const auto found =
          std::find_if(std::begin(kLayoutNames), std::end(kLayoutNames),
                       [&](const char* known) { return layout->is_string() && *layout == known; });
      if (found == std::end(kLayoutNames)) {
        refuse_json(fields.at("layout"), "contiguous, rows, dense or strided", *layout);
      }
      layout_ = static_cast<Layout>(found - std::begin(kLayoutNames));
    }
    align_ = read_align(fields, align_);
  }
  for (const SchemaArgument& argument : names.schema().arguments) {
    mutated_ |= role == Role::kArgument && argument.name == name && argument.is_mutated();
  }
  may_overlap_ = fields.truth("may_overlap", false);
  if (may_overlap_ && !mutated_) {
    refuse_json(fields.at("may_overlap"), "an argument that the op changes, Tensor(a!)", true);
  }
  const std::string dtype = fields.text("dtype");
  const json* shape = fields.find("shape");
  if (role == Role::kOutput) {
    if (align_ > kOutputAlign) {
      refuse_json(fields.at("align"), "at most 256 for an output", fields.get("align"));
    }
    if (const json* like = fields.find("like")) {
      like_ = names.scope().find_tensor(like->is_string() ? like->get<std::string>() : "");
      if (like_ < 0) refuse_json(fields.at("like"), "a Tensor argument of the op", *like);
      // Items of lists are indexed after the arguments, and cannot be copied by an output.
      const auto& arguments = names.schema().arguments;
      const auto place = static_cast<size_t>(like_);
      if (place >= arguments.size() || arguments[place].type != ArgumentType::kTensor) {
        refuse_json(fields.at("like"), "a Tensor argument that is always given", *like);
      }
    }
    const bool plain = layout_ == Layout::kContiguous || (like_ >= 0 && layout_ == Layout::kDense);
    if (!plain) {
      refuse_json(fields.at("layout"), "contiguous for an output, or 'like' beside it",
                  fields.get("layout"));
    }
  }
  fields.finish();
  read_dtype(dtype, names);
  if (shape != nullptr) {
    read_shape(*shape, names);
  } else if (role == Role::kArgument && entry.contains("shape")) {
    any_shape_ = true;
  } else if (like_ < 0) {
    fields.get("shape");  // throws
  }
}

void Pattern::read_dtype(const std::string& text, Names& names) {
  if (find_dtype(text, &dtype_)) return;
  auto& variables = names.variables();
  const auto found = std::find_if(variables.begin(), variables.end(),
                                  [&](const Names::Variable& v) { return v.name == text; });
  if (found == variables.end()) {
    fail({"input", op_ + ": tensors." + name_ + ".dtype", "is unknown",
          "a name of torch's, as float32, or a variable of 'dtypes'", "'" + printable(text) + "'",
          ""});
  }
  variable_ = static_cast<int>(found - variables.begin());
  variable_name_ = text;
  allowed_ = found->allowed;
  if (!found->bound && role_ != Role::kArgument) {
    fail({"input", op_ + ": tensors." + name_ + ".dtype", "is not bound by any argument",
          "a variable that a Tensor argument has", "'" + printable(text) + "'", ""});
  }
  found->bound = true;
}

void Pattern::read_shape(const json& shape, Names& names) {
  const std::string label = op_ + ": tensors." + name_ + ".shape";
  if (!shape.is_array()) refuse_json(label, "a list of sizes", shape);
  if (shape.size() > static_cast<size_t>(kMaxDims)) {
    refuse_json(label, "at most " + std::to_string(kMaxDims) + " dims", shape.size());
  }
  for (size_t dim = 0; dim < shape.size(); ++dim) read_size(shape[dim], dim, names);
}

void Pattern::read_size(const json& size, size_t dim, Names& names) {
  const std::string label = op_ + ": tensors." + name_ + ".shape[" + std::to_string(dim) + "]";
  const bool argument = role_ == Role::kArgument;
  Size read{};
  if (size.is_string()) {
    const std::string text = size.get<std::string>();
    const bool group = text[0] == '*';
    const std::string bare = group ? text.substr(1) : text;
    if (!is_identifier(bare)) refuse_json(label, "a name, as \"n\" or \"*s\"", size);
    if (group && group_at_ >= 0) refuse_json(label, "one '*' in a shape", size);
    const int place = group ? names.find_group(bare) : names.find_size(bare);
    if (group ? names.find_size(bare) >= 0 : names.find_group(bare) >= 0) {
      refuse_json(label, "another name for a size than for a group of dims", size);
    }
    // An op's number of that name may not be usable as a size: a float, or an optional.
    if (names.is_argument(bare)) {
      const auto& arguments = names.schema().arguments;
      if (group || place < 0 || arguments[static_cast<size_t>(place)].type != ArgumentType::kInt) {
        refuse_json(label, "a name of its own, or that of an int argument", size);
      }
    }
    if (place < 0 && !argument) {
      fail({"input", label, "is a size that no argument says",
            "a name that a Tensor argument binds", "'" + text + "'", ""});
    }
    if (group) group_at_ = static_cast<int>(dim);
    read.kind = group ? (place < 0 ? Size::kBindGroup : Size::kSameGroup)
                      : (place < 0 ? Size::kBind : Size::kSame);
    read.index = place >= 0 ? place : group ? names.add_group(bare) : names.add_size(bare);
    shape_text_.push_back(text);
  } else if (size.is_number_integer()) {
    const bool fits = !size.is_number_unsigned() || size.get<uint64_t>() <= uint64_t{INT64_MAX};
    if (!fits || size.get<int64_t>() < 0) refuse_json(label, "a size, 0 or more", size);
    read.kind = Size::kConstant;
    read.value = size.get<int64_t>();
    shape_text_.push_back(std::to_string(read.value));
  } else if (argument && bind_shifted(size, read, names)) {
    const std::string name = names.scope().numbers[static_cast<size_t>(read.index)].first;
    shape_text_.push_back("(" + name + (read.value < 0 ? " - " : " + ") +
                          std::to_string(std::abs(read.value)) + ")");
  } else if (size.is_array()) {
    read.kind = Size::kExpression;
    read.index = static_cast<int32_t>(unread_.size());
    unread_.emplace_back(dim, size);
    shape_text_.push_back("");
  } else {
    refuse_json(label, "a name, an int or an expression", size);
  }
  sizes_.push_back(read);
}

// ["add", ["number", "n"], 1], ["add", 1, ["number", "n"]] or ["sub", ["number", "n"], 1] with a
// name that is not bound yet.
bool Pattern::bind_shifted(const json& tree, Size& size, Names& names) {
  constexpr int64_t kMostShift = int64_t{1} << 30;
  const bool adds = tree.is_array() && tree.size() == 3 && tree[0] == "add";
  const bool subtracts = tree.is_array() && tree.size() == 3 && tree[0] == "sub";
  if (!adds && !subtracts) return false;
  const bool swapped = adds && tree[1].is_number_integer();
  const json& leaf = tree[swapped ? 2 : 1];
  const json& shift = tree[swapped ? 1 : 2];
  const bool right = leaf.is_array() && leaf.size() == 2 && leaf[0] == "number" &&
                     leaf[1].is_string() && shift.is_number_integer() && shift <= kMostShift &&
                     shift >= -kMostShift;
  if (!right) return false;
  const std::string name = leaf[1].get<std::string>();
  if (!is_identifier(name) || names.is_argument(name) || names.find_size(name) >= 0 ||
      names.find_group(name) >= 0) {
    return false;
  }
  size.kind = Size::kBindShifted;
  size.index = names.add_size(name);
  size.value = subtracts ? -shift.get<int64_t>() : shift.get<int64_t>();
  return true;
}

void Pattern::read_expressions(const Names& names) {
  for (const auto& [dim, tree] : unread_) {
    const std::string label = op_ + ": tensors." + name_ + ".shape[" + std::to_string(dim) + "]";
    expressions_.push_back(Expression::integer(tree, names.scope(), label));
    shape_text_[dim] = expressions_.back().text();
  }
  has_expressions_ = !expressions_.empty();
  unread_.clear();
}

ScalarType Pattern::dtype(const CallState& state) const {
  return variable_ < 0 ? dtype_ : state.dtypes[static_cast<size_t>(variable_)];
}

int64_t Pattern::shape(const CallState& state, int64_t* sizes, int64_t* strides) const {
  if (like_ >= 0) {
    const TensorFacts& other = state.facts[static_cast<size_t>(like_)];
    std::copy_n(other.sizes, other.dim, sizes);
    std::copy_n(other.strides, other.dim, strides);
    return other.dim;
  }
  int64_t dim = 0;
  const auto add = [&](int64_t size) {
    if (dim == kMaxDims) {
      refuse(-1, "has too many dims", "at most " + std::to_string(kMaxDims), "more");
    }
    sizes[dim++] = size;
  };
  for (size_t i = 0; i < sizes_.size(); ++i) {
    const Size& size = sizes_[i];
    const auto index = static_cast<size_t>(size.index);
    int64_t value = size.value;
    if (size.kind == Size::kSameGroup) {
      const DimGroup& group = state.groups[index];
      for (int64_t j = 0; j < group.count; ++j) add(group.sizes[j]);
      continue;
    }
    if (size.kind == Size::kSame) value = state.numbers[index].integer;
    if (size.kind == Size::kExpression) {
      value = expressions_[index].evaluate(state.arguments()).integer;
    }
    if (value < 0) {
      refuse(-1, "has a negative size in dim " + std::to_string(i) + ", '" + shape_text_[i] + "'",
             "0 or more", std::to_string(value));
    }
    add(value);
  }
  contiguous_strides(sizes, dim, strides);
  return dim;
}

}  // namespace torch_cubin
