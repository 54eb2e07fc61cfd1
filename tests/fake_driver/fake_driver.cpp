// A stand-in libcuda.so.1 for tests without a GPU: it records every call, checks the handles that
// it is given, and fails any call on demand.
//
// The set of functions is csrc/driver/table.h, so that it cannot fall behind the library: a
// function that is added there and not here does not compile. Without FAKE_CUDA_DEVICES it has no
// device, as a machine without a GPU. Tests steer it through the fake_* functions (control.py).
// Longer than files should be, since all of the table shares one state.
#include <cuda.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "driver/table.h"
#include "fake_kernels.h"

namespace {

enum Index : int {
#define FAKE_INDEX(name, version) k_##name,
  TORCH_CUBIN_DRIVER_FUNCTIONS(FAKE_INDEX)
#undef FAKE_INDEX
      kFunctions
};

const char* const kNames[] = {
#define FAKE_NAME(name, version) #name,
    TORCH_CUBIN_DRIVER_FUNCTIONS(FAKE_NAME)
#undef FAKE_NAME
};

// Every code of cuda.h and its name.
const std::pair<int, const char*> kErrors[] = {
#include "fake_errors.inc"  // build.py
};

struct Library {
  bool alive = true;
};
struct Function {
  Library* library;
  std::string name;
  std::map<int, int> attributes;
};

struct UserObject {
  void* data;
  CUhostFn destroy;
  bool held = false;  // by the graph
};

struct Failure {
  long after = 0;  // calls that succeed first
  long times = 0;  // then so many fail
  CUresult code = CUDA_SUCCESS;
};

// Guards everything below. Leaked: calls may come while the process ends.
std::mutex& mutex = *new std::mutex;
struct State {
  long calls[kFunctions] = {};
  Failure failures[kFunctions];
  std::vector<std::string> journal;
  std::map<std::string, std::vector<int>> declared;  // parameter sizes by kernel
  std::map<std::string, std::string> globals;        // their memory
  std::map<std::string, long> settings;
  std::set<Library*> libraries;
  std::set<Function*> functions;
  std::set<void*> memory;               // allocated and not freed
  std::vector<std::string> images;      // given to cuLibraryLoadData: their ELF headers
  std::vector<std::string> launches;    // JSON
  std::vector<std::string> violations;  // what no caller may do
  std::set<UserObject*> objects;        // that a graph holds, or their maker
  int pid = 0;
};
State& state = *new State;

thread_local CUcontext current = nullptr;
thread_local CUstreamCaptureMode capture_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
// What cuStreamCreate makes, and the graph of a capture.
const auto kOwnStream = reinterpret_cast<CUstream>(0x6000L);
const auto kGraph = reinterpret_cast<CUgraph>(0x7000L);
thread_local std::vector<CUcontext> below;  // of pushed contexts

long setting(const char* name, long otherwise) {
  const auto found = state.settings.find(name);
  return found == state.settings.end() ? otherwise : found->second;
}

int device_count() {
  const char* text = std::getenv("FAKE_CUDA_DEVICES");
  return text == nullptr ? 0 : std::atoi(text);
}

CUcontext context_of(int device) { return reinterpret_cast<CUcontext>(0x1000L + device); }

void violation(const std::string& what) { state.violations.push_back(what); }

// Set while the host's own cost is measured: nothing is recorded, no lock is taken.
std::atomic<bool> quiet{false};

CUresult enter(Index index) {
  if (quiet.load(std::memory_order_relaxed)) return CUDA_SUCCESS;
  std::lock_guard<std::mutex> lock(mutex);
  ++state.calls[index];
  state.journal.push_back(kNames[index]);
  Failure& failure = state.failures[index];
  if (failure.times > 0 && failure.after-- <= 0) {
    failure.after = 0;
    --failure.times;
    return failure.code;
  }
  if (state.pid != 0 && state.pid != getpid() && index != k_cuGetErrorName &&
      index != k_cuGetErrorString) {
    return CUDA_ERROR_NOT_INITIALIZED;
  }
  return CUDA_SUCCESS;
}

Function* function_of(void* handle) {
  auto* function = static_cast<Function*>(handle);
  if (state.functions.count(function) == 0) {
    violation("a function that does not exist");
    return nullptr;
  }
  if (!function->library->alive) {
    violation("the function '" + function->name + "' of an unloaded library");
    return nullptr;
  }
  return function;
}

CUresult release(UserObject* object) {
  {
    std::lock_guard<std::mutex> lock(mutex);
    if (state.objects.erase(object) == 0) {
      violation("releasing a user object that does not exist");
      return CUDA_ERROR_INVALID_VALUE;
    }
  }
  object->destroy(object->data);
  delete object;
  return CUDA_SUCCESS;
}

std::string hex(const void* data, size_t size) {
  static const char* digits = "0123456789abcdef";
  std::string text;
  for (size_t i = 0; i < size; ++i) {
    const unsigned char byte = static_cast<const unsigned char*>(data)[i];
    text += digits[byte >> 4];
    text += digits[byte & 15];
  }
  return text;
}

// FAKE_CUDA_DECLARE="vec_add:8,8,8,4;small:1,4": fake_declare() for programs without a test in
// them.
void declare_from_environment() {
  const char* text = std::getenv("FAKE_CUDA_DECLARE");
  while (text != nullptr && *text != '\0') {
    const char* colon = std::strchr(text, ':');
    if (colon == nullptr) return;
    std::vector<int>& sizes = state.declared[std::string(text, colon)];
    sizes.clear();
    for (text = colon + 1; *text != '\0' && *text != ';';) {
      char* end = nullptr;
      sizes.push_back(static_cast<int>(std::strtol(text, &end, 10)));
      text = *end == ',' ? end + 1 : end;
    }
    if (*text == ';') ++text;
  }
}

// --- the functions, each with the signature of cuda.h ---

namespace fake {

CUresult cuInit(unsigned) {
  std::lock_guard<std::mutex> lock(mutex);
  if (device_count() == 0) return CUDA_ERROR_NO_DEVICE;
  declare_from_environment();
  state.pid = getpid();
  return CUDA_SUCCESS;
}
CUresult cuDriverGetVersion(int* version) {
  *version = static_cast<int>(setting("version", 13000));
  return CUDA_SUCCESS;
}
CUresult cuGetErrorName(CUresult error, const char** name) {
  *name = nullptr;
  for (const auto& [code, text] : kErrors) {
    if (code == static_cast<int>(error)) *name = text;
  }
  return *name == nullptr ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult, const char** text) {
  *text = "asked for by the test";
  return CUDA_SUCCESS;
}
CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  *device = ordinal;
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetCount(int* count) {
  *count = device_count();
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetName(char* name, int size, CUdevice) {
  const char* wanted = std::getenv("FAKE_CUDA_NAME");
  std::strncpy(name, wanted != nullptr ? wanted : "Fake GPU", static_cast<size_t>(size));
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice) {
  std::lock_guard<std::mutex> lock(mutex);
  const long sm = setting("sm", 90);
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
      *value = static_cast<int>(sm / 10);
      break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
      *value = static_cast<int>(sm % 10);
      break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
      *value = static_cast<int>(setting("multiprocessors", 132));
      break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN:
      *value = 232448;
      break;
    // An H200's, because kernels are chosen by what they would take there.
    case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE:
      *value = static_cast<int>(setting("l2_bytes", 60 << 20));
      break;
    case CU_DEVICE_ATTRIBUTE_CLOCK_RATE:
      *value = 1980000;
      break;
    case CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE:
      *value = static_cast<int>(setting("memory_clock", 3201000));
      break;
    case CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH:
      *value = static_cast<int>(setting("memory_bus", 6144));
      break;
    default:
      *value = 1000;
  }
  return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  *context = context_of(device);
  return CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext* context) {
  *context = current;
  return CUDA_SUCCESS;
}
CUresult cuCtxPushCurrent(CUcontext context) {
  below.push_back(current);
  current = context;
  return CUDA_SUCCESS;
}
CUresult cuCtxPopCurrent(CUcontext* context) {
  if (below.empty()) return CUDA_ERROR_INVALID_CONTEXT;
  *context = current;
  current = below.back();
  below.pop_back();
  return CUDA_SUCCESS;
}
CUresult cuCtxSetCurrent(CUcontext context) {
  current = context;
  return CUDA_SUCCESS;
}
CUresult cuCtxGetDevice(CUdevice* device) {
  if (current == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  // A context of a test's own, 0x2000 + i, is of device i and not its primary one.
  *device = static_cast<CUdevice>(reinterpret_cast<uintptr_t>(current) & 0xfff);
  return CUDA_SUCCESS;
}
CUresult cuMemAlloc(CUdeviceptr* address, size_t bytes) {
  std::lock_guard<std::mutex> lock(mutex);
  if (current == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  if (setting("capturing", 0) != 0 && capture_mode != CU_STREAM_CAPTURE_MODE_RELAXED) {
    return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  }
  if (bytes > size_t{1} << 40) return CUDA_ERROR_OUT_OF_MEMORY;
  void* memory = std::malloc(bytes);
  state.memory.insert(memory);
  *address = reinterpret_cast<CUdeviceptr>(memory);
  return CUDA_SUCCESS;
}
CUresult cuMemFree(CUdeviceptr address) {
  std::lock_guard<std::mutex> lock(mutex);
  if (state.memory.erase(reinterpret_cast<void*>(address)) == 0) {
    violation("freeing memory that is not allocated");
    return CUDA_ERROR_INVALID_VALUE;
  }
  std::free(reinterpret_cast<void*>(address));
  return CUDA_SUCCESS;
}
CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream) {
  if (current == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes);
  return CUDA_SUCCESS;
}
CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t bytes, CUstream stream) {
  std::lock_guard<std::mutex> lock(mutex);
  if (current == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  if (stream != kOwnStream) violation("setting memory on a stream that may be captured");
  std::memset(reinterpret_cast<void*>(to), value, bytes);
  return CUDA_SUCCESS;
}
CUresult cuStreamCreate(CUstream* stream, unsigned flags) {
  std::lock_guard<std::mutex> lock(mutex);
  if (current == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  if (flags != CU_STREAM_NON_BLOCKING) violation("a stream that waits for the legacy one");
  *stream = kOwnStream;
  return CUDA_SUCCESS;
}
CUresult cuStreamDestroy(CUstream stream) {
  std::lock_guard<std::mutex> lock(mutex);
  if (stream != kOwnStream) violation("destroying a stream that another owns");
  return CUDA_SUCCESS;
}
CUresult cuStreamGetId(CUstream stream, unsigned long long* id) {
  std::lock_guard<std::mutex> lock(mutex);
  if (setting("capturing", 0) != 0) violation("asking for the id of a captured stream");
  *id = static_cast<unsigned long long>(setting("stream id", reinterpret_cast<intptr_t>(stream)));
  return CUDA_SUCCESS;
}
CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
  std::swap(*mode, capture_mode);
  return CUDA_SUCCESS;
}
CUresult cuUserObjectCreate(CUuserObject* object, void* data, CUhostFn destroy, unsigned count,
                            unsigned flags) {
  std::lock_guard<std::mutex> lock(mutex);
  if (count != 1 || flags != CU_USER_OBJECT_NO_DESTRUCTOR_SYNC) return CUDA_ERROR_INVALID_VALUE;
  auto* made = new UserObject{data, destroy};
  state.objects.insert(made);
  *object = reinterpret_cast<CUuserObject>(made);
  return CUDA_SUCCESS;
}
CUresult cuUserObjectRelease(CUuserObject object, unsigned) {
  return release(reinterpret_cast<UserObject*>(object));
}
CUresult cuGraphRetainUserObject(CUgraph graph, CUuserObject object, unsigned, unsigned flags) {
  std::lock_guard<std::mutex> lock(mutex);
  if (graph != kGraph || flags != CU_GRAPH_USER_OBJECT_MOVE) return CUDA_ERROR_INVALID_VALUE;
  reinterpret_cast<UserObject*>(object)->held = true;
  return CUDA_SUCCESS;
}
// Waiting for other streams than the captured one is allowed where the thread says so.
CUresult cuStreamSynchronize(CUstream stream) {
  std::lock_guard<std::mutex> lock(mutex);
  const bool relaxed = stream == kOwnStream && capture_mode == CU_STREAM_CAPTURE_MODE_RELAXED;
  if (setting("capturing", 0) != 0 && !relaxed) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  return CUDA_SUCCESS;
}
CUresult cuCtxSynchronize() {
  std::lock_guard<std::mutex> lock(mutex);
  if (setting("capturing", 0) != 0) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  return current == nullptr ? CUDA_ERROR_INVALID_CONTEXT : CUDA_SUCCESS;
}
CUresult cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return CUDA_SUCCESS;
}
CUresult cuStreamIsCapturing(CUstream, CUstreamCaptureStatus* status) {
  *status = CU_STREAM_CAPTURE_STATUS_NONE;
  if (quiet.load(std::memory_order_relaxed)) return CUDA_SUCCESS;
  std::lock_guard<std::mutex> lock(mutex);
  *status = setting("capturing", 0) != 0 ? CU_STREAM_CAPTURE_STATUS_ACTIVE
                                         : CU_STREAM_CAPTURE_STATUS_NONE;
  return CUDA_SUCCESS;
}
CUresult cuPointerGetAttribute(void* data, CUpointer_attribute, CUdeviceptr address) {
  std::lock_guard<std::mutex> lock(mutex);
  if ((address >> 40) == 0) return CUDA_ERROR_INVALID_VALUE;  // tests: device + 1 up there
  *static_cast<int*>(data) = static_cast<int>(address >> 40) - 1;
  return CUDA_SUCCESS;
}
CUresult cuLibraryLoadData(CUlibrary* library, const void* code, CUjit_option* options,
                           void** values, unsigned count, CUlibraryOption*, void**, unsigned) {
  std::lock_guard<std::mutex> lock(mutex);
  const auto* bytes = static_cast<const char*>(code);
  const bool is_elf = std::memcmp(bytes,
                                  "\x7f"
                                  "ELF",
                                  4) == 0;
  if (!is_elf) {
    const std::string text =
        bytes;  // NUL-terminated, or this reads too far and the sanitizer tells
    for (unsigned i = 0; i < count && text.find("broken") != std::string::npos; ++i) {
      if (options[i] != CU_JIT_ERROR_LOG_BUFFER) continue;
      std::strcpy(static_cast<char*>(values[i]), "ptxas fatal: unknown instruction 'broken'");
      return CUDA_ERROR_INVALID_PTX;
    }
  }
  auto* made = new Library;
  state.libraries.insert(made);
  state.images.push_back(is_elf ? hex(bytes, 64) : "PTX");
  *library = reinterpret_cast<CUlibrary>(made);
  return CUDA_SUCCESS;
}
CUresult cuLibraryUnload(CUlibrary handle) {
  std::lock_guard<std::mutex> lock(mutex);
  auto* library = reinterpret_cast<Library*>(handle);
  if (state.libraries.count(library) == 0 || !library->alive) {
    violation("unloading a library that is not loaded");
    return CUDA_ERROR_INVALID_HANDLE;
  }
  library->alive = false;
  return CUDA_SUCCESS;
}
CUresult cuLibraryGetKernel(CUkernel* kernel, CUlibrary handle, const char* name) {
  std::lock_guard<std::mutex> lock(mutex);
  auto* library = reinterpret_cast<Library*>(handle);
  if (!library->alive) violation("a kernel of an unloaded library");
  if (state.declared.count(name) == 0) return CUDA_ERROR_NOT_FOUND;
  auto* function = new Function{library, name, {}};
  state.functions.insert(function);
  *kernel = reinterpret_cast<CUkernel>(function);
  return CUDA_SUCCESS;
}
CUresult cuLibraryGetGlobal(CUdeviceptr* address, size_t* bytes, CUlibrary, const char* name) {
  std::lock_guard<std::mutex> lock(mutex);
  if (current == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  const auto found = state.globals.find(name);
  if (found == state.globals.end()) return CUDA_ERROR_NOT_FOUND;
  *address = reinterpret_cast<CUdeviceptr>(found->second.data());
  *bytes = found->second.size();
  return CUDA_SUCCESS;
}
CUresult cuKernelGetFunction(CUfunction* function, CUkernel kernel) {
  std::lock_guard<std::mutex> lock(mutex);
  *function = reinterpret_cast<CUfunction>(function_of(kernel));
  return *function == nullptr ? CUDA_ERROR_INVALID_HANDLE : CUDA_SUCCESS;
}
CUresult cuKernelGetAttribute(int* value, CUfunction_attribute attribute, CUkernel kernel,
                              CUdevice) {
  std::lock_guard<std::mutex> lock(mutex);
  Function* function = function_of(kernel);
  if (function == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  const auto set = function->attributes.find(attribute);
  if (set != function->attributes.end()) {
    *value = set->second;
  } else if (attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK) {
    *value = static_cast<int>(setting("max_threads", 1024));
  } else {
    *value = attribute == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES ? 49152 : 0;
  }
  return CUDA_SUCCESS;
}
CUresult cuKernelSetAttribute(CUfunction_attribute attribute, int value, CUkernel kernel,
                              CUdevice) {
  std::lock_guard<std::mutex> lock(mutex);
  Function* function = function_of(kernel);
  if (function == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  if (function->attributes[attribute] > value) violation("an attribute that is lowered");
  function->attributes[attribute] = value;
  return CUDA_SUCCESS;
}
CUresult cuFuncGetAttribute(int* value, CUfunction_attribute, CUfunction function) {
  std::lock_guard<std::mutex> lock(mutex);
  *value = 32;
  return function_of(function) == nullptr ? CUDA_ERROR_INVALID_HANDLE : CUDA_SUCCESS;
}
CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* count, CUfunction function, int, size_t) {
  std::lock_guard<std::mutex> lock(mutex);
  *count = static_cast<int>(setting("blocks", 2));
  return function_of(function) == nullptr ? CUDA_ERROR_INVALID_HANDLE : CUDA_SUCCESS;
}
CUresult cuOccupancyMaxActiveClusters(int* count, CUfunction function,
                                      const CUlaunchConfig* config) {
  std::lock_guard<std::mutex> lock(mutex);
  long blocks = 1;
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    const CUlaunchAttribute& attribute = config->attrs[i];
    if (attribute.id != CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION) continue;
    const auto& size = attribute.value.clusterDim;
    blocks = long{size.x} * long{size.y} * long{size.z};
  }
  const long threads = blocks * long{config->blockDimX} * config->blockDimY * config->blockDimZ;
  const bool fits = blocks <= setting("largest_cluster", 16) &&
                    threads <= setting("largest_cluster_threads", 16 * 1024);
  *count = fits ? static_cast<int>(setting("clusters", 60)) : 0;
  return function_of(function) == nullptr ? CUDA_ERROR_INVALID_HANDLE : CUDA_SUCCESS;
}
// What the driver's documentation says of a tensor map, without interleaving.
static bool is_valid_map(CUtensorMapDataType type, cuuint32_t rank, void* address,
                         const cuuint64_t* dims, const cuuint64_t* strides, const cuuint32_t* box,
                         const cuuint32_t* element_strides, CUtensorMapSwizzle swizzle) {
  constexpr unsigned kBytes[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4};  // by the type's number
  constexpr unsigned kRows[] = {0, 32, 64, 128};                          // of a swizzle
  if (type >= sizeof(kBytes) / sizeof(*kBytes) || rank == 0 || rank > 5) return false;
  if (reinterpret_cast<uintptr_t>(address) % 16 != 0) return false;
  for (cuuint32_t i = 0; i < rank; ++i) {
    if (dims[i] == 0 || dims[i] > uint64_t{1} << 32 || box[i] == 0 || box[i] > 256) return false;
    if (element_strides[i] == 0 || element_strides[i] > 8) return false;
    if (i + 1 < rank && (strides[i] % 16 != 0 || strides[i] >= uint64_t{1} << 40)) return false;
  }
  const unsigned row = box[0] * kBytes[type];
  return row % 16 == 0 &&
         (swizzle == CU_TENSOR_MAP_SWIZZLE_NONE || swizzle > 3 || row <= kRows[swizzle]);
}

CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank,
                                void* address, const cuuint64_t* dims, const cuuint64_t* strides,
                                const cuuint32_t* box, const cuuint32_t* element_strides,
                                CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  if (reinterpret_cast<uintptr_t>(map) % 64 != 0 ||
      !is_valid_map(type, rank, address, dims, strides, box, element_strides, swizzle)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  std::memset(map, 0, sizeof(*map));
  // A layout of our own, which the test reads back.
  auto* out = reinterpret_cast<uint64_t*>(map);
  out[0] = reinterpret_cast<uint64_t>(address);
  out[1] = uint64_t{type} | uint64_t{rank} << 8 | uint64_t(interleave) << 16 |
           uint64_t(swizzle) << 24 | uint64_t(promotion) << 32 | uint64_t(fill) << 40;
  for (cuuint32_t i = 0; i < rank; ++i) {
    out[2 + i] = dims[i];
    if (i + 1 < rank) out[7 + i] = strides[i];
    reinterpret_cast<uint16_t*>(out + 11)[i] = static_cast<uint16_t>(box[i]);
    reinterpret_cast<uint16_t*>(out + 13)[i] = static_cast<uint16_t>(element_strides[i]);
  }
  return CUDA_SUCCESS;
}
CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction handle, void** params, void**) {
  if (quiet.load(std::memory_order_relaxed)) return CUDA_SUCCESS;
  std::lock_guard<std::mutex> lock(mutex);
  // As on a GPU (measured): PyTorch's streams and others (fake_torch_cuda.cpp) bring their context,
  // the default one does not.
  const auto stream = reinterpret_cast<uintptr_t>(config->hStream);
  const bool brings = stream >= 0x5000 && stream < 0x5080;
  CUcontext context = brings ? context_of(static_cast<int>(stream % 64)) : current;
  if (context == nullptr) {
    violation("a launch without a context");
    return CUDA_ERROR_INVALID_CONTEXT;
  }
  Function* function = function_of(handle);
  if (function == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  std::string text =
      "{\"kernel\": \"" + function->name + "\", \"grid\": [" + std::to_string(config->gridDimX) +
      ", " + std::to_string(config->gridDimY) + ", " + std::to_string(config->gridDimZ) +
      "], \"block\": [" + std::to_string(config->blockDimX) + ", " +
      std::to_string(config->blockDimY) + ", " + std::to_string(config->blockDimZ) +
      "], \"shared\": " + std::to_string(config->sharedMemBytes) +
      ", \"stream\": " + std::to_string(stream) +
      ", \"device\": " + std::to_string(reinterpret_cast<uintptr_t>(context) - 0x1000) +
      ", \"attributes\": {";
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    const CUlaunchAttribute& attribute = config->attrs[i];
    text += (i == 0 ? "\"" : ", \"") + std::to_string(attribute.id) + "\": [";
    const size_t numbers = attribute.id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION ? 3 : 1;
    for (size_t j = 0; j < numbers; ++j) {
      int number;
      std::memcpy(&number, reinterpret_cast<const char*>(&attribute.value) + 4 * j, 4);
      text += (j == 0 ? "" : ", ") + std::to_string(number);
    }
    text += "]";
  }
  text += "}, \"params\": [";
  const std::vector<int>& sizes = state.declared[function->name];
  for (size_t i = 0; i < sizes.size(); ++i) {
    text += (i == 0 ? "\"" : ", \"") + hex(params[i], static_cast<size_t>(sizes[i])) + "\"";
  }
  state.launches.push_back(text + "]}");
  if (const char* path = std::getenv("FAKE_CUDA_LAUNCHES")) {
    if (FILE* file = std::fopen(path, "a")) {
      std::fprintf(file, "%s\n", state.launches.back().c_str());
      std::fclose(file);
    }
  }
  if (std::getenv("FAKE_CUDA_COMPUTE") != nullptr) compute(function->name, *config, params);
  return CUDA_SUCCESS;
}

}  // namespace fake

// Every function behind enter(), with a signature that cuda.h's must equal.
template <int index>
struct Implementation;
#define FAKE_IMPLEMENTATION(name, version)                \
  template <>                                             \
  struct Implementation<k_##name> {                       \
    static constexpr decltype(&::name) run = &fake::name; \
  };
