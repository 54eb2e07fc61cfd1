#include "ops/common/argument_checks.h"

#include "cubin/error.h"

namespace torch_cubin {

std::string argument_text(const char* op, const char* name) {
  return std::string(op) + " argument '" + name + "'";
}

void check_device(const char* op, const char* name, const TensorView& view, const char* first_name,
                  const TensorView& first) {
  if (view.device_type == first.device_type && view.device_index == first.device_index) return;
  fail({"input", argument_text(op, name), "is on another device",
        first.device_text() + " like '" + first_name + "'", view.device_text(),
        "Move one of them with .to(device)."});
}

void check_like(const char* op, const char* name, const TensorView& view, const char* first_name,
                const TensorView& first) {
  check_device(op, name, view, first_name, first);
  if (view.dtype == first.dtype) return;
  fail({"input", argument_text(op, name), "has another dtype",
        dtype_name(first.dtype) + " like '" + first_name + "'", dtype_name(view.dtype),
        "Convert one of them with .to(dtype)."});
}

void fail_dtype(const char* op, const char* name, const std::string& expected,
                const TensorView& view) {
  fail({"input", argument_text(op, name), "has a wrong dtype", expected, dtype_name(view.dtype),
        "Convert it with .to(dtype)."});
}

void check_side(const char* op, const char* name, const TensorView& view, const char* first_name,
                const TensorView& first, ScalarType dtype) {
  check_device(op, name, view, first_name, first);
  if (view.dtype != dtype) fail_dtype(op, name, dtype_name(dtype), view);
}

void check_float_dtype(const char* op, const char* name, const TensorView& view,
                       const std::string& instead) {
  for (const ScalarType dtype :
       {ScalarType::Half, ScalarType::BFloat16, ScalarType::Float, ScalarType::Double}) {
    if (view.dtype == dtype) return;
  }
  fail({"input", argument_text(op, name), "has an unsupported dtype",
        "float16, bfloat16, float32 or float64", dtype_name(view.dtype),
        "Convert it with .to(dtype), or use " + instead + "."});
}

MemoryFacts memory_of(const TensorView& view) {
  const void* data = view.handle == nullptr ? nullptr : view.find_data();
  return {data, view.sizes, view.strides, view.dim, element_size(view.dtype)};
}

void check_apart(const char* op, const char* name, const TensorView& written,
                 const char* other_name, const TensorView& view) {
  if (!share_memory(memory_of(written), memory_of(view))) return;
  fail({"input", argument_text(op, name),
        std::string("shares memory with '") + other_name + "', and is written to",
        "memory of its own", "memory of both",
        "Clone one of them. Where torch.compile dropped a clone() that the program makes "
        "(pytorch#198031), make the copy outside of the compiled function."});
}

}  // namespace torch_cubin
