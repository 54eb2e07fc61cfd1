// Structs that cross the C ABI. The first field is the struct's size in the caller's header; new
// fields are appended. So callers may be older or newer than this library.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "torch_cubin/abi.h"

namespace torch_cubin {

// The size of a struct when version 1 introduced it, which every caller provides. It never changes
// when fields are added. A struct without a specialisation is not part of the ABI.
template <class T>
struct FirstVersion;
#define TC_FIRST_VERSION(type, bytes)           \
  template <>                                   \
  struct FirstVersion<struct type> {            \
    static constexpr uint64_t kSize = bytes;    \
    static constexpr const char* kName = #type; \
  }
TC_FIRST_VERSION(torch_cubin_v1_facts, 80);
TC_FIRST_VERSION(torch_cubin_v1_attributes, 40);
TC_FIRST_VERSION(torch_cubin_v1_launch_call, 128);
TC_FIRST_VERSION(torch_cubin_v1_tensor_map_spec, 160);
TC_FIRST_VERSION(torch_cubin_v1_device, 152);
#undef TC_FIRST_VERSION

// Throws [internal] for a size below the one of the first version.
void check_struct(uint64_t size, uint64_t least, const char* name);

template <class T>
void check_struct(const T& given) {
  check_struct(given.size, FirstVersion<T>::kSize, FirstVersion<T>::kName);
}

// Copies the fields that the caller knows; the others are zero.
template <class T>
T from_caller(const T* given) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) >= FirstVersion<T>::kSize);
  check_struct(*given);
  T known{};
  std::memcpy(static_cast<void*>(&known), given, std::min<uint64_t>(given->size, sizeof(T)));
  return known;
}

// Copies the fields of `made` that the caller's struct contains; its size field stays unchanged.
template <class T>
void to_caller(T made, T* out) {
  check_struct(*out);
  made.size = out->size;
  std::memcpy(static_cast<void*>(out), &made, std::min<uint64_t>(out->size, sizeof(T)));
}

}  // namespace torch_cubin
