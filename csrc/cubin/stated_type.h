// The parameter types that a file states: C++ in a kernel's mangled name, PTX in its declaration.
//
// Includes neither torch nor cuda.h.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace torch_cubin {

// The element types of tensors, with PyTorch's numbers (c10::ScalarType), which are stable.
enum class Element : uint8_t {
  kUInt8 = 0,
  kInt8 = 1,
  kInt16 = 2,
  kInt32 = 3,
  kInt64 = 4,
  kFloat16 = 5,
  kFloat32 = 6,
  kFloat64 = 7,
  kComplex32 = 8,
  kComplex64 = 9,
  kComplex128 = 10,
  kBool = 11,
  kBFloat16 = 15,
  kFloat8E5M2 = 23,
  kFloat8E4M3 = 24,
  kUInt16 = 27,
  kUInt32 = 28,
  kUInt64 = 29,
  kFloat8E8M0 = 44,
  kFloat4 = 45,
};

// A set of element types, one bit per number.
using Elements = uint64_t;
constexpr Elements elements() { return 0; }
template <class... T>
constexpr Elements elements(Element first, T... rest) {
  return uint64_t{1} << static_cast<int>(first) | elements(rest...);
}
constexpr bool has_element(Elements set, int number) {
  return number >= 0 && number < 64 && (set >> number & 1) != 0;
}

// PyTorch's name, such as "float32"; "" for any other number.
const char* element_name(int number);
// "float32 or complex64"
std::string elements_text(Elements set);

// The kind of a number that is passed by value. An unknown class takes integers, since it may be an
// enum, but no float; vectors and complex numbers take no number at all (kNone).
enum class Number : uint8_t { kUnsaid, kAnyInteger, kSigned, kUnsigned, kBool, kFloat, kNone };

struct StatedType {
  std::string text;  // "float const*", "f32"; "" if not stated
  // The element types that it may point to or be; empty if unspecified (void*, char*, structs,
  // enums).
  Elements takes = 0;
  Number number = Number::kUnsaid;  // for a value
  bool is_pointer = false;
  uint32_t size = 0;  // bytes; 0 if unknown
};

// "float32 or complex64, for 'float2 const*'", for errors.
std::string stated_text(const StatedType& stated);

// Parses a C++ type as a demangler writes it: "float const*", "unsigned int", "ns::Params".
StatedType stated_type_of_cpp(std::string_view type);
// Parses a PTX type without its dot: "f32", "u64", "b8[128]".
StatedType stated_type_of_ptx(std::string_view type);

// Whether arguments are compared with it.
inline bool is_compared(const StatedType& stated) {
  return stated.takes != 0 || stated.number != Number::kUnsaid;
}

// The parameter types in a function's demangled name; empty if it has no parameters.
std::vector<StatedType> stated_types(std::string_view demangled);

}  // namespace torch_cubin
