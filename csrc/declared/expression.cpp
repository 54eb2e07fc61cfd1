#include "declared/expression.h"

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>

#include "cubin/error.h"
#include "declared/expression_operation.h"
#include "package/fields.h"

namespace torch_cubin {

namespace {

using nlohmann::json;
using Op = ExpressionOperation;

constexpr int kMaxDepth = 64;  // so that a manifest's tree cannot overflow the stack
constexpr size_t kMaxNodes = 4096;

constexpr ExpressionOperation kOperations[] = {
    {"number", Op::kNumber, Op::kLeaf, 0, ""},
    {"size", Op::kSize, Op::kLeaf, 0, "size"},
    {"stride", Op::kStride, Op::kLeaf, 0, "stride"},
    {"numel", Op::kNumel, Op::kLeaf, 0, "numel"},
    {"dim", Op::kDim, Op::kLeaf, 0, "dim"},
    {"itemsize", Op::kItemsize, Op::kLeaf, 0, "itemsize"},
    {"defined", Op::kDefined, Op::kLeaf, 0, "defined"},
    {"contiguous", Op::kContiguous, Op::kLeaf, 0, "contiguous"},
    {"is_dtype", Op::kIsDtype, Op::kLeaf, 0, "dtype"},
    {"is", Op::kIs, Op::kLeaf, 0, ""},
    {"sm", Op::kSm, Op::kLeaf, 0, "sm"},
    {"multiprocessors", Op::kMultiprocessors, Op::kLeaf, 0, "multiprocessors"},
    {"add", Op::kAdd, Op::kArithmetic, 2, "+"},
    {"sub", Op::kSub, Op::kArithmetic, 2, "-"},
    {"mul", Op::kMul, Op::kArithmetic, 2, "*"},
    {"floordiv", Op::kFloorDiv, Op::kIntegers, 2, "//"},
    {"mod", Op::kMod, Op::kIntegers, 2, "%"},
    {"truediv", Op::kTrueDiv, Op::kFloats, 2, "/"},
    {"min", Op::kMin, Op::kArithmetic, 2, "min"},
    {"max", Op::kMax, Op::kArithmetic, 2, "max"},
    {"neg", Op::kNeg, Op::kArithmetic, 1, "-"},
    {"abs", Op::kAbs, Op::kArithmetic, 1, "abs"},
    {"next_power_of_2", Op::kNextPower, Op::kIntegers, 1, "next_power_of_2"},
    {"sqrt", Op::kSqrt, Op::kFloats, 1, "sqrt"},
    {"float", Op::kFloat, Op::kFloats, 1, "float"},
    {"lt", Op::kLess, Op::kCompare, 2, "<"},
    {"le", Op::kLessEqual, Op::kCompare, 2, "<="},
    {"eq", Op::kEqual, Op::kCompare, 2, "=="},
    {"ne", Op::kNotEqual, Op::kCompare, 2, "!="},
    {"and", Op::kAnd, Op::kLogic, 2, "and"},
    {"or", Op::kOr, Op::kLogic, 2, "or"},
    {"not", Op::kNot, Op::kLogic, 1, "not"},
    {"select", Op::kSelect, Op::kChoice, 3, "select"},
};

const ExpressionOperation* find(const std::string& name) {
  for (const ExpressionOperation& operation : kOperations) {
    if (name == operation.name) return &operation;
  }
  return nullptr;
}

const char* name_of(ValueType type) {
  switch (type) {
    case ValueType::kBool:
      return "bool";
    case ValueType::kInt:
      return "int";
    case ValueType::kFloat:
      return "float";
    default:
      return "None";
  }
}

std::string shown(const json& tree) {
  return printable(tree.dump(-1, ' ', false, json::error_handler_t::replace));
}

int place_of_name(const std::vector<std::string>& names, const std::string& name) {
  const auto found = std::find(names.begin(), names.end(), name);
  return name.empty() || found == names.end() ? -1 : static_cast<int>(found - names.begin());
}

}  // namespace

int64_t Value::bits() const {
  if (type != ValueType::kFloat) return integer;
  int64_t bits = 0;
  const double same = number == 0 ? 0 : number;
  std::memcpy(&bits, &same, sizeof(bits));
  return bits;
}

std::string Value::text() const {
  if (type == ValueType::kBool) return integer != 0 ? "True" : "False";
  return type == ValueType::kInt ? std::to_string(integer) : json(number).dump();
}

int Scope::find_tensor(const std::string& name) const { return place_of_name(tensors, name); }

int Scope::find_text(const std::string& name) const { return place_of_name(texts, name); }

int Scope::find_number(const std::string& name) const {
  const auto found = std::find_if(numbers.begin(), numbers.end(),
                                  [&](const auto& number) { return number.first == name; });
  return name.empty() || found == numbers.end() ? -1 : static_cast<int>(found - numbers.begin());
}

Expression::Expression(const json& tree, const Scope& scope, std::string label)
    : label_(std::move(label)) {
  read(tree, scope, 0);
  find_quick();
}

void Expression::find_quick() {
  const auto is = [&](const Node& node, Op::Code code) {
    return node.operation != nullptr && node.operation->code == code;
  };
  const auto operand = [&](const Node& node, int i) -> const Node& {
    return nodes_[static_cast<size_t>(node.operands[i])];
  };
  const Node& root = nodes_[0];
  if (root.operation == nullptr) {
    quick_ = Quick::kConstant;
    constant_ = root.value;
  } else if (is(root, Op::kNumber)) {
    quick_ = Quick::kNumber;
    number_ = root.index;
  } else if (is(root, Op::kNeg) && is(operand(root, 0), Op::kFloorDiv)) {
    const Node& quotient = operand(root, 0);
    const Node &negated = operand(quotient, 0), &divisor = operand(quotient, 1);
    if (!is(negated, Op::kNeg) || !is(operand(negated, 0), Op::kNumber)) return;
    if (operand(negated, 0).type != ValueType::kInt) return;
    if (divisor.operation != nullptr || divisor.type != ValueType::kInt) return;
    if (divisor.value.integer < 1) return;
    quick_ = Quick::kCeilDiv;
    number_ = operand(negated, 0).index;
    constant_ = divisor.value;
  }
}

Expression Expression::integer(const json& tree, const Scope& scope, const std::string& label,
                               const char* wanted) {
  Expression read(tree, scope, label);
  if (read.type() != ValueType::kInt) refuse_json(label, wanted, tree);
  return read;
}

int32_t Expression::read(const json& tree, const Scope& scope, int depth) {
  if (depth > kMaxDepth || nodes_.size() >= kMaxNodes) {
    malformed("is too large",
              "at most " + std::to_string(kMaxDepth) + " levels and " + std::to_string(kMaxNodes) +
                  " nodes",
              "");
  }
  const auto at = static_cast<int32_t>(nodes_.size());
  nodes_.emplace_back();
  Node node{};
  if (tree.is_boolean()) {
    node.value = Value::of(tree.get<bool>());
  } else if (tree.is_number_integer()) {
    if (tree.is_number_unsigned() && tree.get<uint64_t>() > uint64_t{INT64_MAX}) {
      malformed("holds a number that is too large", "64-bit integers", shown(tree));
    }
    node.value = Value::of(tree.get<int64_t>());
  } else if (tree.is_number_float()) {
    node.value = Value::of(tree.get<double>());
  } else {
    if (!tree.is_array() || tree.empty() || !tree[0].is_string()) {
      malformed("holds a value that is no node", "a number, a bool or [\"operation\", ...]",
                shown(tree));
    }
    const ExpressionOperation* operation = find(tree[0].get<std::string>());
    if (operation == nullptr) {
      malformed("holds an unknown operation", "a known one", shown(tree[0]));
    }
    node.operation = operation;
    if (operation->rule == Op::kLeaf) {
      read_leaf(node, tree, scope);
    } else {
      if (tree.size() != 1 + static_cast<size_t>(operation->operands)) {
        malformed("has a wrong number of operands",
                  std::to_string(operation->operands) + " for '" + operation->name + "'",
                  shown(tree));
      }
      for (int i = 0; i < operation->operands; ++i) {
        node.operands[i] = read(tree[i + 1], scope, depth + 1);
      }
      check_operands(node);
    }
  }
  if (node.operation == nullptr) node.type = node.value.type;
  nodes_[at] = node;
  return at;
}

void Expression::read_leaf(Node& node, const json& tree, const Scope& scope) {
  const Op::Code code = node.operation->code;
  if (code == Op::kSm || code == Op::kMultiprocessors) {
    if (tree.size() != 1) malformed("has a wrong number of operands", "none", shown(tree));
    return;
  }
  const bool with_dim = code == Op::kSize || code == Op::kStride;
  const bool with_dtype = code == Op::kIsDtype || code == Op::kIs;
  const size_t wanted = with_dim || with_dtype ? 3 : 2;
  if (tree.size() != wanted || !tree[1].is_string() ||
      tree[1].get_ref<const std::string&>().empty() || (with_dim && !tree[2].is_number_integer()) ||
      (with_dtype && !tree[2].is_string())) {
    malformed("reads an argument wrongly", "[\"size\", \"x\", 0], [\"numel\", \"x\"] and so on",
              shown(tree));
  }
  const std::string name = tree[1].get<std::string>();
  node.words = static_cast<int32_t>(words_.size());
  words_.push_back({name, with_dtype ? tree[2].get<std::string>() : ""});
  if (code == Op::kNumber) {
    node.index = scope.find_number(name);
    if (node.index < 0) malformed("reads an unknown number", "a number of the op", shown(tree));
    node.type = scope.numbers[static_cast<size_t>(node.index)].second;
    return;
  }
  node.index = code == Op::kIs ? scope.find_text(name) : scope.find_tensor(name);
  if (node.index < 0) {
    malformed(
        code == Op::kIs ? "compares a value that is no string or dtype" : "reads an unknown tensor",
        code == Op::kIs ? "a str or ScalarType argument of the op" : "a tensor of the op",
        shown(tree));
  }
  if (with_dim) node.value = Value::of(tree[2].get<int64_t>());
  if (with_dtype || code == Op::kDefined || code == Op::kContiguous) {
    node.type = ValueType::kBool;
  }
}

void Expression::check_operands(Node& node) const {
  const ExpressionOperation& entry = *node.operation;
  ValueType types[3]{};
  bool any_bool = false, any_float = false, all_bool = true;
  for (int i = 0; i < entry.operands; ++i) {
    types[i] = nodes_[node.operands[i]].type;
    if (entry.rule == Op::kChoice && i == 0) continue;
    any_bool |= types[i] == ValueType::kBool;
    all_bool &= types[i] == ValueType::kBool;
    any_float |= types[i] == ValueType::kFloat;
  }
  const auto refuse = [&](const char* expected) {
    std::string got = name_of(types[0]);
    for (int i = 1; i < entry.operands; ++i) got += std::string(", ") + name_of(types[i]);
    malformed("has operands of a wrong type", std::string(expected) + " for '" + entry.name + "'",
              got);
  };
  node.type = any_float ? ValueType::kFloat : ValueType::kInt;
  switch (entry.rule) {
    case Op::kArithmetic:
      if (any_bool) refuse("numbers");
      return;
    case Op::kIntegers:
      if (any_bool || any_float) refuse("integers");
      return;
    case Op::kFloats:
      if (any_bool) refuse("numbers");
      node.type = ValueType::kFloat;
      return;
    case Op::kCompare:
      if (any_bool) refuse("numbers");
      node.type = ValueType::kBool;
      return;
    case Op::kLogic:
      if (!all_bool) refuse("bools");
      node.type = ValueType::kBool;
      return;
    default:
      if (types[0] != ValueType::kBool || (any_bool && !all_bool)) {
        refuse("a bool and two numbers or bools");
      }
      if (all_bool) node.type = ValueType::kBool;
  }
}

std::string Expression::text(int32_t at) const {
  const Node& node = nodes_[at];
  if (node.operation == nullptr) return node.value.text();
  std::string symbol = node.operation->symbol;
  const auto operand = [&](int i) { return text(node.operands[i]); };
  if (node.operation->rule == Op::kLeaf) {
    const Op::Code code = node.operation->code;
    if (node.words < 0) return symbol;
    const Words& words = words_[node.words];
    if (code == Op::kNumber) return words.name;
    if (code == Op::kIsDtype) return "(" + words.name + ".dtype == " + words.compare + ")";
    if (code == Op::kIs) return "(" + words.name + " == '" + words.compare + "')";
    if (code == Op::kSize || code == Op::kStride) {
      return words.name + "." + symbol + "(" + std::to_string(node.value.integer) + ")";
    }
    return words.name + "." + symbol;
  }
  const bool letters = symbol[0] >= 'a' && symbol[0] <= 'z' && symbol != "and" && symbol != "or";
  if (node.operation->operands == 1) return symbol + "(" + operand(0) + ")";
  if (!letters) return "(" + operand(0) + " " + symbol + " " + operand(1) + ")";
  std::string list = operand(0) + ", " + operand(1);
  if (node.operation->operands == 3) list += ", " + operand(2);
  return symbol + "(" + list + ")";
}

void Expression::malformed(const std::string& problem, const std::string& expected,
                           const std::string& got) const {
  fail({"input", label_, problem, expected, got, ""});
}

}  // namespace torch_cubin
