// Schemas: what an op takes and gives, in PyTorch's schema language.
//
// PyTorch parses the same text when the op is registered, but its C API says no more than that it
// failed; and reading the boxed arguments of a call needs the types. Only the types that a declared
// op may have are known here (docs/manifest.md).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace torch_cubin {

enum class ArgumentType : uint8_t {
  kTensor,
  kOptionalTensor,
  kTensorList,
  kInt,  // int and SymInt
  kOptionalInt,
  kFloat,
  kOptionalFloat,
  kBool,
  kOptionalBool,
  kString,
  kDtype,
};

struct SchemaArgument {
  std::string name;
  std::string type_text;  // "Tensor?"
  ArgumentType type = ArgumentType::kTensor;
  std::string alias;  // "a" of Tensor(a!): the op writes to it
  bool keyword_only = false;
  std::string default_text;  // "" where it has none

  bool is_mutated() const { return !alias.empty(); }
  bool is_optional_number() const {
    return type == ArgumentType::kOptionalInt || type == ArgumentType::kOptionalFloat ||
           type == ArgumentType::kOptionalBool;
  }
  bool is_tensor() const {
    return type == ArgumentType::kTensor || type == ArgumentType::kOptionalTensor ||
           type == ArgumentType::kTensorList;
  }
};

struct Schema {
  std::string name_space;
  std::string name;
  std::string overload;  // often ""
  std::vector<SchemaArgument> arguments;
  std::vector<std::string> returns;  // each a Tensor; its name, or ""

  bool mutates() const {
    for (const SchemaArgument& argument : arguments) {
      if (argument.is_mutated()) return true;
    }
    return false;
  }
  std::string qualified_name() const;      // "mylib::vec_add.overload"
  std::string unqualified_name() const;    // "vec_add.overload"
  std::string unqualified_schema() const;  // what a library of the namespace is told
  std::string text() const;                // the same for every way of writing it
};

// Throws [input], pointing at the place.
Schema parse_schema(const std::string& text);

}  // namespace torch_cubin
