#include "torch_shims.h"

#include <cuda.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <atomic>
#include <cstring>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>

#include "cubin/error.h"
#include "cubin/image.h"
#include "declared/contract.h"
#include "declared/slots.h"
#include "driver/dl.h"
#include "driver/table.h"
#include "pytorch/internals.h"
#include "pytorch/stream.h"

namespace fuzz {
namespace {

std::atomic<int64_t> g_alive{0}, g_launches{0};
std::atomic<bool> g_grad_mode{false};
std::atomic<LoadHook> g_load_hook{nullptr};
const torch_cubin::Contract* g_tuned_contract = nullptr;
constexpr bool kFalse = false;

struct FakeList {
  std::vector<StableIValue> items;
};

// By kernel. Its address is the kernel's handle: a map does not move what it holds.
std::map<std::string, std::vector<uint32_t>>& sizes_of_params() {
  static auto* const sizes = new std::map<std::string, std::vector<uint32_t>>;
  return *sizes;
}

FakeTensor* tensor_of(AtenTensorHandle handle) { return reinterpret_cast<FakeTensor*>(handle); }
FakeList* list_of(StableListHandle handle) { return reinterpret_cast<FakeList*>(handle); }
std::string* string_of(StringHandle handle) { return reinterpret_cast<std::string*>(handle); }

// --- a driver with two devices of compute capability 9.0, whose calls all succeed ---

CUresult get_version(int* version) {
  *version = 13000;
  return CUDA_SUCCESS;
}
CUresult get_text(CUresult, const char** text) {
  *text = "an error";
  return CUDA_SUCCESS;
}
CUresult get_device(CUdevice* device, int ordinal) {
  *device = ordinal;
  return CUDA_SUCCESS;
}
CUresult get_count(int* count) {
  *count = 2;
  return CUDA_SUCCESS;
}
CUresult get_name(char* name, int size, CUdevice) {
  std::strncpy(name, "a GPU", static_cast<size_t>(size));
  return CUDA_SUCCESS;
}
CUresult get_attribute(int* value, CUdevice_attribute attribute, CUdevice) {
  const bool minor = attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR;
  const bool major = attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR;
  const bool shared = attribute == CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN;
  *value = minor ? 0 : major ? 9 : shared ? 232448 : 132;
  return CUDA_SUCCESS;
}
CUresult retain(CUcontext* context, CUdevice device) {
  *context = reinterpret_cast<CUcontext>(uintptr_t{4096} + static_cast<uintptr_t>(device));
  return CUDA_SUCCESS;
}
CUresult no_context(CUcontext* context) {
  *context = nullptr;
  return CUDA_SUCCESS;
}
CUresult get_range(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return CUDA_SUCCESS;
}
CUresult is_capturing(CUstream, CUstreamCaptureStatus* status) {
  *status = CU_STREAM_CAPTURE_STATUS_NONE;
  return CUDA_SUCCESS;
}
CUresult get_capture(CUstream, CUstreamCaptureStatus* status, cuuint64_t*, CUgraph*,
                     const CUgraphNode**, size_t*) {
  return is_capturing(nullptr, status);
}
CUresult load(CUlibrary* library, const void*, CUjit_option*, void**, unsigned, CUlibraryOption*,
              void**, unsigned) {
  *library = reinterpret_cast<CUlibrary>(uintptr_t{8192});
  const LoadHook hook = g_load_hook.load();
  return hook == nullptr ? CUDA_SUCCESS : static_cast<CUresult>(hook());
}
CUresult get_kernel(CUkernel* kernel, CUlibrary, const char* name) {
  *kernel = reinterpret_cast<CUkernel>(&sizes_of_params().at(name));
  return CUDA_SUCCESS;
}
CUresult get_function(CUfunction* function, CUkernel kernel) {
  *function = reinterpret_cast<CUfunction>(kernel);
  return CUDA_SUCCESS;
}
CUresult get_kernel_attribute(int* value, CUfunction_attribute attribute, CUkernel, CUdevice) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}
CUresult get_function_attribute(int* value, CUfunction_attribute, CUfunction) {
  *value = 32;
  return CUDA_SUCCESS;
}
CUresult get_blocks(int* count, CUfunction, int, size_t) {
  *count = 2;
  return CUDA_SUCCESS;
}
CUresult get_clusters(int* count, CUfunction, const CUlaunchConfig*) {
  *count = 60;
  return CUDA_SUCCESS;
}
CUresult encode(CUtensorMap* map, CUtensorMapDataType, cuuint32_t rank, void*,
                const cuuint64_t* dims, const cuuint64_t* strides, const cuuint32_t* box,
                const cuuint32_t* element_strides, CUtensorMapInterleave, CUtensorMapSwizzle,
                CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  if (rank == 0 || rank > 5) __builtin_trap();
  std::memset(map, 0, sizeof(*map));
  auto* const out = reinterpret_cast<volatile uint64_t*>(map);
  for (cuuint32_t i = 0; i < rank; ++i) {
    if (box[i] == 0 || box[i] > 256 || element_strides[i] == 0) __builtin_trap();
    out[i] = dims[i] + (i + 1 < rank ? strides[i] : 0);
  }
  return CUDA_SUCCESS;
}
CUresult launch(const CUlaunchConfig* config, CUfunction function, void** params, void**) {
  const auto& sizes = *reinterpret_cast<const std::vector<uint32_t>*>(function);
  if (config->gridDimX == 0 || config->blockDimX == 0 || config->blockDimX > 1024) __builtin_trap();
  volatile uint8_t sum = 0;
  for (size_t i = 0; i < sizes.size(); ++i) {
    for (uint32_t j = 0; j < sizes[i]; ++j) {
      sum = static_cast<uint8_t>(sum + static_cast<const uint8_t*>(params[i])[j]);
    }
  }
  ++g_launches;
  return CUDA_SUCCESS;
}

// The other functions, which are not needed.
template <class Type>
struct Succeeds;
template <class... Arguments>
struct Succeeds<CUresult (*)(Arguments...)> {
  static CUresult run(Arguments...) { return CUDA_SUCCESS; }
};

CUresult get_address(const char* name, void** function, int, cuuint64_t,
                     CUdriverProcAddressQueryResult*) {
  static const auto* const known = new std::map<std::string, void*>{
#define SUCCEED(function, version) \
  {#function, reinterpret_cast<void*>(&Succeeds<decltype(&::function)>::run)},
      TORCH_CUBIN_DRIVER_FUNCTIONS(SUCCEED)
#undef SUCCEED
  };
  static const auto* const own = new std::map<std::string, void*>{
#define OWN(name, function) {name, reinterpret_cast<void*>(&function)}
      OWN("cuDriverGetVersion", get_version),
      OWN("cuGetErrorName", get_text),
      OWN("cuGetErrorString", get_text),
      OWN("cuDeviceGet", get_device),
      OWN("cuDeviceGetCount", get_count),
      OWN("cuDeviceGetName", get_name),
      OWN("cuDeviceGetAttribute", get_attribute),
      OWN("cuDevicePrimaryCtxRetain", retain),
      OWN("cuCtxGetCurrent", no_context),
      OWN("cuCtxPopCurrent", no_context),
      OWN("cuCtxGetStreamPriorityRange", get_range),
      OWN("cuStreamIsCapturing", is_capturing),
      OWN("cuStreamGetCaptureInfo", get_capture),
      OWN("cuLibraryLoadData", load),
      OWN("cuLibraryGetKernel", get_kernel),
      OWN("cuKernelGetFunction", get_function),
      OWN("cuKernelGetAttribute", get_kernel_attribute),
      OWN("cuFuncGetAttribute", get_function_attribute),
      OWN("cuOccupancyMaxActiveBlocksPerMultiprocessor", get_blocks),
      OWN("cuOccupancyMaxActiveClusters", get_clusters),
      OWN("cuTensorMapEncodeTiled", encode),
      OWN("cuLaunchKernelEx", launch),
#undef OWN
  };
  const auto found = own->find(name);
  if (found != own->end()) {
    *function = found->second;
    return CUDA_SUCCESS;
  }
  // Functions outside the table belong to newer drivers.
  const auto other = known->find(name);
  *function = other != known->end() ? other->second : nullptr;
  return other != known->end() ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

// What torch_cubin looks up in libtorch_cpu and libc10.
bool requires_grad(const void* impl) { return *static_cast<const bool*>(impl); }
std::shared_ptr<void> no_level(uint64_t) { return nullptr; }
void bump_version(const void*) {}
const char* no_text() { return "out of memory"; }

}  // namespace

FakeTensor* new_tensor() {
  ++g_alive;
  auto* made = new FakeTensor;
  made->requires_grad = &kFalse;
  return made;
}
AtenTensorHandle handle_of(FakeTensor* tensor) {
  return reinterpret_cast<AtenTensorHandle>(tensor);
}

StableListHandle new_list(const std::vector<AtenTensorHandle>& tensors) {
  ++g_alive;
  auto* made = new FakeList;
  for (const AtenTensorHandle tensor : tensors) {
    made->items.push_back(torch::stable::detail::from(tensor));
  }
  return reinterpret_cast<StableListHandle>(made);
}
StringHandle new_string(const std::string& text) {
  ++g_alive;
  return reinterpret_cast<StringHandle>(new std::string(text));
}
int64_t objects_alive() { return g_alive; }
void set_grad_mode(bool enabled) { g_grad_mode = enabled; }
int64_t launches() { return g_launches; }
void set_load_hook(LoadHook hook) { g_load_hook = hook; }
void set_tuned_contract(const torch_cubin::Contract* contract) { g_tuned_contract = contract; }

void declare_kernels(const std::vector<uint8_t>& bytes) {
  const torch_cubin::Image image = torch_cubin::parse_cubin(bytes.data(), bytes.size(), "an image");
  for (const torch_cubin::KernelInfo& kernel : image.kernels) {
    std::vector<uint32_t>& sizes = sizes_of_params()[kernel.name];
    sizes.clear();
    for (const auto& param : kernel.params) sizes.push_back(param.size);
  }
}

}  // namespace fuzz

// In place of csrc/driver/dl.cpp, csrc/pytorch/stream.cpp, csrc/pytorch/internals.cpp, and of
// csrc/declared/slots.cpp: ops are read, and not registered.
namespace torch_cubin {

nlohmann::json define_contracts(std::vector<std::unique_ptr<const Contract>> contracts) {
  return contracts.size();
}

const Contract& find_contract(const std::string& name) {
  const Contract* contract = fuzz::g_tuned_contract;
  if (contract == nullptr || contract->schema().qualified_name() != name) {
    fail({"input", "op '" + printable(name) + "'", "is not declared", "", "", ""});
  }
  return *contract;
}

void* dl_loaded(const char*) { return nullptr; }
void* dl_open(const char*, std::string*) { return &fuzz::g_alive; }
void* dl_symbol(void*, const char* name) {
  const bool is_getter = std::strcmp(name, "cuGetProcAddress_v2") == 0;
  return is_getter ? reinterpret_cast<void*>(&fuzz::get_address)
                   : reinterpret_cast<void*>(&fuzz::get_version);
}
std::string dl_path_of(const void*) { return ""; }

LaunchStream current_stream(int) { return {}; }
CurrentStream current_stream_if_any() { return &current_stream; }

void* pytorch_symbol(const char* symbol) {
  const std::string name = symbol;
  if (name.find("requires_grad") != std::string::npos) {
    return reinterpret_cast<void*>(&fuzz::requires_grad);
  }
  if (name.find("ForwardADLevel") != std::string::npos) {
    return reinterpret_cast<void*>(&fuzz::no_level);
  }
  if (name.find("bump_version") != std::string::npos) {
    return reinterpret_cast<void*>(&fuzz::bump_version);
  }
  if (name == "torch_exception_get_what_without_backtrace") {
    return reinterpret_cast<void*>(&fuzz::no_text);
  }
  return nullptr;
}

}  // namespace torch_cubin

extern "C" {

using namespace fuzz;

uint64_t aoti_torch_abi_version() { return TORCH_ABI_VERSION; }
int32_t aoti_torch_device_type_cpu() { return 0; }
int32_t aoti_torch_device_type_cuda() { return 1; }
int32_t aoti_torch_dtype_uint8() { return 0; }
int32_t aoti_torch_device_type_meta() { return 14; }
bool aoti_torch_grad_mode_is_enabled() { return g_grad_mode; }

AOTITorchError aoti_torch_get_dim(AtenTensorHandle tensor, int64_t* dim) {
  *dim = static_cast<int64_t>(tensor_of(tensor)->sizes.size());
  return 0;
}
AOTITorchError aoti_torch_get_numel(AtenTensorHandle tensor, int64_t* numel) {
  *numel = 1;
  for (const int64_t size : tensor_of(tensor)->sizes) *numel *= size;
  return 0;
}
AOTITorchError aoti_torch_get_sizes(AtenTensorHandle tensor, int64_t** sizes) {
  *sizes = tensor_of(tensor)->sizes.data();
  return 0;
}
AOTITorchError aoti_torch_get_strides(AtenTensorHandle tensor, int64_t** strides) {
  *strides = tensor_of(tensor)->strides.data();
  return 0;
}
AOTITorchError aoti_torch_get_dtype(AtenTensorHandle tensor, int32_t* dtype) {
  *dtype = tensor_of(tensor)->dtype;
  return 0;
}
AOTITorchError aoti_torch_get_device_type(AtenTensorHandle tensor, int32_t* type) {
  *type = tensor_of(tensor)->device_type;
  return 0;
}
AOTITorchError aoti_torch_get_device_index(AtenTensorHandle tensor, int32_t* index) {
  *index = tensor_of(tensor)->device_index;
  return 0;
}
AOTITorchError aoti_torch_get_data_ptr(AtenTensorHandle tensor, void** data) {
  *data = tensor_of(tensor)->data;
  return 0;
}
AOTITorchError aoti_torch_get_storage_offset(AtenTensorHandle tensor, int64_t* offset) {
  *offset = tensor_of(tensor)->offset;
  return 0;
}
AOTITorchError aoti_torch_is_contiguous(AtenTensorHandle, bool* contiguous) {
  *contiguous = false;
  return 0;
}
AOTITorchError aoti_torch_empty_strided(int64_t dim, const int64_t* sizes, const int64_t* strides,
                                        int32_t dtype, int32_t type, int32_t index,
                                        AtenTensorHandle* made) {
  if (dim < 0 || dim > 64) __builtin_trap();
  int64_t numel = 1;
  for (int64_t i = 0; i < dim; ++i) {
    if (sizes[i] < 0) __builtin_trap();  // PyTorch would raise; a contract must have seen it
    if (__builtin_mul_overflow(numel, sizes[i], &numel) || numel > int64_t{1} << 36) return 1;
  }
  FakeTensor* tensor = new_tensor();
  tensor->sizes.assign(sizes, sizes + dim);
  tensor->strides.assign(strides, strides + dim);
  tensor->dtype = dtype;
  tensor->device_type = type;
  tensor->device_index = index;
  if (numel > 0) tensor->data = reinterpret_cast<void*>((uint64_t{1} << 40) * (index + 1));
  *made = handle_of(tensor);
  return 0;
}
AOTITorchError aoti_torch_is_defined(AtenTensorHandle, bool* defined) {
  *defined = true;
  return 0;
}
AOTITorchError aoti_torch_new_uninitialized_tensor(AtenTensorHandle* made) {
  *made = handle_of(new_tensor());
  return 0;
}
AOTITorchError aoti_torch_zero_(AtenTensorHandle) { return 0; }
AOTITorchError aoti_torch_delete_tensor_object(AtenTensorHandle tensor) {
  --g_alive;
  delete tensor_of(tensor);
  return 0;
}
AOTITorchError torch_list_size(StableListHandle list, size_t* size) {
  *size = list_of(list)->items.size();
  return 0;
}
// As in PyTorch, where a list of the stable ABI holds its items' handles: nothing is copied.
AOTITorchError torch_list_get_item(StableListHandle list, size_t index, StableIValue* item) {
  *item = list_of(list)->items.at(index);
  return 0;
}
AOTITorchError torch_delete_list(StableListHandle list) {
  --g_alive;
  delete list_of(list);
  return 0;
}
AOTITorchError torch_delete_string(StringHandle text) {
  --g_alive;
  delete string_of(text);
  return 0;
}
AOTITorchError torch_string_length(StringHandle text, size_t* length) {
  *length = string_of(text)->size();
  return 0;
}
AOTITorchError torch_string_c_str(StringHandle text, const char** data) {
  *data = string_of(text)->c_str();
  return 0;
}

}  // extern "C"
