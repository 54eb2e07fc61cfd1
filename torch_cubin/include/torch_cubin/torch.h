// torch_cubin for C++ with PyTorch: tensors as kernel arguments, and typed functions for
// torch_cubin's own ops. Uses PyTorch's stable ABI: compiled code runs with every torch from 2.11
// on.
//
//   #include <torch_cubin/torch.h>
//   using namespace torch_cubin;
//   TORCH_CUBIN_EMBED(my_cubin);          // embedded by CMake, setuptools or load_inline
//
//   Tensor add_one(Tensor x) {
//     static auto kernel = embedded(my_cubin)["add_one"];    // once per process, for all devices
//     Tensor y = torch_cubin::empty_like(x);
//     kernel(grid(cdiv(x.numel(), 256)), block(256), x, y, int(x.numel()));
//     return y;
//   }
//   STABLE_TORCH_LIBRARY(mylib, m) { m.def("add_one(Tensor x) -> Tensor"); }
//   STABLE_TORCH_LIBRARY_IMPL(mylib, CUDA, m) { m.impl("add_one", TORCH_BOX(&add_one)); }
//
// A launch with tensors, which must be on one device, uses that device and PyTorch's current stream
// there.
#pragma once

#include <dlfcn.h>
#include <link.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch_cubin/cubin.h>

#include <atomic>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#if !TORCH_CUBIN_EXCEPTIONS
#error "torch_cubin/torch.h needs exceptions, as PyTorch does"
#endif

