// Schemas: what an op takes and gives, in PyTorch's schema language.
//
// PyTorch parses the same text when the op is registered, and refuses what is no schema: defaults,
// keywords as names, their order. Its C API tells nothing of what it has parsed, and a call's boxed
// arguments cannot be read without their types; so what a contract speaks of is read here: names,
// types (those alone that a declared op may have: docs/manifest.md), what is changed, outputs.
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
  // Optional ones, too.
  bool is_float() const {
    return type == ArgumentType::kFloat || type == ArgumentType::kOptionalFloat;
  }
  bool is_bool() const {
    return type == ArgumentType::kBool || type == ArgumentType::kOptionalBool;
  }
  // A str, or a dtype, which is compared by its name.
  bool is_text() const { return type == ArgumentType::kString || type == ArgumentType::kDtype; }
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
  std::string unqualified_schema() const;  // without the namespace
  std::string text() const;                // the same for every way of writing it
  // The schema as PyTorch gets it, in the library of the namespace: no default depends on the
  // locale.
  std::string schema_for_pytorch() const;

 private:
  std::string written(bool for_pytorch) const;
};

// Throws [input], pointing at the place.
Schema parse_schema(const std::string& text);

// Throws [input] for an op that cannot be declared: of a namespace that is taken, without a tensor,
// or with no effect.
void check_schema(const Schema& schema);

// Throws [input] for an op that PyTorch's autograd cannot give a derivative.
void check_differentiable(const Schema& schema);

// Throws [input] where a backward op, which knows its arguments by name, could not tell an argument
// or output of this one from a gradient.
void check_gradient_names(const Schema& schema);

}  // namespace torch_cubin
