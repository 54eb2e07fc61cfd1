// 32 threads use everything at once for the first time, under ThreadSanitizer (run.py): images,
// driver, devices, modules, launches, declared ops; with a loader that is slow, and one that fails.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "cubin/error.h"
#include "cubin/inspect.h"
#include "declared/contract.h"
#include "package/user_images.h"
#include "pytorch/stream.h"
#include "runtime/device.h"
#include "runtime/launch.h"
#include "torch_shims.h"

namespace {

using namespace torch_cubin;

constexpr int kThreads = 32;
std::atomic<int> g_loads{0};
std::atomic<int> g_failures_left{0};

int slow_load() {
  ++g_loads;
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  int left = g_failures_left.load();
  while (left > 0 && !g_failures_left.compare_exchange_weak(left, left - 1)) {
  }
  return left > 0 ? 999 : 0;  // CUDA_ERROR_UNKNOWN
}

void require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "first_use: not so: %s\n", what);
  std::exit(1);
}

// Runs `work` in all threads at once; how many it threw in.
template <class Work>
int at_once(Work work) {
  std::atomic<int> waiting{kThreads}, errors{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&, i] {
      --waiting;
      while (waiting.load() > 0) std::this_thread::yield();
      try {
        work(i);
      } catch (const Error& error) {
        require(last_error() == error.what(), "each thread keeps the text of its own error");
        ++errors;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return errors;
}

void launch_vec_add(Module& module, int device, int64_t shared) {
  uint64_t address = 4096;
  int32_t count = 64;
  void* params[] = {&address, &address, &address, &count};
  torch_cubin_launch_call call{};
  call.size = sizeof(call);
  call.device = device;
  call.grid[0] = call.grid[1] = call.grid[2] = 1;
  call.block[0] = 64;
  call.block[1] = call.block[2] = 1;
  call.shared_memory = shared;
  call.params = params;
  launch(module.kernel("vec_add"), call, &current_stream);
}

std::unique_ptr<Module> fresh(const std::vector<uint8_t>& bytes) {
  return std::make_unique<Module>(images_of(bytes.data(), bytes.size(), "the image", false),
                                  "the image");
}

void call(const Contract& contract) {
  StableIValue stack[2];
  for (StableIValue& value : stack) {
    fuzz::FakeTensor* const tensor = fuzz::new_tensor();
    tensor->sizes = {64};
    tensor->strides = {1};
    tensor->data = reinterpret_cast<void*>((uint64_t{1} << 40) + 4096);
    value = torch::stable::detail::from(fuzz::handle_of(tensor));
  }
  contract.call(stack);
  aoti_torch_delete_tensor_object(torch::stable::detail::to<AtenTensorHandle>(stack[0]));
}

}  // namespace

int main(int count, char** paths) {
  require(count == 3, "first_use IMAGE CONTRACTS");
  std::ifstream file(paths[1], std::ios::binary);
  const std::vector<uint8_t> bytes{std::istreambuf_iterator<char>(file), {}};
  fuzz::declare_kernels(bytes);
  fuzz::set_load_hook(&slow_load);

  // Facts of the image, and errors about damaged ones.
  require(at_once([&](int i) {
            inspect_to_json(bytes.data(), bytes.size() - static_cast<size_t>(i % 2), "an image");
          }) == kThreads / 2,
          "half of the images were cut short");

  // The driver, two devices and a module: each opened once, whoever comes first.
  auto module = fresh(bytes);
  require(at_once([&](int i) { launch_vec_add(*module, i % 2, 1000 * i); }) == 0, "all launched");
  require(g_loads == 1, "one load, which serves both devices");
  require(fuzz::launches() == kThreads, "each launched once");

  // A loader that fails in one thread: that one sees the error, the others go on.
  auto failing = fresh(bytes);
  g_failures_left = 1;
  require(at_once([&](int) { launch_vec_add(*failing, 0, 0); }) == 1, "one saw the error");
  g_failures_left = kThreads;
  auto always = fresh(bytes);
  require(at_once([&](int) { launch_vec_add(*always, 0, 0); }) == kThreads, "all saw the error");
  g_failures_left = 0;
  launch_vec_add(*always, 0, 0);  // a failure is not kept

  // A declared op: its first call in all threads, and definitions beside calls.
  ContractImages images;
  images.add(bytes, "an image");
  std::ifstream text(paths[2]);
  const nlohmann::json contracts = nlohmann::json::parse(text);
  const Contract contract(contracts[0], images);
  const int64_t before = fuzz::launches();
  require(at_once([&](int i) {
            for (int j = 0; j < 20; ++j) call(contract);
            if (i % 4 != 0) return;
            ContractImages own;
            own.add(bytes, "an image");
            call(Contract(contracts[0], own));
          }) == 0,
          "all calls went through");
  require(fuzz::launches() - before == 20 * kThreads + kThreads / 4, "each call launched");
  require(fuzz::objects_alive() == 0, "no tensor is left");

  // Launches against unload().
  auto closing = fresh(bytes);
  const int refused = at_once([&](int i) {
    for (int j = 0; j < 20; ++j) launch_vec_add(*closing, 0, 0);
    if (i == 0) closing->unload(false, &current_stream);
  });
  std::printf("first_use: %d threads, %lld launches, %d loads, %d refused after unload()\n",
              kThreads, static_cast<long long>(fuzz::launches()), g_loads.load(), refused);
  return 0;
}
