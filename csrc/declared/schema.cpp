#include "declared/schema.h"

#include <algorithm>

#include "cubin/error.h"

namespace torch_cubin {
namespace {

constexpr size_t kMaxText = 64 << 10;
constexpr size_t kMaxArguments = 64;  // PyTorch's own ops have fewer

// What PyTorch takes as a dtype's name in a default.
constexpr const char* kDtypeNames[] = {
    "float16", "bfloat16", "float32", "float64",   "uint8",      "int8",          "int16",
    "int32",   "int64",    "bool",    "complex64", "complex128", "float8_e4m3fn", "float8_e5m2",
    "half",    "float",    "double",  "short",     "int",        "long"};

// Words that PyTorch's parser does not take for names, and those that Python does not.
constexpr const char* kKeywords[] = {
    "False",   "None",   "True",     "and",      "as",   "assert", "async", "await",
    "break",   "class",  "continue", "def",      "del",  "elif",   "else",  "except",
    "finally", "for",    "from",     "global",   "if",   "import", "in",    "inf",
    "is",      "lambda", "nan",      "nonlocal", "not",  "or",     "pass",  "raise",
    "return",  "try",    "while",    "with",     "yield"};

struct Known {
  const char* text;
  ArgumentType type;
};
constexpr Known kTypes[] = {
    {"Tensor", ArgumentType::kTensor},       {"Tensor?", ArgumentType::kOptionalTensor},
    {"Tensor[]", ArgumentType::kTensorList}, {"int", ArgumentType::kInt},
    {"SymInt", ArgumentType::kInt},          {"int?", ArgumentType::kOptionalInt},
    {"float", ArgumentType::kFloat},         {"float?", ArgumentType::kOptionalFloat},
    {"bool", ArgumentType::kBool},           {"bool?", ArgumentType::kOptionalBool},
    {"str", ArgumentType::kString},          {"ScalarType", ArgumentType::kDtype},
};

bool is_letter(char c) { return c == '_' || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }
bool is_digit(char c) { return c >= '0' && c <= '9'; }

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
    if (schema.overload == "default") {
      refuse(at_, "has an overload that PyTorch keeps for itself", "another name", "'default'");
    }
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
    bool keyword_only = false, have_default = false;
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
      if (argument.default_text.empty() && have_default && !keyword_only) {
        refuse(start, "has an argument without a default after one that has one", "a default",
               "'" + argument.name + "'");
      }
      have_default |= !argument.default_text.empty();
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

  std::string default_value(const SchemaArgument& argument) {
    skip_spaces();
    const size_t start = at_;
    std::string value;
    if (at_ < text_.size() && (text_[at_] == '"' || text_[at_] == '\'')) {
      value = quoted();
    } else {
      while (at_ < text_.size() && (is_letter(text_[at_]) || is_digit(text_[at_]) ||
                                    std::string("+-.[]").find(text_[at_]) != std::string::npos)) {
        value += text_[at_++];
      }
    }
    const auto expect = [&](bool right, const char* expected) {
      if (right) return;
      refuse(start, "has a wrong default for '" + argument.name + "'",
             std::string(expected) + " for " + argument.type_text,
             value.empty() ? "nothing" : value);
    };
    const bool none = value == "None";
    const bool truth = value == "True" || value == "False";
    switch (argument.type) {
      case ArgumentType::kTensor:
        expect(false, "no default");
        break;
      case ArgumentType::kOptionalTensor:
        expect(none, "None");
        break;
      case ArgumentType::kTensorList:
        expect(false, "no default");
        break;
      case ArgumentType::kInt:
        expect(is_number(value, false), "an integer");
        break;
      case ArgumentType::kOptionalInt:
        expect(none || is_number(value, false), "an integer or None");
        break;
      case ArgumentType::kFloat:
        expect(is_number(value, true), "a number");
        break;
      case ArgumentType::kOptionalFloat:
        expect(none || is_number(value, true), "a number or None");
        break;
      case ArgumentType::kBool:
        expect(truth, "True or False");
        break;
      case ArgumentType::kOptionalBool:
        expect(none || truth, "True, False or None");
        break;
      case ArgumentType::kString:
        expect(!value.empty() && (value[0] == '"' || value[0] == '\''), "text in quotes");
        break;
      case ArgumentType::kDtype:
        expect(std::find(std::begin(kDtypeNames), std::end(kDtypeNames), value) !=
                   std::end(kDtypeNames),
               "a dtype's name, as float32");
        break;
    }
    return value;
  }

  // NOTE: PyTorch unescapes what stands in quotes in its own way; without a backslash there is
  // nothing to unescape.
  std::string quoted() {
    const char quote = text_[at_];
    const size_t start = at_;
    const size_t end = text_.find(quote, at_ + 1);
    if (end == std::string::npos)
      refuse(start, "has text that does not end", "a closing quote", "");
    const std::string value = text_.substr(start, end + 1 - start);
    if (value.find('\\') != std::string::npos || value.find('\n') != std::string::npos) {
      refuse(start, "has a backslash or a newline in a default", "plain text", "");
    }
    at_ = end + 1;
    return value;
  }

  static bool is_number(const std::string& value, bool floating) {
    size_t i = 0;
    const auto digits = [&] {
      const size_t first = i;
      while (i < value.size() && is_digit(value[i])) ++i;
      return i - first;
    };
    if (i < value.size() && value[i] == '-') ++i;
    const size_t before = digits();
    if (!floating) return before > 0 && before <= 18 && i == value.size();
    size_t after = 0;
    if (i < value.size() && value[i] == '.') {
      ++i;
      after = digits();
    }
    if (before + after == 0) return false;
    if (i < value.size() && (value[i] == 'e' || value[i] == 'E')) {
      ++i;
      if (i < value.size() && (value[i] == '-' || value[i] == '+')) ++i;
      const size_t exponent = digits();
      if (exponent == 0 || exponent > 3) return false;
    }
    return i == value.size();
  }

  std::string name(const char* what) {
    skip_spaces();
    const size_t start = at_;
    while (at_ < text_.size() && (is_letter(text_[at_]) || (at_ > start && is_digit(text_[at_])))) {
      ++at_;
    }
    if (at_ == start) refuse_here(what);
    const std::string found = text_.substr(start, at_ - start);
    for (const char* keyword : kKeywords) {
      if (found == keyword) refuse(start, "uses a keyword as a name", what, "'" + found + "'");
    }
    return found;
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

std::string Schema::unqualified_schema() const {
  std::string text = unqualified_name() + "(";
  bool keyword_only = false, first = true;
  for (const SchemaArgument& argument : arguments) {
    if (!first) text += ", ";
    first = false;
    if (argument.keyword_only && !keyword_only) text += "*, ";
    keyword_only = argument.keyword_only;
    if (argument.is_mutated()) {
      text += "Tensor(" + argument.alias + "!)";
    } else {
      text += argument.type_text;
    }
    text += " " + argument.name;
    if (!argument.default_text.empty()) text += "=" + argument.default_text;
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

}  // namespace torch_cubin
