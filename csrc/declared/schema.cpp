#include "declared/schema.h"

#include <algorithm>

#include "cubin/error.h"

namespace torch_cubin {
namespace {

constexpr size_t kMaxText = 64 << 10;
constexpr size_t kMaxArguments = 64;  // PyTorch's own ops have fewer

// Names that PyTorch and this library keep for their own ops.
constexpr const char* kReserved[] = {"aten", "prim",      "prims",   "cubin",
                                     "onnx", "quantized", "inductor"};

struct Known {
  const char* text;
  ArgumentType type;
};
constexpr Known kTypes[] = {
    {"Tensor", ArgumentType::kTensor},        {"Tensor?", ArgumentType::kOptionalTensor},
    {"Tensor[]", ArgumentType::kTensorList},  {"int", ArgumentType::kInt},
    {"SymInt", ArgumentType::kInt},           {"int?", ArgumentType::kOptionalInt},
    {"SymInt?", ArgumentType::kOptionalInt},  {"float", ArgumentType::kFloat},
    {"float?", ArgumentType::kOptionalFloat}, {"bool", ArgumentType::kBool},
    {"bool?", ArgumentType::kOptionalBool},   {"str", ArgumentType::kString},
    {"ScalarType", ArgumentType::kDtype},
};

bool is_letter(char c) { return c == '_' || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }
bool is_digit(char c) { return c >= '0' && c <= '9'; }

// The same number without a point: "25e-2" for "0.25". PyTorch's schema parser reads numbers by the
// process's locale, and where that has a decimal comma it would stop at the point. What is no decimal
// number stays, for PyTorch to refuse.
std::string without_point(const std::string& number) {
  const size_t point = number.find('.');
  const size_t exponent = std::min(number.find_first_of("eE"), number.size());
  if (point == std::string::npos || point > exponent) return number;
  const std::string whole = number.substr(0, point);
  const std::string fraction = number.substr(point + 1, exponent - point - 1);
  const std::string power = number.substr(std::min(exponent + 1, number.size()));
  const size_t sign = !whole.empty() && (whole[0] == '-' || whole[0] == '+') ? 1 : 0;
  const size_t power_sign = !power.empty() && (power[0] == '-' || power[0] == '+') ? 1 : 0;
  const auto are_digits = [](const std::string& text, size_t from) {
    return text.find_first_not_of("0123456789", from) == std::string::npos;
  };
  const bool is_decimal = are_digits(whole, sign) && are_digits(fraction, 0) &&
                          are_digits(power, power_sign) && whole.size() + fraction.size() > sign &&
                          power.size() < 10 &&
                          (exponent == number.size() || power.size() > power_sign);
  if (!is_decimal) return number;
  const long long shift =
      (power.empty() ? 0 : std::stoll(power)) - static_cast<long long>(fraction.size());
  return whole + fraction + "e" + std::to_string(shift);
}

class Parser {
 public:
  explicit Parser(const std::string& text) : text_(text) {}

  Schema parse() {
    if (text_.size() > kMaxText) {
      refuse(0, "is too long", "at most " + std::to_string(kMaxText) + " characters",
             std::to_string(text_.size()));
    }
    Schema schema;
    schema.name_space = name("a namespace");
    if (!take("::")) refuse_here("'::' after the namespace");
    schema.name = name("the op's name");
    if (take(".")) schema.overload = name("the overload's name");
    arguments(schema);
    if (!take("->")) refuse_here("'->' and what it returns");
    returns(schema);
    skip_spaces();
    if (at_ != text_.size()) refuse_here("the end");
    return schema;
  }

 private:
  void arguments(Schema& schema) {
    if (!take("(")) refuse_here("'(' and the arguments");
    bool keyword_only = false;
    if (take(")")) return;
    do {
      skip_spaces();
      const size_t start = at_;
      if (take("*")) {
        if (keyword_only) refuse(start, "has two '*'", "one", "");
        keyword_only = true;
        continue;
      }
      SchemaArgument argument = one_argument();
      argument.keyword_only = keyword_only;
      for (const SchemaArgument& other : schema.arguments) {
        if (other.name == argument.name) {
          refuse(start, "has two arguments of one name", "names that differ",
                 "'" + argument.name + "'");
        }
        if (argument.is_mutated() && other.alias == argument.alias) {
          refuse(start, "lets two arguments share memory", "another letter for each",
                 "'" + argument.alias + "!' twice");
        }
      }
      schema.arguments.push_back(std::move(argument));
      if (schema.arguments.size() > kMaxArguments) {
        refuse(start, "has too many arguments", "at most " + std::to_string(kMaxArguments), "more");
      }
    } while (take(","));
    if (!take(")")) refuse_here("',' or ')'");
  }

