// Packing: the arguments of one of a contract's kernels, as the bytes of its parameters.
//
// Constants are packed once, when the op is defined; a call copies them and writes the rest over
// the copy.
#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "cubin/image.h"
#include "declared/call_state.h"
#include "declared/pattern.h"
#include "declared/tensor_map_argument.h"

namespace torch_cubin {

// Resolves a kernel's arguments: the tensors of a call by name, lists separately.
struct ArgumentPlaces {
  const Schema& schema;
  const Scope& scope;  // includes items of lists ("xs[2]"), outputs and scratch
  std::string label;   // "op 'mylib::vec_add': kernels[0].args"
  // The dtypes that a tensor may have, by its index.
  std::function<std::vector<ScalarType>(size_t)> dtypes_of;
};

// Memory of a single launch, whose address is an argument.
struct WorkspaceArgument {
  uint32_t at = 0;  // the pointer's offset in the packed bytes
  std::optional<Expression> bytes;
  bool is_per_block = false;  // `bytes` are for each block of the grid
  int64_t align = 1;
  bool zeroed = false;
  std::string label;
};

class Packing {
 public:
  // Throws [params] if the arguments do not fit the kernel's parameters, with a table of these;
  // [input] for a malformed argument.
  Packing(const nlohmann::json& arguments, const KernelInfo& kernel, const ArgumentPlaces& places);

  size_t bytes() const { return constant_.size(); }
  size_t params() const { return starts_.size(); }

  // Whether an argument, or a part of one, gives the kernel access to the tensor's memory: its
  // address, an element's address, or a tensor map.
  bool reaches(size_t tensor) const;

  // The workspaces, which a call allocates and writes to `out` after pack().
  const std::vector<WorkspaceArgument>& workspaces() const { return workspaces_; }

  // `out` has capacity for bytes() and is aligned to 16, `params` for params(). Throws [input].
  void pack(const CallState& state, uint8_t* out, void** params) const;
  // The same, given `before`, the result of pack() for another call with the same sizes, strides
  // and numbers. Writes only addresses and arguments that contain some.
  void pack_known(const CallState& state, const uint8_t* before, uint8_t* out, void** params) const;

 private:
  enum class Kind : uint8_t {
    kPointer,
    kItem,     // a pointer to an item of a list, which must exist in the call
    kAddress,  // the address of a tensor's element, by an expression
    kInteger,
    kAnyInteger,  // signed or unsigned, whichever the value fits
    kFloat16,
    kBFloat16,
    kTruncated,  // to bfloat16, by dropping bits of a float32, as Triton's launcher does
    kFloat32,
    kFloat64,
    kBool,
    kTensorMap,
  };
  static bool holds_address(Kind kind) {
    return kind == Kind::kPointer || kind == Kind::kItem || kind == Kind::kAddress ||
           kind == Kind::kTensorMap;
  }
  struct Piece {
    Kind kind;
    bool is_signed = false;
    uint32_t size = 0;  // bytes
    uint32_t at = 0;
    int32_t index = 0;   // index of a tensor, an expression or a tensor map
    int32_t tensor = 0;  // for kAddress, whose `index` is the expression's
    // For kAddress: the number of range checks; their expressions, three each, follow the
    // element's.
    uint32_t parts = 0;
    bool is_item = false;  // for kAddress: an item of a list, which must exist in the call
    std::string label;
  };

  // Adds an argument of at most `capacity` bytes at `at`; returns its size. `param`: it is a whole
  // parameter. `stated`: the type that the file states for that parameter; null if types do not
  // matter.
  uint32_t add(const nlohmann::json& argument, uint32_t at, uint32_t capacity, bool param,
               const StatedType* stated, const std::string& label, const ArgumentPlaces& places);
  uint32_t add_pointer(const nlohmann::json& argument, Piece piece, const ArgumentPlaces& places);
  uint32_t add_address(const nlohmann::json& argument, Piece piece, const ArgumentPlaces& places);
  void add_part(const nlohmann::json& part, Piece* piece, const ArgumentPlaces& places);
  uint32_t add_number(const nlohmann::json& argument, Piece piece, uint32_t capacity, bool param,
                      const StatedType* stated, const ArgumentPlaces& places);
  // Compares the dtypes that the tensor may have with the pointee type of the kernel's parameter.
  void check_pointee(size_t tensor, const StatedType& stated, const std::string& label,
                     const ArgumentPlaces& places);
  void check_dtypes(const CallState& state) const;
  uint32_t add_struct(const nlohmann::json& argument, uint32_t at, const std::string& label,
                      const ArgumentPlaces& places);
  uint32_t add_workspace(const nlohmann::json& argument, uint32_t at, const std::string& label,
                         const ArgumentPlaces& places);
  uint32_t add_bytes(const nlohmann::json& argument, uint32_t at, const std::string& label);
  void reserve(uint32_t at, uint32_t size, const std::string& label);
  // A piece's name in errors of calls: the user's text, and the argument's position.
  std::string label_in_calls(const Piece& piece, const ArgumentPlaces& places,
                             const std::string& kernel) const;
  void pack_address(const Piece& piece, const CallState& state, uint8_t* out) const;
  void write(const Piece& piece, const Value& value, uint8_t* out) const;
  // Throws [input] if the call's list does not have the item.
  static void require_item(const Piece& piece, const TensorFacts& item);
  // The address of the element; null if the tensor or the part is empty. Throws [input] for an
  // element out of range.
  const void* address(const Piece& piece, const CallState& state) const;

  struct Pointer {
    uint32_t at;
    uint32_t tensor;  // its index
  };

  // Tensors whose dtype variable allows other dtypes than the kernel takes; checked in each call.
  struct Typed {
    size_t tensor;
    StatedType stated;
    std::string label;
  };

  std::vector<Typed> typed_;
  std::vector<uint8_t> constant_;
  std::vector<Pointer> pointers_;       // pieces of kind kPointer
  std::vector<uint32_t> with_address_;  // indices of pieces with other addresses
  std::vector<uint32_t> starts_;        // start of each parameter
  std::vector<Piece> pieces_;
  std::vector<Expression> expressions_;
  std::vector<TensorMapArgument> maps_;
  std::vector<WorkspaceArgument> workspaces_;
};

// A kernel's parameters, for the end of an error: "The binary says: ...".
std::string parameter_table(const KernelInfo& kernel);

}  // namespace torch_cubin
