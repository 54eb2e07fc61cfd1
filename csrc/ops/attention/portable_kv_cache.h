// The part of the portable forward's seam that serves flash_attention_with_kvcache.
#pragma once

#include <memory>
#include <vector>

#include "ops/attention/kv_cache.h"
#include "ops/attention/portable.h"

namespace torch_cubin {

std::unique_ptr<KvCacheKernels> make_portable_kv_cache(const Device& device,
                                                       const std::vector<PackageKernel*>& kernels);

}  // namespace torch_cubin
