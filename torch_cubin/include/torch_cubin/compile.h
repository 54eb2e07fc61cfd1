// Compiles CUDA C++ at run time with NVRTC, which is opened at the first use. A program does not
// link NVRTC, and compiling needs no GPU.
//
//   Compiled scale = compile(source, {"sm_90a", {"scale<float>"}});    // or {}: this device's
//   scale["scale<float>"](grid(4), block(256), stream, x, 2.0f, n);
#pragma once

#include <dlfcn.h>
#include <torch_cubin/cubin.h>

#include <cstring>

#if !TORCH_CUBIN_EXCEPTIONS
#error "torch_cubin/compile.h needs exceptions"
#endif

namespace torch_cubin {
inline namespace v1 {

struct CompileOptions {
  std::string arch = "";                // "sm_90a"; "": that of the current device
  std::vector<std::string> names = {};  // template instances: "scale<float>"
  std::vector<std::string> options =
      {};                          // for NVRTC: "--use_fast_math", "-I/usr/local/cuda/include"
  std::string file = "source.cu";  // the source's name in the compiler's messages
};

// A module, with the symbols of the requested names.
class Compiled {
 public:
  Compiled(Module module, std::map<std::string, std::string> symbols, std::vector<char> image,
           std::string log)
      : module_(std::move(module)),
        symbols_(std::move(symbols)),
        image_(std::move(image)),
        log_(std::move(log)) {}

  // Finds a kernel by an expression of `names`, or by any name that Module accepts.
  Kernel operator[](const std::string& name) const {
    const auto found = symbols_.find(name);
    return module_[found == symbols_.end() ? name : found->second];
  }
  const Module& module() const { return module_; }
  const std::map<std::string, std::string>& symbols() const { return symbols_; }
  const std::vector<char>& image() const { return image_; }  // the cubin
  const std::string& log() const { return log_; }            // warnings

 private:
  Module module_;
  std::map<std::string, std::string> symbols_;
  std::vector<char> image_;
  std::string log_;
};

namespace detail {

// The functions used from NVRTC (nvrtc.h); a program is an opaque pointer.
struct Nvrtc {
  int (*nvrtcVersion)(int*, int*);
  int (*nvrtcCreateProgram)(void**, const char*, const char*, int, const char* const*,
                            const char* const*);
  int (*nvrtcDestroyProgram)(void**);
  int (*nvrtcAddNameExpression)(void*, const char*);
  int (*nvrtcCompileProgram)(void*, int, const char* const*);
  int (*nvrtcGetProgramLogSize)(void*, size_t*);
  int (*nvrtcGetProgramLog)(void*, char*);
  int (*nvrtcGetCUBINSize)(void*, size_t*);
  int (*nvrtcGetCUBIN)(void*, char*);
  int (*nvrtcGetLoweredName)(void*, const char*, const char**);
  const char* (*nvrtcGetErrorString)(int);
};

inline const Nvrtc& nvrtc() {
  static const Nvrtc found = [] {
    std::vector<std::string> names = {"libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"};
    const char* chosen = std::getenv("TORCH_CUBIN_NVRTC");
    if (chosen != nullptr && chosen[0] != '\0') names = {chosen};
    void* library = nullptr;
    std::string said;
    for (size_t i = 0; i < names.size() && library == nullptr; ++i) {
      library = dlopen(names[i].c_str(), RTLD_NOW | RTLD_LOCAL);
      const char* text = library == nullptr ? dlerror() : nullptr;
      if (text != nullptr && said.empty()) said = text;
    }
    if (library == nullptr) {
      throw make_error(
          "file", "NVRTC", "could not be opened", names.front(), said,
          "Install nvidia-cuda-nvrtc, and name the library's path in TORCH_CUBIN_NVRTC.");
    }
    Nvrtc made{};
    const auto resolve = [&](auto& function, const char* name) {
      void* symbol = dlsym(library, name);
      if (symbol == nullptr) throw make_error("file", "NVRTC", "is too old", name, "");
      std::memcpy(&function, &symbol, sizeof(symbol));
    };
#define TORCH_CUBIN_RESOLVE(name) resolve(made.name, #name)
    TORCH_CUBIN_RESOLVE(nvrtcVersion);
    TORCH_CUBIN_RESOLVE(nvrtcCreateProgram);
    TORCH_CUBIN_RESOLVE(nvrtcDestroyProgram);
    TORCH_CUBIN_RESOLVE(nvrtcAddNameExpression);
    TORCH_CUBIN_RESOLVE(nvrtcCompileProgram);
    TORCH_CUBIN_RESOLVE(nvrtcGetProgramLogSize);
    TORCH_CUBIN_RESOLVE(nvrtcGetProgramLog);
    TORCH_CUBIN_RESOLVE(nvrtcGetCUBINSize);
    TORCH_CUBIN_RESOLVE(nvrtcGetCUBIN);
    TORCH_CUBIN_RESOLVE(nvrtcGetLoweredName);
    TORCH_CUBIN_RESOLVE(nvrtcGetErrorString);
#undef TORCH_CUBIN_RESOLVE
    // In NVIDIA's wheels NVRTC has no search path for its builtins library.
    Dl_info info{};
    int major = 0, minor = 0;
    made.nvrtcVersion(&major, &minor);
    if (dladdr(reinterpret_cast<void*>(made.nvrtcVersion), &info) != 0) {
      const std::string own = info.dli_fname;
      const std::string builtins = own.substr(0, own.rfind('/') + 1) + "libnvrtc-builtins.so." +
                                   std::to_string(major) + "." + std::to_string(minor);
      dlopen(builtins.c_str(), RTLD_NOW | RTLD_GLOBAL);  // if it is missing, NVRTC reports it
    }
    return made;
  }();
  return found;
}

}  // namespace detail

// Throws [file] without NVRTC, and [input] with the compiler's log if the source does not compile.
inline Compiled compile(const std::string& source, const CompileOptions& options = {}) {
  const detail::Nvrtc& nvrtc = detail::nvrtc();
  std::string arch = options.arch;
  if (arch.empty()) {
    const int capability = device_info().capability;
    arch = "sm_" + std::to_string(capability) + (capability >= 90 ? "a" : "");
  }
  struct Program {
    const detail::Nvrtc& nvrtc;
    void* handle = nullptr;
    ~Program() {
      if (handle != nullptr) nvrtc.nvrtcDestroyProgram(&handle);
    }
  } program{nvrtc};
  const auto check = [&](int code, const char* what, const std::string& log = "") {
    if (code == 0) return;
    throw make_error("input", "the source '" + options.file + "'", "does not compile", what,
                     nvrtc.nvrtcGetErrorString(code), log);
  };
  check(nvrtc.nvrtcCreateProgram(&program.handle, source.c_str(), options.file.c_str(), 0, nullptr,
                                 nullptr),
        "a program");
  for (const std::string& name : options.names) {
    check(nvrtc.nvrtcAddNameExpression(program.handle, name.c_str()), name.c_str());
  }
  const std::string target = "--gpu-architecture=" + arch;
  std::vector<const char*> words = {target.c_str()};
  for (const std::string& word : options.options) words.push_back(word.c_str());
  const int done =
      nvrtc.nvrtcCompileProgram(program.handle, static_cast<int>(words.size()), words.data());
  size_t size = 0;
  nvrtc.nvrtcGetProgramLogSize(program.handle, &size);
  std::string log(size, '\0');
  if (size > 0) nvrtc.nvrtcGetProgramLog(program.handle, &log[0]);
  while (!log.empty() && (log.back() == '\0' || log.back() == '\n')) log.pop_back();
  check(done, ("code for " + arch).c_str(), "The compiler says:\n" + log);
  check(nvrtc.nvrtcGetCUBINSize(program.handle, &size), "a cubin");
  std::vector<char> image(size);
  check(nvrtc.nvrtcGetCUBIN(program.handle, image.data()), "a cubin");
  std::map<std::string, std::string> symbols;
  for (const std::string& name : options.names) {
    const char* symbol = nullptr;
    check(nvrtc.nvrtcGetLoweredName(program.handle, name.c_str(), &symbol), name.c_str());
    symbols[name] = symbol;
  }
  Module module = Module::from_memory(image, options.file.c_str());
  return Compiled(std::move(module), std::move(symbols), std::move(image), std::move(log));
}

}  // namespace v1
}  // namespace torch_cubin
