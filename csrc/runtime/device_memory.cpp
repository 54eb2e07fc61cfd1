#include "runtime/device_memory.h"

#include <atomic>

namespace torch_cubin {
namespace {

std::atomic<ReleaseCache> g_release{nullptr};

}  // namespace

void set_release_cache(ReleaseCache release) { g_release.store(release); }

bool release_cached_memory(int device_index) {
  const ReleaseCache release = g_release.load();
  if (release != nullptr) release(device_index);
  return release != nullptr;
}

}  // namespace torch_cubin