namespace torch_cubin {
inline namespace v1 {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

namespace detail {

inline void check_torch(AOTITorchError code, const char* what) {
  if (code == AOTI_TORCH_SUCCESS) return;
  throw make_error("internal", "PyTorch", std::string("could not ") + what);
}

// Empties PyTorch's cache by requesting more memory than any GPU has: the allocator frees its cache
// before it reports an error. The stable ABI has no torch.cuda.empty_cache().
inline void release_pytorch_cache(int32_t device) {
  const int64_t more_than_any_gpu = int64_t{1} << 44, stride = 1;  // bytes: 16 TiB
  AtenTensorHandle handle = nullptr;
  if (aoti_torch_empty_strided(1, &more_than_any_gpu, &stride, aoti_torch_dtype_uint8(),
                               aoti_torch_device_type_cuda(), device, &handle) == 0) {
    aoti_torch_delete_tensor_object(handle);
  }
}
[[maybe_unused]] inline const bool release_cache_is_set =
    (set_release_cache(&release_pytorch_cache), true);

using StreamGetter = AOTITorchError (*)(int32_t device, void** stream);

// Looked up instead of linked, so that one binary works with CPU-only builds of PyTorch too.
inline StreamGetter stream_getter() {
  static std::atomic<StreamGetter> known{nullptr};
  StreamGetter getter = known.load(std::memory_order_acquire);
  if (getter != nullptr) return getter;
  void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
  if (library != nullptr) {
    getter = reinterpret_cast<StreamGetter>(dlsym(library, "aoti_torch_get_current_cuda_stream"));
  }
  if (getter == nullptr) {
    throw make_error("driver", "PyTorch", "has no CUDA stream to give", "a CUDA build of torch",
                     "one without libtorch_cuda.so in this process");
  }
  known.store(getter, std::memory_order_release);
  return getter;
}

}  // namespace detail

// PyTorch's current stream on a device.
inline Stream current_stream(int device) {
  void* stream = nullptr;
  detail::check_torch(detail::stream_getter()(device, &stream), "give its current stream");
  return Stream(static_cast<CUstream_st*>(stream));
}

// A tensor whose address is passed regardless of its strides: for kernels that handle them.
struct __attribute__((visibility("hidden"))) Strided {
  const Tensor& tensor;
};
inline Strided strided(const Tensor& tensor) { return {tensor}; }

namespace detail {

// Returns the address of a tensor's first element. The first tensor sets the launch's device and
// stream.
inline void* pack_tensor(AtenTensorHandle tensor, bool needs_contiguous, Packing& packing) {
  int32_t type = 0, index = 0;
  check_torch(aoti_torch_get_device_type(tensor, &type), "tell a tensor's device");
  check_torch(aoti_torch_get_device_index(tensor, &index), "tell a tensor's device");
  static const int32_t cuda = aoti_torch_device_type_cuda();
  if (type != cuda) {
    throw make_error(
        "input", "a tensor argument", "is on no CUDA device", "a CUDA tensor",
        type == aoti_torch_device_type_cpu() ? "one on the CPU" : "one on another kind of device",
        "Move it with .cuda().");
  }
  if (packing.call.device == kCurrentDevice) packing.call.device = index;
  if (packing.call.device != index) {
    throw make_error("input", "a tensor argument", "is on another device than the launch",
                     "cuda:" + std::to_string(packing.call.device),
                     "cuda:" + std::to_string(index));
  }
  // Also a launch with an explicit device uses PyTorch's current stream there.
  if (!packing.has_stream) packing.call.stream = current_stream(index).handle();
  packing.has_stream = true;
  bool contiguous = true;
  if (needs_contiguous) {
    check_torch(aoti_torch_is_contiguous(tensor, &contiguous), "tell a tensor's layout");
  }
  if (!contiguous) {
    throw make_error(
        "input", "a tensor argument", "is not contiguous", "a contiguous tensor",
        "one with other strides",
        "Pass strided(tensor) to a kernel that knows its strides, or a contiguous copy.");
  }
  void* data = nullptr;
  check_torch(aoti_torch_get_data_ptr(tensor, &data), "tell a tensor's address");
  if (data == nullptr) {
    int64_t count = 0;
    check_torch(aoti_torch_get_numel(tensor, &count), "tell a tensor's size");
    if (count != 0) {
      throw make_error("input", "a tensor argument", "has elements and no memory",
                       "a tensor with memory of its own", std::to_string(count) + " elements");
    }
  }
  return data;
}

struct TensorArgument {
  using Packed = void*;
  static constexpr bool kSetsStream = true;
  static constexpr uint32_t kKind = TORCH_CUBIN_V1_POINTER;
  static constexpr const char* type() { return "a tensor"; }
};

inline uint32_t kind_of_tensor(AtenTensorHandle tensor) {
  int32_t dtype = -1;
  check_torch(aoti_torch_get_dtype(tensor, &dtype), "tell a tensor's dtype");
  return with_element(TORCH_CUBIN_V1_POINTER, dtype);
}

}  // namespace detail

template <>
struct Argument<Tensor> : detail::TensorArgument {
  static uint32_t kind(const Tensor& tensor) { return detail::kind_of_tensor(tensor.get()); }
  static void* pack(const Tensor& tensor, detail::Packing& packing) {
    return detail::pack_tensor(tensor.get(), true, packing);
  }
};
template <>
struct Argument<Strided> : detail::TensorArgument {
  static uint32_t kind(const Strided& strided) {
    return detail::kind_of_tensor(strided.tensor.get());
  }
  static void* pack(const Strided& strided, detail::Packing& packing) {
    return detail::pack_tensor(strided.tensor.get(), false, packing);
  }
};
// A missing tensor is a null pointer.
template <>
struct Argument<std::optional<Tensor>> : detail::TensorArgument {
  static uint32_t kind(const std::optional<Tensor>& tensor) {
    return tensor ? detail::kind_of_tensor(tensor->get()) : kKind;
  }
  static void* pack(const std::optional<Tensor>& tensor, detail::Packing& packing) {
    return tensor ? detail::pack_tensor(tensor->get(), true, packing) : nullptr;
  }
};

// --- allocation, from PyTorch's caching allocator ---

// Allocates a contiguous tensor on the device of `like`, with its dtype unless `dtype` is given.
inline Tensor new_empty(const Tensor& like, const std::vector<int64_t>& sizes,
                        std::optional<ScalarType> dtype = std::nullopt) {
  std::vector<int64_t> strides(sizes.size());
  int64_t step = 1;
  for (size_t i = sizes.size(); i-- > 0;) {
    strides[i] = step;
    if (sizes[i] > 1) step *= sizes[i];
  }
  int32_t type = 0, index = 0, number = 0;
  detail::check_torch(aoti_torch_get_device_type(like.get(), &type), "tell a tensor's device");
  detail::check_torch(aoti_torch_get_device_index(like.get(), &index), "tell a tensor's device");
  if (dtype) {
    number = torch::stable::detail::to<int32_t>(torch::stable::detail::from(*dtype));
  } else {
    detail::check_torch(aoti_torch_get_dtype(like.get(), &number), "tell a tensor's dtype");
  }
  AtenTensorHandle made = nullptr;
  detail::check_torch(aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(),
                                               strides.data(), number, type, index, &made),
                      "allocate a tensor");
  return Tensor(made);
}

// Like torch.empty_like: keeps the strides of `like` if it is dense in memory.
inline Tensor empty_like(const Tensor& like) {
  bool contiguous = false;
  detail::check_torch(aoti_torch_is_contiguous(like.get(), &contiguous), "tell a tensor's layout");
  if (!contiguous) return torch::stable::empty_like(like);
  int64_t dim = 0, *sizes = nullptr, *strides = nullptr;
  int32_t type = 0, index = 0, dtype = 0;
  detail::check_torch(aoti_torch_get_dim(like.get(), &dim), "tell a tensor's shape");
  detail::check_torch(aoti_torch_get_sizes(like.get(), &sizes), "tell a tensor's shape");
  detail::check_torch(aoti_torch_get_strides(like.get(), &strides), "tell a tensor's shape");
  detail::check_torch(aoti_torch_get_device_type(like.get(), &type), "tell a tensor's device");
  detail::check_torch(aoti_torch_get_device_index(like.get(), &index), "tell a tensor's device");
  detail::check_torch(aoti_torch_get_dtype(like.get(), &dtype), "tell a tensor's dtype");
  AtenTensorHandle made = nullptr;
  detail::check_torch(aoti_torch_empty_strided(dim, sizes, strides, dtype, type, index, &made),
                      "allocate a tensor");
  return Tensor(made);
}

// --- torch_cubin's ops, and those of packages ---

namespace detail {

// Loads _C.so, which registers the ops: the one in this process, else TORCH_CUBIN_LIBRARY, else the
// one built against or the one of libtorch_cubin's package.
inline void* ops_library() {
  static void* const library = [] {
    std::string path;
    dl_iterate_phdr(
        [](struct dl_phdr_info* info, size_t, void* out) {
          const std::string name = info->dlpi_name;
          const std::string own = "/torch_cubin/_C.so";
          if (name.size() < own.size() || name.substr(name.size() - own.size()) != own) return 0;
          *static_cast<std::string*>(out) = name;
          return 1;
        },
        &path);
    if (path.empty()) {
      const char* chosen = std::getenv("TORCH_CUBIN_LIBRARY");
      if (chosen != nullptr) path = chosen;
    }
#ifdef TORCH_CUBIN_OPS_LIBRARY
    if (path.empty()) path = TORCH_CUBIN_OPS_LIBRARY;
#endif
    if (path.empty()) {
      const std::string own = torch_cubin_v1_library_path();
      path = own.substr(0, own.rfind('/') + 1) + "../_C.so";
    }
    void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) {
      const char* text = dlerror();
      throw make_error("file", "torch_cubin's ops", "could not be loaded",
                       "torch_cubin/_C.so of the installed package", text != nullptr ? text : path,
                       "Name it in the environment variable TORCH_CUBIN_LIBRARY.");
    }
    return handle;
  }();
  return library;
}

template <class Function>
Function* ops_function(const char* name) {
  void* found = dlsym(ops_library(), name);
  if (found == nullptr) {
    throw make_error("file", "torch_cubin/_C.so", "is older than this program's headers", name, "");
  }
  return reinterpret_cast<Function*>(found);
}

// Restores an Error from its text, which contains the tag.
inline Error error_of_text(const std::string& text) {
  const size_t open = text.find("torch_cubin ["), close = text.find("]: ", open);
  if (open == std::string::npos || close == std::string::npos) {
    return make_error("internal", text, "");
  }
  const std::string tag = text.substr(open + 13, close - open - 13);
  std::string rest = text.substr(close + 3);
  if (!rest.empty() && rest.back() == '.') rest.pop_back();
  return make_error(tag.c_str(), rest, "");
}

template <class T>
struct Returned {
  static T take(StableIValue* stack) { return torch::stable::detail::to<T>(stack[0]); }
};
template <>
struct Returned<void> {
  static void take(StableIValue*) {}
};
template <class... T>
struct Returned<std::tuple<T...>> {
  static std::tuple<T...> take(StableIValue* stack) {
    return take_each(stack, std::index_sequence_for<T...>());
  }
  template <size_t... i>
  static std::tuple<T...> take_each(StableIValue* stack, std::index_sequence<i...>) {
    return {torch::stable::detail::to<T>(stack[i])...};
  }
};
template <class T>
constexpr size_t kReturned = 1;
template <class... T>
constexpr size_t kReturned<std::tuple<T...>> = sizeof...(T);

}  // namespace detail

