// Reads a contract's arguments. packing_write.cpp writes them for a call.
#include "declared/packing.h"

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>

#include "cubin/error.h"
#include "cubin/hex.h"
#include "package/fields.h"
#include "runtime/kernel.h"
#include "runtime/tensor_map.h"

namespace torch_cubin {
namespace {

using nlohmann::json;

constexpr size_t kMaxWorkspaces = 16;
constexpr uint32_t kParamStep = 16;  // each parameter is aligned to it

// The kinds of scalars by name; `code` is i, u, f, g or t (bfloat16) or b.
struct ScalarKind {
  const char* name;
  char code;
  uint32_t size;
};
constexpr ScalarKind kScalars[] = {
    {"int8", 'i', 1},    {"int16", 'i', 2},
    {"int32", 'i', 4},   {"int64", 'i', 8},
    {"uint8", 'u', 1},   {"uint16", 'u', 2},
    {"uint32", 'u', 4},  {"uint64", 'u', 8},
    {"float16", 'f', 2}, {"bfloat16", 'g', 2},
    {"float32", 'f', 4}, {"float64", 'f', 8},
    {"bool", 'b', 1},    {"bfloat16_truncated", 't', 2},
};

constexpr char kPassBits[] =
    "Convert it, or say that its bits are meant: torch_cubin.bits(...), [\"bits\", ARG].";

int number_of(ScalarType dtype) { return static_cast<int>(dtype); }

// The type code of a parameter's number. Without a `kind` it is the file's stated type; with one,
// the stated type must agree.
char code_of(const StatedType& stated, const ScalarKind* kind, char code,
             const std::string& label) {
  const bool is_integer = code == 'i' || code == 'u' || code == 'n';
  if (stated.is_pointer) {  // an address as a number
    if (is_integer && (kind == nullptr || kind->size == sizeof(void*))) return code;
  } else if (kind != nullptr) {
    if (stated.takes == 0) return code;
    ScalarType dtype{};
    const char* const name = kind->code == 't' ? "bfloat16" : kind->name;
    if (find_dtype(name, &dtype) && has_element(stated.takes, number_of(dtype))) return code;
  } else {
    switch (stated.number) {
      case Number::kFloat:
        if (code == 'b') break;
        return has_element(stated.takes, number_of(ScalarType::BFloat16)) ? 'g' : 'f';
      case Number::kBool:
        if (code != 'f') return 'b';
        break;
      case Number::kSigned:
      case Number::kUnsigned:
        if (code == 'n') return stated.number == Number::kSigned ? 'i' : 'u';
        if (code == 'b') return code;
        break;
      case Number::kAnyInteger:
        if (code != 'f') return code;
        break;
      case Number::kUnsaid:
        return code;
      case Number::kNone:
        break;
    }
  }
  fail({"params", label, "is of another type than its parameter", stated_text(stated),
        kind != nullptr ? kind->name
        : code == 'f'   ? "a float"
        : code == 'b'   ? "a condition"
                        : "an int",
        kPassBits});
}

}  // namespace

std::string parameter_table(const KernelInfo& kernel) {
  std::string text = "The binary says: kernel '" + printable(kernel.name) + "' has " +
                     counted(kernel.params.size(), "parameter");
  for (const ParamInfo& param : kernel.params) {
    text += "\n  [" + std::to_string(param.index) + "] " + counted(param.size, "byte") +
            " at offset " + std::to_string(param.offset);
    if (param.kind == ParamKind::kPointer) text += ", a pointer";
    if (param.kind == ParamKind::kValue) text += ", a value";
  }
  return text + (kernel.params.empty() ? "." : "");
}

namespace {

// The error's explanation if a Triton kernel has too few arguments, since it adds pointers to
// scratch memory; "" for other kernels. Triton's binaries require a block and distinguish pointers.
std::string hidden_pointers(const KernelInfo& kernel, size_t given) {
  constexpr size_t kMostHidden = 2;
  const size_t more = kernel.params.size() - std::min(given, kernel.params.size());
  bool pointers = more > 0 && more <= kMostHidden && kernel.required_block[0] != 0;
  for (size_t i = given; pointers && i < kernel.params.size(); ++i) {
    pointers = kernel.params[i].kind == ParamKind::kPointer;
  }
  if (!pointers) return "";
  return "\nWhere Triton compiled it, the last " + counted(more, "pointer") +
         " are its own, to scratch memory, which may be needed: "
         "torch_cubin.producers.triton.define_op fills them.";
}

}  // namespace

Packing::Packing(const json& arguments, const KernelInfo& kernel, const ArgumentPlaces& places) {
  if (!arguments.is_array()) refuse_json(places.label, "a list of arguments", arguments);
  if (arguments.size() != kernel.params.size()) {
    fail({"params", places.label, "are another number than the kernel has parameters",
          std::to_string(kernel.params.size()), std::to_string(arguments.size()),
          parameter_table(kernel) + hidden_pointers(kernel, arguments.size())});
  }
  for (size_t i = 0; i < arguments.size(); ++i) {
    const std::string label = places.label + "[" + std::to_string(i) + "]";
    const auto start =
        static_cast<uint32_t>((constant_.size() + kParamStep - 1) / kParamStep * kParamStep);
    const uint32_t wanted = kernel.params[i].size;
    const StatedType& stated = kernel.params[i].stated;
    const uint32_t size = add(arguments[i], start, wanted, true,
                              is_compared(stated) ? &stated : nullptr, label, places);
    if (size != wanted) {
      fail({"params", label, "does not fit its parameter", counted(wanted, "byte"),
            counted(size, "byte") + " (" + shown_json(arguments[i]) + ")",
            parameter_table(kernel)});
    }
    reserve(start, size, label);
    starts_.push_back(start);
  }
  for (size_t i = 0; i < pieces_.size(); ++i) {
    Piece& piece = pieces_[i];
    piece.label = label_in_calls(piece, places, kernel.name);
    if (piece.kind == Kind::kTensorMap) maps_[static_cast<size_t>(piece.index)].rename(piece.label);
    if (piece.kind == Kind::kPointer) {
      pointers_.push_back({piece.at, static_cast<uint32_t>(piece.index)});
    } else if (holds_address(piece.kind)) {
      with_address_.push_back(static_cast<uint32_t>(i));
    }
  }
}

std::string Packing::label_in_calls(const Piece& piece, const ArgumentPlaces& places,
                                    const std::string& kernel) const {
  std::string what;
  if (!holds_address(piece.kind)) {
    what = expressions_[static_cast<size_t>(piece.index)].text();
  } else {
    const size_t tensor = piece.kind == Kind::kTensorMap
                              ? maps_[static_cast<size_t>(piece.index)].tensor()
                          : piece.kind == Kind::kAddress ? static_cast<size_t>(piece.tensor)
                                                         : static_cast<size_t>(piece.index);
    what = places.scope.tensors[tensor];
  }
  const std::string op = places.label.substr(0, places.label.rfind(": kernels["));
  const std::string index = piece.label.substr(places.label.size() + 1);
  return op + ": '" + printable(what) + "', argument " + index.substr(0, index.find(']')) +
         " of kernel '" + printable(kernel) + "',";
}

void Packing::reserve(uint32_t at, uint32_t size, const std::string& label) {
  if (size > kMaxParamBytes) {
    fail({"params", label, "is too large", "at most " + std::to_string(kMaxParamBytes) + " bytes",
          std::to_string(size), ""});
  }
  if (constant_.size() < at + size) constant_.resize(at + size);
}

uint32_t Packing::add(const json& argument, uint32_t at, uint32_t capacity, bool param,
                      const StatedType* stated, const std::string& label,
                      const ArgumentPlaces& places) {
  if (!argument.is_array() || argument.empty() || !argument[0].is_string()) {
    refuse_json(label, "[\"pointer\", \"x\"], [\"int32\", EXPRESSION] and so on", argument);
  }
  const std::string kind = argument[0].get<std::string>();
  Piece piece{};
  piece.at = at;
  piece.label = label;
  if (kind == "bits") {
    if (argument.size() != 2) refuse_json(label, "[\"bits\", ARG]", argument);
    return add(argument[1], at, capacity, param, nullptr, label, places);
  }
  if (kind == "pointer" || kind == "address") {
    const uint32_t size = kind == "pointer" ? add_pointer(argument, std::move(piece), places)
                                            : add_address(argument, std::move(piece), places);
    const Piece& added = pieces_.back();
    const int32_t tensor = kind == "pointer" ? added.index : added.tensor;
    if (stated != nullptr) check_pointee(static_cast<size_t>(tensor), *stated, label, places);
    return size;
  }
  if (kind == "struct") return add_struct(argument, at, label, places);
  if (kind == "bytes") return add_bytes(argument, at, label);
  if (kind == "workspace") return add_workspace(argument, at, label, places);
  if (kind == "tensor_map") {
    if (argument.size() != 2) refuse_json(label, "[\"tensor_map\", {...}]", argument);
    piece.kind = Kind::kTensorMap;
    piece.size = kTensorMapBytes;
    piece.index = static_cast<int32_t>(maps_.size());
    maps_.emplace_back(argument[1], places.scope, label);
    reserve(at, piece.size, label);
    pieces_.push_back(std::move(piece));
    return kTensorMapBytes;
  }
  return add_number(argument, std::move(piece), capacity, param, stated, places);
}

void Packing::check_pointee(size_t tensor, const StatedType& stated, const std::string& label,
                            const ArgumentPlaces& places) {
  if (!stated.is_pointer) {
    // PTX declares addresses as integers.
    if (stated.number == Number::kUnsaid || stated.number == Number::kAnyInteger) return;
    fail({"params", label, "is a tensor, where the kernel takes a number", stated_text(stated),
          "a pointer", ""});
  }
  std::string got;
  bool any = false, all = true;
  for (const ScalarType dtype : places.dtypes_of(tensor)) {
    const bool taken = has_element(stated.takes, number_of(dtype));
    any |= taken;
    all &= taken;
    got += (got.empty() ? "" : ", ") + dtype_name(dtype);
  }
  if (all) return;
  if (!any) {
    fail({"params", label, "is of another type than its parameter", stated_text(stated), got,
          kPassBits});
  }
  typed_.push_back({tensor, stated, label});
}

uint32_t Packing::add_pointer(const json& argument, Piece piece, const ArgumentPlaces& places) {
  const std::string name =
      argument.size() > 1 && argument[1].is_string() ? argument[1].get<std::string>() : "";
  piece.size = sizeof(void*);
  piece.kind = Kind::kPointer;
  std::string full = name;
  if (argument.size() == 3 && argument[2].is_number_unsigned()) {
    full += "[" + std::to_string(argument[2].get<uint64_t>()) + "]";
    piece.kind = Kind::kItem;
  }
  // ["pointer", "xs[2]"] is refused, because only ["pointer", "xs", 2] is checked against the
  // list's length.
  if (name.find('[') != std::string::npos) full.clear();
  piece.index = places.scope.find_tensor(full);
  if (piece.index < 0 || argument.size() != (piece.kind == Kind::kItem ? 3 : 2)) {
    refuse_json(piece.label, "[\"pointer\", a tensor of the op] or [\"pointer\", a list, an index]",
                argument);
  }
  reserve(piece.at, piece.size, piece.label);
  pieces_.push_back(std::move(piece));
  return sizeof(void*);
}

uint32_t Packing::add_address(const json& argument, Piece piece, const ArgumentPlaces& places) {
  piece.size = sizeof(void*);
  piece.kind = Kind::kAddress;
  const bool has_parts = argument.size() == 4 && argument[3].is_array();
  piece.tensor = (argument.size() == 3 || has_parts) && argument[1].is_string()
                     ? places.scope.find_tensor(argument[1].get<std::string>())
                     : -1;
  if (piece.tensor < 0) {
    refuse_json(piece.label,
                "[\"address\", a tensor of the op, an element, [[first, count, size], ...]]",
                argument);
  }
  piece.is_item = argument[1].get<std::string>().find('[') != std::string::npos;
  piece.index = static_cast<int32_t>(expressions_.size());
  expressions_.push_back(Expression::integer(argument[2], places.scope, piece.label,
                                             "an integer, the element's place in memory"));
  if (has_parts) {
    for (const json& part : argument[3]) add_part(part, &piece, places);
  }
  reserve(piece.at, piece.size, piece.label);
  pieces_.push_back(std::move(piece));
  return sizeof(void*);
}

void Packing::add_part(const json& part, Piece* piece, const ArgumentPlaces& places) {
  if (!part.is_array() || part.size() != 3) {
    refuse_json(piece->label, "a part's [first, count, size]", part);
  }
  for (const json& number : part) {
    expressions_.push_back(
        Expression::integer(number, places.scope, piece->label,
                            "integers: a part's first place, its places, its dim's size"));
  }
  ++piece->parts;
}

uint32_t Packing::add_number(const json& argument, Piece piece, uint32_t capacity, bool param,
                             const StatedType* stated, const ArgumentPlaces& places) {
  const std::string kind = argument[0].get<std::string>();
  const auto known = std::find_if(std::begin(kScalars), std::end(kScalars),
                                  [&](const ScalarKind& scalar) { return kind == scalar.name; });
  const bool own_size = kind == "number";
  if ((known == std::end(kScalars) && !own_size) || argument.size() != 2) {
    refuse_json(piece.label,
                "pointer, address, number, int32, float32, ..., bool, struct, tensor_map, "
                "workspace or bytes",
                argument);
  }
  if (own_size && !param) refuse_json(piece.label, "a scalar with a size, as int32", argument);
  Expression expression(argument[1], places.scope, piece.label);
  const ValueType type = expression.type();
  char code = own_size ? (type == ValueType::kBool  ? 'b'
                          : type == ValueType::kInt ? 'n'
                                                    : 'f')
                       : known->code;
  if (stated != nullptr) code = code_of(*stated, own_size ? nullptr : known, code, piece.label);
  const auto is_float = [](char c) { return c == 'f' || c == 'g' || c == 't'; };
  const bool right = code == 'b'      ? type == ValueType::kBool || (own_size && stated != nullptr)
                     : is_float(code) ? type != ValueType::kBool
                                      : type == ValueType::kInt;
  if (!right) {
    refuse_json(piece.label,
                code == 'b'      ? "a condition"
                : is_float(code) ? "a number"
                                 : "an integer",
                argument[1]);
  }
  piece.size = own_size ? capacity : known->size;
  if (own_size) {
    const bool fits = code == 'b'   ? capacity == 1
                      : code == 'g' ? capacity == 2
                      : code == 'f'
                          ? capacity == 4 || capacity == 8 || (stated != nullptr && capacity == 2)
                          : capacity == 1 || capacity == 2 || capacity == 4 || capacity == 8;
    if (!fits) return code == 'b' ? 1 : 8;  // not `capacity`: refused with the kernel's table
  }
  switch (code) {
    case 'i':
    case 'u':
      piece.kind = Kind::kInteger;
      piece.is_signed = code == 'i';
      break;
    case 'n':
      piece.kind = Kind::kAnyInteger;
      break;
    case 't':
      piece.kind = Kind::kTruncated;
      break;
    case 'g':
      piece.kind = Kind::kBFloat16;
      break;
    case 'f':
      piece.kind = piece.size == 2   ? Kind::kFloat16
                   : piece.size == 4 ? Kind::kFloat32
                                     : Kind::kFloat64;
      break;
    default:
      piece.kind = Kind::kBool;
  }
  const uint32_t size = piece.size;
  reserve(piece.at, size, piece.label);
  if (expression.is_constant()) {
    write(piece, expression.evaluate({}), constant_.data());
    return size;
  }
  piece.index = static_cast<int32_t>(expressions_.size());
  expressions_.push_back(std::move(expression));
  pieces_.push_back(std::move(piece));
  return size;
}

uint32_t Packing::add_struct(const json& argument, uint32_t at, const std::string& label,
                             const ArgumentPlaces& places) {
  const bool right = argument.size() == 3 && argument[1].is_number_integer() && argument[1] > 0 &&
                     argument[1] <= kMaxParamBytes && argument[2].is_array();
  if (!right) refuse_json(label, "[\"struct\", size in bytes, [[offset, ARG], ...]]", argument);
  const auto size = argument[1].get<uint32_t>();
  reserve(at, size, label);
  std::vector<std::pair<uint32_t, uint32_t>> taken;
  for (size_t i = 0; i < argument[2].size(); ++i) {
    const json& member = argument[2][i];
    const std::string inner = label + "[2][" + std::to_string(i) + "]";
    const bool pair = member.is_array() && member.size() == 2 && member[0].is_number_integer() &&
                      member[0] >= 0 && member[0] < size;
    if (!pair) refuse_json(inner, "[offset below " + std::to_string(size) + ", ARG]", member);
    const auto offset = member[0].get<uint32_t>();
    const uint32_t bytes =
        add(member[1], at + offset, size - offset, false, nullptr, inner, places);
    if (bytes > size - offset) {
      fail({"params", inner, "passes the end of its struct",
            "at most " + counted(size - offset, "byte"), std::to_string(bytes), ""});
    }
    for (const auto& [begin, end] : taken) {
      if (offset >= end || offset + bytes <= begin) continue;
      fail({"params", inner, "overlaps another member of its struct", "", shown_json(member), ""});
    }
    taken.emplace_back(offset, offset + bytes);
  }
  return size;
}

uint32_t Packing::add_workspace(const json& argument, uint32_t at, const std::string& label,
                                const ArgumentPlaces& places) {
  if (argument.size() != 2) refuse_json(label, "[\"workspace\", {...}]", argument);
  Fields fields(argument[1], label);
  WorkspaceArgument workspace;
  workspace.at = at;
  workspace.label = label;
  workspace.is_per_block = fields.find("bytes_per_block") != nullptr;
  const char* const name = workspace.is_per_block ? "bytes_per_block" : "bytes";
  const json& bytes = fields.get(name);
  workspace.bytes = Expression::integer(bytes, places.scope, fields.at(name));
  workspace.align = read_align(fields, workspace.align);
  workspace.zeroed = fields.truth("zeroed", false);
  fields.finish();
  if (workspaces_.size() == kMaxWorkspaces) {
    refuse_json(label, "at most " + std::to_string(kMaxWorkspaces) + " workspaces", argument);
  }
  reserve(at, sizeof(void*), label);
  workspaces_.push_back(std::move(workspace));
  return sizeof(void*);
}

uint32_t Packing::add_bytes(const json& argument, uint32_t at, const std::string& label) {
  const std::string text =
      argument.size() == 2 && argument[1].is_string() ? argument[1].get<std::string>() : "";
  const std::vector<uint8_t> bytes = bytes_of_hex(text);
  if (bytes.empty() || bytes.size() > static_cast<size_t>(kMaxParamBytes)) {
    refuse_json(label, "[\"bytes\", lower-case hex digits, two a byte]", argument);
  }
  const auto size = static_cast<uint32_t>(bytes.size());
  reserve(at, size, label);
  std::copy(bytes.begin(), bytes.end(), constant_.begin() + at);
  return size;
}

bool Packing::reaches(size_t tensor) const {
  return std::any_of(pieces_.begin(), pieces_.end(), [&](const Piece& piece) {
    const auto index = static_cast<size_t>(piece.index);
    switch (piece.kind) {
      case Kind::kPointer:
      case Kind::kItem:
        return index == tensor;
      case Kind::kAddress:
        return static_cast<size_t>(piece.tensor) == tensor;
      case Kind::kTensorMap:
        return maps_[index].tensor() == tensor;
      default:
        return false;
    }
  });
}

}  // namespace torch_cubin
