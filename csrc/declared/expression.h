// Expressions: compute numbers of a declared op (a grid, a size, a kernel's scalar) from its
// arguments. They are JSON trees made by _declared/expressions.py, which defines the nodes and
// evaluates the same trees for symbolic sizes. A test compares both on random trees.
//
// Names, types and depth are checked once, when a tree is read. Remaining errors at run time are
// integer overflow, division by zero and dims that a tensor does not have.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace torch_cubin {

// kNone: an optional number that a call omitted; no expression gives it.
enum class ValueType : uint8_t { kBool, kInt, kFloat, kNone };

struct Value {
  ValueType type = ValueType::kInt;
  int64_t integer = 0;  // of kBool: 0 or 1
  double number = 0;    // of kFloat

  static Value of(bool x) { return {ValueType::kBool, x, 0}; }
  static Value of(int64_t x) { return {ValueType::kInt, x, 0}; }
  static Value of(double x) { return {ValueType::kFloat, 0, x}; }
  double as_number() const {
    return type == ValueType::kFloat ? number : static_cast<double>(integer);
  }
  // Equal for equal values of one type: -0.0 and 0.0 are the same, as in Python.
  int64_t bits() const;
  std::string text() const;  // as Python writes it
};

// The names that a tree may use: the op's tensors, its numbers with their types, and its strings
// and dtypes, which can only be compared. An entry without a name is not accessible.
struct Scope {
  std::vector<std::string> tensors;
  std::vector<std::pair<std::string, ValueType>> numbers;
  std::vector<std::string> texts;

  // The index of a name; -1 if there is none.
  int find_tensor(const std::string& name) const;
  int find_number(const std::string& name) const;
  int find_text(const std::string& name) const;
};

// The metadata of a tensor argument that expressions may read; zeros for an absent one.
struct TensorFacts {
  const int64_t* sizes = nullptr;
  const int64_t* strides = nullptr;
  int64_t dim = 0;
  int64_t itemsize = 0;    // bytes
  const char* dtype = "";  // torch's name: "float32"
  bool defined = false;
};

// The arguments of one call, in the Scope's order.
struct Arguments {
  const TensorFacts* tensors = nullptr;
  const Value* numbers = nullptr;
  int64_t sm = 0;  // of the device: 90 for 9.0
  int64_t multiprocessors = 0;
  const std::string_view* texts = nullptr;  // for a dtype: torch's name
};

struct ExpressionOperation;

class Expression {
 public:
  // Throws [input], naming `label` ("grid[0] of 'mylib::vec_add'"), for an invalid tree or names
  // that are not in the scope.
  Expression(const nlohmann::json& tree, const Scope& scope, std::string label);

  // The same for an expression that must be an integer; errors call it `wanted`.
  static Expression integer(const nlohmann::json& tree, const Scope& scope,
                            const std::string& label, const char* wanted = "an integer");

  ValueType type() const { return nodes_[0].type; }

  // Whether it is a constant number or bool.
  bool is_constant() const { return quick_ == Quick::kConstant; }

  // Throws [input], naming the subexpression that has no value.
  Value evaluate(const Arguments& arguments) const {
    if (quick_ == Quick::kConstant) return constant_;
    if (quick_ != Quick::kTree) {
      const Value& number = arguments.numbers[number_];
      if (quick_ == Quick::kNumber && number.type != ValueType::kNone) return number;
      // Negating INT64_MIN overflows; the general path reports it.
      if (quick_ == Quick::kCeilDiv && number.type == ValueType::kInt &&
          number.integer != INT64_MIN) {
        const int64_t divisor = constant_.integer;
        return Value::of(number.integer / divisor + (number.integer % divisor > 0 ? 1 : 0));
      }
    }
    return evaluate(0, arguments);
  }

  // The expression in Python's syntax; "cdiv" is "-(-a // b)".
  std::string text() const { return text(0); }

 private:
  struct Node {
    const ExpressionOperation* operation = nullptr;  // null: a constant
    ValueType type = ValueType::kInt;
    int32_t operands[3]{};  // indices into nodes_
    int32_t index = 0;      // of a leaf, in the scope
    int32_t words = -1;     // of a leaf, in words_
    Value value;            // of a constant; the dim of a leaf
  };
  struct Words {
    std::string name;     // of a leaf's argument
    std::string compare;  // the dtype or string that it is compared with
  };

  // Common forms of expressions, evaluated without the tree: the driver evicts the caches between
  // calls, and each node would cost a cache miss.
  enum class Quick : uint8_t {
    kTree,
    kConstant,  // constant_
    kNumber,    // a number of the op
    kCeilDiv    // -(-n // constant_), a number n and a constant above 0
  };

  void find_quick();
  int32_t read(const nlohmann::json& tree, const Scope& scope, int depth);
  void read_leaf(Node& node, const nlohmann::json& tree, const Scope& scope);
  void check_operands(Node& node) const;
  Value evaluate(int32_t at, const Arguments& arguments) const;
  Value evaluate_leaf(int32_t at, const Arguments& arguments) const;
  Value of_integers(int32_t at, int64_t a, int64_t b) const;
  Value of_floats(int32_t at, double a, double b) const;
  std::string text(int32_t at) const;
  [[noreturn]] void no_value(int32_t at, const std::string& problem) const;
  [[noreturn]] void malformed(const std::string& problem, const std::string& expected,
                              const std::string& got) const;

  Quick quick_ = Quick::kTree;
  int32_t number_ = 0;  // index of the number
  Value constant_;
  std::vector<Node> nodes_;  // the root first
  std::string label_;
  std::vector<Words> words_;
};

}  // namespace torch_cubin