TORCH_CUBIN_DRIVER_FUNCTIONS(FAKE_IMPLEMENTATION)

template <int index, class Type>
struct Wrapped;
template <int index, class... Arguments>
struct Wrapped<index, CUresult (*)(Arguments...)> {
  static CUresult run(Arguments... arguments) {
    const CUresult result = enter(static_cast<Index>(index));
    return result != CUDA_SUCCESS ? result : Implementation<index>::run(arguments...);
  }
};

int index_of(const char* name) {
  for (int i = 0; i < kFunctions; ++i) {
    if (std::strcmp(kNames[i], name) == 0) return i;
  }
  return -1;
}

const char* join(const std::vector<std::string>& texts, const char* separator) {
  static thread_local std::string joined;
  joined.clear();
  for (const std::string& text : texts) joined += (joined.empty() ? "" : separator) + text;
  return joined.c_str();
}

}  // namespace

// Not in the table, because older drivers lack it. Contexts from 0x3000 on are green: 0x3000 + i of
// device i.
static CUresult stream_get_green_ctx(CUstream stream, void** green) {
  std::lock_guard<std::mutex> lock(mutex);
  if (stream != nullptr) violation("asking for the green context of a stream");
  const auto context = reinterpret_cast<uintptr_t>(current);
  *green = context - 0x3000 < 0x1000 ? current : nullptr;
  return context == 0 ? CUDA_ERROR_INVALID_CONTEXT : CUDA_SUCCESS;
}

