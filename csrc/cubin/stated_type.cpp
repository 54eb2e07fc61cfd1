#include "cubin/stated_type.h"

#include <algorithm>
#include <iterator>

#include "cubin/cpp_spelling.h"
#include "cubin/demangle.h"
#include "cubin/error.h"

namespace torch_cubin {
namespace {

using E = Element;

struct ElementName {
  Element element;
  const char* name;
};
constexpr ElementName kElementNames[] = {
    {E::kUInt8, "uint8"},
    {E::kInt8, "int8"},
    {E::kInt16, "int16"},
    {E::kInt32, "int32"},
    {E::kInt64, "int64"},
    {E::kFloat16, "float16"},
    {E::kFloat32, "float32"},
    {E::kFloat64, "float64"},
    {E::kComplex32, "complex32"},
    {E::kComplex64, "complex64"},
    {E::kComplex128, "complex128"},
    {E::kBool, "bool"},
    {E::kBFloat16, "bfloat16"},
    {E::kFloat8E5M2, "float8_e5m2"},
    {E::kFloat8E4M3, "float8_e4m3fn"},
    {E::kUInt16, "uint16"},
    {E::kUInt32, "uint32"},
    {E::kUInt64, "uint64"},
    {E::kFloat8E8M0, "float8_e8m0fnu"},
    {E::kFloat4, "float4_e2m1fn_x2"},
};

constexpr Elements kBytes = elements(E::kUInt8, E::kInt8, E::kBool);
constexpr Elements kShorts = elements(E::kInt16, E::kUInt16);
constexpr Elements kInts = elements(E::kInt32, E::kUInt32);
constexpr Elements kLongs = elements(E::kInt64, E::kUInt64);
constexpr Elements kHalf = elements(E::kFloat16);
constexpr Elements kBrain = elements(E::kBFloat16);
constexpr Elements kFloat = elements(E::kFloat32);
constexpr Elements kDouble = elements(E::kFloat64);
// Also accepted as raw bytes, since not every PyTorch has the dtype.
constexpr Elements kStored = elements(E::kUInt8, E::kInt8);

struct KnownType {
  std::string_view name;
  Elements takes;
  Number number;
  uint32_t size;
  bool is_raw = false;  // as a pointee: memory of any type
};

// In the spelling of cpp_spelling.h. A class that is passed by value has its memory layout.
constexpr KnownType kCppTypes[] = {
    {"bool", kBytes, Number::kBool, 1},
    {"char", kBytes, Number::kAnyInteger, 1, true},
    {"unsigned char", kBytes, Number::kUnsigned, 1, true},
    {"signed char", kBytes, Number::kSigned, 1},
    {"short", kShorts, Number::kSigned, 2},
    {"unsigned short", kShorts, Number::kUnsigned, 2},
    {"int", kInts, Number::kSigned, 4},
    {"unsigned int", kInts, Number::kUnsigned, 4},
    {"long", kLongs, Number::kSigned, 8},
    {"unsigned long", kLongs, Number::kUnsigned, 8},
    {"long long", kLongs, Number::kSigned, 8},
    {"unsigned long long", kLongs, Number::kUnsigned, 8},
    {"float", kFloat, Number::kFloat, 4},
    {"double", kDouble, Number::kFloat, 8},
    {"__half", kHalf, Number::kFloat, 2},
    {"__half_raw", kHalf, Number::kFloat, 2},
    {"_Float16", kHalf, Number::kFloat, 2},
    {"__fp16", kHalf, Number::kFloat, 2},
    {"c10::Half", kHalf, Number::kFloat, 2},
    {"torch::headeronly::Half", kHalf, Number::kFloat, 2},
    {"at::Half", kHalf, Number::kFloat, 2},
    {"cutlass::half_t", kHalf, Number::kFloat, 2},
    {"__nv_bfloat16", kBrain, Number::kFloat, 2},
    {"__nv_bfloat16_raw", kBrain, Number::kFloat, 2},
    {"__bf16", kBrain, Number::kFloat, 2},
    {"std::bfloat16_t", kBrain, Number::kFloat, 2},
    {"c10::BFloat16", kBrain, Number::kFloat, 2},
    {"torch::headeronly::BFloat16", kBrain, Number::kFloat, 2},
    {"at::BFloat16", kBrain, Number::kFloat, 2},
    {"cutlass::bfloat16_t", kBrain, Number::kFloat, 2},
    {"cutlass::tfloat32_t", kFloat, Number::kFloat, 4},
    {"__half2", kHalf | elements(E::kComplex32), Number::kNone, 4},
    {"__nv_bfloat162", kBrain, Number::kNone, 4},
    {"__nv_fp8_e4m3", kStored | elements(E::kFloat8E4M3), Number::kNone, 1},
    {"__nv_fp8x2_e4m3", kStored | elements(E::kFloat8E4M3), Number::kNone, 2},
    {"__nv_fp8x4_e4m3", kStored | elements(E::kFloat8E4M3), Number::kNone, 4},
    {"c10::Float8_e4m3fn", kStored | elements(E::kFloat8E4M3), Number::kNone, 1},
    {"cutlass::float_e4m3_t", kStored | elements(E::kFloat8E4M3), Number::kNone, 1},
    {"__nv_fp8_e5m2", kStored | elements(E::kFloat8E5M2), Number::kNone, 1},
    {"__nv_fp8x2_e5m2", kStored | elements(E::kFloat8E5M2), Number::kNone, 2},
    {"__nv_fp8x4_e5m2", kStored | elements(E::kFloat8E5M2), Number::kNone, 4},
    {"c10::Float8_e5m2", kStored | elements(E::kFloat8E5M2), Number::kNone, 1},
    {"cutlass::float_e5m2_t", kStored | elements(E::kFloat8E5M2), Number::kNone, 1},
    {"__nv_fp8_e8m0", kStored | elements(E::kFloat8E8M0), Number::kNone, 1},
    {"__nv_fp4_e2m1", kStored | elements(E::kFloat4), Number::kNone, 1},
    {"__nv_fp4x2_e2m1", kStored | elements(E::kFloat4), Number::kNone, 1},
    {"__nv_fp4x4_e2m1", kStored | elements(E::kFloat4), Number::kNone, 2},
};

constexpr KnownType kComplex[] = {
    // in any namespace
    {"::complex<float>", elements(E::kComplex64), Number::kNone, 8},
    {"::complex<double>", elements(E::kComplex128), Number::kNone, 16},
    {"::complex<__half>", elements(E::kComplex32), Number::kNone, 4},
    {"::complex<c10::Half>", elements(E::kComplex32), Number::kNone, 4},
};

// CUDA's vector types, such as float4. A vector of two floats may be a complex number.
struct VectorType {
  std::string_view name;
  std::string_view element;
  Elements also = 0;  // for a vector of two
};
constexpr VectorType kVectors[] = {
    {"char", "char"},
    {"uchar", "unsigned char"},
    {"short", "short"},
    {"ushort", "unsigned short"},
    {"int", "int"},
    {"uint", "unsigned int"},
    {"long", "long"},
    {"ulong", "unsigned long"},
    {"longlong", "long long"},
    {"ulonglong", "unsigned long long"},
    {"float", "float", elements(E::kComplex64)},
    {"double", "double", elements(E::kComplex128)},
};

const KnownType* find_known(std::string_view name) {
  const auto found = std::find_if(std::begin(kCppTypes), std::end(kCppTypes),
                                  [&](const KnownType& known) { return known.name == name; });
  return found != std::end(kCppTypes) ? &*found : nullptr;
}

bool ends_with(std::string_view text, std::string_view end) {
  return text.size() >= end.size() && text.substr(text.size() - end.size()) == end;
}

// A type of the table, a complex number or a vector; all zero if unknown.
KnownType known_type(std::string_view name) {
  if (const KnownType* known = find_known(name)) return *known;
  for (const KnownType& known : kComplex) {
    if (ends_with(name, known.name)) return known;
  }
  std::string_view vector = name;
  for (const std::string_view aligned : {"_16a", "_32a"}) {
    if (ends_with(vector, aligned)) vector.remove_suffix(aligned.size());
  }
  if (vector.empty() || vector.back() < '1' || vector.back() > '4') return {};
  for (const VectorType& known : kVectors) {
    if (vector.substr(0, vector.size() - 1) != known.name) continue;
    KnownType found = *find_known(known.element);
    if (vector.back() == '2') found.takes |= known.also;
    found.number = Number::kNone;
    found.size *= static_cast<uint32_t>(vector.back() - '0');
    return found;
  }
  return {};
}

// Splits a list at its commas outside of brackets.
std::vector<std::string_view> parts_of(std::string_view list) {
  std::vector<std::string_view> parts;
  const std::vector<int> depths = bracket_depths(list);
  size_t start = 0;
  for (size_t i = 0; i <= list.size(); ++i) {
    if (i < list.size() && (list[i] != ',' || depths[i] != 0)) continue;
    parts.push_back(list.substr(start, i - start));
    start = i + 1;
  }
  return parts;
}

// Whether a type's name is that of a class or an enum, not of a type that an expression gives, such
// as `decltype(...)` or `std::conditional<...>::type`, which may be any.
bool is_class(std::string_view name) {
  return !name.empty() && name.find_first_of("([") == std::string_view::npos &&
         !ends_with(name, "::type");
}

}  // namespace

const char* element_name(int number) {
  for (const ElementName& known : kElementNames) {
    if (static_cast<int>(known.element) == number) return known.name;
  }
  return "";
}

std::string elements_text(Elements set) {
  std::string text;
  for (const ElementName& known : kElementNames) {
    if (!has_element(set, static_cast<int>(known.element))) continue;
    text += (text.empty() ? "" : " or ") + std::string(known.name);
  }
  return text;
}

std::string stated_text(const StatedType& stated) {
  const std::string taken = stated.takes != 0                ? elements_text(stated.takes)
                            : stated.number == Number::kNone ? "a value's bytes"
                                                             : "an int or a value's bytes";
  return taken + ", for '" + printable(stated.text) + "'";
}

StatedType stated_type_of_cpp(std::string_view type) {
  StatedType stated;
  const size_t first = type.find_first_not_of(' ');
  if (first == std::string_view::npos) return stated;
  stated.text = std::string(type.substr(first, type.find_last_not_of(' ') + 1 - first));
  std::string name = common_spelling(type);
  // A pointer to an array counts as a pointer to its elements: "float(*)[4]".
  const size_t array = name.find("(*)[");
  if (array != std::string::npos) name = name.substr(0, array) + "*";
  size_t depth = 0;
  if (ends_with(name, "::*")) return stated;  // a pointer to a member, which is an offset
  while (!name.empty() && (name.back() == '*' || name.back() == '&')) {
    name.pop_back();
    ++depth;
  }
  if (depth > 1 || (depth == 1 && ends_with(name, "&"))) {
    stated.takes = kLongs;  // addresses
    stated.is_pointer = true;
    stated.size = 8;
    return stated;
  }
  if (depth == 1) {
    const KnownType to = known_type(name);
    stated.is_pointer = true;
    stated.size = 8;
    if (!to.is_raw) stated.takes = to.takes;
    return stated;
  }
  const KnownType known = known_type(name);
  stated.takes = known.takes;
  stated.number = known.number;
  stated.size = known.size;
  if (known.size == 0 && is_class(name)) stated.number = Number::kAnyInteger;
  return stated;
}

StatedType stated_type_of_ptx(std::string_view type) {
  struct PtxType {
    std::string_view name;
    std::string_view cpp;
  };
  constexpr PtxType kPtxTypes[] = {
      {"u8", "char"},    {"s8", "char"},   {"u16", "short"},          {"s16", "short"},
      {"u32", "int"},    {"s32", "int"},   {"u64", "long"},           {"s64", "long"},
      {"f16", "__half"}, {"f32", "float"}, {"bf16", "__nv_bfloat16"}, {"f64", "double"}};
  StatedType stated;
  stated.text = std::string(type);
  for (const PtxType& known : kPtxTypes) {
    if (known.name != type) continue;
    const KnownType& as = *find_known(known.cpp);
    stated.takes = as.takes;
    stated.size = as.size;
    // Compilers also use `u` for signed integers.
    stated.number = as.number == Number::kFloat ? as.number : Number::kAnyInteger;
  }
  return stated;
}

std::vector<StatedType> stated_types(std::string_view demangled) {
  std::vector<StatedType> types;
  std::string_view parameters;
  if (!find_parameters(demangled, &parameters) || parameters.empty()) return types;
  for (const std::string_view part : parts_of(parameters))
    types.push_back(stated_type_of_cpp(part));
  return types;
}

}  // namespace torch_cubin
