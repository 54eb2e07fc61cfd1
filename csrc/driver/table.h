// The CUDA driver functions that torch_cubin uses, each with the CUDA version of its ABI.
//
// cuGetProcAddress gets exactly this version, so that the pointer matches the type in cuda.h: a
// newer version could return a function with another signature.
#pragma once

// X(function, version as 1000 * major + 10 * minor)
#define TORCH_CUBIN_DRIVER_FUNCTIONS(X)                \
  X(cuInit, 2000)                                      \
  X(cuDriverGetVersion, 2020)                          \
  X(cuGetErrorName, 6000)                              \
  X(cuGetErrorString, 6000)                            \
  X(cuDeviceGet, 2000)                                 \
  X(cuDeviceGetCount, 2000)                            \
  X(cuDeviceGetName, 2000)                             \
  X(cuDeviceGetAttribute, 2000)                        \
  X(cuDevicePrimaryCtxRetain, 7000)                    \
  X(cuCtxGetCurrent, 4000)                             \
  X(cuCtxPushCurrent, 4000)                            \
  X(cuCtxPopCurrent, 4000)                             \
  X(cuCtxSetCurrent, 4000)                             \
  X(cuCtxGetDevice, 2000)                              \
  X(cuCtxSynchronize, 2000)                            \
  X(cuCtxGetStreamPriorityRange, 5050)                 \
  X(cuStreamIsCapturing, 10000)                        \
  X(cuStreamSynchronize, 2000)                         \
  X(cuStreamCreate, 2000)                              \
  X(cuStreamDestroy, 4000)                             \
  X(cuStreamGetId, 12000)                              \
  X(cuThreadExchangeStreamCaptureMode, 10010)          \
  X(cuUserObjectCreate, 11030)                         \
  X(cuUserObjectRelease, 11030)                        \
  X(cuGraphRetainUserObject, 11030)                    \
  X(cuMemAlloc, 3020)                                  \
  X(cuMemFree, 3020)                                   \
  X(cuMemcpyAsync, 4000)                               \
  X(cuMemsetD8Async, 3020)                             \
  X(cuPointerGetAttribute, 4000)                       \
  X(cuLibraryLoadData, 12000)                          \
  X(cuLibraryUnload, 12000)                            \
  X(cuLibraryGetKernel, 12000)                         \
  X(cuLibraryGetGlobal, 12000)                         \
  X(cuKernelGetFunction, 12000)                        \
  X(cuKernelGetAttribute, 12000)                       \
  X(cuKernelSetAttribute, 12000)                       \
  X(cuFuncGetAttribute, 2020)                          \
  X(cuOccupancyMaxActiveBlocksPerMultiprocessor, 6050) \
  X(cuOccupancyMaxActiveClusters, 11070)               \
  X(cuTensorMapEncodeTiled, 12000)                     \
  X(cuLaunchKernelEx, 11060)
