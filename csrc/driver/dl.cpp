#include "driver/dl.h"

#include <dlfcn.h>

#if defined(__GLIBC__) && defined(__x86_64__)
__asm__(".symver dlopen,dlopen@GLIBC_2.2.5");
__asm__(".symver dlsym,dlsym@GLIBC_2.2.5");
__asm__(".symver dlerror,dlerror@GLIBC_2.2.5");
__asm__(".symver dladdr,dladdr@GLIBC_2.2.5");
#endif

namespace torch_cubin {

void* dl_loaded(const char* name) { return dlopen(name, RTLD_LAZY | RTLD_NOLOAD); }

void* dl_open(const char* name, std::string* error) {
  void* library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* text = dlerror();
    *error = text != nullptr ? text : "unknown error";
  }
  return library;
}

void* dl_symbol(void* library, const char* name) { return dlsym(library, name); }

std::string dl_path_of(const void* address) {
  Dl_info info{};
  if (dladdr(address, &info) == 0 || info.dli_fname == nullptr) return "";
  return info.dli_fname;
}

}  // namespace torch_cubin
