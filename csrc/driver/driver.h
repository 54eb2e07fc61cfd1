// The CUDA Driver API: opened on first use, never at import, and checked at every call.
//
// The only layer that names libcuda or includes cuda.h. Nothing here is called from a static
// destructor: the driver may be gone by then.
#pragma once

#include <cuda.h>

#include <atomic>
#include <string>

#include "driver/table.h"

namespace torch_cubin {

struct Driver {
#define TORCH_CUBIN_MEMBER(name, version) decltype(&::name) name = nullptr;
  TORCH_CUBIN_DRIVER_FUNCTIONS(TORCH_CUBIN_MEMBER)
#undef TORCH_CUBIN_MEMBER
  // Null for drivers before CUDA 12.4, which have no green contexts. The type is spelled out
  // because cuda.h may be older; the handle is only compared with null.
  CUresult (*cuStreamGetGreenCtx)(CUstream stream, void** green) = nullptr;
  // cuStreamGetCaptureInfo of CUDA 11.3. The type is spelled out because cuda.h of CUDA 13 has
  // another version's.
  CUresult (*capture_info)(CUstream stream, CUstreamCaptureStatus* status, cuuint64_t* id,
                           CUgraph* graph, const CUgraphNode** dependencies,
                           size_t* count) = nullptr;
  int version = 0;  // 13000 for CUDA 13.0
};

// The table. The first call opens libcuda.so.1 and calls cuInit; safe from many threads; a failure
// throws [driver], [no_device] or [fork] and the next call tries again.
const Driver& driver();

// Whether this process was forked after (or while) the parent initialised the driver.
bool driver_forked();

// Throws [fork] if driver_forked(). Call it before taking a lock: a lock that another thread held
// at the fork stays locked in the child, here and in libcuda, so a child that waits for it hangs.
void refuse_forked();

// Whether a call failed because a CUDA graph is being captured.
inline bool is_capture_error(CUresult result) {
  return result >= CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED &&
         result <= CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
}

// Throws unless `result` is success. `action` says what failed ("cuLaunchKernelEx of 'name'").
// The tag follows the code: [oom], [fault] for errors that poison the context, [fork] in a forked
// child, [closed] after the context was destroyed, otherwise `tag`.
void check(CUresult result, const char* tag, const std::string& action);
inline void check(CUresult result, const char* tag, const char* action) {
  if (result != CUDA_SUCCESS) check(result, tag, std::string(action));
}

// "13.0"
std::string driver_version_text();

// Launch statistics of this process. Every launch writes both members, so they share a cache line.
struct alignas(64) Launches {
  std::atomic<int64_t> count{0};
  // A kernel's fault surfaces at a later call, which then names this kernel. Names are never freed.
  std::atomic<const char*> last_kernel{nullptr};
};
inline Launches launches;

// "CUDA_ERROR_INVALID_VALUE (1): invalid argument"
std::string describe(CUresult result);

// For destructors, which must not throw. Ignores the error code on purpose: after the driver's own
// shutdown every call returns CUDA_ERROR_DEINITIALIZED, and a leak at that point is harmless.
inline void ignore_in_destructor(CUresult) {}

}  // namespace torch_cubin
