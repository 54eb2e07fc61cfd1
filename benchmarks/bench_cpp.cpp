// Host cost of a launch of three pointers and an int from C++, in nanoseconds: torch_cubin/cubin.h,
// a bare cuLaunchKernel loop and, compiled with -DWITH_TVM_FFI, tvm-ffi's CubinKernel, one process.
//
//   bench_cpp CUBIN [ROUNDS]        (bench_cpp.py compiles and runs it)
//
// Blocks of 256 launches are submitted without waiting, few enough that the driver's queue does not
// fill. Contenders are interleaved, in another order in every round; printed are medians over the
// rounds, and medians of the per-round differences to the bare loop.
#include <dlfcn.h>
#include <torch_cubin/cubin.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <functional>
#include <iterator>
#include <random>

#ifdef WITH_TVM_FFI
#include <tvm/ffi/extra/cuda/cubin_launcher.h>
#endif

using namespace torch_cubin;

namespace {

constexpr int kLaunches = 256, kElements = 1024, kThreads = 256;

using Load = int (*)(void**, const void*);
using Get = int (*)(void**, void*, const char*);
using LaunchKernel = int (*)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                             unsigned, void*, void**, void**);
using StreamCreate = int (*)(void**, unsigned);

template <class T>
T driver_function(const char* name) {
  static void* library = dlopen("libcuda.so.1", RTLD_NOW);
  return reinterpret_cast<T>(dlsym(library, name));
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

double nanoseconds_of(const std::function<void()>& block) {
  const auto start = std::chrono::steady_clock::now();
  block();
  const auto end = std::chrono::steady_clock::now();
  return std::chrono::duration<double, std::nano>(end - start).count() / kLaunches;
}

}  // namespace

int main(int count, char** arguments) {
  if (count < 2) return 2;
  const int rounds = count > 2 ? std::atoi(arguments[2]) : 200;
  try {
    set_device(0);  // makes the primary context current, like cudaSetDevice
    std::printf("%s, one launch of vec_add(float*, float*, float*, int)\n", device_info().name);
    const std::string path = arguments[1];
    std::ifstream file(path, std::ios::binary);
    const std::vector<char> image{std::istreambuf_iterator<char>(file), {}};
    std::vector<float> ones(kElements, 1);
    Buffer<float> x(ones), y(ones), z(kElements);
    const auto to = [](const Buffer<float>& buffer) { return buffer.data(); };
    float *a = to(x), *b = to(y), *c = to(z);
    void* stream = nullptr;
    driver_function<StreamCreate>("cuStreamCreate")(&stream, 1);
    const Stream ours(static_cast<CUstream_st*>(stream));

    void *module = nullptr, *function = nullptr;
    driver_function<Load>("cuModuleLoadData")(&module, image.data());
    driver_function<Get>("cuModuleGetFunction")(&function, module, "vec_add");
    const auto launch_kernel = driver_function<LaunchKernel>("cuLaunchKernel");
    int n = kElements;
    const Kernel forever = Module::from_file(path, Module::kForever)["vec_add"];
    const Kernel unloadable = Module::from_file(path)["vec_add"];
    const auto typed = Module::from_file(path, Module::kForever)
                           .kernel<void(const float*, const float*, float*, int)>("vec_add");

    std::vector<std::pair<const char*, std::function<void()>>> contenders;
    contenders.emplace_back("bare cuLaunchKernel", [&] {
      for (int i = 0; i < kLaunches; ++i) {
        void* params[] = {&a, &b, &c, &n};
        launch_kernel(function, kElements / kThreads, 1, 1, kThreads, 1, 1, 0, stream, params,
                      nullptr);
      }
    });
    contenders.emplace_back("embedded(x)[...], never unloaded", [&] {
      for (int i = 0; i < kLaunches; ++i) {
        forever(grid(kElements / kThreads), block(kThreads), ours, a, b, c, n);
      }
    });
    contenders.emplace_back("the same, with a signature", [&] {
      for (int i = 0; i < kLaunches; ++i) {
        typed(grid(kElements / kThreads), block(kThreads), ours, a, b, c, n);
      }
    });
    contenders.emplace_back("Module::from_file(...)[...]", [&] {
      for (int i = 0; i < kLaunches; ++i) {
        unloadable(grid(kElements / kThreads), block(kThreads), ours, a, b, c, n);
      }
    });
#ifdef WITH_TVM_FFI
    tvm::ffi::CubinModule theirs(image.data());
    tvm::ffi::CubinKernel kernel = theirs["vec_add"];
    contenders.emplace_back("tvm-ffi CubinKernel", [&] {
      for (int i = 0; i < kLaunches; ++i) {
        void* params[] = {&a, &b, &c, &n};
        const auto done =
            kernel.Launch(params, tvm::ffi::dim3(kElements / kThreads), tvm::ffi::dim3(kThreads),
                          static_cast<cudaStream_t>(stream));
        TVM_FFI_CHECK_CUBIN_LAUNCHER_CUDA_ERROR(done);
      }
    });
#endif
    std::vector<std::vector<double>> times(contenders.size());
    std::vector<size_t> order(contenders.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = i;
    std::mt19937 random(0);
    for (int round = 0; round < rounds + 10; ++round) {
      std::shuffle(order.begin(), order.end(), random);
      std::vector<double> now(contenders.size());
      for (const size_t i : order) {
        now[i] = nanoseconds_of(contenders[i].second);
        synchronize(ours);
      }
      if (round < 10) continue;
      for (size_t i = 0; i < now.size(); ++i) times[i].push_back(now[i]);
    }
    if (z.to_vector(ours)[kElements - 1] != 2) throw std::runtime_error("a wrong number");
    std::printf("%-36s %8s %10s\n", "", "ns", "over bare");
    for (size_t i = 0; i < contenders.size(); ++i) {
      std::vector<double> over;
      for (size_t j = 0; j < times[i].size(); ++j) over.push_back(times[i][j] - times[0][j]);
      std::printf("%-36s %8.0f %+10.0f\n", contenders[i].first, median(times[i]), median(over));
    }
    return 0;
  } catch (const std::exception& error) {
    std::printf("%s\n", error.what());
    return 1;
  }
}
