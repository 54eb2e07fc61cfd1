// What the backends of float8_e4m3fn share: factors, and the kernel that transposes an operand.
#pragma once

#include <optional>

#include "kernels/attention/sm90/e4m3_params.h"
#include "kernels/attention/sm90/e4m3_values_params.h"
#include "ops/attention/sm90/map.h"

namespace torch_cubin {

constexpr AttentionStep kSm90TransposeStep{"transpose", "attention/sm90/e4m3_values",
                                           sizeof(Sm90E4m3ValuesParams)};
constexpr int64_t kTransposedGroup = 16;  // keys whose order is one pattern

Sm90Descale sm90_descale(const std::optional<TensorView>& view);

// Launches a kernel of kSm90TransposeStep. `params` has v, out, next, stride, columns, keys and
// granule; the others follow from `all` and `rows`.
void transpose_keys(PackageKernel& kernel, const Device& device, const AttentionParams& all,
                    const Sm90Rows& rows, Sm90E4m3ValuesParams& params);

}  // namespace torch_cubin
