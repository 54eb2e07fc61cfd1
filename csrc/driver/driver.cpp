#include "driver/driver.h"

#include <pthread.h>

#include <atomic>
#include <memory>
#include <mutex>

#include "cubin/error.h"
#include "driver/dl.h"

namespace torch_cubin {
namespace {

constexpr int kMinimumDriver = 12000;  // cuLibrary*
constexpr int kGreenContexts = 12040;
constexpr int kCaptureInfo = 11030;

using GetProcAddress = CUresult (*)(const char*, void**, int, cuuint64_t,
                                    CUdriverProcAddressQueryResult*);

// Leaked on purpose, like every process-wide cache here: threads may still launch at exit.
std::atomic<const Driver*> g_driver{nullptr};
std::mutex g_driver_mutex;      // guards the making of g_driver
std::atomic<int> g_opening{0};  // threads that are making it
std::atomic<bool> g_forked{false};

// Clears the table in the child, so that its next call reaches driver(), which throws [fork].
// Launches therefore need no check of their own.
void note_fork_in_child() {
  if (g_driver.exchange(nullptr) != nullptr || g_opening.load() != 0) g_forked.store(true);
}

class Opening {
 public:
  Opening() { g_opening.fetch_add(1); }
  ~Opening() { g_opening.fetch_sub(1); }
};

std::string version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

void resolve(const char* name, int version, GetProcAddress get, int have, void** function) {
  CUdriverProcAddressQueryResult status{};
  const CUresult result = get(name, function, version, CU_GET_PROC_ADDRESS_DEFAULT, &status);
  if (result == CUDA_SUCCESS && *function != nullptr) return;
  fail({"driver", "the CUDA driver", std::string("has no function ") + name,
        "a driver for CUDA " + version_text(version < kMinimumDriver ? kMinimumDriver : version) +
            " or newer",
        "one for CUDA " + version_text(have), "Install a newer NVIDIA driver."});
}

[[noreturn]] void fail_to_initialise(CUresult result, const std::string& path) {
  const std::string code = std::to_string(static_cast<int>(result));
  if (result == CUDA_ERROR_NO_DEVICE) {
    fail({"no_device", "the CUDA driver", "found no device", "at least one visible GPU", "none",
          "Check nvidia-smi and CUDA_VISIBLE_DEVICES."});
  }
  if (result == CUDA_ERROR_STUB_LIBRARY) {
    fail({"driver", "libcuda.so.1", "is the toolkit's stub, not a driver",
          "the library that the NVIDIA driver installs", path,
          "Take the toolkit's stubs folder out of LD_LIBRARY_PATH."});
  }
  if (result == CUDA_ERROR_NOT_INITIALIZED) {
    fail({"fork", "the CUDA driver", "cannot be used in a forked process",
          "a process that did not fork after CUDA was initialised", "CUDA error " + code,
          "Start workers with the 'spawn' method."});
  }
  fail({"driver", "the CUDA driver", "could not be initialised", "success from cuInit",
        "CUDA error " + code, "Check that nvidia-smi works on this machine."});
}

const Driver* open_driver() {
  std::string error;
  void* library = dl_open("libcuda.so.1", &error);
  if (library == nullptr) {
    fail({"driver", "libcuda.so.1", "could not be opened", "the library of an NVIDIA driver", error,
          "Install the NVIDIA driver, or run on a machine that has one."});
  }
  auto get = reinterpret_cast<GetProcAddress>(dl_symbol(library, "cuGetProcAddress_v2"));
  if (get == nullptr) {
    fail({"driver", "the CUDA driver", "is too old", "a driver for CUDA 12.0 or newer",
          "one without cuGetProcAddress_v2", "Install a newer NVIDIA driver."});
  }
  auto driver = std::make_unique<Driver>();
  int version = 0;
  auto get_version =
      reinterpret_cast<decltype(&cuDriverGetVersion)>(dl_symbol(library, "cuDriverGetVersion"));
  if (get_version != nullptr) get_version(&version);
#define TORCH_CUBIN_RESOLVE(name, minimum) \
  resolve(#name, minimum, get, version, reinterpret_cast<void**>(&driver->name));
  TORCH_CUBIN_DRIVER_FUNCTIONS(TORCH_CUBIN_RESOLVE)
#undef TORCH_CUBIN_RESOLVE
  resolve("cuStreamGetCaptureInfo", kCaptureInfo, get, version,
          reinterpret_cast<void**>(&driver->capture_info));
  CUdriverProcAddressQueryResult status{};
  auto** const green = reinterpret_cast<void**>(&driver->cuStreamGetGreenCtx);
  if (get("cuStreamGetGreenCtx", green, kGreenContexts, CU_GET_PROC_ADDRESS_DEFAULT, &status) !=
      CUDA_SUCCESS) {
    *green = nullptr;
  }
  const CUresult result = driver->cuInit(0);
  if (result != CUDA_SUCCESS) {
    fail_to_initialise(result, dl_path_of(reinterpret_cast<void*>(driver->cuInit)));
  }
  if (version < kMinimumDriver) {
    fail({"driver", "the CUDA driver", "is too old", "CUDA 12.0 or newer", version_text(version),
          "Install a newer NVIDIA driver."});
  }
  driver->version = version;
  return driver.release();
}

// Newer than CUDA 12.0's header.
constexpr auto kContained = static_cast<CUresult>(226);         // CUDA_ERROR_CONTAINED
constexpr auto kTensorMemoryLeak = static_cast<CUresult>(721);  // CUDA_ERROR_TENSOR_MEMORY_LEAK

// Whether the error leaves the context unusable, so that only a new process can use the GPU again.
bool poisons_context(CUresult result) {
  switch (result) {
    case kContained:
    case kTensorMemoryLeak:
    case CUDA_ERROR_EXTERNAL_DEVICE:
    case CUDA_ERROR_ILLEGAL_ADDRESS:
    case CUDA_ERROR_MISALIGNED_ADDRESS:
    case CUDA_ERROR_INVALID_ADDRESS_SPACE:
    case CUDA_ERROR_INVALID_PC:
    case CUDA_ERROR_ILLEGAL_INSTRUCTION:
    case CUDA_ERROR_HARDWARE_STACK_ERROR:
    case CUDA_ERROR_LAUNCH_FAILED:
    case CUDA_ERROR_LAUNCH_TIMEOUT:
    case CUDA_ERROR_ASSERT:
    case CUDA_ERROR_ECC_UNCORRECTABLE:
    case CUDA_ERROR_MPS_CLIENT_TERMINATED:
      return true;
    default:
      return false;
  }
}

}  // namespace

[[gnu::hot]] const Driver& driver() {
  const Driver* ready = g_driver.load(std::memory_order_acquire);
  if (ready != nullptr) return *ready;
  refuse_forked();
  static const int noted = pthread_atfork(nullptr, nullptr, &note_fork_in_child);
  static_cast<void>(noted);  // pthread_atfork fails only when out of memory
  const Opening opening;
  std::lock_guard<std::mutex> lock(g_driver_mutex);
  ready = g_driver.load(std::memory_order_relaxed);
  if (ready == nullptr) {
    ready = open_driver();
    g_driver.store(ready, std::memory_order_release);
  }
  return *ready;
}

bool driver_forked() { return g_forked.load(std::memory_order_relaxed); }

void refuse_forked() {
  if (!driver_forked()) return;
  fail({"fork", "the CUDA driver", "cannot be used in a forked process",
        "a process that did not fork after CUDA was initialised", "a child of one that did",
        "Start workers with the 'spawn' method."});
}

std::string driver_version_text() { return version_text(driver().version); }

std::string describe(CUresult result) {
  const char* name = nullptr;
  const char* text = nullptr;
  const Driver& d = driver();
  d.cuGetErrorName(result, &name);
  d.cuGetErrorString(result, &text);
  return std::string(name != nullptr ? name : "CUDA error") + " (" +
         std::to_string(static_cast<int>(result)) + "): " + (text != nullptr ? text : "unknown");
}

void check(CUresult result, const char* tag, const std::string& action) {
  if (result == CUDA_SUCCESS) return;
  const std::string got = describe(result);
  if (driver_forked()) {
    fail({"fork", action, "was called in a forked process", "the process that initialised CUDA",
          got, "Start workers with the 'spawn' method."});
  }
  if (result == CUDA_ERROR_OUT_OF_MEMORY) {
    fail_out_of_memory(action + " failed: " + got);
  }
  if (poisons_context(result)) {
    const char* kernel = launches.last_kernel.load(std::memory_order_relaxed);
    fail({"fault", action, "found the GPU's context broken by an earlier fault", "success",
          got + (kernel == nullptr ? "" : ", after kernel '" + printable(kernel) + "'"),
          "This process cannot use the GPU any more: restart it."});
  }
  // Handles of a reset context are invalid, and so is a handle that never was a stream.
  if (result == CUDA_ERROR_CONTEXT_IS_DESTROYED || result == CUDA_ERROR_DEINITIALIZED ||
      result == CUDA_ERROR_INVALID_HANDLE) {
    fail({"closed", action, "found the CUDA context gone, or a stream that is none",
          "a live context", got,
          "If something reset the device, restart the process: what it held is lost."});
  }
  if (is_capture_error(result)) {
    fail({"capture", action, "is not allowed in this CUDA graph capture", "success", got,
          "Make one call before the capture begins."});
  }
  fail({tag, action, "failed", "success", got, ""});
}

}  // namespace torch_cubin
