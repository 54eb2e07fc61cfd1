// CallState: the facts about one call's arguments. It is on the stack entirely.
#pragma once

#include <cstdint>
#include <string_view>
#include <type_traits>

#include "declared/expression.h"
#include "pytorch/tensor.h"

namespace torch_cubin {

// Definitions that exceed these are refused, so calls do not check them.
constexpr size_t kMaxOpArguments = 64;
constexpr size_t kMaxOpTensors = kMaxOpArguments + 64;  // items of lists, outputs and scratch too
constexpr size_t kMaxOpNumbers = 256;
constexpr size_t kMaxOpVariables = 16;  // dtype variables; groups of dims ("*s")

constexpr int32_t kNoDevice = -2;  // no tensor yet; -1 is the CPU's index
constexpr auto kUnboundDtype = static_cast<ScalarType>(-1);

// An array with uninitialised elements: a call writes only those that it uses.
template <class T, size_t N>
class Unset {
 public:
  static_assert(std::is_trivially_destructible<T>::value && std::is_trivially_copyable<T>::value,
                "plain data");
  T& operator[](size_t i) { return reinterpret_cast<T*>(bytes_)[i]; }
  const T& operator[](size_t i) const { return reinterpret_cast<const T*>(bytes_)[i]; }
  T* data() { return reinterpret_cast<T*>(bytes_); }
  const T* data() const { return reinterpret_cast<const T*>(bytes_); }

 private:
  alignas(T) unsigned char bytes_[N * sizeof(T)];
};

// The sizes that a "*s" matched; borrowed from the tensor that bound it.
struct DimGroup {
  const int64_t* sizes;
  int64_t count;
};

// Tensors are indexed by the argument's index in the schema, followed by the list items that
// expressions or pointers name, the outputs, and scratch. Numbers are indexed by the argument's
// index, followed by those that Names (declared/pattern.h) adds.
struct CallState {
  Unset<TensorFacts, kMaxOpTensors> facts;
  Unset<void*, kMaxOpTensors> addresses;
  Unset<Value, kMaxOpNumbers> numbers;
  Unset<std::string_view, kMaxOpArguments> texts;
  Unset<DimGroup, kMaxOpVariables> groups;
  Unset<ScalarType, kMaxOpVariables> dtypes;  // kUnboundDtype until a tensor binds it
  int32_t device_type = -1;                   // of all tensors; -1: that of the first
  int32_t device = kNoDevice;
  int64_t sm = -1;  // 90 for 9.0; -1 (like multiprocessors) if the tensors are not on a GPU
  int64_t multiprocessors = -1;

  Arguments arguments() const {
    return {facts.data(), numbers.data(), sm, multiprocessors, texts.data()};
  }
};

}  // namespace torch_cubin
