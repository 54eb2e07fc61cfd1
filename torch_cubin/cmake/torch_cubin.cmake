# Cubins, or a whole package, inside a target of your own (embed.py, beside this file):
#
#   find_package(Python COMPONENTS Interpreter REQUIRED)
#   execute_process(COMMAND ${Python_EXECUTABLE} -m torch_cubin cmake-dir
#                   OUTPUT_VARIABLE torch_cubin_DIR OUTPUT_STRIP_TRAILING_WHITESPACE)
#   include(${torch_cubin_DIR}/torch_cubin.cmake)      # or find_package(torch_cubin), for cubin.h
#
#   torch_cubin_embed(mine NAME my_cubin FILES vec_add.cubin)       # TORCH_CUBIN_EMBED(my_cubin)
#   torch_cubin_embed(mine FILES vec_add.sm_80.cubin vec_add.sm_90a.cubin)
#   torch_cubin_embed(mine PACKAGE kernels)
#
# The target is a library or a program, in C or C++; what it is linked into is then what
# torch_cubin.load or load_package is given. The files may be products of the build. Neither nvcc
# nor CUDA is needed.

set(_torch_cubin_embed "${CMAKE_CURRENT_LIST_DIR}/embed.py")

function(torch_cubin_embed target)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "PACKAGE;NAME" "FILES")
  if(arg_UNPARSED_ARGUMENTS OR NOT TARGET ${target} OR
     (DEFINED arg_PACKAGE AND DEFINED arg_FILES) OR NOT (arg_PACKAGE OR arg_FILES))
    message(FATAL_ERROR "torch_cubin_embed: expected TARGET [NAME name] FILES file... or PACKAGE folder, "
                        "got: ${ARGV}")
  endif()
  if(NOT Python_EXECUTABLE)
    find_package(Python COMPONENTS Interpreter REQUIRED)
  endif()

  set(inputs)
  foreach(file IN LISTS arg_FILES)
    get_filename_component(file "${file}" ABSOLUTE BASE_DIR "${CMAKE_CURRENT_SOURCE_DIR}")
    list(APPEND inputs "${file}")
  endforeach()
  set(arguments ${inputs})
  if(arg_PACKAGE)
    get_filename_component(folder "${arg_PACKAGE}" ABSOLUTE BASE_DIR "${CMAKE_CURRENT_SOURCE_DIR}")
    file(GLOB_RECURSE inputs CONFIGURE_DEPENDS "${folder}/*")
    set(arguments --package "${folder}")
  endif()

  if(arg_NAME)
    set(name "${arg_NAME}")
  else()
    string(SHA256 name "${arguments}")
    string(SUBSTRING "${name}" 0 16 name)
  endif()
  get_property(languages GLOBAL PROPERTY ENABLED_LANGUAGES)
  set(suffix cpp)
  if(C IN_LIST languages)
    set(suffix c)
  endif()
  set(unit "${CMAKE_CURRENT_BINARY_DIR}/torch_cubin/${target}_${name}.${suffix}")
  add_custom_command(
    OUTPUT "${unit}"
    # -I: torch_cubin's own modules must not hide Python's.
    COMMAND "${Python_EXECUTABLE}" -I "${_torch_cubin_embed}" --output "${unit}"
            --symbol torch_cubin_embedded_${name} ${arguments}
    DEPENDS ${inputs} "${_torch_cubin_embed}"
    COMMENT "Embedding device code into ${target}"
    VERBATIM)
  target_sources(${target} PRIVATE "${unit}")

  # Nothing refers to the files: a linker would leave the unit in a static library, and drop it from
  # a program under --gc-sections.
  get_target_property(type ${target} TYPE)
  if(type MATCHES "STATIC|OBJECT")
    set(scope INTERFACE)
  else()
    set(scope PRIVATE)
  endif()
  target_link_options(${target} ${scope} "LINKER:-u,torch_cubin_embedded_${name}")
endfunction()
