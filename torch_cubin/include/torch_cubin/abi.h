/* The C ABI of libtorch_cubin, version 1: the base of cubin.h, and of bindings for other languages.
 *
 * The ABI is additive: functions and trailing fields of structs are added, nothing is changed or
 * removed. A struct's first field is its size as the caller knows it. A function that returns an
 * error returns null for success, otherwise an object that the caller frees. Any thread may call
 * any function. This header needs neither CUDA's headers nor PyTorch. */
#ifndef TORCH_CUBIN_ABI_H_
#define TORCH_CUBIN_ABI_H_

#include <stdint.h>

#if defined(__GNUC__)
#define TORCH_CUBIN_V1 __attribute__((visibility("default")))
#else
#define TORCH_CUBIN_V1
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef struct torch_cubin_v1_error torch_cubin_v1_error;
typedef struct torch_cubin_v1_module torch_cubin_v1_module;
typedef struct torch_cubin_v1_kernel torch_cubin_v1_kernel;

/* The level of version 1, which grows with additions. The function returns TORCH_CUBIN_V1_LEVEL of
 * the library. */
#define TORCH_CUBIN_V1_LEVEL 3u /* 2: torch_cubin_v1_set_release_cache; 3: torch_cubin_v1_inspect */
TORCH_CUBIN_V1 uint32_t torch_cubin_v1_level(void);

/* The path of the file that contains the library; "" if it is linked into a program without a
 * name. */
TORCH_CUBIN_V1 const char* torch_cubin_v1_library_path(void);

/* --- errors --- */

#define TORCH_CUBIN_V1_TAG 0u      /* "params", "launch", ...: docs/cpp.md lists them */
#define TORCH_CUBIN_V1_MESSAGE 1u  /* the whole text */
#define TORCH_CUBIN_V1_OBJECT 2u   /* "kernel 'vec_add'"; this and the rest may be "" */
#define TORCH_CUBIN_V1_PROBLEM 3u  /* "has too many threads a block" */
#define TORCH_CUBIN_V1_EXPECTED 4u /* "at most 1024" */
#define TORCH_CUBIN_V1_GOT 5u      /* "2048, block (2048, 1, 1)" */
#define TORCH_CUBIN_V1_ADVICE 6u   /* how to fix it */

/* Returns one part, valid as long as the error; "" for a part unknown to this library. */
TORCH_CUBIN_V1 const char* torch_cubin_v1_error_part(const torch_cubin_v1_error* error,
                                                     uint32_t part);
TORCH_CUBIN_V1 void torch_cubin_v1_error_free(torch_cubin_v1_error* error);

/* Makes an error by the library's template; null arguments mean "". */
TORCH_CUBIN_V1 torch_cubin_v1_error* torch_cubin_v1_error_make(const char* tag, const char* object,
                                                               const char* problem,
                                                               const char* expected,
                                                               const char* got, const char* advice);

/* --- files --- */

/* Describes a file's bytes as JSON (docs/inspect.md), which the caller frees with
 * torch_cubin_v1_text_free. `origin` names the file in errors. Never calls the driver. */
TORCH_CUBIN_V1 torch_cubin_v1_error* torch_cubin_v1_inspect(const void* data, uint64_t size,
                                                            const char* origin, char** out);
TORCH_CUBIN_V1 void torch_cubin_v1_text_free(char* text);

/* --- modules --- */

#define TORCH_CUBIN_V1_UNKNOWN_SIZE UINT64_MAX /* read the size from the bytes' own header */

struct torch_cubin_v1_image {
  const void* data;
  uint64_t size;      /* bytes; or TORCH_CUBIN_V1_UNKNOWN_SIZE */
  const char* origin; /* the name in errors; null: "bytes" */
};

#define TORCH_CUBIN_V1_NO_PTX 1u  /* PTX is ignored, and an error if there is nothing else */
#define TORCH_CUBIN_V1_FOREVER 2u /* never unloaded; launches skip the count that unload needs */

/* Opens a module from the bytes of one or more files, which are copied: cubins, fatbins, PTX, host
 * ELF files, C source with arrays, bundles of torch_cubin.embed. Does not call the driver. The
 * caller owns one reference. `origin` names the module in errors; null: that of the first image. */
TORCH_CUBIN_V1 torch_cubin_v1_error* torch_cubin_v1_module_open(
    const struct torch_cubin_v1_image* images, uint64_t count, const char* origin, uint32_t flags,
    torch_cubin_v1_module** out);

/* Opens a module from files, or from packages: folders with manifest.json. */
TORCH_CUBIN_V1 torch_cubin_v1_error* torch_cubin_v1_module_open_files(const char* const* paths,
                                                                      uint64_t count,
                                                                      uint32_t flags,
                                                                      torch_cubin_v1_module** out);

