// All forms of embedding an image in a program, without a driver: their bytes must be equal.
// Compiled by tests/faults/test_cpp.py, which writes xxd.h, words.h and list.h.
#include <torch_cubin/cubin.h>

#include <cstdio>
#include <string>
#include <vector>

#include "words.h"  // bin2c --type longlong: const uint64_t words[]
#include "xxd.h"    // unsigned char several_cubin[], unsigned int several_cubin_len

TORCH_CUBIN_EMBED(by_embed);                     // torch_cubin.embed --name
TORCH_CUBIN_INCBIN(by_incbin, "several.cubin");  // .incbin
TORCH_CUBIN_BINARY(by_binary, several_cubin);    // ld -r -b binary
static const unsigned char by_list[] = {
#ifdef __has_embed
#embed "several.cubin"
#else
#include "list.h"  // such a list as #embed gives
#endif
};
extern "C" const unsigned char other_cubin[];   // an array of another file: no size is known
extern "C" const unsigned int other_cubin_len;  // TensorRT-LLM's form

using namespace torch_cubin;

int main() {
  try {
    const std::vector<std::string> names = Module::from_file("several.cubin").kernel_names();
    const std::vector<std::pair<const char*, Module>> modules = {
        {"TORCH_CUBIN_EMBED", Module::embedded(by_embed)},
        {"TORCH_CUBIN_EMBED by name", Module::embedded("by_embed")},
        {"TORCH_CUBIN_INCBIN", embedded(by_incbin)},
        {"TORCH_CUBIN_BINARY", embedded("by_binary")},
        {"xxd -i", Module::from_memory(several_cubin, several_cubin_len)},
        {"bin2c", Module::from_memory(words)},
#ifdef __has_embed
        {"#embed", Module::from_memory(by_list)},
#else
        {"a list of bytes", Module::from_memory(by_list)},
#endif
        {"pointer and length", Module::from_memory(other_cubin, other_cubin_len)},
        {"pointer alone", Module::from_memory(static_cast<const void*>(other_cubin))},
        {"source file", Module::from_file("xxd.h")},
    };
    for (const auto& [name, module] : modules) {
      std::printf("%s: %s\n", name, module.kernel_names() == names ? "right" : "WRONG");
    }
    // Two architectures under one name.
    std::printf("%s\n", std::string(Module::embedded("by_embed")["vec_add"].name()).c_str());
    return 0;
  } catch (const Error& error) {
    std::printf("%s\n", error.what());
    return 1;
  }
}
