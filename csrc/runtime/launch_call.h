/* What Python hands over for one launch, and for one tensor map: plain C, shared by the library and
 * by the small extension module of csrc/python_launch.c, which is compiled apart from it.
 *
 * Numbers are as wide as Python's checks leave them: the library checks every range. */
#pragma once

#include <stdint.h>

#define TORCH_CUBIN_COOPERATIVE 1u
#define TORCH_CUBIN_DEPENDENT 2u /* programmatic dependent launch */
#define TORCH_CUBIN_PRIORITY 4u  /* `priority` is given */
#define TORCH_CUBIN_STREAM 8u    /* `stream` is given; otherwise PyTorch's current one */
#define TORCH_CUBIN_CLUSTER 16u  /* `cluster` is given */

struct torch_cubin_launch_call {
  uint32_t size;  /* of this struct: both sides must be of one build */
  uint32_t flags; /* TORCH_CUBIN_* */
  int32_t device; /* PyTorch's index */
  int32_t priority;
  int64_t grid[3];
  int64_t block[3];
  int64_t cluster[3];
  int64_t shared_memory; /* dynamic, bytes */
  void* stream;
  void** params; /* one pointer a parameter */
};

#define TORCH_CUBIN_MAP_DIMS 5

/* A tensor map, dims innermost first, as the driver wants them; enums by the driver's numbers. */
struct torch_cubin_tensor_map {
  uint32_t size;
  uint32_t rank;
  uint32_t data_type;
  uint32_t interleave;
  uint32_t swizzle;
  uint32_t l2_promotion;
  uint32_t oob_fill;
  int32_t device; /* of the tensor */
  void* address;
  uint64_t dims[TORCH_CUBIN_MAP_DIMS];
  uint64_t strides[TORCH_CUBIN_MAP_DIMS]; /* bytes, from the second dim on */
  uint32_t box[TORCH_CUBIN_MAP_DIMS];
  uint32_t element_strides[TORCH_CUBIN_MAP_DIMS];
};