/* Reference counting. Releasing the last reference leaves the code loaded in the driver: only
 * unload frees it, since a launch or a CUDA graph may still need it. */
TORCH_CUBIN_V1 void torch_cubin_v1_module_retain(torch_cubin_v1_module* module);
TORCH_CUBIN_V1 void torch_cubin_v1_module_release(torch_cubin_v1_module* module);

/* The kernels' names (symbols), sorted; null past the last. Valid as long as the module. */
TORCH_CUBIN_V1 const char* torch_cubin_v1_module_kernel_name(torch_cubin_v1_module* module,
                                                             uint64_t index);

/* Finds a kernel by its symbol, or by its C++ name if that is unambiguous: "ns::f", "f<int>" or
 * "f(float*, int)". Returns the same object every time, valid as long as the module. */
TORCH_CUBIN_V1 torch_cubin_v1_error* torch_cubin_v1_module_kernel(torch_cubin_v1_module* module,
                                                                  const char* name, uint64_t size,
                                                                  torch_cubin_v1_kernel** out);

/* The device of the thread's current context; device 0 without one. */
#define TORCH_CUBIN_V1_CURRENT_DEVICE INT32_MIN

/* Finds a __device__ or __constant__ variable. */
TORCH_CUBIN_V1 torch_cubin_v1_error* torch_cubin_v1_module_global(torch_cubin_v1_module* module,
                                                                  int32_t device, const char* name,
                                                                  uint64_t size, uint64_t* address,
                                                                  uint64_t* bytes);

TORCH_CUBIN_V1 torch_cubin_v1_error* torch_cubin_v1_module_preload(torch_cubin_v1_module* module,
                                                                   int32_t device);

/* Waits for submitted work, then unloads everything from the driver, and *unloaded is 1. If a CUDA
 * graph has captured a kernel, or `keep` is not 0, everything stays loaded, and *unloaded is 0.
 * In both cases the module is closed: calls of its kernels are errors [closed]. */
TORCH_CUBIN_V1 torch_cubin_v1_error* torch_cubin_v1_module_unload(torch_cubin_v1_module* module,
                                                                  int32_t keep, int32_t* unloaded);

/* --- kernels --- */

#define TORCH_CUBIN_V1_ANY 0u           /* a parameter of unknown kind */
#define TORCH_CUBIN_V1_POINTER 1u       /* an argument or parameter that is an address */
#define TORCH_CUBIN_V1_VALUE 2u         /* one that is not an address */
#define TORCH_CUBIN_V1_ELEMENT_SHIFT 8u /* see torch_cubin_v1_argument */

struct torch_cubin_v1_param {
  uint32_t size; /* bytes */
  uint32_t kind; /* TORCH_CUBIN_V1_ANY, _POINTER or _VALUE */
};

/* A kernel's properties as recorded in the binary; needs no GPU. Pointers are valid as long as the
 * module. */
struct torch_cubin_v1_facts {
  uint64_t size; /* of this struct */
  const char* name;
  const struct torch_cubin_v1_param* params;
  uint64_t param_count;
  uint32_t registers;     /* per thread; 0 for PTX */
  uint32_t static_shared; /* bytes per block */
  uint32_t uses_dynamic_shared;
  uint32_t required_block[3]; /* 0 if not recorded, as below */
  uint32_t max_block[3];
  uint32_t cluster[3];
};
TORCH_CUBIN_V1 void torch_cubin_v1_kernel_info(const torch_cubin_v1_kernel* kernel,
                                               struct torch_cubin_v1_facts* out);

/* A kernel's attributes on one device, as reported by the driver. */
struct torch_cubin_v1_attributes {
  uint64_t size;       /* of this struct */
  int32_t max_threads; /* per block */
  int32_t registers;
  int32_t static_shared;
  int32_t max_dynamic_shared; /* the maximum of a launch */
  int32_t local_bytes;        /* per thread */
  int32_t constant_bytes;
  int32_t binary_version; /* 90 for sm_90 */
  int32_t ptx_version;
};
TORCH_CUBIN_V1 torch_cubin_v1_error* torch_cubin_v1_kernel_attributes(
    torch_cubin_v1_kernel* kernel, int32_t device, struct torch_cubin_v1_attributes* out);

TORCH_CUBIN_V1 torch_cubin_v1_error* torch_cubin_v1_kernel_preload(torch_cubin_v1_kernel* kernel,
                                                                   int32_t device);

/* An argument of a launch, checked against the binary's parameter table. */
struct torch_cubin_v1_argument {
  uint32_t size; /* bytes */
  /* As for a parameter; from bit TORCH_CUBIN_V1_ELEMENT_SHIFT on the type of the value or of the
   * pointed-to elements: 1 + its c10::ScalarType, 0 if unknown. */
  uint32_t kind;
  const char* type; /* for errors: "float*" */
};
TORCH_CUBIN_V1 torch_cubin_v1_error* torch_cubin_v1_kernel_check(
    const torch_cubin_v1_kernel* kernel, const struct torch_cubin_v1_argument* arguments,
    uint64_t count);

