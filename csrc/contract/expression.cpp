#include "contract/expression.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "cubin/error.h"
#include "runtime/contiguous.h"

namespace torch_cubin {

struct ExpressionOperation {
  const char* name;
  int code;
  int rule;
  int operands;
  const char* symbol;  // in text
};

namespace {

using nlohmann::json;

constexpr int kMaxDepth = 64;  // a tree of a manifest must not overflow the stack
constexpr size_t kMaxNodes = 4096;

enum Code {
  kNumber,
  kSize,
  kStride,
  kNumel,
  kDim,
  kItemsize,
  kDefined,
  kContiguous,
  kIsDtype,
  kIs,
  kSm,
  kMultiprocessors,
  kAdd,
  kSub,
  kMul,
  kFloorDiv,
  kMod,
  kTrueDiv,
  kMin,
  kMax,
  kNeg,
  kAbs,
  kSqrt,
  kFloat,
  kLess,
  kLessEqual,
  kEqual,
  kNotEqual,
  kAnd,
  kOr,
  kNot,
  kSelect,
};

// What an operation's operands may be, and what it gives.
enum Rule {
  kLeaf,        // ["number", name] and the like; no operands
  kArithmetic,  // numbers; float if one is
  kIntegers,    // integers
  kFloats,      // numbers; gives a float
  kCompare,     // numbers; gives a bool
  kLogic,       // bools
  kChoice,      // a bool, and two of one type, or numbers
};

constexpr ExpressionOperation kOperations[] = {
    {"number", kNumber, kLeaf, 0, ""},
    {"size", kSize, kLeaf, 0, "size"},
    {"stride", kStride, kLeaf, 0, "stride"},
    {"numel", kNumel, kLeaf, 0, "numel"},
    {"dim", kDim, kLeaf, 0, "dim"},
    {"itemsize", kItemsize, kLeaf, 0, "itemsize"},
    {"defined", kDefined, kLeaf, 0, "defined"},
    {"contiguous", kContiguous, kLeaf, 0, "contiguous"},
    {"is_dtype", kIsDtype, kLeaf, 0, "dtype"},
    {"is", kIs, kLeaf, 0, ""},
    {"sm", kSm, kLeaf, 0, "sm"},
    {"multiprocessors", kMultiprocessors, kLeaf, 0, "multiprocessors"},
    {"add", kAdd, kArithmetic, 2, "+"},
    {"sub", kSub, kArithmetic, 2, "-"},
    {"mul", kMul, kArithmetic, 2, "*"},
    {"floordiv", kFloorDiv, kIntegers, 2, "//"},
    {"mod", kMod, kIntegers, 2, "%"},
    {"truediv", kTrueDiv, kFloats, 2, "/"},
    {"min", kMin, kArithmetic, 2, "min"},
    {"max", kMax, kArithmetic, 2, "max"},
    {"neg", kNeg, kArithmetic, 1, "-"},
    {"abs", kAbs, kArithmetic, 1, "abs"},
    {"sqrt", kSqrt, kFloats, 1, "sqrt"},
    {"float", kFloat, kFloats, 1, "float"},
    {"lt", kLess, kCompare, 2, "<"},
    {"le", kLessEqual, kCompare, 2, "<="},
    {"eq", kEqual, kCompare, 2, "=="},
    {"ne", kNotEqual, kCompare, 2, "!="},
    {"and", kAnd, kLogic, 2, "and"},
    {"or", kOr, kLogic, 2, "or"},
    {"not", kNot, kLogic, 1, "not"},
    {"select", kSelect, kChoice, 3, "select"},
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

// Of an int and a float, exactly: -1, 0 or 1; kUnordered for a NaN.
constexpr int kUnordered = 2;
int compare(int64_t a, double b) {
  if (std::isnan(b)) return kUnordered;
  if (b >= 0x1p63) return -1;
  if (b < -0x1p63) return 1;
  const double whole = std::trunc(b);
  const auto integer = static_cast<int64_t>(whole);
  if (a != integer) return a < integer ? -1 : 1;
  return b > whole ? -1 : b < whole ? 1 : 0;
}
int reversed(int order) { return order == kUnordered ? kUnordered : -order; }

bool holds(int comparison, int order) {
  switch (comparison) {
    case kLess:
      return order == -1;
    case kLessEqual:
      return order == -1 || order == 0;
    case kEqual:
      return order == 0;
    default:
      return order != 0;
  }
}

std::string text_of(const Value& value) {
  if (value.type == ValueType::kBool) return value.integer != 0 ? "True" : "False";
  return value.type == ValueType::kInt ? std::to_string(value.integer) : json(value.number).dump();
}

}  // namespace

Expression::Expression(const json& tree, const Scope& scope, std::string label)
    : label_(std::move(label)) {
  read(tree, scope, 0);
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
      malformed("holds what is no node", "a number, a bool or [\"operation\", ...]", shown(tree));
    }
    const ExpressionOperation* operation = find(tree[0].get<std::string>());
    if (operation == nullptr) {
      malformed("holds an unknown operation", "a known one", shown(tree[0]));
    }
    node.operation = operation;
    if (operation->rule == kLeaf) {
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
  nodes_[at] = std::move(node);
  return at;
}

void Expression::read_leaf(Node& node, const json& tree, const Scope& scope) {
  const int code = node.operation->code;
  if (code == kSm || code == kMultiprocessors) {
    if (tree.size() != 1) malformed("has a wrong number of operands", "none", shown(tree));
    return;
  }
  const bool with_dim = code == kSize || code == kStride;
  const bool with_dtype = code == kIsDtype || code == kIs;
  const size_t wanted = with_dim || with_dtype ? 3 : 2;
  if (tree.size() != wanted || !tree[1].is_string() || tree[1] == "" ||
      (with_dim && !tree[2].is_number_integer()) || (with_dtype && !tree[2].is_string())) {
    malformed("reads an argument in a wrong way",
              "[\"size\", \"x\", 0], [\"numel\", \"x\"] and so on", shown(tree));
  }
  const std::string name = tree[1].get<std::string>();
  node.words = static_cast<int32_t>(words_.size());
  words_.push_back({name, with_dtype ? tree[2].get<std::string>() : ""});
  if (code == kNumber) {
    const auto& numbers = scope.numbers;
    const auto found = std::find_if(numbers.begin(), numbers.end(),
                                    [&](const auto& number) { return number.first == name; });
    if (found == numbers.end())
      malformed("reads an unknown number", "a number of the op", shown(tree));
    node.index = static_cast<int32_t>(found - numbers.begin());
    node.type = found->second;
    return;
  }
  const auto& names = code == kIs ? scope.texts : scope.tensors;
  const auto found = std::find(names.begin(), names.end(), name);
  if (found == names.end()) {
    malformed(code == kIs ? "compares what is no string or dtype" : "reads an unknown tensor",
              code == kIs ? "a str or ScalarType argument of the op" : "a tensor of the op",
              shown(tree));
  }
  node.index = static_cast<int32_t>(found - names.begin());
  if (with_dim) node.value = Value::of(tree[2].get<int64_t>());
  if (with_dtype || code == kDefined || code == kContiguous) {
    node.type = ValueType::kBool;
  }
}

void Expression::check_operands(Node& node) const {
  const ExpressionOperation& entry = *node.operation;
  ValueType types[3]{};
  bool any_bool = false, any_float = false, all_bool = true;
  for (int i = 0; i < entry.operands; ++i) {
    types[i] = nodes_[node.operands[i]].type;
    if (entry.rule == kChoice && i == 0) continue;
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
    case kArithmetic:
      if (any_bool) refuse("numbers");
      return;
    case kIntegers:
      if (any_bool || any_float) refuse("integers");
      return;
    case kFloats:
      if (any_bool) refuse("numbers");
      node.type = ValueType::kFloat;
      return;
    case kCompare:
      if (any_bool) refuse("numbers");
      node.type = ValueType::kBool;
      return;
    case kLogic:
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

Value Expression::evaluate_leaf(int32_t at, const Arguments& arguments) const {
  const Node& node = nodes_[at];
  const int code = node.operation->code;
  if (code == kNumber) {
    const Value& number = arguments.numbers[node.index];
    if (number.type == ValueType::kNone) no_value(at, "reads a number that is None");
    return number;
  }
  if (code == kIs) return Value::of(arguments.texts[node.index] == words_[node.words].compare);
  if (code == kSm) return Value::of(arguments.sm);
  if (code == kMultiprocessors) return Value::of(arguments.multiprocessors);
  const TensorFacts& tensor = arguments.tensors[node.index];
  if (code == kDefined) return Value::of(tensor.defined);
  if (!tensor.defined) no_value(at, "reads a tensor that is None");
  switch (code) {
    case kSize:
    case kStride: {
      int64_t i = node.value.integer;
      if (i < 0) i += tensor.dim;
      if (i < 0 || i >= tensor.dim) {
        no_value(at, "reads a dim of a tensor of " + std::to_string(tensor.dim) + " dims");
      }
      return Value::of(code == kSize ? tensor.sizes[i] : tensor.strides[i]);
    }
    case kNumel: {
      int64_t product = 1;
      bool overflows = false, empty = false;
      for (int64_t i = 0; i < tensor.dim; ++i) {
        empty |= tensor.sizes[i] == 0;
        overflows |= __builtin_mul_overflow(product, tensor.sizes[i], &product);
      }
      if (empty) return Value::of(int64_t{0});
      if (overflows) no_value(at, "overflows a 64-bit integer");
      return Value::of(product);
    }
    case kDim:
      return Value::of(tensor.dim);
    case kItemsize:
      return Value::of(tensor.itemsize);
    case kContiguous:
      return Value::of(is_contiguous(tensor.sizes, tensor.strides, tensor.dim));
    default:
      return Value::of(words_[node.words].compare == tensor.dtype);
  }
}

Value Expression::evaluate(int32_t at, const Arguments& arguments) const {
  const Node& node = nodes_[at];
  if (node.operation == nullptr) return node.value;
  if (node.operation->rule == kLeaf) return evaluate_leaf(at, arguments);
  const auto operand = [&](int i) { return evaluate(node.operands[i], arguments); };
  const Value a = operand(0);
  switch (node.operation->code) {  // what does not need the other operands, or not all
    case kAnd:
      return a.integer == 0 ? a : operand(1);
    case kOr:
      return a.integer != 0 ? a : operand(1);
    case kSelect: {
      const Value chosen = operand(a.integer != 0 ? 1 : 2);
      return node.type == ValueType::kFloat ? Value::of(chosen.as_number()) : chosen;
    }
    case kNot:
      return Value::of(a.integer == 0);
    case kFloat:
      return Value::of(a.as_number());
    case kSqrt:
      if (a.as_number() < 0) no_value(at, "takes the square root of a negative number");
      return Value::of(std::sqrt(a.as_number()));
    default:
      break;
  }
  const Value b = node.operation->operands > 1 ? operand(1) : Value::of(int64_t{0});
  if (node.operation->rule == kCompare && a.type != b.type) {
    // Exactly, as Python does: an int may be between two doubles.
    const bool first = a.type == ValueType::kInt;
    const int order = first ? compare(a.integer, b.number) : reversed(compare(b.integer, a.number));
    return Value::of(holds(node.operation->code, order));
  }
  const bool floats = a.type == ValueType::kFloat || b.type == ValueType::kFloat ||
                      node.operation->code == kTrueDiv;
  return floats ? of_floats(at, a.as_number(), b.as_number())
                : of_integers(at, a.integer, b.integer);
}

Value Expression::of_integers(int32_t at, int64_t a, int64_t b) const {
  const auto checked = [&](bool overflows, int64_t result) {
    if (overflows) no_value(at, "overflows a 64-bit integer");
    return Value::of(result);
  };
  int64_t result = 0;
  switch (nodes_[at].operation->code) {
    case kAdd: {
      const bool overflows = __builtin_add_overflow(a, b, &result);
      return checked(overflows, result);
    }
    case kSub: {
      const bool overflows = __builtin_sub_overflow(a, b, &result);
      return checked(overflows, result);
    }
    case kMul: {
      const bool overflows = __builtin_mul_overflow(a, b, &result);
      return checked(overflows, result);
    }
    case kFloorDiv:
      if (b == 0) no_value(at, "divides by zero");
      if (b == -1) return checked(a == INT64_MIN, a == INT64_MIN ? 0 : -a);
      return Value::of(a / b - (a % b != 0 && (a < 0) != (b < 0) ? 1 : 0));
    case kMod:
      if (b == 0) no_value(at, "divides by zero");
      if (b == -1) return Value::of(int64_t{0});
      return Value::of(a % b + (a % b != 0 && (a < 0) != (b < 0) ? b : 0));
    case kMin:
      return Value::of(b < a ? b : a);
    case kMax:
      return Value::of(b > a ? b : a);
    case kNeg:
      return checked(a == INT64_MIN, a == INT64_MIN ? 0 : -a);
    case kAbs:
      return checked(a == INT64_MIN, a == INT64_MIN ? 0 : (a < 0 ? -a : a));
    case kLess:
      return Value::of(a < b);
    case kLessEqual:
      return Value::of(a <= b);
    case kEqual:
      return Value::of(a == b);
    default:
      return Value::of(a != b);
  }
}

Value Expression::of_floats(int32_t at, double a, double b) const {
  switch (nodes_[at].operation->code) {
    case kAdd:
      return Value::of(a + b);
    case kSub:
      return Value::of(a - b);
    case kMul:
      return Value::of(a * b);
    case kTrueDiv:
      if (b == 0) no_value(at, "divides by zero");
      return Value::of(a / b);
    case kMin:
      return Value::of(b < a ? b : a);
    case kMax:
      return Value::of(b > a ? b : a);
    case kNeg:
      return Value::of(-a);
    case kAbs:
      return Value::of(std::fabs(a));
    case kLess:
      return Value::of(a < b);
    case kLessEqual:
      return Value::of(a <= b);
    case kEqual:
      return Value::of(a == b);
    default:
      return Value::of(a != b);
  }
}

std::string Expression::text(int32_t at) const {
  const Node& node = nodes_[at];
  if (node.operation == nullptr) return text_of(node.value);
  const std::string symbol = node.operation->symbol;
  const auto operand = [&](int i) { return text(node.operands[i]); };
  switch (node.operation->rule) {
    case kLeaf: {
      const int code = node.operation->code;
      if (node.words < 0) return symbol;
      const Words& words = words_[node.words];
      if (code == kNumber) return words.name;
      if (code == kIsDtype) return "(" + words.name + ".dtype == " + words.compare + ")";
      if (code == kIs) return "(" + words.name + " == '" + words.compare + "')";
      if (code == kSize || code == kStride) {
        return words.name + "." + symbol + "(" + std::to_string(node.value.integer) + ")";
      }
      return words.name + "." + symbol;
    }
    default:
      break;
  }
  const bool letters = symbol[0] >= 'a' && symbol[0] <= 'z' && symbol != "and" && symbol != "or";
  if (node.operation->operands == 1) return symbol + "(" + operand(0) + ")";
  if (!letters) return "(" + operand(0) + " " + symbol + " " + operand(1) + ")";
  std::string list = operand(0) + ", " + operand(1);
  if (node.operation->operands == 3) list += ", " + operand(2);
  return symbol + "(" + list + ")";
}

void Expression::no_value(int32_t at, const std::string& problem) const {
  fail({"input", label_ + ": '" + printable(text(at)) + "'", problem, "", "",
        "The definition does not allow for these arguments."});
}

void Expression::malformed(const std::string& problem, const std::string& expected,
                           const std::string& got) const {
  fail({"input", label_, problem, expected, got, ""});
}

}  // namespace torch_cubin
