// The baseline of bench_op.py for declared ops: the same op, vec_add of float32, written by hand
// for one kernel on PyTorch's stable ABI. It checks dtype, shape, layout and device, allocates the
// output and launches on the current stream; its error messages are short, as usual in such code.
#include <dlfcn.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device, void** stream);

namespace {

using torch::stable::Tensor;
using Load = int (*)(void**, const void*);
using Get = int (*)(void**, void*, const char*);
using Launch = int (*)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                       void*, void**, void**);

Launch launch;
void* function;

Tensor vec_add(Tensor x, Tensor y) {
  const auto device = x.get_device_index();
  STD_TORCH_CHECK(x.is_cuda() && y.is_cuda() && y.get_device_index() == device,
                  "x and y must be on one CUDA device");
  constexpr auto kFloat = torch::headeronly::ScalarType::Float;
  STD_TORCH_CHECK(x.scalar_type() == kFloat && y.scalar_type() == kFloat, "float32 is expected");
  STD_TORCH_CHECK(x.is_contiguous() && y.is_contiguous(), "x and y must be contiguous");
  const auto sizes = x.sizes(), others = y.sizes();
  STD_TORCH_CHECK(sizes.equals(others), "x and y must have the same shape");
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(x.dim(), sizes.data(), x.strides().data(),
                                                  static_cast<int32_t>(kFloat),
                                                  aoti_torch_device_type_cuda(), device, &handle));
  Tensor out(handle);
  int n = static_cast<int>(x.numel());
  if (n == 0) return out;
  const torch::stable::accelerator::DeviceGuard guard(device);
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  void *px = x.data_ptr(), *py = y.data_ptr(), *po = out.data_ptr();
  void* parameters[] = {&px, &py, &po, &n};
  const int code =
      launch(function, (n + 255) / 256, 1, 1, 256, 1, 1, 0, stream, parameters, nullptr);
  STD_TORCH_CHECK(code == 0, "cuLaunchKernel failed");
  return out;
}

}  // namespace

// Returns 0 or a CUresult. The context of the device must be current.
extern "C" int prepare(const void* image) {
  void* cuda = dlopen("libcuda.so.1", RTLD_NOW);
  if (cuda == nullptr) return -1;
  const auto load = reinterpret_cast<Load>(dlsym(cuda, "cuModuleLoadData"));
  const auto get = reinterpret_cast<Get>(dlsym(cuda, "cuModuleGetFunction"));
  launch = reinterpret_cast<Launch>(dlsym(cuda, "cuLaunchKernel"));
  if (load == nullptr || get == nullptr || launch == nullptr) return -2;
  void* module = nullptr;
  const int code = load(&module, image);
  return code != 0 ? code : get(&function, module, "vec_add");
}

STABLE_TORCH_LIBRARY(handwritten, m) { m.def("vec_add(Tensor x, Tensor y) -> Tensor"); }
STABLE_TORCH_LIBRARY_IMPL(handwritten, CUDA, m) { m.impl("vec_add", TORCH_BOX(&vec_add)); }
