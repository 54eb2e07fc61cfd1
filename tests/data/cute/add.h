
#pragma once

#include <cuda_runtime.h>
#include <cuda_fp16.h>
#include <stdio.h>
#include <stdint.h>


// Macro to check for cuda errors.
#ifndef CUTE_DSL_CUDA_ERROR_CHECK
#define CUTE_DSL_CUDA_ERROR_CHECK(err) { \
    if ((err) != cudaSuccess) { \
        printf("Got Cuda Error %s: %s\n", cudaGetErrorName(err), cudaGetErrorString(err)); \
    } \
}

#endif

typedef struct {
    cudaLibrary_t module;
} addp_Kernel_Module_t;

#ifdef __cplusplus
extern "C" {
#endif
void _mlir_addp_cuda_init(void **);
void _mlir_addp_cuda_load_to_device(void **);
static inline void addp_Kernel_Module_Load(addp_Kernel_Module_t *module) {
    cudaLibrary_t *libraryPtr = &(module->module);
    cudaError_t ret = cudaSuccess;
    struct {
        cudaLibrary_t **libraryPtr;
        cudaError_t *ret;
    } initArgs = {&libraryPtr, &ret};
    _mlir_addp_cuda_init((void **)(&initArgs));
    CUTE_DSL_CUDA_ERROR_CHECK(ret);
    int32_t device_id = 0;
    struct {
        cudaLibrary_t **library;
        int32_t *device_id;
        cudaError_t *ret;
    } loadArgs = {&libraryPtr, &device_id, &ret};
    int32_t device_count;
    CUTE_DSL_CUDA_ERROR_CHECK(cudaGetDeviceCount(&device_count));
    for (int32_t i = 0; i < device_count; i++) {
        device_id = i;
        _mlir_addp_cuda_load_to_device((void **)(&loadArgs));
        CUTE_DSL_CUDA_ERROR_CHECK(ret);
    }
}

static inline void addp_Kernel_Module_Unload(addp_Kernel_Module_t *module) {
    CUTE_DSL_CUDA_ERROR_CHECK(cudaLibraryUnload(module->module));
}

#ifdef __cplusplus
}
#endif

typedef struct {
    void *data;
    int32_t dynamic_shapes[1];
} addp_Tensor_x_t;


typedef struct {
    void *data;
    int32_t dynamic_shapes[1];
} addp_Tensor_y_t;


typedef struct {
    void *data;
    int32_t dynamic_shapes[1];
} addp_Tensor_out_t;

#ifdef __cplusplus
extern "C"
#endif
void _mlir_addp__mlir_ciface_cutlass_add_function_FakeTensorFloat32div11_FakeTensorFloat32div11_FakeTensorFloat32div11(void **args, int32_t num_args);

static inline int32_t cute_dsl_addp_wrapper(addp_Kernel_Module_t *module, addp_Tensor_x_t *x, addp_Tensor_y_t *y, addp_Tensor_out_t *out) {
    int32_t ret = 0;
    void *args[4] = {
        x, y, out,
        &ret
    };
    _mlir_addp__mlir_ciface_cutlass_add_function_FakeTensorFloat32div11_FakeTensorFloat32div11_FakeTensorFloat32div11(args, 4);
    return ret;
}
