// cubin.h on a GPU, or on two: what the stand-in driver cannot show.
//
//   check_gpu FOLDER        (tests/data)
//
// Run by tests/gpu/test_cuda_cpp.py.
#include <dlfcn.h>
#include <torch_cubin/cubin.h>

#include <cstdio>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

using namespace torch_cubin;

namespace {

int g_failures = 0;

#define CHECK(condition)                                           \
  do {                                                             \
    if (!(condition)) {                                            \
      std::printf("line %d: %s is false\n", __LINE__, #condition); \
      ++g_failures;                                                \
    }                                                              \
  } while (false)

#define REFUSED(name, ...)                                                             \
  do {                                                                                 \
    try {                                                                              \
      __VA_ARGS__;                                                                     \
      std::printf("line %d: no error\n", __LINE__);                                    \
      ++g_failures;                                                                    \
    } catch (const Error& error) {                                                     \
      if (std::string(error.tag()) != name) {                                          \
        std::printf("line %d: expected [%s], got %s\n", __LINE__, name, error.what()); \
        ++g_failures;                                                                  \
      }                                                                                \
    }                                                                                  \
  } while (false)

struct Scale {
  float factor;
  int32_t offset;
  double shift;
  int8_t sign;
};

template <class Function>
Function* driver_function(const char* name) {
  static void* library = dlopen("libcuda.so.1", RTLD_NOW);
  return reinterpret_cast<Function*>(dlsym(library, name));
}

std::vector<float> counted(size_t count) {
  std::vector<float> made(count);
  std::iota(made.begin(), made.end(), 1.0f);
  return made;
}

// Every kind of argument and launch, on the thread's current device.
void one_device(const Module& module) {
  constexpr int n = 1000;
  Buffer<float> x(counted(n)), y(counted(n)), z(n);
  module["vec_add"](grid(4), block(256), nullptr, x, y, z, n);
  CHECK(z.to_vector()[999] == 2000);

  module["scale"](grid(4), block(256), nullptr, Scale{2.0f, -3, 0.5, -1}, x, z, n);
  CHECK(z.to_vector()[9] == -(10 * 2.0f - 3 + 0.5f));

  Buffer<int64_t> echoed(11);
  module["echo"](grid(1), block(1), nullptr, true, int8_t{-5}, uint8_t{250}, int16_t{-300},
                 uint16_t{40000}, -7, 4000000000u, 1.5f, int64_t{-9}, 2.5, x.data(), echoed);
  const auto bits = echoed.to_vector();
  CHECK(bits[0] == 1 && bits[1] == -5 && bits[2] == 250 && bits[3] == -300 && bits[4] == 40000);
  CHECK(bits[5] == -7 && bits[6] == 4000000000 && bits[7] == 0x3fc00000 && bits[8] == -9);
  CHECK(bits[9] == 0x4004000000000000 && bits[10] == reinterpret_cast<int64_t>(x.data()));

  const Global<float[4]> table = module.global<float[4]>("table");
  table.set({1, 2, 3, 4});
  const Global<int> counter = module.global<int>("counter");
  counter.set(0);
  module["use_globals"](grid(1), block(8), nullptr, z);
  CHECK(z.to_vector()[6] == 3);
  int counted_threads = 0;
  counter.get(counted_threads);
  CHECK(counted_threads == 8);

  // More than 48 KB of shared memory.
  constexpr int many = 25000;
  Buffer<float> long_x(counted(many)), long_z(many);
  module["reverse"](launch(grid(1), block(256)).shared_memory(many * 4), long_x, long_z, many);
  CHECK(long_z.to_vector()[0] == many && long_z.to_vector()[many - 1] == 1);
  REFUSED("launch", module["reverse"](grid(1), block(256), nullptr, x, z, n));

  const torch_cubin_v1_device device = device_info();
  const int blocks = device.multiprocessors;
  Buffer<int> arrived(std::vector<int>{0}), parts(static_cast<size_t>(blocks)),
      sums(static_cast<size_t>(blocks));
  Kernel grid_sum = module["grid_sum"];
  CHECK(grid_sum.occupancy(launch(grid(1), block(32))) >= 1);
  grid_sum(launch(grid(blocks), block(32)).cooperative(), arrived, parts, sums);
  CHECK(sums.to_vector()[static_cast<size_t>(blocks) - 1] == blocks * (blocks + 1) / 2);
  REFUSED("launch", grid_sum(launch(grid(1000000), block(32)).cooperative(), arrived, parts, sums));

  const auto attributes = module["vec_add"].attributes();
  CHECK(attributes.max_threads == 1024 && attributes.registers > 0);
  CHECK(attributes.binary_version == 90 && attributes.max_dynamic_shared > 200000);

  if (device.capability >= 90) {
    Buffer<int> ranks(8);
    module["cluster_ranks"](launch(grid(8), block(32)).cluster(4).dependent(), ranks);
    CHECK(ranks.to_vector()[7] == 403);
    module["cluster_of_two"](grid(8), block(32), nullptr, ranks);
    CHECK(ranks.to_vector()[7] == 201);
    Buffer<float> matrix(counted(64 * 32)), box(8 * 16);
    const TensorMap map =
        TensorMap::tiled(matrix.data(), MapType::kFloat32, {{32, 16}, {64, 8, 32 * sizeof(float)}});
    module["tma_box"](grid(1), block(32), nullptr, map, 5, 8, 8 * 16, box);
    CHECK(box.to_vector()[0] == 5 * 32 + 8 + 1 && box.to_vector()[16] == 6 * 32 + 8 + 1);
  }
}

// A kernel that a graph has captured keeps its module loaded.
void captured(const Module& module) {
  set_device(0);  // a stream is of the thread's context
  CUstream_st* stream = nullptr;
  void *graph = nullptr, *runnable = nullptr;
  CHECK(driver_function<int(CUstream_st**, unsigned)>("cuStreamCreate")(&stream, 1) == 0);
  Buffer<float> x(counted(256)), z(256);
  Kernel add = module["vec_add"];
  add(grid(1), block(256), stream, x, x, z, 256);
  synchronize(stream);
  driver_function<int(CUstream_st*, int)>("cuStreamBeginCapture_v2")(stream, 2);
  add(grid(1), block(256), stream, z, x, z, 256);
  driver_function<int(CUstream_st*, void**)>("cuStreamEndCapture")(stream, &graph);
  CHECK(driver_function<int(void**, void*, unsigned long long)>("cuGraphInstantiateWithFlags")(
            &runnable, graph, 0) == 0);
  CHECK(!module.unload());
  REFUSED("closed", add(grid(1), block(256), stream, x, x, z, 256));
  for (int i = 0; i < 2; ++i) {
    CHECK(driver_function<int(void*, CUstream_st*)>("cuGraphLaunch")(runnable, stream) == 0);
  }
  CHECK(z.to_vector(stream)[9] == 4 * 10);
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 2) return 2;
  const std::string path = std::string(arguments[1]) + "/launch.sm_90a.cuda130.cubin";
  try {
    const Module module = Module::from_file(path);
    std::vector<std::thread> threads;
    one_device(module);  // a thread without a context
    for (int device = 0; device < device_count(); ++device) {
      threads.emplace_back([&module, device] {
        try {
          set_device(device);
          for (int i = 0; i < 5; ++i) one_device(module);
        } catch (const std::exception& error) {
          std::printf("cuda:%d: %s\n", device, error.what());
          ++g_failures;
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    if (device_count() > 1) {
      Buffer<float> there(counted(256), 1), sum(256, 1);
      module["vec_add"](launch(grid(1), block(256)).device(1), there, there, sum, 256);
      CHECK(sum.to_vector()[255] == 512);
    }
    CHECK(module.unload());
    REFUSED("closed", one_device(module));
    captured(Module::from_file(path));
  } catch (const std::exception& error) {
    std::printf("unexpected: %s\n", error.what());
    return 1;
  }
  std::printf("%d GPUs: %s\n", device_count(), g_failures == 0 ? "right" : "WRONG");
  return g_failures == 0 ? 0 : 1;
}
