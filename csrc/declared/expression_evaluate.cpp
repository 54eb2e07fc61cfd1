// Evaluation of an expression for a call's arguments.
#include <cmath>
#include <string>

#include "cubin/error.h"
#include "declared/expression.h"
#include "declared/expression_operation.h"
#include "pytorch/contiguous.h"

namespace torch_cubin {

namespace {

using Op = ExpressionOperation;

// Compares an int and a float exactly. Returns -1, 0 or 1, or NaN for a NaN: comparing the result
// with 0 gives the result of comparing the two.
double compare(int64_t a, double b) {
  if (std::isnan(b)) return b;
  if (b >= 0x1p63) return -1;
  if (b < -0x1p63) return 1;
  const double whole = std::trunc(b);
  const auto integer = static_cast<int64_t>(whole);
  if (a != integer) return a < integer ? -1 : 1;
  return b > whole ? -1 : b < whole ? 1 : 0;
}

// Minimum, maximum and comparisons of integers or floats.
template <class T>
Value ordered(Op::Code code, T a, T b) {
  switch (code) {
    case Op::kMin:
      return Value::of(b < a ? b : a);
    case Op::kMax:
      return Value::of(b > a ? b : a);
    case Op::kLess:
      return Value::of(a < b);
    case Op::kLessEqual:
      return Value::of(a <= b);
    case Op::kEqual:
      return Value::of(a == b);
    default:
      return Value::of(a != b);
  }
}

}  // namespace

Value Expression::evaluate_leaf(int32_t at, const Arguments& arguments) const {
  const Node& node = nodes_[at];
  const Op::Code code = node.operation->code;
  if (code == Op::kNumber) {
    const Value& number = arguments.numbers[node.index];
    if (number.type == ValueType::kNone) no_value(at, "reads a number that is None");
    return number;
  }
  if (code == Op::kIs) return Value::of(arguments.texts[node.index] == words_[node.words].compare);
  if ((code == Op::kSm || code == Op::kMultiprocessors) && arguments.sm < 0) {
    no_value(at, "depends on the device, which these tensors do not have");
  }
  if (code == Op::kSm) return Value::of(arguments.sm);
  if (code == Op::kMultiprocessors) return Value::of(arguments.multiprocessors);
  const TensorFacts& tensor = arguments.tensors[node.index];
  if (code == Op::kDefined) return Value::of(tensor.defined);
  if (!tensor.defined) no_value(at, "reads a tensor that is None");
  switch (code) {
    case Op::kSize:
    case Op::kStride: {
      int64_t i = node.value.integer;
      if (i < 0) i += tensor.dim;
      if (i < 0 || i >= tensor.dim) {
        no_value(at, "reads a dim of a tensor of " + counted(tensor.dim, "dim"));
      }
      return Value::of(code == Op::kSize ? tensor.sizes[i] : tensor.strides[i]);
    }
    case Op::kNumel: {
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
    case Op::kDim:
      return Value::of(tensor.dim);
    case Op::kItemsize:
      return Value::of(tensor.itemsize);
    case Op::kContiguous:
      return Value::of(is_contiguous(tensor.sizes, tensor.strides, tensor.dim));
    default:
      return Value::of(words_[node.words].compare == tensor.dtype);
  }
}

Value Expression::evaluate(int32_t at, const Arguments& arguments) const {
  const Node& node = nodes_[at];
  if (node.operation == nullptr) return node.value;
  if (node.operation->rule == Op::kLeaf) return evaluate_leaf(at, arguments);
  const auto operand = [&](int i) { return evaluate(node.operands[i], arguments); };
  const Value a = operand(0);
  switch (node.operation->code) {  // unary operations, and those that short-circuit
    case Op::kAnd:
      return a.integer == 0 ? a : operand(1);
    case Op::kOr:
      return a.integer != 0 ? a : operand(1);
    case Op::kSelect: {
      const Value chosen = operand(a.integer != 0 ? 1 : 2);
      return node.type == ValueType::kFloat ? Value::of(chosen.as_number()) : chosen;
    }
    case Op::kNot:
      return Value::of(a.integer == 0);
    case Op::kFloat:
      return Value::of(a.as_number());
    case Op::kSqrt:
      if (a.as_number() < 0) no_value(at, "takes the square root of a negative number");
      return Value::of(std::sqrt(a.as_number()));
    default:
      break;
  }
  const Value b = node.operation->operands > 1 ? operand(1) : Value::of(int64_t{0});
  if (node.operation->rule == Op::kCompare && a.type != b.type) {
    // Exact, as in Python: an int may lie between two doubles.
    const bool first = a.type == ValueType::kInt;
    const double order = first ? compare(a.integer, b.number) : -compare(b.integer, a.number);
    return ordered(node.operation->code, order, 0.0);
  }
  const bool floats = a.type == ValueType::kFloat || b.type == ValueType::kFloat ||
                      node.operation->code == Op::kTrueDiv;
  return floats ? of_floats(at, a.as_number(), b.as_number())
                : of_integers(at, a.integer, b.integer);
}

Value Expression::of_integers(int32_t at, int64_t a, int64_t b) const {
  const Op::Code code = nodes_[at].operation->code;
  if ((code == Op::kFloorDiv || code == Op::kMod) && b == 0) no_value(at, "divides by zero");
  int64_t result = 0;
  bool overflows = false;
  switch (code) {
    case Op::kAdd:
      overflows = __builtin_add_overflow(a, b, &result);
      break;
    case Op::kSub:
      overflows = __builtin_sub_overflow(a, b, &result);
      break;
    case Op::kMul:
      overflows = __builtin_mul_overflow(a, b, &result);
      break;
    case Op::kNeg:
      overflows = __builtin_sub_overflow(int64_t{0}, a, &result);
      break;
    case Op::kAbs:
      overflows = __builtin_sub_overflow(int64_t{0}, a, &result) && a < 0;
      result = a < 0 ? result : a;
      break;
    case Op::kNextPower:
      overflows = a > int64_t{1} << 62;
      if (a > 0 && !overflows) {
        for (result = 1; result < a;) result *= 2;
      }
      break;
    case Op::kFloorDiv:
      if (b == -1) {  // INT64_MIN / -1 traps
        overflows = __builtin_sub_overflow(int64_t{0}, a, &result);
      } else {
        result = a / b - (a % b != 0 && (a < 0) != (b < 0) ? 1 : 0);
      }
      break;
    case Op::kMod:
      if (b != -1) result = a % b + (a % b != 0 && (a < 0) != (b < 0) ? b : 0);
      break;
    default:
      return ordered(code, a, b);
  }
  if (overflows) no_value(at, "overflows a 64-bit integer");
  return Value::of(result);
}

Value Expression::of_floats(int32_t at, double a, double b) const {
  const Op::Code code = nodes_[at].operation->code;
  switch (code) {
    case Op::kAdd:
      return Value::of(a + b);
    case Op::kSub:
      return Value::of(a - b);
    case Op::kMul:
      return Value::of(a * b);
    case Op::kTrueDiv:
      if (b == 0) no_value(at, "divides by zero");
      return Value::of(a / b);
    case Op::kNeg:
      return Value::of(-a);
    case Op::kAbs:
      return Value::of(std::fabs(a));
    default:
      return ordered(code, a, b);
  }
}

void Expression::no_value(int32_t at, const std::string& problem) const {
  fail({"input", label_ + ": '" + printable(text(at)) + "'", problem, "", "",
        "The definition does not allow for these arguments."});
}

}  // namespace torch_cubin