#define TORCH_CUBIN_V1_COOPERATIVE 1u
#define TORCH_CUBIN_V1_DEPENDENT 2u /* programmatic dependent launch */
#define TORCH_CUBIN_V1_PRIORITY 4u  /* `priority` is set */
#define TORCH_CUBIN_V1_CLUSTER 16u  /* `cluster` is set */

struct torch_cubin_v1_launch_call {
  uint32_t size;  /* of this struct */
  uint32_t flags; /* TORCH_CUBIN_V1_COOPERATIVE, ... */
  int32_t device; /* an ordinal, or TORCH_CUBIN_V1_CURRENT_DEVICE */
  int32_t priority;
  int64_t grid[3];
  int64_t block[3]; /* 0, 0, 0: the block required by the binary */
  int64_t cluster[3];
  int64_t shared_memory; /* dynamic, bytes */
  void* stream;          /* a CUstream; null: the driver's default stream */
  void** params;         /* the address of each argument */
  const struct torch_cubin_v1_argument* arguments;
  uint64_t argument_count;
};
TORCH_CUBIN_V1 torch_cubin_v1_error* torch_cubin_v1_launch(
    torch_cubin_v1_kernel* kernel, const struct torch_cubin_v1_launch_call* launch);

/* The number of blocks of this shape that one multiprocessor runs at a time or, if the launch has
 * clusters, the number of clusters that the device runs. Ignores grid, stream and parameters. */
TORCH_CUBIN_V1 torch_cubin_v1_error* torch_cubin_v1_kernel_occupancy(
    torch_cubin_v1_kernel* kernel, const struct torch_cubin_v1_launch_call* launch, int64_t* out);

/* The number of kernels launched by this library so far. */
TORCH_CUBIN_V1 int64_t torch_cubin_v1_launches(void);

/* --- tensor maps --- */

/* Dims start with the innermost, and enums have the driver's values. */
struct torch_cubin_v1_tensor_map_spec {
  uint32_t size; /* of this struct */
  uint32_t rank; /* 1 to 5 */
  uint32_t data_type;
  uint32_t interleave;
  uint32_t swizzle;
  uint32_t l2_promotion;
  uint32_t oob_fill;
  int32_t device;
  void* address;
  uint64_t dims[5];
  uint64_t strides[5]; /* bytes, from the second dim on */
  uint32_t box[5];
  uint32_t element_strides[5];
};
/* Writes 128 bytes to `out`, which may have any alignment. */
TORCH_CUBIN_V1 torch_cubin_v1_error* torch_cubin_v1_tensor_map(
    const struct torch_cubin_v1_tensor_map_spec* map, void* out);

/* --- devices and memory, for programs without the CUDA runtime --- */

struct torch_cubin_v1_device {
  uint64_t size; /* of this struct */
  int32_t index;
  int32_t capability; /* 90 for 9.0 */
  int32_t multiprocessors;
  int32_t max_shared_memory; /* per block, with the opt-in */
  char name[128];
};
TORCH_CUBIN_V1 torch_cubin_v1_error* torch_cubin_v1_device_count(int32_t* out);
TORCH_CUBIN_V1 torch_cubin_v1_error* torch_cubin_v1_device_info(int32_t device,
                                                                struct torch_cubin_v1_device* out);
/* Makes the device's primary context current on this thread, as cudaSetDevice does. */
TORCH_CUBIN_V1 torch_cubin_v1_error* torch_cubin_v1_set_device(int32_t device);

/* Sets the process-wide callback that is called if the driver has no memory for a kernel's code;
 * loading is then retried once. A caching allocator frees its cached memory there. null: none. It
 * may be called on any thread, and must not call this library. */
TORCH_CUBIN_V1 void torch_cubin_v1_set_release_cache(void (*release)(int32_t device));

TORCH_CUBIN_V1 torch_cubin_v1_error* torch_cubin_v1_allocate(int32_t device, uint64_t bytes,
                                                             void** out);
/* Waits for the device's work, like the driver's cuMemFree. */
TORCH_CUBIN_V1 torch_cubin_v1_error* torch_cubin_v1_deallocate(int32_t device, void* memory);
/* Copies in stream order, in any direction: the driver knows where each address is. */
TORCH_CUBIN_V1 torch_cubin_v1_error* torch_cubin_v1_copy(int32_t device, void* to, const void* from,
                                                         uint64_t bytes, void* stream);
TORCH_CUBIN_V1 torch_cubin_v1_error* torch_cubin_v1_synchronize(int32_t device, void* stream);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* TORCH_CUBIN_ABI_H_ */
