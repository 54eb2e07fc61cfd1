// torch_cubin for C++: modules, kernels and launches of cubins, fatbins and PTX. A single header,
// so that a program includes one file.
//
//   #include <torch_cubin/cubin.h>            // C++17; link torch_cubin (see docs/cpp.md)
//   using namespace torch_cubin;
//
//   Module module = Module::from_file("add.cubin");
//   Kernel add = module["add"];               // the name is checked; C++ names are accepted
//   // The arguments are checked against the binary's parameter table.
//   add(grid(cdiv(n, 256)), block(256), stream, a, b, c, n);
//
// Needs neither PyTorch nor CUDA's headers; if those are included, their types are accepted. Errors
// throw torch_cubin::Error. Every function that can throw has a variant `try_...` that returns a
// Result instead; without exceptions (-fno-exceptions) only these exist.
#pragma once

#include <torch_cubin/abi.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <initializer_list>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#if defined(__cpp_exceptions)
#define TORCH_CUBIN_EXCEPTIONS 1
#else
#define TORCH_CUBIN_EXCEPTIONS 0
#endif

struct CUstream_st;  // the pointee of CUstream and cudaStream_t

namespace torch_cubin {
inline namespace v1 {

// --- errors ---

// torch_cubin [tag]: <object> <problem>: expected X, got Y. <advice>
class __attribute__((visibility("default"))) Error : public std::runtime_error {
 public:
  explicit Error(torch_cubin_v1_error* error)
      : std::runtime_error(torch_cubin_v1_error_part(error, TORCH_CUBIN_V1_MESSAGE)),
        error_(error, &torch_cubin_v1_error_free) {}

  // "params", "launch", "image", ...: the same tags as in Python.
  const char* tag() const noexcept { return part(TORCH_CUBIN_V1_TAG); }
  // The parts of the message; "" for a missing part.
  const char* object() const noexcept { return part(TORCH_CUBIN_V1_OBJECT); }
  const char* problem() const noexcept { return part(TORCH_CUBIN_V1_PROBLEM); }
  const char* expected() const noexcept { return part(TORCH_CUBIN_V1_EXPECTED); }
  const char* got() const noexcept { return part(TORCH_CUBIN_V1_GOT); }
  const char* advice() const noexcept { return part(TORCH_CUBIN_V1_ADVICE); }

 private:
  const char* part(uint32_t which) const noexcept {
    return torch_cubin_v1_error_part(error_.get(), which);
  }
  std::shared_ptr<torch_cubin_v1_error> error_;  // shared: exceptions must be copyable
};

// A value or an Error, for code without exceptions.
template <class T>
class [[nodiscard]] Result {
 public:
  Result(const T& value) : value_(value) {}
  Result(T&& value) : value_(std::move(value)) {}
  Result(Error error) : error_(std::make_unique<Error>(std::move(error))) {}
  explicit operator bool() const noexcept { return value_.has_value(); }
  // Requires a value (the result converts to true).
  T& value() { return *value_; }
  const T& value() const { return *value_; }
  T& operator*() { return *value_; }
  T* operator->() { return &*value_; }
  // Requires an error (the result converts to false).
  const Error& error() const { return *error_; }

 private:
  std::optional<T> value_;
  std::unique_ptr<Error> error_;
};

template <>
class [[nodiscard]] Result<void> {
 public:
  Result() = default;
  Result(Error error) : error_(std::make_unique<Error>(std::move(error))) {}
  explicit operator bool() const noexcept { return error_ == nullptr; }
  const Error& error() const { return *error_; }

 private:
  std::unique_ptr<Error> error_;
};

using Status = Result<void>;

namespace detail {

inline Status status(torch_cubin_v1_error* error) {
  if (error == nullptr) return {};
  return Error(error);
}

#if TORCH_CUBIN_EXCEPTIONS
inline void check(torch_cubin_v1_error* error) {
  if (__builtin_expect(error != nullptr, 0)) throw Error(error);
}
template <class T>
T value_of(Result<T> result) {
  if (!result) throw result.error();
  return std::move(*result);
}
#endif

}  // namespace detail

// Makes an error of your own, by the library's template.
inline Error make_error(const char* tag, const std::string& object, const std::string& problem,
                        const std::string& expected = "", const std::string& got = "",
                        const std::string& advice = "") {
  return Error(torch_cubin_v1_error_make(tag, object.c_str(), problem.c_str(), expected.c_str(),
                                         got.c_str(), advice.c_str()));
}

// --- shapes ---

template <class A, class B>
constexpr std::common_type_t<A, B> cdiv(A a, B b) {
  return (a + b - 1) / b;
}

struct Dim3 {
  int64_t x = 1, y = 1, z = 1;
};
struct Grid : Dim3 {};
struct Block : Dim3 {};

namespace detail {

template <class T>
using IsShape = decltype(std::declval<T>().x, std::declval<T>().y, std::declval<T>().z);

template <class To>
constexpr To shape(int64_t x, int64_t y, int64_t z) {
  To to;
  to.x = x;
  to.y = y;
  to.z = z;
  return to;
}

}  // namespace detail

// grid(): the blocks of a launch. block(): the threads of a block. Both accept dim3.
template <class T, class = std::enable_if_t<std::is_integral_v<T>>>
constexpr Grid grid(T x, int64_t y = 1, int64_t z = 1) {
  return detail::shape<Grid>(static_cast<int64_t>(x), y, z);
}
template <class T, class = detail::IsShape<T>>
constexpr Grid grid(const T& dims) {
  return detail::shape<Grid>(dims.x, dims.y, dims.z);
}
template <class T, class = std::enable_if_t<std::is_integral_v<T>>>
constexpr Block block(T x, int64_t y = 1, int64_t z = 1) {
  return detail::shape<Block>(static_cast<int64_t>(x), y, z);
}
template <class T, class = detail::IsShape<T>>
constexpr Block block(const T& dims) {
  return detail::shape<Block>(dims.x, dims.y, dims.z);
}

// A CUstream or cudaStream_t, owned by the caller; nullptr is the default stream.
class Stream {
 public:
  constexpr Stream() = default;
  constexpr Stream(std::nullptr_t) {}
  constexpr Stream(CUstream_st* stream) : handle_(stream) {}
  constexpr void* handle() const { return handle_; }

 private:
  void* handle_ = nullptr;
};

constexpr int kCurrentDevice = TORCH_CUBIN_V1_CURRENT_DEVICE;

// The configuration of a launch:
//   kernel(launch(grid(64), block(128)).cluster(2).shared_memory(100000).on(stream), a, b);
class Launch {
 public:
  constexpr Launch(Grid grid, Block block) : call_{} {
    call_.size = sizeof(call_);
    call_.device = kCurrentDevice;
    set(call_.grid, grid);
    set(call_.block, block);
  }
  // Uses the block required by the binary (.reqntid, Triton's kernels).
  explicit constexpr Launch(Grid grid) : Launch(grid, detail::shape<Block>(0, 0, 0)) {}

  constexpr Launch& on(Stream stream) {
    call_.stream = stream.handle();
    has_stream_ = true;
    return *this;
  }
  // Selects a device other than that of the current context; its primary context is used.
  constexpr Launch& device(int index) {
    call_.device = index;
    return *this;
  }
  constexpr Launch& shared_memory(int64_t bytes) {  // dynamic; may exceed 48 KB
    call_.shared_memory = bytes;
    return *this;
  }
  constexpr Launch& cluster(int64_t x, int64_t y = 1, int64_t z = 1) {  // blocks
    call_.flags |= TORCH_CUBIN_V1_CLUSTER;
    set(call_.cluster, detail::shape<Dim3>(x, y, z));
    return *this;
  }
  // Runs all blocks at the same time, so that they may wait for each other.
  constexpr Launch& cooperative() {
    call_.flags |= TORCH_CUBIN_V1_COOPERATIVE;
    return *this;
  }
  // Programmatic dependent launch: may start before the previous kernel of the stream has ended.
  constexpr Launch& dependent() {
    call_.flags |= TORCH_CUBIN_V1_DEPENDENT;
    return *this;
  }
  constexpr Launch& priority(int value) {  // as for streams: lower values run first
    call_.flags |= TORCH_CUBIN_V1_PRIORITY;
    call_.priority = value;
    return *this;
  }

  const torch_cubin_v1_launch_call& call() const { return call_; }
  torch_cubin_v1_launch_call& call() { return call_; }
  constexpr bool has_stream() const { return has_stream_; }

 private:
  template <class Shape>
  static constexpr void set(int64_t (&to)[3], const Shape& from) {
    to[0] = from.x;
    to[1] = from.y;
    to[2] = from.z;
  }
  torch_cubin_v1_launch_call call_;
  bool has_stream_ = false;
};

inline Launch launch(Grid grid, Block block) { return Launch(grid, block); }
inline Launch launch(Grid grid) { return Launch(grid); }

// --- arguments ---

namespace detail {

// The launch for which arguments are packed; an argument may set its device and stream.
struct Packing {
  torch_cubin_v1_launch_call& call;
  bool has_stream;
};

}  // namespace detail

}  // namespace v1
}  // namespace torch_cubin

