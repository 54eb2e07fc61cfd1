// The dtypes of tokens' weights, shared by host and device code.
#pragma once

namespace torch_cubin {

enum ExpertWeights { kWeightsOne, kWeightsFloat32, kWeightsFloat16, kWeightsBFloat16 };

}  // namespace torch_cubin
