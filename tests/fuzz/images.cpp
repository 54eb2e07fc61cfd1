// Cubins and PTX: what parse_cubin and parse_ptx promise of everything that they accept.
#include "cubin/image.h"
#include "cubin/inspect.h"
#include "cubin/ptx.h"
#include "cubin/sha256.h"
#include "elf_mutator.h"
#include "target.h"

namespace fuzz {
namespace {

void check_image(const torch_cubin::Image& image, size_t size) {
  require(image.size == size && image.arch.sm >= 20 && image.arch.sm <= 255);
  for (size_t i = 0; i < image.kernels.size(); ++i) {
    const torch_cubin::KernelInfo& kernel = image.kernels[i];
    require(!kernel.name.empty() && (i == 0 || image.kernels[i - 1].name < kernel.name));
    uint32_t end = 0;
    for (size_t j = 0; j < kernel.params.size(); ++j) {
      require(kernel.params[j].index == j && kernel.params[j].offset >= end);
      end = kernel.params[j].offset + kernel.params[j].size;
    }
    require(end == kernel.param_bytes);
    require(&image.kernel(kernel.name) == &kernel);
  }
}

void run_cubin(const uint8_t* data, size_t size) {
  accepts({"image"}, [&] {
    const torch_cubin::Image image = torch_cubin::parse_cubin(data, size, "the input");
    check_image(image, size);
    torch_cubin::image_to_json(image);
    require(!accepts({"no_kernel"}, [&] { image.kernel("no such kernel"); }));
  });
}

void run_ptx(const uint8_t* data, size_t size) {
  accepts({"image"}, [&] {
    const torch_cubin::Ptx ptx = torch_cubin::parse_ptx(data, size, "the input");
    require(ptx.size <= size && !ptx.version.empty());
    for (const torch_cubin::PtxKernel& kernel : ptx.kernels) {
      require(!kernel.name.empty());
      for (size_t i = 0; i < kernel.params.size(); ++i) require(kernel.params[i].index == i);
    }
  });
}

void run_inspect(const uint8_t* data, size_t size) {
  accepts({"image", "hash"}, [&] { torch_cubin::inspect_to_json(data, size, "the input"); });
}

const Register kCubin({"cubin", run_cubin, mutate_elf});
const Register kPtx({"ptx", run_ptx, nullptr});
const Register kInspect({"inspect", run_inspect, mutate_elf});

}  // namespace
}  // namespace fuzz
