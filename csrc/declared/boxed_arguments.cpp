#include "declared/boxed_arguments.h"

#include <tuple>

#include "cubin/error.h"

namespace torch_cubin {
namespace {

using torch::stable::detail::to;

// The heap cell with the value of an optional argument; null if it is None.
const StableIValue* cell_of(StableIValue value) { return to<StableIValue*>(value); }

void check_read(AOTITorchError error, const char* what) {
  if (error != 0) fail({"internal", what, "could not be read", "", "", ""});
}

// A failed release cannot be handled.
void give_back(AtenTensorHandle tensor) { std::ignore = aoti_torch_delete_tensor_object(tensor); }

void give_back_list(StableListHandle list) {
  size_t length = 0;
  if (torch_list_size(list, &length) != 0) return;
  for (size_t i = 0; i < length; ++i) {
    StableIValue item = 0;
    if (torch_list_get_item(list, i, &item) == 0) give_back(to<AtenTensorHandle>(item));
  }
  std::ignore = torch_delete_list(list);
}

}  // namespace

BoxedArguments::~BoxedArguments() {
  for (size_t i = 0; i < schema_.arguments.size(); ++i) {
    switch (schema_.arguments[i].type) {
      case ArgumentType::kTensor:
        give_back(to<AtenTensorHandle>(stack_[i]));
        break;
      case ArgumentType::kOptionalTensor:
        if (const StableIValue* cell = cell_of(stack_[i])) {
          give_back(to<AtenTensorHandle>(*cell));
          delete cell;
        }
        break;
      case ArgumentType::kTensorList:
        give_back_list(to<StableListHandle>(stack_[i]));
        break;
      case ArgumentType::kOptionalInt:
      case ArgumentType::kOptionalFloat:
      case ArgumentType::kOptionalBool:
        delete cell_of(stack_[i]);
        break;
      case ArgumentType::kString:
        std::ignore = torch_delete_string(to<StringHandle>(stack_[i]));
        break;
      case ArgumentType::kInt:
      case ArgumentType::kFloat:
      case ArgumentType::kBool:
      case ArgumentType::kDtype:
        break;
    }
  }
}

AtenTensorHandle BoxedArguments::tensor(size_t i) const {
  if (schema_.arguments[i].type == ArgumentType::kTensor) return to<AtenTensorHandle>(stack_[i]);
  const StableIValue* cell = cell_of(stack_[i]);
  return cell == nullptr ? nullptr : to<AtenTensorHandle>(*cell);
}

size_t BoxedArguments::length(size_t i) const {
  size_t length = 0;
  check_read(torch_list_size(to<StableListHandle>(stack_[i]), &length), "a list argument");
  return length;
}

TensorView BoxedArguments::item(size_t i, size_t index) const {
  StableIValue item = 0;
  check_read(torch_list_get_item(to<StableListHandle>(stack_[i]), index, &item), "a list argument");
  return TensorView(to<AtenTensorHandle>(item));
}

Value BoxedArguments::number(size_t i) const {
  StableIValue value = stack_[i];
  const SchemaArgument& argument = schema_.arguments[i];
  if (argument.is_optional_number()) {
    const StableIValue* cell = cell_of(value);
    if (cell == nullptr) return {ValueType::kNone, 0, 0};
    value = *cell;
  }
  if (argument.is_float()) return Value::of(to<double>(value));
  if (argument.is_bool()) return Value::of(to<bool>(value));
  return Value::of(to<int64_t>(value));
}

std::string_view BoxedArguments::text(size_t i) const {
  if (schema_.arguments[i].type == ArgumentType::kDtype) {
    // A dtype argument has the same numbering as tensors' metadata.
    const char* name = dtype_text(static_cast<ScalarType>(to<int32_t>(stack_[i])));
    return name != nullptr ? name : "";
  }
  const auto handle = to<StringHandle>(stack_[i]);
  size_t length = 0;
  const char* data = nullptr;
  check_read(torch_string_length(handle, &length), "a str argument");
  check_read(torch_string_c_str(handle, &data), "a str argument");
  return {data, length};
}

}  // namespace torch_cubin
