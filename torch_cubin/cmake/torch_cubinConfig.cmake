# find_package(torch_cubin [COMPONENTS torch]), with torch_cubin_DIR from
# `python -m torch_cubin cmake-dir`:
#
#   torch_cubin::torch_cubin   cubin.h and the shared library; it needs neither PyTorch nor CUDA
#   torch_cubin::static        the same, linked into the target
#   torch_cubin::torch         torch.h, with the PyTorch of Python_EXECUTABLE (component torch)
#   torch_cubin_embed(...)     device code inside a target (torch_cubin.cmake)

include("${CMAKE_CURRENT_LIST_DIR}/torch_cubin.cmake")
get_filename_component(_torch_cubin_root "${CMAKE_CURRENT_LIST_DIR}/.." ABSOLUTE)

if(NOT TARGET torch_cubin::torch_cubin)
  add_library(torch_cubin::torch_cubin SHARED IMPORTED)
  set_target_properties(torch_cubin::torch_cubin PROPERTIES
    IMPORTED_LOCATION "${_torch_cubin_root}/lib/libtorch_cubin.so"
    IMPORTED_SONAME libtorch_cubin.so
    INTERFACE_INCLUDE_DIRECTORIES "${_torch_cubin_root}/include"
    INTERFACE_COMPILE_FEATURES cxx_std_17)
  add_library(torch_cubin::static STATIC IMPORTED)
  set_target_properties(torch_cubin::static PROPERTIES
    IMPORTED_LOCATION "${_torch_cubin_root}/lib/libtorch_cubin.a"
    INTERFACE_INCLUDE_DIRECTORIES "${_torch_cubin_root}/include"
    INTERFACE_COMPILE_FEATURES cxx_std_17
    INTERFACE_LINK_LIBRARIES "${CMAKE_DL_LIBS};pthread")
endif()

if("torch" IN_LIST torch_cubin_FIND_COMPONENTS AND NOT TARGET torch_cubin::torch)
  if(NOT Python_EXECUTABLE)
    find_package(Python COMPONENTS Interpreter REQUIRED)
  endif()
  # Not find_package(Torch): a CUDA build of PyTorch asks there for a CUDA toolkit, which is not
  # needed.
  execute_process(
    COMMAND "${Python_EXECUTABLE}" -c
            "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])"
    OUTPUT_VARIABLE _torch_cubin_torch OUTPUT_STRIP_TRAILING_WHITESPACE
    RESULT_VARIABLE _torch_cubin_failed)
  if(_torch_cubin_failed)
    set(torch_cubin_NOT_FOUND_MESSAGE "${Python_EXECUTABLE} has no torch")
    set(torch_cubin_FOUND FALSE)
    return()
  endif()
  add_library(torch_cubin::torch INTERFACE IMPORTED)
  # CUDA builds register their kernels from libtorch_cuda, to which nothing refers by name.
  set(_torch_cubin_cuda)
  if(EXISTS "${_torch_cubin_torch}/lib/libtorch_cuda.so")
    set(_torch_cubin_cuda "-Wl,--no-as-needed,${_torch_cubin_torch}/lib/libtorch_cuda.so,--as-needed")
  endif()
  set_target_properties(torch_cubin::torch PROPERTIES
    INTERFACE_INCLUDE_DIRECTORIES
      "${_torch_cubin_root}/include;${_torch_cubin_torch}/include;${_torch_cubin_torch}/include/torch/csrc/api/include"
    INTERFACE_COMPILE_FEATURES cxx_std_20
    INTERFACE_COMPILE_DEFINITIONS "TORCH_TARGET_VERSION=0x020b000000000000;TORCH_CUBIN_OPS_LIBRARY=\"${_torch_cubin_root}/_C.so\""
    INTERFACE_LINK_LIBRARIES
      "torch_cubin::static;${_torch_cubin_torch}/lib/libtorch_cpu.so;${_torch_cubin_torch}/lib/libc10.so;${_torch_cubin_cuda}")
endif()

set(torch_cubin_FOUND TRUE)