// Not in the table, because cuda.h of CUDA 13 declares another version.
static CUresult stream_get_capture_info(CUstream stream, CUstreamCaptureStatus* status, cuuint64_t*,
                                        CUgraph* graph, const CUgraphNode**, size_t*) {
  *status = CU_STREAM_CAPTURE_STATUS_NONE;
  *graph = kGraph;
  return fake::cuStreamIsCapturing(stream, status);
}

#define FAKE_API extern "C" __attribute__((visibility("default")))

FAKE_API CUresult cuGetProcAddress_v2(const char* name, void** function, int, cuuint64_t,
                                      CUdriverProcAddressQueryResult*) {
  *function = nullptr;
  if (state.settings.count(std::string("missing ") + name) != 0) return CUDA_ERROR_NOT_FOUND;
#define FAKE_RESOLVE(known, version)                                                   \
  if (std::strcmp(name, #known) == 0) {                                                \
    *function = reinterpret_cast<void*>(&Wrapped<k_##known, decltype(&::known)>::run); \
  }
  TORCH_CUBIN_DRIVER_FUNCTIONS(FAKE_RESOLVE)
  if (std::strcmp(name, "cuStreamGetGreenCtx") == 0) {
    *function = reinterpret_cast<void*>(&stream_get_green_ctx);
  }
  if (std::strcmp(name, "cuStreamGetCaptureInfo") == 0) {
    *function = reinterpret_cast<void*>(&stream_get_capture_info);
  }
  return *function == nullptr ? CUDA_ERROR_NOT_FOUND : CUDA_SUCCESS;
}

#undef cuDriverGetVersion
FAKE_API CUresult cuDriverGetVersion(int* version) { return fake::cuDriverGetVersion(version); }

// The next `times` calls of `name`, after `after` more, give `code`.
FAKE_API int fake_fail(const char* name, long after, long times, int code) {
  std::lock_guard<std::mutex> lock(mutex);
  const int index = index_of(name);
  if (index < 0) return -1;
  state.failures[index].after = after;
  state.failures[index].times = times;
  state.failures[index].code = static_cast<CUresult>(code);
  return 0;
}
FAKE_API long fake_calls(const char* name) {
  std::lock_guard<std::mutex> lock(mutex);
  const int index = index_of(name);
  return index < 0 ? -1 : state.calls[index];
}
FAKE_API void fake_set(const char* name, long value) {
  std::lock_guard<std::mutex> lock(mutex);
  state.settings[name] = value;
}
FAKE_API void fake_unset(const char* name) {
  std::lock_guard<std::mutex> lock(mutex);
  state.settings.erase(name);
}
FAKE_API void fake_declare(const char* kernel, int count, const int* sizes) {
  std::lock_guard<std::mutex> lock(mutex);
  state.declared[kernel].assign(sizes, sizes + count);
}
FAKE_API void fake_global(const char* name, long bytes) {
  std::lock_guard<std::mutex> lock(mutex);
  state.globals[name].assign(static_cast<size_t>(bytes), '\0');
}
// The graph, and what was instantiated from it, is destroyed.
FAKE_API void fake_destroy_graph() {
  const std::set<UserObject*> objects = state.objects;
  for (UserObject* object : objects) {
    if (object->held) release(object);
  }
}
FAKE_API void fake_quiet(int on) { quiet = on != 0; }
FAKE_API void fake_make_current(long context) { current = reinterpret_cast<CUcontext>(context); }
// The texts live until the thread asks again.
FAKE_API const char* fake_functions() {
  return join(std::vector<std::string>(kNames, kNames + kFunctions), "\n");
}
FAKE_API const char* fake_errors() {
  std::vector<std::string> lines;
  for (const auto& [code, name] : kErrors) lines.push_back(std::to_string(code) + " " + name);
  return join(lines, "\n");
}
FAKE_API const char* fake_journal() {
  std::lock_guard<std::mutex> lock(mutex);
  return join(state.journal, "\n");
}
FAKE_API const char* fake_images() {
  std::lock_guard<std::mutex> lock(mutex);
  return join(state.images, "\n");
}
FAKE_API const char* fake_launches() {
  std::lock_guard<std::mutex> lock(mutex);
  return join(state.launches, "\n");
}
FAKE_API const char* fake_violations() {
  std::lock_guard<std::mutex> lock(mutex);
  return join(state.violations, "\n");
}
FAKE_API long fake_memory_alive() {
  std::lock_guard<std::mutex> lock(mutex);
  return static_cast<long>(state.memory.size());
}
FAKE_API long fake_libraries_alive() {
  std::lock_guard<std::mutex> lock(mutex);
  long alive = 0;
  for (const Library* library : state.libraries) alive += library->alive ? 1 : 0;
  return alive;
}
// Forgets what was recorded and every failure asked for; handles stay.
FAKE_API void fake_reset() {
  std::lock_guard<std::mutex> lock(mutex);
  for (long& count : state.calls) count = 0;
  for (Failure& failure : state.failures) failure = Failure();
  state.journal.clear();
  state.images.clear();
  state.launches.clear();
  state.violations.clear();
  state.settings.clear();
}