struct __half;  // CUDA's types, defined by cuda_fp16.h and cuda_bf16.h
struct __nv_bfloat16;

namespace torch_cubin {
inline namespace v1 {

// The c10::ScalarType number of a type, for kernels whose file states their parameters' types (a
// mangled name, PTX). Types without a number, and untyped memory (void*, char*, unsigned char*,
// std::byte*), match every type of their size. Specialize it for types of your own.
template <class T>
struct ElementType : std::integral_constant<int, -1> {};
template <>
struct ElementType<bool> : std::integral_constant<int, 11> {};
template <>
struct ElementType<signed char> : std::integral_constant<int, 1> {};
template <>
struct ElementType<short> : std::integral_constant<int, 2> {};
template <>
struct ElementType<unsigned short> : std::integral_constant<int, 27> {};
template <>
struct ElementType<int> : std::integral_constant<int, 3> {};
template <>
struct ElementType<unsigned int> : std::integral_constant<int, 28> {};
template <>
struct ElementType<long> : std::integral_constant<int, 4> {};
template <>
struct ElementType<unsigned long> : std::integral_constant<int, 29> {};
template <>
struct ElementType<long long> : std::integral_constant<int, 4> {};
template <>
struct ElementType<unsigned long long> : std::integral_constant<int, 29> {};
template <>
struct ElementType<float> : std::integral_constant<int, 6> {};
template <>
struct ElementType<double> : std::integral_constant<int, 7> {};
template <>
struct ElementType<__half> : std::integral_constant<int, 5> {};
template <>
struct ElementType<__nv_bfloat16> : std::integral_constant<int, 15> {};
template <class T>
struct ElementType<T*> : std::integral_constant<int, 4> {};  // an address

namespace detail {

// Combines a kind with the type of an argument or of its pointed-to elements.
constexpr uint32_t with_element(uint32_t kind, int number) {
  return kind | static_cast<uint32_t>(number + 1) << TORCH_CUBIN_V1_ELEMENT_SHIFT;
}
template <class T>
constexpr uint32_t pointer_to() {
  return with_element(TORCH_CUBIN_V1_POINTER, ElementType<std::remove_cv_t<T>>::value);
}

}  // namespace detail

// Converts a type to a kernel parameter. torch.h adds tensors. Specialize it for types of your own:
// type(), kKind, Packed (the passed type), kSetsStream, pack(argument, packing); and kind(argument)
//   if the element type is known only from the argument itself.
template <class T, class = void>
struct Argument {
  static_assert(!std::is_array_v<T>,
                "an array is no kernel's argument: pass a device pointer, or a struct by value");
  static_assert(
      std::is_trivially_copyable_v<T>,
      "a kernel's argument must be trivially copyable: a number, a pointer, a plain struct");
  using Packed = const T&;
  static constexpr bool kSetsStream = false;
  static constexpr uint32_t kKind =
      std::is_pointer_v<T> ? detail::pointer_to<std::remove_pointer_t<T>>()
                           : detail::with_element(std::is_floating_point_v<T> ? TORCH_CUBIN_V1_VALUE
                                                                              : TORCH_CUBIN_V1_ANY,
                                                  ElementType<T>::value);
  static constexpr const char* type() {
    if constexpr (std::is_pointer_v<T>) return "a pointer";
    if constexpr (std::is_same_v<T, float>) return "a float";
    if constexpr (std::is_same_v<T, double>) return "a double";
    if constexpr (std::is_same_v<T, bool>) return "a bool";
    if constexpr (std::is_integral_v<T>) return "an integer";
    if constexpr (std::is_enum_v<T>) return "an enum";
    if constexpr (std::is_class_v<T> || std::is_union_v<T>) return "a struct";
    return "an argument";
  }
  static const T& pack(const T& argument, detail::Packing&) { return argument; }
};

template <>
struct Argument<std::nullptr_t> {
  using Packed = void*;
  static constexpr bool kSetsStream = false;
  static constexpr uint32_t kKind = TORCH_CUBIN_V1_POINTER;
  static constexpr const char* type() { return "nullptr"; }
  static void* pack(std::nullptr_t, detail::Packing&) { return nullptr; }
};

namespace detail {

template <class T>
using ArgumentOf = Argument<std::remove_cv_t<T>>;

// The argument descriptions that the library checks against the binary's table, once per set of
// types.
template <class... T>
struct Types {
  static constexpr torch_cubin_v1_argument kArguments[sizeof...(T) + 1] = {
      {sizeof(std::remove_reference_t<typename ArgumentOf<T>::Packed>), ArgumentOf<T>::kKind,
       ArgumentOf<T>::type()}...,
      {0, 0, nullptr}};
};

template <class T, class = void>
struct HasKind : std::false_type {};
template <class T>
struct HasKind<T, std::void_t<decltype(&ArgumentOf<T>::kind)>> : std::true_type {};

template <class T>
torch_cubin_v1_argument described(const T& argument) {
  torch_cubin_v1_argument out = Types<T>::kArguments[0];
  if constexpr (HasKind<T>::value) out.kind = ArgumentOf<T>::kind(argument);
  return out;
}

template <class T>
void* address_of(T& value) {
  return const_cast<void*>(static_cast<const void*>(std::addressof(value)));
}

// Packs the arguments and launches. pack() throws its errors itself.
template <class... T>
torch_cubin_v1_error* launch(torch_cubin_v1_kernel* kernel, Launch& how, const T&... arguments) {
  Packing packing{how.call(), how.has_stream()};
  std::tuple<typename ArgumentOf<T>::Packed...> packed{
      ArgumentOf<T>::pack(arguments, packing)...};  // left to right
  return std::apply(
      [&](auto&... values) {
        void* params[] = {address_of(values)..., nullptr};
        packing.call.params = params;
        packing.call.argument_count = sizeof...(T);
        if constexpr ((... || HasKind<T>::value)) {
          const torch_cubin_v1_argument known[] = {described(arguments)...};
          packing.call.arguments = known;
          return torch_cubin_v1_launch(kernel, &packing.call);
        } else {
          packing.call.arguments = Types<T...>::kArguments;
          return torch_cubin_v1_launch(kernel, &packing.call);
        }
      },
      packed);
}

inline torch_cubin_v1_error* launch_addresses(torch_cubin_v1_kernel* kernel,
                                              const torch_cubin_v1_facts& known, Launch& how,
                                              void** addresses, uint64_t count) {
  std::vector<torch_cubin_v1_argument> arguments(count);
  for (uint64_t i = 0; i < count && i < known.param_count; ++i) {
    arguments[i] = {known.params[i].size, known.params[i].kind, "an address"};
  }
  how.call().params = addresses;
  how.call().arguments = arguments.data();
  how.call().argument_count = count;
  return torch_cubin_v1_launch(kernel, &how.call());
}

}  // namespace detail

// --- kernels ---

struct Parameter {
  uint32_t size;  // bytes
  uint32_t kind;  // TORCH_CUBIN_V1_ANY, _POINTER or _VALUE; most binaries do not record it
};

class Module;
template <class Signature>
class TypedKernel;

// A kernel of a module, which it keeps alive. Cheap to copy; any thread may launch it, on any
// device.
class Kernel {
 public:
  Kernel() = default;

  std::string_view name() const { return facts().name; }
  std::vector<Parameter> parameters() const {
    const torch_cubin_v1_facts known = facts();
    std::vector<Parameter> found;
    for (uint64_t i = 0; i < known.param_count; ++i) {
      found.push_back({known.params[i].size, known.params[i].kind});
    }
    return found;
  }
  // The kernel's properties as recorded in the binary; needs no GPU.
  torch_cubin_v1_facts facts() const {
    torch_cubin_v1_facts out{};
    out.size = sizeof(out);
    torch_cubin_v1_kernel_info(handle_, &out);
    return out;
  }

  template <class... T>
  Status try_launch(Launch how, const T&... arguments) const {
    return detail::status(detail::launch(handle_, how, arguments...));
  }
  template <class... T>
  Status try_launch(Grid grid, Block block, Stream stream, const T&... arguments) const {
    return try_launch(Launch(grid, block).on(stream), arguments...);
  }
  // Takes arguments like cuLaunchKernel: the address of each. Their number is checked against the
  // binary; the values are not checked, since their types are unknown.
  Status try_launch_addresses(Launch how, void** addresses, uint64_t count) const {
    return detail::status(detail::launch_addresses(handle_, facts(), how, addresses, count));
  }
  // Checks argument types against the binary's table.
  template <class... T>
  Status try_check() const {
    return detail::status(torch_cubin_v1_kernel_check(
        handle_, detail::Types<std::decay_t<T>...>::kArguments, sizeof...(T)));
  }
  Status try_preload(int device = kCurrentDevice) const {
    return detail::status(torch_cubin_v1_kernel_preload(handle_, device));
  }
  Result<torch_cubin_v1_attributes> try_attributes(int device = kCurrentDevice) const {
    torch_cubin_v1_attributes out{};
    out.size = sizeof(out);
    torch_cubin_v1_error* error = torch_cubin_v1_kernel_attributes(handle_, device, &out);
    if (error != nullptr) return Error(error);
    return out;
  }
  Result<int64_t> try_occupancy(const Launch& how) const {
    int64_t out = 0;
    torch_cubin_v1_error* error = torch_cubin_v1_kernel_occupancy(handle_, &how.call(), &out);
    if (error != nullptr) return Error(error);
    return out;
  }

#if TORCH_CUBIN_EXCEPTIONS
  // Without a stream, launches on the default stream or, with tensors (torch.h), on PyTorch's
  // current one.
  template <class... T>
  void operator()(Launch how, const T&... arguments) const {
    detail::check(detail::launch(handle_, how, arguments...));
  }
  template <class... T>
  void operator()(Grid grid, Block block, Stream stream, const T&... arguments) const {
    Launch how(grid, block);
    detail::check(detail::launch(handle_, how.on(stream), arguments...));
  }
  // Tensors (torch.h) determine the device and stream.
  template <class First, class... T,
            class = std::enable_if_t<!std::is_convertible_v<const First&, Stream>>>
  void operator()(Grid grid, Block block, const First& first, const T&... arguments) const {
    static_assert(
        detail::ArgumentOf<First>::kSetsStream || (... || detail::ArgumentOf<T>::kSetsStream),
        "kernel(grid, block, stream, arguments...) takes a cudaStream_t, a CUstream or nullptr "
        "(the default stream); cast a void* to cudaStream_t. Tensors (torch.h) need none");
    Launch how(grid, block);
    detail::check(detail::launch(handle_, how, first, arguments...));
  }
  // For an existing array: void* args[] = {&a, &b, &n}; add.launch_addresses(how, args);
  template <size_t count>
  void launch_addresses(Launch how, void* (&addresses)[count]) const {
    launch_addresses(how, addresses, count);
  }
  void launch_addresses(Launch how, void** addresses, uint64_t count) const {
    detail::check(detail::launch_addresses(handle_, facts(), how, addresses, count));
  }
  // Checks the types of a signature once, here; arguments are then converted to them:
  //   auto add = module["add"].as<void(const float*, const float*, float*, int)>();
  template <class Signature>
  TypedKernel<Signature> as() const {
    return TypedKernel<Signature>(*this);
  }
  template <class... T>
  void check() const {
    detail::check(torch_cubin_v1_kernel_check(
        handle_, detail::Types<std::decay_t<T>...>::kArguments, sizeof...(T)));
  }
  void preload(int device = kCurrentDevice) const {
    detail::check(torch_cubin_v1_kernel_preload(handle_, device));
  }
  torch_cubin_v1_attributes attributes(int device = kCurrentDevice) const {
    return detail::value_of(try_attributes(device));
  }
  // The number of blocks that one multiprocessor runs at a time, for the launch's block and shared
  // memory; if the launch has clusters, the number of clusters that the device runs.
  int64_t occupancy(const Launch& how) const { return detail::value_of(try_occupancy(how)); }
#endif

 private:
  friend class Module;
  Kernel(std::shared_ptr<torch_cubin_v1_module> module, torch_cubin_v1_kernel* handle)
      : module_(std::move(module)), handle_(handle) {}
  std::shared_ptr<torch_cubin_v1_module> module_;
  torch_cubin_v1_kernel* handle_ = nullptr;
};

#if TORCH_CUBIN_EXCEPTIONS
template <class... T>
class TypedKernel<void(T...)> {
 public:
  explicit TypedKernel(Kernel kernel) : kernel_(std::move(kernel)) { kernel_.check<T...>(); }
  void operator()(Launch how, T... arguments) const { kernel_(how, arguments...); }
  void operator()(Grid grid, Block block, Stream stream, T... arguments) const {
    kernel_(Launch(grid, block).on(stream), arguments...);
  }
  const Kernel& kernel() const { return kernel_; }

 private:
  Kernel kernel_;
};
#endif

// --- embedded images ---

// Named bytes in this program or library, declared by TORCH_CUBIN_EMBED.
class Embedded {
 public:
  Embedded(const char* name, const void* data, uint64_t size = TORCH_CUBIN_V1_UNKNOWN_SIZE)
      : name_(name), data_(data), size_(size), next_(first()) {
    first() = this;
  }
  Embedded(const Embedded&) = delete;
  Embedded& operator=(const Embedded&) = delete;
  const char* name() const { return name_; }
  torch_cubin_v1_image image() const { return {data_, size_, name_}; }

  // Finds a name in this program or library (not in others of the process); null if there is none.
  static const Embedded* find(std::string_view name) {
    const Embedded* found = first();
    while (found != nullptr && name != found->name_) found = found->next_;
    return found;
  }
  // All names, as "'a', 'b'".
  static std::string names() {
    std::string text;
    for (const Embedded* each = first(); each != nullptr; each = each->next_) {
      text += (text.empty() ? "'" : ", '") + std::string(each->name_) + "'";
    }
    return text;
  }

 private:
  __attribute__((visibility("hidden"))) static Embedded*& first() {
    static Embedded* list = nullptr;
    return list;
  }
  const char* name_;
  const void* data_;
  uint64_t size_;
  Embedded* next_;
};

// --- globals and memory ---

#if TORCH_CUBIN_EXCEPTIONS
// Waits for all work submitted to the stream.
inline void synchronize(Stream stream = nullptr, int device = kCurrentDevice) {
  detail::check(torch_cubin_v1_synchronize(device, stream.handle()));
}
// Copies in stream order; either side may be host or device memory.
inline void copy(void* to, const void* from, uint64_t bytes, Stream stream = nullptr,
                 int device = kCurrentDevice) {
  detail::check(torch_cubin_v1_copy(device, to, from, bytes, stream.handle()));
}
// Sets the process-wide callback that is called if the driver has no memory for a kernel's code;
// loading is then retried. A caching allocator frees its cached memory there; torch.h sets
// PyTorch's. `release` may be called on any thread, and must not call torch_cubin.
inline void set_release_cache(void (*release)(int32_t device)) {
  torch_cubin_v1_set_release_cache(release);
}

inline int device_count() {
  int32_t count = 0;
  detail::check(torch_cubin_v1_device_count(&count));
  return count;
}
inline torch_cubin_v1_device device_info(int device = kCurrentDevice) {
  torch_cubin_v1_device out{};
  out.size = sizeof(out);
  detail::check(torch_cubin_v1_device_info(device, &out));
  return out;
}
// Like cudaSetDevice: the default device of this thread's launches and buffers.
inline void set_device(int device) { detail::check(torch_cubin_v1_set_device(device)); }

// A __device__ or __constant__ variable on one device: module.global<float[64]>("table").
template <class T>
class Global {
 public:
  Global(uint64_t address, int device) : address_(address), device_(device) {}
  std::remove_extent_t<T>* address() const {
    return reinterpret_cast<std::remove_extent_t<T>*>(static_cast<uintptr_t>(address_));
  }
  // Copies in stream order; a `value` in pinned memory must stay valid until then.
  void set(const T& value, Stream stream = nullptr) const {
    copy(address(), &value, sizeof(T), stream, device_);
  }
  // Waits for the stream.
  void get(T& value, Stream stream = nullptr) const {
    copy(&value, address(), sizeof(T), stream, device_);
    synchronize(stream, device_);
  }

 private:
  uint64_t address_;
  int device_;
};

// Device memory for programs without the CUDA runtime; a kernel receives its address.
template <class T>
class Buffer {
  static_assert(std::is_trivially_copyable_v<T>, "device memory holds plain values");

 public:
  explicit Buffer(size_t count, int device = kCurrentDevice) : count_(count), device_(device) {
    void* memory = nullptr;
    detail::check(torch_cubin_v1_allocate(device, count * sizeof(T), &memory));
    data_ = static_cast<T*>(memory);
  }
  explicit Buffer(const std::vector<T>& from, int device = kCurrentDevice)
      : Buffer(from.size(), device) {
    copy_from(from.data());
    synchronize(nullptr, device_);
  }
  ~Buffer() {
    if (data_ == nullptr) return;
    // Errors are ignored: at exit the driver may be shut down already.
    torch_cubin_v1_error* error = torch_cubin_v1_deallocate(device_, data_);
    if (error != nullptr) torch_cubin_v1_error_free(error);
  }
  Buffer(Buffer&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), count_(other.count_), device_(other.device_) {}
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  T* data() const { return data_; }
  size_t size() const { return count_; }
  void copy_from(const T* host, Stream stream = nullptr) {
    copy(data_, host, count_ * sizeof(T), stream, device_);
  }
  // Waits for the stream.
  std::vector<T> to_vector(Stream stream = nullptr) const {
    std::vector<T> host(count_);
    copy(host.data(), data_, count_ * sizeof(T), stream, device_);
    synchronize(stream, device_);
    return host;
  }

 private:
  T* data_ = nullptr;
  size_t count_;
  int device_;
};

template <class T>
struct Argument<Buffer<T>> {
  using Packed = T*;
  static constexpr bool kSetsStream = false;
  static constexpr uint32_t kKind = detail::pointer_to<T>();
  static constexpr const char* type() { return "a Buffer"; }
  static T* pack(const Buffer<T>& buffer, detail::Packing&) { return buffer.data(); }
};
#endif

// --- tensor maps ---

// The driver's values (CUtensorMapDataType and so on).
enum class MapType : uint32_t {
  kUInt8 = 0,
  kUInt16 = 1,
  kUInt32 = 2,
  kInt32 = 3,
  kUInt64 = 4,
  kInt64 = 5,
  kFloat16 = 6,
  kFloat32 = 7,
  kFloat64 = 8,
  kBFloat16 = 9,
  kFloat32Ftz = 10,
  kTFloat32 = 11,
  kTFloat32Ftz = 12
};
enum class MapSwizzle : uint32_t { kNone = 0, k32Bytes = 1, k64Bytes = 2, k128Bytes = 3 };
enum class MapInterleave : uint32_t { kNone = 0, k16Bytes = 1, k32Bytes = 2 };
enum class MapL2Promotion : uint32_t { kNone = 0, k64Bytes = 1, k128Bytes = 2, k256Bytes = 3 };

struct MapDim {
  uint64_t size;            // elements
  uint32_t box;             // elements per copy; 1 to 256
  uint64_t stride;          // bytes; ignored in the first dim, which is contiguous
  uint32_t element_stride;  // 1 for all elements

  constexpr MapDim(uint64_t size_, uint32_t box_, uint64_t stride_ = 0,
                   uint32_t element_stride_ = 1)
      : size(size_), box(box_), stride(stride_), element_stride(element_stride_) {}
};

// An argument for a parameter `const __grid_constant__ CUtensorMap`; a CUtensorMap is accepted too.
class alignas(64) TensorMap {
 public:
  struct Options {
    MapSwizzle swizzle = MapSwizzle::kNone;
    MapL2Promotion l2_promotion = MapL2Promotion::k256Bytes;
    MapInterleave interleave = MapInterleave::kNone;
    bool nan_fill = false;  // fill elements outside the tensor with NaN instead of zero
    int device = kCurrentDevice;
  };
  // `dims`: 1 to 5, the innermost first.
  static Result<TensorMap> try_tiled(const void* address, MapType type,
                                     std::initializer_list<MapDim> dims, const Options& options) {
    torch_cubin_v1_tensor_map_spec spec{};
    spec.size = sizeof(spec);
    spec.rank = static_cast<uint32_t>(dims.size());
    spec.data_type = static_cast<uint32_t>(type);
    spec.interleave = static_cast<uint32_t>(options.interleave);
    spec.swizzle = static_cast<uint32_t>(options.swizzle);
    spec.l2_promotion = static_cast<uint32_t>(options.l2_promotion);
    spec.oob_fill = options.nan_fill ? 1 : 0;
    spec.device = options.device;
    spec.address = const_cast<void*>(address);
    size_t i = 0;
    for (const MapDim& dim : dims) {
      if (i == 5) break;
      spec.dims[i] = dim.size;
      spec.box[i] = dim.box;
      spec.element_strides[i] = dim.element_stride;
      if (i > 0) spec.strides[i - 1] = dim.stride;
      ++i;
    }
    TensorMap map;
    torch_cubin_v1_error* error = torch_cubin_v1_tensor_map(&spec, map.bytes);
    if (error != nullptr) return Error(error);
    return map;
  }
#if TORCH_CUBIN_EXCEPTIONS
  static TensorMap tiled(const void* address, MapType type, std::initializer_list<MapDim> dims,
                         const Options& options) {
    return detail::value_of(try_tiled(address, type, dims, options));
  }
  static TensorMap tiled(const void* address, MapType type, std::initializer_list<MapDim> dims) {
    return tiled(address, type, dims, Options());
  }
#endif
  unsigned char bytes[128] = {};
};

// --- modules ---

// One or more images; each device loads the best one that has a kernel. Cheap to copy. Images are
// loaded at the first launch, global or preload, and unloaded only by unload(): without it they
// stay loaded after the last Module and Kernel are destroyed.
class Module {
 public:
  enum Flags : uint32_t {
    kNone = 0,
    kNoPtx = TORCH_CUBIN_V1_NO_PTX,     // ignore PTX, so that the driver never compiles
    kForever = TORCH_CUBIN_V1_FOREVER,  // never unloaded; launches are a few nanoseconds faster
  };

  Module() = default;

  // Opens a cubin, fatbin, PTX, host ELF file, C source with arrays, a package's folder, or a
  // folder of Triton's cache with one kernel, whose launches take only the user's arguments.
  static Result<Module> try_from_file(const std::string& path, uint32_t flags = kNone) {
    return try_from_files({path}, flags);
  }
  static Result<Module> try_from_files(const std::vector<std::string>& paths,
                                       uint32_t flags = kNone) {
    std::vector<const char*> names;
    for (const std::string& path : paths) names.push_back(path.c_str());
    torch_cubin_v1_module* module = nullptr;
    torch_cubin_v1_error* error =
        torch_cubin_v1_module_open_files(names.data(), names.size(), flags, &module);
    return made(error, module);
  }
  // Copies the bytes. Without a size, it is read from their own header.
  static Result<Module> try_from_memory(const void* data,
                                        uint64_t size = TORCH_CUBIN_V1_UNKNOWN_SIZE,
                                        const char* origin = nullptr, uint32_t flags = kNone) {
    return try_from_images({{data, size, origin}}, flags);
  }
  static Result<Module> try_from_images(const std::vector<torch_cubin_v1_image>& images,
                                        uint32_t flags = kNone) {
    torch_cubin_v1_module* module = nullptr;
    torch_cubin_v1_error* error =
        torch_cubin_v1_module_open(images.data(), images.size(), nullptr, flags, &module);
    return made(error, module);
  }
  static Result<Module> try_embedded(const Embedded& embedded, uint32_t flags = kNone) {
    return try_from_images({embedded.image()}, flags);
  }
  static Result<Module> try_embedded(std::string_view name, uint32_t flags = kNone) {
    const Embedded* found = Embedded::find(name);
    if (found != nullptr) return try_embedded(*found, flags);
    return make_error("image", "the name '" + std::string(name) + "'",
                      "is embedded nowhere in this program or library", Embedded::names(), "",
                      "TORCH_CUBIN_EMBED declares embedded images.");
  }

  Result<Kernel> try_kernel(std::string_view name) const {
    torch_cubin_v1_kernel* kernel = nullptr;
    torch_cubin_v1_error* error =
        torch_cubin_v1_module_kernel(handle_.get(), name.data(), name.size(), &kernel);
    if (error != nullptr) return Error(error);
    return Kernel(handle_, kernel);
  }
  std::vector<std::string> kernel_names() const {
    std::vector<std::string> names;
    for (uint64_t i = 0;; ++i) {
      const char* name = torch_cubin_v1_module_kernel_name(handle_.get(), i);
      if (name == nullptr) return names;
      names.emplace_back(name);
    }
  }
  Status try_preload(int device = kCurrentDevice) const {
    return detail::status(torch_cubin_v1_module_preload(handle_.get(), device));
  }
  // Waits for submitted work, unloads everything from the driver, and returns true. Returns false,
  // with everything still loaded, if a CUDA graph captured one of its kernels or `keep` is set.
  // In both cases later calls are errors [closed].
  Result<bool> try_unload(bool keep = false) const {
    int32_t unloaded = 0;
    torch_cubin_v1_error* error = torch_cubin_v1_module_unload(handle_.get(), keep, &unloaded);
    if (error != nullptr) return Error(error);
    return unloaded != 0;
  }
  // The address and size in bytes of a variable.
  Result<std::pair<uint64_t, uint64_t>> try_global(std::string_view name,
                                                   int device = kCurrentDevice) const {
    uint64_t address = 0, bytes = 0;
    torch_cubin_v1_error* error = torch_cubin_v1_module_global(handle_.get(), device, name.data(),
                                                               name.size(), &address, &bytes);
    if (error != nullptr) return Error(error);
    return std::make_pair(address, bytes);
  }

#if TORCH_CUBIN_EXCEPTIONS
  static Module from_file(const std::string& path, uint32_t flags = kNone) {
    return detail::value_of(try_from_file(path, flags));
  }
  static Module from_files(const std::vector<std::string>& paths, uint32_t flags = kNone) {
    return detail::value_of(try_from_files(paths, flags));
  }
  static Module from_memory(const void* data, uint64_t size = TORCH_CUBIN_V1_UNKNOWN_SIZE,
                            const char* origin = nullptr, uint32_t flags = kNone) {
    return detail::value_of(try_from_memory(data, size, origin, flags));
  }
  // For arrays of bytes or words: xxd -i, bin2c, #embed.
  template <class T, size_t kCount, class = std::enable_if_t<std::is_arithmetic_v<T>>>
  static Module from_memory(const T (&array)[kCount], const char* origin = nullptr,
                            uint32_t flags = kNone) {
    return from_memory(static_cast<const void*>(array), sizeof(array), origin, flags);
  }
  // For std::vector, std::string, std::array or std::span of bytes.
  template <class Bytes, class = decltype(std::declval<const Bytes&>().data()), class = void>
  static Module from_memory(const Bytes& bytes, const char* origin = nullptr,
                            uint32_t flags = kNone) {
    return from_memory(static_cast<const void*>(bytes.data()), bytes.size() * sizeof(*bytes.data()),
                       origin, flags);
  }
  // For several architectures of the same kernels.
  static Module from_images(const std::vector<torch_cubin_v1_image>& images,
                            uint32_t flags = kNone) {
    return detail::value_of(try_from_images(images, flags));
  }
  static Module embedded(const Embedded& embedded, uint32_t flags = kNone) {
    return detail::value_of(try_embedded(embedded, flags));
  }
  static Module embedded(std::string_view name, uint32_t flags = kNone) {
    return detail::value_of(try_embedded(name, flags));
  }

  Kernel operator[](std::string_view name) const { return detail::value_of(try_kernel(name)); }
  Kernel kernel(std::string_view name) const { return (*this)[name]; }
  template <class Signature>
  TypedKernel<Signature> kernel(std::string_view name) const {
    return TypedKernel<Signature>((*this)[name]);
  }
  void preload(int device = kCurrentDevice) const {
    detail::check(torch_cubin_v1_module_preload(handle_.get(), device));
  }
  bool unload(bool keep = false) const { return detail::value_of(try_unload(keep)); }
  // Throws [params] if the variable's size differs from T's.
  template <class T>
  Global<T> global(std::string_view name, int device = kCurrentDevice) const {
    const std::pair<uint64_t, uint64_t> found = detail::value_of(try_global(name, device));
    if (found.second != sizeof(T)) {
      throw make_error("params", "global variable '" + std::string(name) + "'",
                       "has another size than its type", std::to_string(found.second) + " bytes",
                       std::to_string(sizeof(T)) + " bytes");
    }
    return Global<T>(found.first, device);
  }
#endif

  explicit operator bool() const { return handle_ != nullptr; }

 private:
  explicit Module(torch_cubin_v1_module* handle)
      : handle_(handle, &torch_cubin_v1_module_release) {}
  static Result<Module> made(torch_cubin_v1_error* error, torch_cubin_v1_module* module) {
    if (error != nullptr) return Error(error);
    return Module(module);
  }
  std::shared_ptr<torch_cubin_v1_module> handle_;
};

#if TORCH_CUBIN_EXCEPTIONS
// For statics: `static auto kernel = torch_cubin::embedded(my_cubin)["add_one"];` The module is
// never unloaded, so its launches skip the count that unload needs.
inline Module embedded(const Embedded& image) { return Module::embedded(image, Module::kForever); }
inline Module embedded(std::string_view name) { return Module::embedded(name, Module::kForever); }
#endif

// --- families of kernels ---

// Kernels that are selected by fields of their names: "matmul_{dtype}_{m}x{n}".
//
//   KernelFamily family("gemm_{m}x{n}_sm{arch}");
//   family.add(gemm_128x64_sm90, gemm_128x64_sm90_len);    // the kernels' names have the fields,
//   family.add("gemm_64x64_sm90", bytes, size, "kernel");  // or the image's name has them
//   Kernel kernel = family.find({{"m", "128"}, {"n", "64"}});
class KernelFamily {
 public:
  using Fields = std::map<std::string, std::string>;
  struct Member {
    std::string name;  // the source of the fields
    Fields fields;
    Kernel kernel;
    int64_t number(const std::string& field) const {
      const auto found = fields.find(field);
      return found == fields.end() ? -1 : std::strtoll(found->second.c_str(), nullptr, 10);
    }
  };

  explicit KernelFamily(std::string pattern) : pattern_(std::move(pattern)) {}

  // Reads the fields of a name; false if the pattern does not match. Fields match as little as
  // possible.
  bool match(std::string_view name, Fields& fields) const {
    fields.clear();
    return match_from(pattern_, name, fields);
  }

  const std::vector<Member>& members() const { return members_; }
  auto begin() const { return members_.begin(); }
  auto end() const { return members_.end(); }

  // The members with these fields.
  std::vector<const Member*> all(const Fields& fields) const {
    std::vector<const Member*> found;
    for (const Member& member : members_) {
      bool same = true;
      for (const auto& [name, value] : fields) {
        const auto at = member.fields.find(name);
        same = same && at != member.fields.end() && at->second == value;
      }
      if (same) found.push_back(&member);
    }
    return found;
  }

  Result<Kernel> try_find(const Fields& fields) const {
    const std::vector<const Member*> found = all(fields);
    if (found.size() == 1) return found.front()->kernel;
    std::string names, wanted;
    for (size_t i = 0; i < members_.size() && i < 8; ++i) {
      names += (i == 0 ? "'" : ", '") + members_[i].name + "'";
    }
    if (members_.size() > 8) names += " and " + std::to_string(members_.size() - 8) + " more";
    for (const auto& [name, value] : fields) {
      wanted += (wanted.empty() ? "" : ", ") + name + "=" + value;
    }
    return make_error(
        "no_kernel", "the family '" + pattern_ + "'",
        found.empty() ? "has no kernel with these fields" : "has several kernels with these fields",
        names.empty() ? "a member" : "one of " + names, wanted);
  }

  // Adds a module's kernels whose names match the pattern, and returns their number.
  size_t add(const Module& module, std::vector<Error>* errors = nullptr) {
    size_t count = 0;
    Fields fields;
    for (const std::string& name : module.kernel_names()) {
      if (!match(name, fields)) continue;
      Result<Kernel> kernel = module.try_kernel(name);
      if (kernel) {
        members_.push_back({name, fields, *kernel});
        ++count;
      } else if (errors != nullptr) {
        errors->push_back(kernel.error());
      }
    }
    return count;
  }

#if TORCH_CUBIN_EXCEPTIONS
  Kernel find(const Fields& fields) const { return detail::value_of(try_find(fields)); }
  // Throws [no_kernel] if no kernel's name matches the pattern.
  size_t add(const void* data, uint64_t size = TORCH_CUBIN_V1_UNKNOWN_SIZE) {
    const size_t count = add(Module::from_memory(data, size));
    if (count == 0) fail_no_match("the image's kernels");
    return count;
  }
  // Adds an image whose own name (of a file, of an array) has the fields. `kernel` names the
  // kernel, and may be omitted if the image has only one.
  void add(const std::string& name, const Module& module, std::string_view kernel = "") {
    Fields fields;
    if (!match(name, fields)) fail_no_match("'" + name + "'");
    const std::vector<std::string> names = module.kernel_names();
    if (kernel.empty() && names.size() != 1) {
      throw make_error("no_kernel", "the image '" + name + "'", "has not one kernel", "its name",
                       std::to_string(names.size()) + " kernels");
    }
    members_.push_back({name, fields, module[kernel.empty() ? names.front() : kernel]});
  }
  void add(const std::string& name, const void* data, uint64_t size, std::string_view kernel = "") {
    add(name, Module::from_memory(data, size, name.c_str()), kernel);
  }
#endif

 private:
#if TORCH_CUBIN_EXCEPTIONS
  [[noreturn]] void fail_no_match(const std::string& what) const {
    throw make_error("no_kernel", what, "has no name of the family's", "'" + pattern_ + "'", "");
  }
#endif
  static bool match_from(std::string_view pattern, std::string_view name, Fields& fields) {
    if (pattern.empty()) return name.empty();
    if (pattern.front() != '{') {
      return !name.empty() && name.front() == pattern.front() &&
             match_from(pattern.substr(1), name.substr(1), fields);
    }
    const size_t close = pattern.find('}');
    if (close == std::string_view::npos) return false;
    const std::string field(pattern.substr(1, close - 1));
    for (size_t length = 1; length <= name.size(); ++length) {
      const std::string value(name.substr(0, length));
      const auto known = fields.find(field);
      if (known != fields.end()) {  // a repeated field must have the same value
        if (known->second == value &&
            match_from(pattern.substr(close + 1), name.substr(length), fields)) {
          return true;
        }
        continue;
      }
      fields[field] = value;
      if (match_from(pattern.substr(close + 1), name.substr(length), fields)) return true;
      fields.erase(field);
    }
    return false;
  }
  std::string pattern_;
  std::vector<Member> members_;
};

}  // namespace v1
}  // namespace torch_cubin