  SchemaArgument one_argument() {
    SchemaArgument argument;
    const size_t start = at_;
    argument.type_text = name("an argument's type");
    argument.alias = alias();
    for (const char* suffix : {"?", "[]"}) {
      if (take(suffix)) argument.type_text += suffix;
    }
    const auto known = std::find_if(std::begin(kTypes), std::end(kTypes), [&](const Known& type) {
      return argument.type_text == type.text;
    });
    if (known == std::end(kTypes)) {
      std::string expected;
      for (const Known& type : kTypes)
        expected += (expected.empty() ? "" : ", ") + std::string(type.text);
      refuse(start, "has a type that a declared op does not take", expected,
             "'" + argument.type_text + "'");
    }
    argument.type = known->type;
    if (argument.is_mutated() && argument.type != ArgumentType::kTensor) {
      refuse(start, "writes to what is no single tensor", "Tensor(a!)", argument.type_text);
    }
    argument.name = name("the argument's name");
    if (take("=")) argument.default_text = default_value(argument);
    return argument;
  }

  // "a" of "(a!)".
  std::string alias() {
    if (!take("(")) return "";
    const size_t start = at_;
    const std::string letter = name("a letter, as in Tensor(a!)");
    if (!take("!")) {
      refuse(start, "has a tensor that may be returned", "Tensor(a!), which is written to",
             "Tensor(" + letter + ")");
    }
    if (!take(")")) refuse_here("')'");
    return letter;
  }

  void returns(Schema& schema) {
    if (!take("(")) {
      one_return(schema);
      return;
    }
    skip_spaces();
    const size_t start = at_;
    if (take(")")) return;
    do {
      one_return(schema);
    } while (take(","));
    if (!take(")")) refuse_here("',' or ')'");
    if (schema.returns.size() < 2) return;
    for (const std::string& found : schema.returns) {
      if (found.empty()) refuse(start, "does not name its outputs", "(Tensor out, Tensor lse)", "");
    }
  }

  void one_return(Schema& schema) {
    skip_spaces();
    const size_t start = at_;
    const std::string type = name("what it returns: (), Tensor or a tuple of Tensor");
    if (take("(")) {
      refuse(start, "returns an argument", "outputs of the op's own: Tensor", "an alias");
    }
    if (type != "Tensor" || take("?") || take("[]")) {
      refuse(start, "returns what a declared op does not give", "(), Tensor or a tuple of Tensor",
             type);
    }
    skip_spaces();
    std::string found;
    if (at_ < text_.size() && is_letter(text_[at_])) found = name("a name");
    for (const std::string& other : schema.returns) {
      if (!found.empty() && other == found) refuse(start, "has two returns of one name", "", found);
    }
    schema.returns.push_back(found);
  }

  // As it is written. PyTorch parses it when the op is registered, but does not compare it with the
  // argument's type.
  std::string default_value(const SchemaArgument& argument) {
    skip_spaces();
    const size_t start = at_;
    const char quote = at_ < text_.size() ? text_[at_] : '\0';
    if (quote == '"' || quote == '\'') {
      do {
        at_ += at_ < text_.size() && text_[at_] == '\\' ? 2 : 1;
      } while (at_ < text_.size() && text_[at_] != quote);
      if (at_ >= text_.size()) refuse(start, "has text that does not end", "a closing quote", "");
      ++at_;
    } else {
      while (at_ < text_.size() && (is_letter(text_[at_]) || is_digit(text_[at_]) ||
                                    std::string("+-.[]").find(text_[at_]) != std::string::npos)) {
        ++at_;
      }
    }
    if (at_ == start) refuse_here("a default");
    const std::string value = text_.substr(start, at_ - start);
    if (!suits(argument.type, value)) {
      refuse(start, "has a wrong default for '" + argument.name + "'",
             "one of type " + argument.type_text, value);
    }
    return value;
  }

  static bool suits(ArgumentType type, const std::string& value) {
    const bool none = value == "None", truth = value == "True" || value == "False";
    const bool quoted = value[0] == '"' || value[0] == '\'', negative = value[0] == '-';
    const bool word = is_letter(value[0]) && !none && !truth;
    const bool whole = value.find_first_not_of("0123456789", negative) == std::string::npos &&
                       value.size() > negative && value.size() <= 18;
    const bool number = !quoted && !none && !truth && !word;
    switch (type) {
      case ArgumentType::kTensor:
      case ArgumentType::kTensorList:
        return false;
      case ArgumentType::kOptionalTensor:
        return none;
      case ArgumentType::kInt:
        return whole;
      case ArgumentType::kOptionalInt:
        return whole || none;
      case ArgumentType::kFloat:
        return number;
      case ArgumentType::kOptionalFloat:
        return number || none;
      case ArgumentType::kBool:
        return truth;
      case ArgumentType::kOptionalBool:
        return truth || none;
      case ArgumentType::kString:
        return quoted;
      case ArgumentType::kDtype:
        return word;
    }
    return false;
  }

  std::string name(const char* what) {
    skip_spaces();
    const size_t start = at_;
    while (at_ < text_.size() && (is_letter(text_[at_]) || (at_ > start && is_digit(text_[at_])))) {
      ++at_;
    }
    if (at_ == start) refuse_here(what);
    return text_.substr(start, at_ - start);
  }

  void skip_spaces() {
    while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\t' || text_[at_] == '\n')) {
      ++at_;
    }
  }

