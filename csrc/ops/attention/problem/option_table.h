// Derives from the list of an op's options: its schema, and the conversion from boxed arguments.
//
// A list is a macro over X(type, name, default). It expands to a struct of options, and to the
// entries by which signatures look up options by name.
#pragma once

#include <torch/csrc/stable/library.h>

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "pytorch/tensor.h"
#include "pytorch/tensor_type.h"

namespace torch_cubin {

using OptionalTensor = std::optional<Tensor>;

// The type of an option if tensors are of type T, for example views of them.
template <class T, class Type>
using OptionOf = std::conditional_t<std::is_same_v<Type, OptionalTensor>, std::optional<T>, Type>;

std::string option_schema(const std::string& name, const OptionalTensor& value);
std::string option_schema(const std::string& name, const std::optional<double>& value);
std::string option_schema(const std::string& name, bool value);
std::string option_schema(const std::string& name, int64_t value);
std::string option_schema(const std::string& name, double value);

template <class T>
bool is_other(const T& value, const T& unless) {
  return value != unless;
}
inline bool is_other(const OptionalTensor& value, const OptionalTensor&) {
  return value.has_value();
}

inline std::optional<TensorView> opened(const OptionalTensor& option) { return view_of(option); }
template <class T>
T opened(const T& option) {
  return option;
}

inline AtenTensorHandle handle_of(const OptionalTensor& option) {
  return option ? option->get() : nullptr;
}
template <class T>
AtenTensorHandle handle_of(const T&) {
  return nullptr;
}

template <class Options>
struct OptionEntry {
  const char* name;
  std::string schema;                          // "float softcap=0.0"
  void (*take)(Options&, StableIValue);        // consumes the boxed value
  StableIValue (*give)(const Options&);        // a boxed value that the caller owns
  bool (*given)(const Options&);               // whether it differs from the default
  AtenTensorHandle (*tensor)(const Options&);  // null if it is not a tensor or not given
};

// For use with the lists: a member of a struct template over T; an entry, with Options in scope; an
// option of `options`, opened for `views`; a member's value for `options`.
#define TC_OPTION_MEMBER(type, name, ...) OptionOf<T, type> name = __VA_ARGS__;
#define TC_OPTION_ENTRY(type, name, ...)                                             \
  {#name,                                                                            \
   option_schema(#name, type(__VA_ARGS__)),                                          \
   [](Options& options, StableIValue boxed) {                                        \
     options.name = torch::stable::detail::to<type>(boxed);                          \
   },                                                                                \
   [](const Options& options) { return torch::stable::detail::from(options.name); }, \
   [](const Options& options) { return is_other(options.name, type(__VA_ARGS__)); }, \
   [](const Options& options) { return handle_of(options.name); }},
#define TC_OPTION_OPENED(type, name, ...) views.name = opened(options.name);
#define TC_OPTION_COPIED(type, name, ...) options.name = name;

// The arguments of one op: tensors, then options.
template <class Options>
class Signature {
 public:
  // `options`: their names in the order of the schema, "*" before the keyword-only ones;
  // "name=True" overrides the list's default, "name=" makes the argument a required one.
  Signature(const std::string& tensors, const std::string& options, const std::string& results)
      : results_(results), tensors_(1) {
    for (const char c : tensors) tensors_ += c == ',' ? 1 : 0;
    arguments_ = tensors;
    const std::string all = options + " ";
    for (size_t at = 0; at < all.size();) {
      const size_t end = all.find(' ', at);
      const std::string given = all.substr(at, end - at);
      at = end + 1;
      const size_t equals = given.find('=');
      for (size_t i = 0; i < Options::entries().size(); ++i) {
        if (given.substr(0, equals) == Options::entries()[i].name) places_.push_back(i);
      }
      arguments_ += ", ";
      if (given == "*") {
        arguments_ += given;
        continue;
      }
      const std::string& schema = Options::entries()[places_.back()].schema;
      const std::string own = equals == std::string::npos ? "" : given.substr(equals);
      arguments_ +=
          own.empty() ? schema : schema.substr(0, schema.find('=')) + (own == "=" ? "" : own);
    }
  }

  std::string schema(const std::string& op) const {
    return op + "(" + arguments_ + ") -> " + results_;
  }

  int64_t size() const { return tensors_ + static_cast<int64_t>(places_.size()); }

  // The options after the tensors in `stack`; consumes them.
  Options take(const StableIValue* stack) const {
    Options options;
    for (size_t i = 0; i < places_.size(); ++i) entry(i).take(options, stack[tensors_ + i]);
    return options;
  }

  void give(const Options& options, StableIValue* stack) const {
    for (size_t i = 0; i < places_.size(); ++i) stack[tensors_ + i] = entry(i).give(options);
  }

  // Moves the arguments from the stack of an op that has the same number of tensors and no
  // additional options; options that it lacks get their defaults.
  void move_from(const Signature& other, const StableIValue* from, StableIValue* to) const {
    give(Options(), to);  // the default of a tensor option is none, which owns nothing
    for (int64_t i = 0; i < tensors_; ++i) to[i] = from[i];
    for (size_t i = 0; i < places_.size(); ++i) {
      const int64_t place = other.place(entry(i).name);
      if (place >= 0) to[tensors_ + i] = from[place];
    }
  }

  // Index of an option in a stack; -1 if the op does not have it.
  int64_t place(const std::string& name) const {
    for (size_t i = 0; i < places_.size(); ++i) {
      if (name == entry(i).name) return tensors_ + static_cast<int64_t>(i);
    }
    return -1;
  }

  // Throws [input] if a tensor has elements but no memory.
  void require_memory(const char* op, const Options& options,
                      std::initializer_list<const Tensor*> tensors) const {
    size_t argument = 0;
    for (const Tensor* tensor : tensors) {
      torch_cubin::require_memory(op, ++argument, tensor->get());
    }
    for (size_t i = 0; i < places_.size(); ++i, ++argument) {
      const AtenTensorHandle tensor = entry(i).tensor(options);
      if (tensor != nullptr) torch_cubin::require_memory(op, argument + 1, tensor);
    }
  }

  // The names of the options that `other` lacks: "'softcap', 'alibi_slopes' and 'sinks'".
  std::string names_missing_in(const Signature& other) const {
    std::string names, last;
    for (size_t i = 0; i < places_.size(); ++i) {
      if (other.place(entry(i).name) >= 0) continue;
      if (!last.empty()) names += (names.empty() ? "" : ", ") + last;
      last = std::string("'") + entry(i).name + "'";
    }
    return names.empty() ? last : names + " and " + last;
  }

  // Whether an option is given that the op does not have.
  bool lacks_one_of(const Options& options) const {
    for (const OptionEntry<Options>& each : Options::entries()) {
      if (each.given(options) && place(each.name) < 0) return true;
    }
    return false;
  }

 private:
  const OptionEntry<Options>& entry(size_t i) const { return Options::entries()[places_[i]]; }

  std::string arguments_, results_;
  int64_t tensors_;
  std::vector<size_t> places_;  // index in the list for each of its options
};

}  // namespace torch_cubin
