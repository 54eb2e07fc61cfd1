#include "declared/tensor_map_argument.h"

#include <algorithm>
#include <cstdlib>
#include <nlohmann/json.hpp>

#include "cubin/error.h"
#include "package/fields.h"
#include "runtime/tensor_map.h"

namespace torch_cubin {
namespace {

using nlohmann::json;

// The driver's enumerators (cuda.h, CUtensorMapDataType and the following enums). 8-bit floats and
// bools are passed as bytes.
struct DataType {
  const char* dtype;
  uint32_t number;
  bool floating;
};
constexpr DataType kDataTypes[] = {
    {"uint8", 0, false},         {"int8", 0, false},        {"bool", 0, false},
    {"float8_e4m3fn", 0, false}, {"float8_e5m2", 0, false}, {"uint16", 1, false},
    {"int16", 1, false},         {"uint32", 2, false},      {"int32", 3, false},
    {"uint64", 4, false},        {"int64", 5, false},       {"float16", 6, true},
    {"float32", 7, true},        {"float64", 8, true},      {"bfloat16", 9, true},
};

struct Choice {
  const char* name;  // null: JSON's null
  uint32_t number;
};
constexpr Choice kInterleave[] = {{nullptr, 0}, {"16B", 1}, {"32B", 2}};
constexpr Choice kSwizzle[] = {{nullptr, 0},         {"32B", 1},
                               {"64B", 2},           {"128B", 3},
                               {"128B_atom_32B", 4}, {"128B_atom_32B_flip_8B", 5},
                               {"128B_atom_64B", 6}};
constexpr Choice kL2Promotion[] = {{nullptr, 0}, {"64B", 1}, {"128B", 2}, {"256B", 3}};
constexpr Choice kOobFill[] = {{"zeros", 0}, {"nan", 1}};
constexpr uint32_t kInterleave32 = 2;
constexpr uint32_t kSwizzle32 = 1;
constexpr int64_t kMaxBox = 256;
constexpr int64_t kMaxElementStride = 8;

template <size_t N>
uint32_t choose(Fields& fields, const char* name, const Choice (&choices)[N], uint32_t otherwise,
                const json& object) {
  if (!object.contains(name)) {
    fields.find(name);
    return otherwise;
  }
  const json* value = fields.find(name);
  std::string expected;
  for (const Choice& choice : choices) {
    const bool same =
        value == nullptr ? choice.name == nullptr : choice.name != nullptr && *value == choice.name;
    if (same) return choice.number;
    expected += (expected.empty() ? "" : ", ") + std::string(choice.name ? choice.name : "null");
  }
  refuse_json(fields.at(name), expected, value == nullptr ? json() : *value);
}

}  // namespace

TensorMapArgument::TensorMapArgument(const json& object, const Scope& scope,
                                     const std::string& label)
    : label_(label) {
  Fields fields(object, label);
  const int found = scope.find_tensor(fields.text("tensor"));
  if (found < 0) refuse_json(fields.at("tensor"), "a tensor of the op", fields.get("tensor"));
  tensor_ = static_cast<size_t>(found);
  const json& box = fields.list("box");
  if (box.empty() || box.size() > kTensorMapDims) {
    refuse_json(fields.at("box"), "1 to 5 sizes, one a dim of the tensor", box);
  }
  for (size_t i = 0; i < box.size(); ++i) {
    const std::string at = fields.at("box") + "[" + std::to_string(i) + "]";
    box_.push_back(Expression::integer(box[i], scope, at));
  }
  swizzle_ = choose(fields, "swizzle", kSwizzle, 0, object);
  interleave_ = choose(fields, "interleave", kInterleave, 0, object);
  l2_promotion_ = choose(fields, "l2_promotion", kL2Promotion, 2, object);
  oob_fill_ = choose(fields, "oob_fill", kOobFill, 0, object);
  if (const json* strides = fields.find("element_strides")) {
    const bool right = strides->is_array() && strides->size() == box.size() &&
                       std::all_of(strides->begin(), strides->end(), [](const json& x) {
                         return x.is_number_integer() && x >= 1 && x <= kMaxElementStride;
                       });
    if (!right) refuse_json(fields.at("element_strides"), "1 to 8 for each dim", *strides);
    element_strides_ = strides->get<std::vector<uint32_t>>();
  }
  fields.finish();
  if (interleave_ == kInterleave32 && swizzle_ != kSwizzle32) {
    fail({"input", label, "has a swizzle that does not go with interleave 32B", "32B", "another",
          ""});
  }
}

void TensorMapArgument::refuse(const std::string& problem, const std::string& expected,
                               const std::string& got) const {
  fail({"input", label_, problem, expected, got, ""});
}

void TensorMapArgument::encode(const TensorFacts& tensor, void* address, int32_t device,
                               const Arguments& arguments, uint8_t* out) const {
  if (!tensor.defined) refuse("is of a tensor that is None", "a tensor", "None");
  const auto rank = static_cast<int64_t>(box_.size());
  if (tensor.dim != rank || rank < (interleave_ == 0 ? 1 : 3)) {
    refuse("is of a tensor with a wrong number of dims",
           interleave_ == 0 ? std::to_string(rank) : "3 to 5, as many as the box has",
           std::to_string(tensor.dim));
  }
  const auto type = std::find_if(
      std::begin(kDataTypes), std::end(kDataTypes),
      [&](const DataType& known) { return std::string_view(known.dtype) == tensor.dtype; });
  if (type == std::end(kDataTypes))
    refuse("is of a dtype that no tensor map has", "a real dtype", tensor.dtype);
  if (oob_fill_ != 0 && !type->floating)
    refuse("fills with nan", "a floating-point tensor", tensor.dtype);

  TensorMapSpec map{};
  map.rank = static_cast<uint32_t>(rank);
  map.data_type = type->number;
  map.interleave = interleave_;
  map.swizzle = swizzle_;
  map.l2_promotion = l2_promotion_;
  map.oob_fill = oob_fill_;
  map.device = device;
  map.address = address;
  const int64_t step = interleave_ == kInterleave32 ? 32 : 16;
  if (reinterpret_cast<uintptr_t>(map.address) % static_cast<uintptr_t>(step) != 0) {
    refuse("is of a tensor that is not aligned", "a multiple of " + std::to_string(step) + " bytes",
           "another address");
  }
  for (int64_t i = 0; i < rank; ++i) {
    const int64_t dim = rank - 1 - i;  // the driver's order is innermost first
    const int64_t size = tensor.sizes[dim];
    if (size < 1 || size > int64_t{1} << 32) {
      refuse("is of a tensor with a size out of range", "1 to 2^32 in each dim",
             std::to_string(size));
    }
    map.dims[i] = static_cast<uint64_t>(size);
    if (i == 0) {
      if (tensor.strides[dim] != 1 && size != 1) {
        refuse("is of a tensor whose innermost dim has gaps", "stride 1 in the last dim",
               std::to_string(tensor.strides[dim]));
      }
    } else {
      int64_t bytes = 0;
      const bool overflow = __builtin_mul_overflow(tensor.strides[dim], tensor.itemsize, &bytes);
      const bool fits = !overflow && bytes % step == 0 && bytes >= 0 && bytes < int64_t{1} << 40;
      if (!fits && size == 1) {
        bytes = step;  // arbitrary: the stride of a dim of size 1 is not used
      } else if (!fits) {
        refuse("is of a tensor with a stride that the hardware does not take",
               "a multiple of " + std::to_string(step) + " bytes below 2^40 in dim " +
                   std::to_string(dim),
               std::to_string(tensor.strides[dim]) + " elements");
      }
      map.strides[i - 1] = static_cast<uint64_t>(bytes);
    }
    const int64_t box = box_[static_cast<size_t>(dim)].evaluate(arguments).integer;
    if (box < 1 || box > kMaxBox) {
      refuse("has a box out of range", "1 to 256 in each dim", std::to_string(box));
    }
    map.box[i] = static_cast<uint32_t>(box);
    map.element_strides[i] =
        element_strides_.empty() ? 1 : element_strides_[static_cast<size_t>(dim)];
  }
  const int64_t inner = map.box[0] * tensor.itemsize;
  if (interleave_ == 0 && inner % 16 != 0) {
    refuse("has a box with an innermost dim out of step", "a multiple of 16 bytes",
           std::to_string(inner));
  }
  // The spans of the swizzles: 32, 64, and 128 bytes for all others.
  const int64_t span = swizzle_ == 0 ? INT64_MAX : swizzle_ == 1 ? 32 : swizzle_ == 2 ? 64 : 128;
  if (interleave_ == 0 && inner > span) {
    refuse("has a box whose innermost dim is wider than the swizzle",
           "at most " + std::to_string(span) + " bytes", std::to_string(inner));
  }
  if (out != nullptr) encode_tensor_map(map, out);
}

}  // namespace torch_cubin
