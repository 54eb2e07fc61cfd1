// Parses the text of a schema.
#include <algorithm>

#include "cubin/error.h"
#include "declared/schema.h"

namespace torch_cubin {
namespace {

constexpr size_t kMaxText = 64 << 10;
constexpr size_t kMaxArguments = 64;  // PyTorch's own ops have fewer

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
      refuse(start, "writes to an argument that is no single tensor", "Tensor(a!)",
             argument.type_text);
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

  // The default as written. PyTorch parses it at registration but does not compare it with the
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

Schema parse_schema(const std::string& text) { return Parser(text).parse(); }

}  // namespace torch_cubin
