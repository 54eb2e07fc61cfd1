// A call's shape for the driver's launch configuration and for error messages.
#pragma once

#include <cstdint>
#include <string>

#include "driver/driver.h"
#include "runtime/launch_call.h"

namespace torch_cubin {

inline void set_shape(const torch_cubin_launch_call& call, CUstream stream,
                      CUlaunchConfig& config) {
  config.gridDimX = static_cast<unsigned>(call.grid[0]);
  config.gridDimY = static_cast<unsigned>(call.grid[1]);
  config.gridDimZ = static_cast<unsigned>(call.grid[2]);
  config.blockDimX = static_cast<unsigned>(call.block[0]);
  config.blockDimY = static_cast<unsigned>(call.block[1]);
  config.blockDimZ = static_cast<unsigned>(call.block[2]);
  config.sharedMemBytes = static_cast<unsigned>(call.shared_memory);
  config.hStream = stream;
}

// Adds an attribute; config.attrs must have capacity for it.
inline void set_cluster(const int64_t* cluster, CUlaunchConfig& config) {
  CUlaunchAttribute& attribute = config.attrs[config.numAttrs++];
  attribute.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
  attribute.value.clusterDim.x = static_cast<unsigned>(cluster[0]);
  attribute.value.clusterDim.y = static_cast<unsigned>(cluster[1]);
  attribute.value.clusterDim.z = static_cast<unsigned>(cluster[2]);
}

// "(2, 1, 1)"
template <class T>
std::string triple(const T* values) {
  return "(" + std::to_string(values[0]) + ", " + std::to_string(values[1]) + ", " +
         std::to_string(values[2]) + ")";
}

}  // namespace torch_cubin
