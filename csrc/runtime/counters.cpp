#include "runtime/counters.h"

#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace torch_cubin {
namespace {

constexpr int64_t kBytesPerLaunch = 2048;
constexpr int64_t kLaunchesPerChunk = 512;
constexpr size_t kMaxChunks = 32, kMaxStreams = 1024;

// A device's.
struct Counters {
  std::mutex mutex;  // guards the members below
  size_t chunks = 0;
  std::vector<int*> unused;
  // Not by the handle, which may come again while the work of a destroyed stream still runs.
  std::unordered_map<unsigned long long, int*> by_stream_id;
};

// Leaked on purpose: graphs may be destroyed while the process ends.
Counters& counters_of(const Device& device) {
  static auto* const all = new Counters[kMaxDevices];
  return all[device.index];
}

// Allows this thread to allocate and to wait while a graph is captured.
class RelaxedCapture {
 public:
  RelaxedCapture() { exchange(); }
  ~RelaxedCapture() { exchange(); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  void exchange() { ignore_in_destructor(driver().cuThreadExchangeStreamCaptureMode(&mode_)); }

  CUstreamCaptureMode mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;
};

// Memory set to zero, by a stream of its own: the caller's may be captured. Null on failure.
int* zeroed_chunk(const Device& device) {
  const ContextGuard guard(device);
  const RelaxedCapture relaxed;
  const Driver& d = driver();
  CUdeviceptr memory = 0;
  if (d.cuMemAlloc(&memory, kLaunchesPerChunk * kBytesPerLaunch) != CUDA_SUCCESS) return nullptr;
  CUstream stream = nullptr;
  CUresult result = d.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING);
  if (result == CUDA_SUCCESS) {
    result = d.cuMemsetD8Async(memory, 0, kLaunchesPerChunk * kBytesPerLaunch, stream);
    if (result == CUDA_SUCCESS) result = d.cuStreamSynchronize(stream);
    ignore_in_destructor(d.cuStreamDestroy(stream));
  }
  if (result == CUDA_SUCCESS) return reinterpret_cast<int*>(memory);
  ignore_in_destructor(d.cuMemFree(memory));
  return nullptr;
}

// Some that nobody has, or null. The driver is called without the mutex, for which release(), on a
// thread of the driver's, would wait.
int* take(const Device& device) {
  Counters& all = counters_of(device);
  std::unique_lock<std::mutex> lock(all.mutex);
  if (all.unused.empty() && all.chunks < kMaxChunks) {
    ++all.chunks;
    lock.unlock();
    int* const chunk = zeroed_chunk(device);
    lock.lock();
    if (chunk == nullptr) --all.chunks;
    all.unused.reserve(kMaxChunks * kLaunchesPerChunk);  // release() allocates nothing
    for (int64_t i = kLaunchesPerChunk - 1; chunk != nullptr && i >= 0; --i) {
      all.unused.push_back(chunk + i * (kBytesPerLaunch / static_cast<int64_t>(sizeof(int))));
    }
  }
  if (all.unused.empty()) return nullptr;
  int* const taken = all.unused.back();
  all.unused.pop_back();
  return taken;
}

struct Held {
  Counters& all;
  int* counters;
};

// The driver calls it when the graph and all that was instantiated from it have been destroyed, and
// their launches have ended, which left the counters zero.
void CUDA_CB release(void* data) {
  const std::unique_ptr<Held> held(static_cast<Held*>(data));
  const std::lock_guard<std::mutex> lock(held->all.mutex);
  held->all.unused.push_back(held->counters);
}

int* of_graph(const Device& device, CUgraph graph) {
  const Driver& d = driver();
  int* const counters = take(device);
  if (counters == nullptr) return nullptr;
  auto* const held = new Held{counters_of(device), counters};
  CUuserObject object = nullptr;
  if (d.cuUserObjectCreate(&object, held, &release, 1, CU_USER_OBJECT_NO_DESTRUCTOR_SYNC) !=
      CUDA_SUCCESS) {
    release(held);
    return nullptr;
  }
  if (d.cuGraphRetainUserObject(graph, object, 1, CU_GRAPH_USER_OBJECT_MOVE) == CUDA_SUCCESS) {
    return counters;
  }
  ignore_in_destructor(d.cuUserObjectRelease(object, 1));  // which calls release()
  return nullptr;
}

int* of_stream(const Device& device, CUstream stream) {
  unsigned long long id = 0;
  if (driver().cuStreamGetId(stream, &id) != CUDA_SUCCESS) return nullptr;
  Counters& all = counters_of(device);
  {
    const std::lock_guard<std::mutex> lock(all.mutex);
    const auto found = all.by_stream_id.find(id);
    if (found != all.by_stream_id.end()) return found->second;
    if (all.by_stream_id.size() >= kMaxStreams) return nullptr;
  }
  int* const counters = take(device);
  if (counters == nullptr) return nullptr;
  const std::lock_guard<std::mutex> lock(all.mutex);
  const auto [entry, is_new] = all.by_stream_id.emplace(id, counters);
  if (!is_new) all.unused.push_back(counters);  // another thread launches on the stream, too
  return entry->second;
}

}  // namespace

int* counters_of_launch(const Device& device, CUstream stream, int64_t bytes) {
  if (bytes > kBytesPerLaunch) return nullptr;
  const ContextGuard guard(device, stream);
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  CUgraph graph = nullptr;
  // The legacy default stream, null, cannot be captured.
  if (stream != nullptr &&
      driver().capture_info(stream, &status, nullptr, &graph, nullptr, nullptr) != CUDA_SUCCESS) {
    return nullptr;
  }
  if (status == CU_STREAM_CAPTURE_STATUS_NONE) return of_stream(device, stream);
  return status == CU_STREAM_CAPTURE_STATUS_ACTIVE ? of_graph(device, graph) : nullptr;
}

}  // namespace torch_cubin