// Registers torch_cubin's ops with PyTorch; the functions in ops:: do this themselves.
inline void load_ops() { detail::ops_library(); }

// Registers the ops of a package (torch_cubin.save_package), to be called with call().
inline void load_package(const std::string& folder) {
  const char* text = nullptr;
  auto* load =
      detail::ops_function<int(const char*, const char**)>("torch_cubin_v1_torch_load_package");
  if (load(folder.c_str(), &text) != 0) throw detail::error_of_text(text);
}

// Calls any op of PyTorch's dispatcher, with every argument of its schema in order:
//   Tensor y = call<Tensor>("mylib::add_one", x);
template <class Result, class... T>
Result call(const char* op, const T&... arguments) {
  constexpr size_t kSlots =
      sizeof...(T) > detail::kReturned<Result> ? sizeof...(T) : detail::kReturned<Result>;
  StableIValue stack[kSlots] = {torch::stable::detail::from(arguments)...};
  auto* take = detail::ops_function<const char*(int)>("torch_cubin_v1_torch_last_error");
  take(1);  // clears the kept error text: before torch 2.13, PyTorch loses an error's text
  if (torch_call_dispatcher(op, "", stack, TORCH_ABI_VERSION) != AOTI_TORCH_SUCCESS) {
    const std::string text = take(0);
    if (!text.empty()) throw detail::error_of_text(text);
    throw make_error("internal", op, "failed", "", "an error that PyTorch has printed");
  }
  return detail::Returned<Result>::take(stack);
}