// Declares an image that CMake's torch_cubin_embed(), CubinExtension(embed=...),
// load_inline(embed=...) or torch_cubin.embed put into this program or library under this name. Use
// at namespace scope.
#define TORCH_CUBIN_EMBED(name)                      \
  extern "C" __attribute__((visibility("hidden")))   \
  const unsigned char torch_cubin_embedded_##name[]; \
  [[maybe_unused]] static const ::torch_cubin::Embedded name { #name, torch_cubin_embedded_##name }

// Embeds a file that the assembler reads, relative to the compiler's working directory or to a path
// given with -Wa,-I.
#define TORCH_CUBIN_INCBIN(name, file)                                                             \
  __asm__(".pushsection .rodata\n.balign 16\n.globl torch_cubin_incbin_" #name                     \
          "\n.hidden torch_cubin_incbin_" #name "\ntorch_cubin_incbin_" #name ":\n.incbin \"" file \
          "\"\n.globl torch_cubin_incbin_end_" #name "\n.hidden torch_cubin_incbin_end_" #name     \
          "\ntorch_cubin_incbin_end_" #name ":\n.byte 0\n.popsection\n");                          \
  extern "C" __attribute__((visibility("hidden")))                                                 \
  const unsigned char torch_cubin_incbin_##name[];                                                 \
  extern "C" __attribute__((visibility("hidden")))                                                 \
  const unsigned char torch_cubin_incbin_end_##name[];                                             \
  [[maybe_unused]] static const ::torch_cubin::Embedded name {                                     \
    #name, torch_cubin_incbin_##name,                                                              \
        static_cast<uint64_t>(torch_cubin_incbin_end_##name - torch_cubin_incbin_##name)           \
  }

// Declares the output of `ld -r -b binary add.cubin -o add.o`: TORCH_CUBIN_BINARY(add, add_cubin).
#define TORCH_CUBIN_BINARY(name, symbol)                                         \
  extern "C" const unsigned char _binary_##symbol##_start[];                     \
  extern "C" const unsigned char _binary_##symbol##_end[];                       \
  [[maybe_unused]] static const ::torch_cubin::Embedded name {                   \
    #name, _binary_##symbol##_start,                                             \
        static_cast<uint64_t>(_binary_##symbol##_end - _binary_##symbol##_start) \
  }
