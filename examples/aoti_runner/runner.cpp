// A process without Python: loads a package of declared ops and a model that AOTInductor compiled,
// and runs the model on the GPU.
//
//   runner TORCH_CUBIN/_C.so FOLDER        (FOLDER is what export.py wrote)
//
// With TORCH_CUBIN_PACKAGES=FOLDER/ops in the environment the ops come with the library.
#include <ATen/Tensor.h>
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

// Loads torch_cubin, and the package unless the environment names it; returns the source of the
// ops. torch_cubin answers in JSON; an error is {"error": {"tag": ..., "message": ...}}.
std::string load_ops(const std::string& library, const std::string& package) {
  void* handle = dlopen(library.c_str(), RTLD_NOW | RTLD_GLOBAL);
  if (handle == nullptr) throw std::runtime_error(dlerror());
  const auto load =
      reinterpret_cast<char* (*)(const char*)>(dlsym(handle, "torch_cubin_load_package"));
  const auto failure = reinterpret_cast<char* (*)()>(dlsym(handle, "torch_cubin_packages_error"));
  const auto release = reinterpret_cast<void (*)(char*)>(dlsym(handle, "torch_cubin_free"));
  if (load == nullptr || failure == nullptr || release == nullptr) {
    throw std::runtime_error(library + " is not torch_cubin");
  }
  const bool named = std::getenv("TORCH_CUBIN_PACKAGES") != nullptr;  // loaded with the library
  char* answer = named ? failure() : load(package.c_str());
  const std::string text = answer;
  release(answer);
  if (text.rfind("{\"error\"", 0) == 0) throw std::runtime_error(text);
  return named ? "TORCH_CUBIN_PACKAGES" : package;
}

// Reads a file of torch.save.
at::Tensor load_tensor(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("cannot read " + path);
  return torch::jit::pickle_load({std::istreambuf_iterator<char>(file), {}}).toTensor();
}

bool python_is_loaded() {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    if (line.find("libpython") != std::string::npos) return true;
    if (line.find("libtorch_python") != std::string::npos) return true;
  }
  return false;
}

int run(const std::string& library, const std::string& folder) {
  std::printf("ops from %s\n", load_ops(library, folder + "/ops").c_str());
  torch::inductor::AOTIModelPackageLoader model(folder + "/model.pt2");
  const at::Tensor input = load_tensor(folder + "/input.pt").to(at::kCUDA);
  const at::Tensor expected = load_tensor(folder + "/expected.pt");
  const at::Tensor out = model.run({input}).at(0).cpu();
  const double difference = out.sub(expected).abs().max().item<double>();
  std::printf("largest difference from PyTorch: %g\n", difference);
  std::printf("Python in this process: %s\n", python_is_loaded() ? "yes" : "no");
  const bool right = difference <= 1e-4 * expected.abs().max().item<double>();  // also for NaN
  std::puts(right ? "right" : "WRONG");
  return right ? 0 : 1;
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 3) {
    std::fprintf(stderr, "usage: %s TORCH_CUBIN/_C.so FOLDER\n", arguments[0]);
    return 2;
  }
  try {
    return run(arguments[1], arguments[2]);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
