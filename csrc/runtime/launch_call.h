/* The arguments of one launch from Python, in plain C: shared by the library and the separate
 * extension module of csrc/python_launch.c.
 *
 * Numbers are wide enough for Python's unchecked values; the library checks every range. */
#pragma once

#include <stdint.h>

#define TORCH_CUBIN_COOPERATIVE 1u
#define TORCH_CUBIN_DEPENDENT 2u /* programmatic dependent launch */
#define TORCH_CUBIN_PRIORITY 4u  /* `priority` is given */
#define TORCH_CUBIN_STREAM 8u    /* `stream` is given; otherwise PyTorch's current one */
#define TORCH_CUBIN_CLUSTER 16u  /* `cluster` is given */

#define TORCH_CUBIN_CURRENT_DEVICE \
  INT32_MIN /* that of the thread's context; the first if it has none */

struct torch_cubin_launch_call {
  uint32_t size;  /* of this struct: both sides must come from one build */
  uint32_t flags; /* TORCH_CUBIN_* */
  int32_t device; /* PyTorch's index, or TORCH_CUBIN_CURRENT_DEVICE */
  int32_t priority;
  int64_t grid[3];
  int64_t block[3];
  int64_t cluster[3];
  int64_t shared_memory; /* dynamic, bytes */
  void* stream;
  void** params; /* one pointer per parameter */
};
