// Packing::pack: writes a call's arguments into the kernel's parameters.
#include <cstdint>
#include <cstring>

#include "cubin/error.h"
#include "declared/packing.h"
#include "declared/small_floats.h"

namespace torch_cubin {

void Packing::write(const Piece& piece, const Value& value, uint8_t* out) const {
  const auto refuse = [&](const std::string& type) {
    fail({"input", piece.label, "is out of range", "a value of " + type, value.text(), ""});
  };
  uint8_t* const at = out + piece.at;
  switch (piece.kind) {
    case Kind::kInteger:
    case Kind::kAnyInteger: {
      const int64_t x = value.integer;
      const int bits = 8 * static_cast<int>(piece.size);
      const bool any = piece.kind == Kind::kAnyInteger;
      if (bits < 64) {
        const int64_t least = any || piece.is_signed ? -(int64_t{1} << (bits - 1)) : 0;
        const int64_t most =
            any || !piece.is_signed ? (int64_t{1} << bits) - 1 : (int64_t{1} << (bits - 1)) - 1;
        if (x < least || x > most) {
          refuse((any               ? ""
                  : piece.is_signed ? "int"
                                    : "uint") +
                 std::to_string(bits) + (any ? " bits" : ""));
        }
      } else if (!any && !piece.is_signed && x < 0) {
        refuse("uint64");
      }
      std::memcpy(at, &x, piece.size);  // little endian
      return;
    }
    case Kind::kFloat16:
    case Kind::kBFloat16: {
      uint16_t bits = 0;
      const bool half = piece.kind == Kind::kFloat16;
      const double x = value.as_number();
      if (!(half ? to_float16(x, &bits) : to_bfloat16(x, &bits))) {
        refuse(half ? "float16" : "bfloat16");
      }
      std::memcpy(at, &bits, sizeof(bits));
      return;
    }
    case Kind::kFloat32:
    case Kind::kTruncated: {
      float x = 0;
      if (!to_float32(value.as_number(), &x)) refuse("float32");
      uint8_t bytes[sizeof(x)];
      std::memcpy(bytes, &x, sizeof(x));
      std::memcpy(at, bytes + sizeof(x) - piece.size, piece.size);  // little endian
      return;
    }
    case Kind::kFloat64: {
      const double x = value.as_number();
      std::memcpy(at, &x, sizeof(x));
      return;
    }
    default:
      *at = value.integer != 0;
  }
}

void Packing::require_item(const Piece& piece, const TensorFacts& item) {
  if (item.defined) return;
  fail(
      {"input", piece.label, "wants an item that its list does not have", "a longer list", "", ""});
}

const void* Packing::address(const Piece& piece, const CallState& state) const {
  const auto tensor = static_cast<size_t>(piece.tensor);
  const TensorFacts& facts = state.facts[tensor];
  if (piece.is_item) require_item(piece, facts);
  if (!facts.defined) return nullptr;
  const Arguments arguments = state.arguments();
  const auto index = static_cast<size_t>(piece.index);
  bool is_empty = false;
  for (size_t i = 0; i < piece.parts; ++i) {
    const Expression* const part = &expressions_[index + 1 + 3 * i];
    const int64_t first = part[0].evaluate(arguments).integer;
    const int64_t count = part[1].evaluate(arguments).integer;
    const int64_t size = part[2].evaluate(arguments).integer;
    // Not first + count, which may overflow.
    if (first < 0 || count < 0 || first > size || count > size - first) {
      fail({"input", piece.label, "takes a part that its tensor does not have",
            "places of a dim of " + std::to_string(size),
            std::to_string(count) + " from " + std::to_string(first) + " on",
            "The definition does not allow for these arguments."});
    }
    is_empty |= count == 0;
  }
  const auto* const begin = static_cast<const uint8_t*>(state.addresses[tensor]);
  if (begin == nullptr || is_empty) return nullptr;
  // The last element must be addressable.
  const int64_t most = INT64_MAX / facts.itemsize;
  int64_t last = 0;
  for (int64_t i = 0; i < facts.dim; ++i) {
    int64_t more = 0;
    if (__builtin_mul_overflow(facts.sizes[i] - 1, facts.strides[i], &more) ||
        __builtin_add_overflow(last, more, &last) || last > most) {
      last = most;
      break;
    }
  }
  const int64_t at = expressions_[index].evaluate(arguments).integer;
  if (at < 0 || at > last) {
    fail({"input", piece.label, "points outside of its tensor",
          "an element from 0 to " + std::to_string(last), std::to_string(at),
          "The definition does not allow for these arguments."});
  }
  return begin + at * facts.itemsize;
}

// Writes a piece that holds an address.
void Packing::pack_address(const Piece& piece, const CallState& state, uint8_t* out) const {
  const auto index = static_cast<size_t>(piece.index);
  switch (piece.kind) {
    case Kind::kItem:
      require_item(piece, state.facts[index]);
      [[fallthrough]];
    case Kind::kPointer:
      std::memcpy(out + piece.at, &state.addresses[index], sizeof(void*));
      break;
    case Kind::kAddress: {
      const void* const at = address(piece, state);
      std::memcpy(out + piece.at, &at, sizeof(void*));
      break;
    }
    default:
      maps_[index].encode(state, out + piece.at);
  }
}

void Packing::check_dtypes(const CallState& state) const {
  for (const Typed& typed : typed_) {
    const TensorFacts& facts = state.facts[typed.tensor];
    ScalarType dtype{};
    if (!facts.defined || !find_dtype(facts.dtype, &dtype)) continue;
    if (has_element(typed.stated.takes, static_cast<int>(dtype))) continue;
    fail({"input", typed.label, "is of another type than its parameter", stated_text(typed.stated),
          facts.dtype,
          "Choose among kernels by the dtype (`when`), or leave that dtype out of the op's."});
  }
}

void Packing::pack(const CallState& state, uint8_t* out, void** params) const {
  if (!typed_.empty()) check_dtypes(state);
  std::memcpy(out, constant_.data(), constant_.size());
  for (size_t i = 0; i < starts_.size(); ++i) params[i] = out + starts_[i];
  const Arguments arguments = state.arguments();
  for (const Piece& piece : pieces_) {
    if (holds_address(piece.kind)) {
      pack_address(piece, state, out);
    } else {
      const auto index = static_cast<size_t>(piece.index);
      write(piece, expressions_[index].evaluate(arguments), out);
    }
  }
}

void Packing::pack_known(const CallState& state, const uint8_t* before, uint8_t* out,
                         void** params) const {
  std::memcpy(out, before, constant_.size());
  for (size_t i = 0; i < starts_.size(); ++i) params[i] = out + starts_[i];
  for (const Pointer& pointer : pointers_) {
    std::memcpy(out + pointer.at, &state.addresses[pointer.tensor], sizeof(void*));
  }
  for (const uint32_t i : with_address_) pack_address(pieces_[i], state, out);
}

}  // namespace torch_cubin