  bool take(const char* token) {
    skip_spaces();
    const size_t length = std::char_traits<char>::length(token);
    if (text_.compare(at_, length, token) != 0) return false;
    at_ += length;
    return true;
  }

  [[noreturn]] void refuse_here(const std::string& expected) {
    skip_spaces();
    refuse(at_, "cannot be read", expected,
           at_ < text_.size() ? "'" + printable(text_.substr(at_, 20)) + "'" : "the end");
  }

  [[noreturn]] void refuse(size_t at, const std::string& problem, const std::string& expected,
                           const std::string& got) const {
    fail({"input", "schema '" + printable(text_, 400) + "'",
          problem + " (at character " + std::to_string(at + 1) + ": '" +
              printable(text_.substr(std::min(at, text_.size())), 30) + "')",
          expected, got, ""});
  }

  const std::string& text_;
  size_t at_ = 0;
};

}  // namespace

std::string Schema::unqualified_name() const {
  return overload.empty() ? name : name + "." + overload;
}

std::string Schema::qualified_name() const { return name_space + "::" + unqualified_name(); }

std::string Schema::unqualified_schema() const { return written(false); }

std::string Schema::schema_for_pytorch() const { return written(true); }

std::string Schema::written(bool for_pytorch) const {
  std::string text = unqualified_name() + "(";
  bool keyword_only = false, first = true;
  for (const SchemaArgument& argument : arguments) {
    if (!first) text += ", ";
    first = false;
    if (argument.keyword_only && !keyword_only) text += "*, ";
    keyword_only = argument.keyword_only;
    text += argument.is_mutated() ? "Tensor(" + argument.alias + "!)" : argument.type_text;
    text += " " + argument.name;
    if (argument.default_text.empty()) continue;
    const bool point = !for_pytorch || !argument.is_float();
    text += "=" + (point ? argument.default_text : without_point(argument.default_text));
  }
  text += ") -> ";
  const bool single = returns.size() == 1;
  if (!single) text += "(";
  for (size_t i = 0; i < returns.size(); ++i) {
    text += (i > 0 ? ", Tensor" : "Tensor") + (returns[i].empty() ? "" : " " + returns[i]);
  }
  return text + (single ? "" : ")");
}

std::string Schema::text() const { return name_space + "::" + unqualified_schema(); }

Schema parse_schema(const std::string& text) { return Parser(text).parse(); }

void check_schema(const Schema& schema) {
  const std::string op = "op '" + schema.qualified_name() + "'";
  for (const char* reserved : kReserved) {
    if (schema.name_space != reserved) continue;
    fail({"input", op, "lies in a namespace that is taken", "a name of your own",
          "'" + schema.name_space + "'", ""});
  }
  if (std::none_of(schema.arguments.begin(), schema.arguments.end(),
                   [](const SchemaArgument& argument) { return argument.is_tensor(); })) {
    fail({"input", op, "takes no tensor", "at least one Tensor argument, which says the device",
          schema.text(), "Add one, or launch the kernel directly: torch_cubin.load(...)."});
  }
  if (schema.returns.empty() && !schema.mutates()) {
    fail({"input", op, "returns nothing and changes nothing",
          "an output, or an argument that is changed: Tensor(a!)", schema.text(),
          "A compiled graph would leave the call out."});
  }
  for (const SchemaArgument& argument : schema.arguments) {
    for (const std::string& result : schema.returns) {
      if (argument.name != (result.empty() ? "out" : result)) continue;
      fail({"input", op, "has an argument and an output of one name", "names of their own",
            "'" + argument.name + "'",
            result.empty() ? "A single output is called 'out' unless the schema names it." : ""});
    }
  }
}

void check_differentiable(const Schema& schema) {
  const std::string op = "op '" + schema.qualified_name() + "'";
  if (schema.mutates()) {
    fail({"input", op, "changes its arguments, so it can have no derivative",
          "a schema without (a!)", schema.text(), ""});
  }
  for (const SchemaArgument& argument : schema.arguments) {
    if (!argument.keyword_only || !argument.is_tensor()) continue;
    fail({"input", op,
          "has the keyword-only tensor '" + argument.name +
              "', which PyTorch's autograd does not take",
          "tensors before the '*' of the schema", "", ""});
  }
}

void check_gradient_names(const Schema& schema) {
  std::vector<std::string> names;
  for (const SchemaArgument& argument : schema.arguments) names.push_back(argument.name);
  for (const std::string& name : schema.returns) names.push_back(name.empty() ? "out" : name);
  for (size_t i = schema.arguments.size(); i < names.size(); ++i) {
    const std::string gradient = "grad_" + names[i];
    if (std::find(names.begin(), names.end(), gradient) == names.end()) continue;
    fail({"input", "op '" + schema.qualified_name() + "'",
          "has '" + names[i] + "' and '" + gradient +
              "', which its backward op could not tell from the gradient of '" + names[i] + "'",
          "names of their own", gradient, ""});
  }
}

}  // namespace torch_cubin