// The public ops (docs/ops.md, docs/attention.md).
namespace ops {

inline Tensor matmul(const Tensor& a, const Tensor& b) {
  return call<Tensor>("cubin::matmul", a, b);
}

inline Tensor linear(const Tensor& input, const Tensor& weight,
                     const std::optional<Tensor>& bias = std::nullopt,
                     const std::string& activation = "none") {
  return call<Tensor>("cubin::linear", input, weight, bias, activation);
}

inline Tensor addmm(const Tensor& input, const Tensor& mat1, const Tensor& mat2, double beta = 1,
                    double alpha = 1) {
  return call<Tensor>("cubin::addmm", input, mat1, mat2, beta, alpha);
}

struct __attribute__((visibility("hidden"))) AttentionOptions {
  std::optional<Tensor> attn_mask = std::nullopt;
  double dropout_p = 0;
  bool is_causal = false;
  std::optional<double> scale = std::nullopt;
  bool enable_gqa = false;
};

inline Tensor scaled_dot_product_attention(const Tensor& query, const Tensor& key,
                                           const Tensor& value,
                                           const AttentionOptions& options = {}) {
  return call<Tensor>("cubin::scaled_dot_product_attention", query, key, value, options.attn_mask,
                      options.dropout_p, options.is_causal, options.scale, options.enable_gqa);
}
inline Tensor attention(const Tensor& query, const Tensor& key, const Tensor& value,
                        const AttentionOptions& options = {}) {
  return scaled_dot_product_attention(query, key, value, options);
}

}  // namespace ops

// --- schemas of C++ functions, for load_inline ---

namespace detail {

// Rejects types that TORCH_BOX would accept but fill with wrong bits: an int from half of an
// int64_t, a float from a double's bits.
template <class T>
struct SchemaType {
  static_assert(sizeof(T) == 0,
                "torch_cubin: an op takes and returns Tensor, int64_t, double, bool, std::string, "
                "ScalarType, Device, and std::optional, std::vector and std::tuple of these");
  static std::string name() { return {}; }
};
template <>
struct SchemaType<Tensor> {
  static std::string name() { return "Tensor"; }
};
template <>
struct SchemaType<int64_t> {
  static std::string name() { return "int"; }
};
template <>
struct SchemaType<double> {
  static std::string name() { return "float"; }
};
template <>
struct SchemaType<bool> {
  static std::string name() { return "bool"; }
};
template <>
struct SchemaType<std::string> {
  static std::string name() { return "str"; }
};
template <>
struct SchemaType<ScalarType> {
  static std::string name() { return "ScalarType"; }
};
template <>
struct SchemaType<torch::stable::Device> {
  static std::string name() { return "Device"; }
};
template <class T>
struct SchemaType<std::optional<T>> {
  static std::string name() { return SchemaType<T>::name() + "?"; }
};
template <class T>
struct SchemaType<std::vector<T>> {
  static std::string name() { return SchemaType<T>::name() + "[]"; }
};
template <>
struct SchemaType<void> {
  static std::string name() { return "()"; }
};
template <class... T>
struct SchemaType<std::tuple<T...>> {
  static std::string name() {
    std::string text;
    ((text += (text.empty() ? "(" : ", ") + SchemaType<T>::name()), ...);
    return text + ")";
  }
};

template <class Result, class... T>
std::string schema_of(const char* name, Result (*)(T...)) {
  std::string text;
  int i = 0;
  ((text += (text.empty() ? "" : ", ") + SchemaType<std::decay_t<T>>::name() + " arg" +
            std::to_string(i++)),
   ...);
  return std::string(name) + "(" + text + ") -> " + SchemaType<Result>::name();
}

}  // namespace detail

}  // namespace v1
}  // namespace torch_cubin
