// Patterns: a contract's description of a tensor (dtype, shape, layout, alignment), matched against
// an argument, or used to allocate an output. Matching binds the names of sizes.
//
// Which occurrence of a name binds it is decided when the op is defined, so that a call only stores
// and compares.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "declared/call_state.h"
#include "declared/expression.h"
#include "declared/schema.h"
#include "package/fields.h"

namespace torch_cubin {

// The names of a contract, and their indices in a call's state.
class Names {
 public:
  // `op` is for errors: "op 'mylib::vec_add'". Throws [input] for unknown dtypes.
  Names(const Schema& schema, const nlohmann::json* dtypes, std::string op);

  struct Variable {
    std::string name;
    std::vector<ScalarType> allowed;
    bool bound = false;
  };

  const std::string& op() const { return op_; }
  const Schema& schema() const { return schema_; }
  const Scope& scope() const { return scope_; }
  Scope& scope() { return scope_; }
  std::vector<Variable>& variables() { return variables_; }

  // The index of a number by its name; -1 if there is none.
  int find_size(const std::string& name) const { return scope_.find_number(name); }
  int find_group(const std::string& name) const;
  int add_size(const std::string& name);
  int add_group(const std::string& name);
  // Whether the schema has an argument of that name.
  bool is_argument(const std::string& name) const;

  // forget() removes the names bound since mark(), those of one pattern whose tensor a call may
  // omit. A dtype variable bound by such a tensor stays bound for later tensors, but outputs may
  // not use it.
  struct Mark {
    size_t groups;
    size_t numbers;
    std::vector<bool> variables;
  };
  Mark mark() const;
  void forget(const Mark& mark);

  // The index of the flag "x?" or of "len(xs)" for an argument; -1 if it has none.
  int extra(size_t argument) const { return extras_[argument]; }

  // An item of a Tensor[] in the definition: "xs[2]", or ["pointer", "xs", 2].
  struct Item {
    size_t argument;
    size_t index;
    size_t place;
  };
  // Assigns indices to all items in `definition`. Call once, before anything is read.
  void add_items(const nlohmann::json& definition);
  const std::vector<Item>& items() const { return items_; }

 private:
  void check_capacity() const;
  void add_item(const std::string& list, const std::string& index);

  const Schema& schema_;
  std::string op_;
  Scope scope_;
  std::vector<Variable> variables_;
  std::vector<std::string> groups_;
  std::vector<int> extras_;
  std::vector<Item> items_;
};

constexpr int64_t kMaxAlign = 4096;

// The field "align": a power of two up to kMaxAlign; `otherwise` if it is missing.
int64_t read_align(Fields& fields, int64_t otherwise);

class Pattern {
 public:
  enum class Layout : uint8_t { kContiguous, kRows, kDense, kStrided };
  enum class Role : uint8_t { kArgument, kOutput, kScratch };

  // Reads an entry of `tensors` or `scratch` and binds its names.
  Pattern(const std::string& name, Role role, const nlohmann::json& entry, Names& names);

  // Reads the expressions in its shape, once all names that they may use are bound.
  void read_expressions(const Names& names);

  const std::string& name() const { return name_; }
  // The index of the tensor whose shape and strides an output copies; or -1.
  int like() const { return like_; }
  Layout layout() const { return layout_; }
  bool zeroed() const { return zeroed_; }  // for outputs and scratch
  // For an argument that the op changes: whether other arguments may share its memory.
  bool may_overlap() const { return may_overlap_; }
  [[noreturn]] void refuse_overlap(const std::string& other) const;

  // Matches a tensor argument, or an item of one (-1: none), and stores its facts at `place`:
  // checks dtype, device, dims and layout, and binds names. Throws [input]. Expressions in the
  // shape are checked by check_expressions(), when all names are bound. Returns whether the tensor
  // has elements, whose address must then be checked.
  bool match(const TensorView& view, size_t place, int item, CallState& state) const;
  void check_address(const void* address, const TensorView& view, int item) const;
  bool has_expressions() const { return has_expressions_; }
  void check_expressions(size_t place, int item, const CallState& state) const;

  ScalarType dtype(const CallState& state) const;
  // All dtypes that it may have.
  std::vector<ScalarType> dtypes() const {
    return variable_ < 0 ? std::vector<ScalarType>{dtype_} : allowed_;
  }

  // The sizes and strides of an output or scratch. `sizes` and `strides` have capacity for
  // kMaxDims.
  int64_t shape(const CallState& state, int64_t* sizes, int64_t* strides) const;

 private:
  struct Size {
    enum Kind : uint8_t {
      kBind,
      kBindShifted,  // "n + 1": n is one less than the size
      kSame,
      kConstant,
      kExpression,
      kBindGroup,
      kSameGroup
    };
    Kind kind;
    int32_t index = 0;  // index of the number, group or expression
    int64_t value = 0;  // the constant, or the offset added to a name
  };

  void read_dtype(const std::string& text, Names& names);
  void read_shape(const nlohmann::json& shape, Names& names);
  void read_size(const nlohmann::json& size, size_t dim, Names& names);
  bool bind_shifted(const nlohmann::json& tree, Size& size, Names& names);
  // The parts of match(), which bind a device, dtypes and sizes or compare with those bound.
  void check_device(const TensorView& view, int item, CallState& state) const;
  void check_dtype(ScalarType found, int item, CallState& state) const;
  void match_sizes(const TensorView& view, int item, CallState& state) const;
  void check_layout(const TensorView& view, int item) const;
  [[noreturn]] void refuse(int item, const std::string& problem, const std::string& expected,
                           const std::string& got, const std::string& advice = "") const;
  std::string expected_shape() const;

  std::string op_;
  std::string name_;
  Role role_;
  ScalarType dtype_{};
  int variable_ = -1;
  std::string variable_name_;
  std::vector<ScalarType> allowed_;
  bool mutated_ = false;
  bool zeroed_ = false;
  bool may_overlap_ = false;
  bool any_shape_ = false;
  bool has_expressions_ = false;
  std::vector<Size> sizes_;
  int group_at_ = -1;                                      // index of the "*s" in sizes_
  std::vector<std::pair<size_t, nlohmann::json>> unread_;  // by dim, until read_expressions()
  std::vector<Expression> expressions_;
  std::vector<std::string> shape_text_;
  Layout layout_ = Layout::kContiguous;
  int64_t align_ = 16;
  int like_ = -1;
};

}  // namespace torch_cubin
