// Schemas: an op's arguments and returns, in PyTorch's schema language.
//
// PyTorch parses the same text at registration and refuses invalid schemas (defaults, keywords as
// names, their order). But its C API does not return the parsed schema, and boxed arguments cannot
// be read without their types. So this parser reads names, types (of those that declared ops
// support: docs/manifest.md), mutation and returns.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace torch_cubin {

enum class ArgumentType : uint8_t {
  kTensor,
  kOptionalTensor,
  kTensorList,
  kInt,          // int and SymInt
  kOptionalInt,  // int? and SymInt?
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
  std::string default_text;  // "" without a default

  bool is_mutated() const { return !alias.empty(); }
  bool is_optional_number() const {
    return type == ArgumentType::kOptionalInt || type == ArgumentType::kOptionalFloat ||
           type == ArgumentType::kOptionalBool;
  }
  bool is_tensor() const {
    return type == ArgumentType::kTensor || type == ArgumentType::kOptionalTensor ||
           type == ArgumentType::kTensorList;
  }
  // Including optional ones.
  bool is_float() const {
    return type == ArgumentType::kFloat || type == ArgumentType::kOptionalFloat;
  }
  bool is_bool() const {
    return type == ArgumentType::kBool || type == ArgumentType::kOptionalBool;
  }
  // A str, or a dtype, which compares by its name.
  bool is_text() const { return type == ArgumentType::kString || type == ArgumentType::kDtype; }
};

struct Schema {
  std::string name_space;
  std::string name;
  std::string overload;  // often ""
  std::vector<SchemaArgument> arguments;
  std::vector<std::string> returns;  // the names of the returned tensors, or ""

  bool mutates() const {
    for (const SchemaArgument& argument : arguments) {
      if (argument.is_mutated()) return true;
    }
    return false;
  }
  std::string qualified_name() const;      // "mylib::vec_add.overload"
  std::string unqualified_name() const;    // "vec_add.overload"
  std::string unqualified_schema() const;  // without the namespace
  std::string text() const;                // canonical
  // The schema as PyTorch gets it, in the library of the namespace: no default depends on the
  // locale.
  std::string schema_for_pytorch() const;

 private:
  std::string written(bool for_pytorch) const;
};

// Throws [input] with the position of the error.
Schema parse_schema(const std::string& text);

// Throws [input] for an op that cannot be declared: in a reserved namespace, without tensor
// arguments, or without an effect.
void check_schema(const Schema& schema);

// Throws [input] for an op that PyTorch's autograd does not support.
void check_differentiable(const Schema& schema);

// Throws [input] if the name of an argument or output could be mistaken for a gradient's in the
// backward op, whose arguments are identified by name.
void check_gradient_names(const Schema& schema);

}  // namespace torch_cubin
