// cubin.h on the stand-in driver: every call, every kind of bad input, nothing left over.
//
//   check_cubin FOLDER        (tests/data)
//
// Run by tests/faults/test_cpp.py, compiled with AddressSanitizer; prints the failed checks.
// Over 500 lines: one program, because each costs a compilation with AddressSanitizer.
#include <dlfcn.h>
#include <sys/mman.h>
#include <torch_cubin/cubin.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
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

void check_error(const Error& error, const std::string& tag, const std::string& part, int line) {
  if (error.tag() == tag && std::string(error.what()).find(part) != std::string::npos &&
      std::string(error.what()).find("torch_cubin [" + tag + "]: ") != std::string::npos) {
    return;
  }
  std::printf("line %d: expected [%s] ... %s, got %s\n", line, tag.c_str(), part.c_str(),
              error.what());
  ++g_failures;
}

#define REFUSED(tag, part, ...)                     \
  do {                                              \
    try {                                           \
      __VA_ARGS__;                                  \
      std::printf("line %d: no error\n", __LINE__); \
      ++g_failures;                                 \
    } catch (const Error& error) {                  \
      check_error(error, tag, part, __LINE__);      \
    }                                               \
  } while (false)

template <class Function>
Function* fake(const char* name) {
  static void* library = dlopen("libcuda.so.1", RTLD_NOW);
  return reinterpret_cast<Function*>(dlsym(library, name));
}

std::string g_folder;

std::vector<unsigned char> bytes_of(const std::string& name) {
  std::ifstream file(g_folder + "/" + name, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// Bytes that end at the beginning of unreadable memory.
struct Pages {
  explicit Pages(const std::vector<unsigned char>& bytes) {
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    const size_t size = (bytes.size() + page - 1) / page * page;
    whole = size + page;
    start = static_cast<unsigned char*>(
        mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    mprotect(start + size, page, PROT_NONE);
    image = start + size - bytes.size();
    std::memcpy(start + size - bytes.size(), bytes.data(), bytes.size());
  }
  ~Pages() { munmap(start, whole); }
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;
  unsigned char* start;
  unsigned char* image;
  size_t whole;
};

const char kSeveral[] = "several.sm_90a.cuda130.cubin";

Module several() {
  Module module = Module::from_file(g_folder + "/" + kSeveral);
  // A driver reads the sizes from the cubin.
  for (const std::string& name : module.kernel_names()) {
    std::vector<int> sizes;
    for (const Parameter& p : module[name].parameters()) sizes.push_back(static_cast<int>(p.size));
    fake<void(const char*, int, const int*)>("fake_declare")(
        name.c_str(), static_cast<int>(sizes.size()), sizes.data());
  }
  return module;
}

std::string last_launch() {
  const std::string all = fake<const char*()>("fake_launches")();
  return all.substr(all.rfind('\n') + 1);
}

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

struct Three {
  int a, b, c;
};
struct Wrong {
  char bytes[20];
};
enum class Word : int { kSeven = 7 };

void launches() {
  Module module = several();
  Kernel add = module["vec_add"];
  auto* a = reinterpret_cast<float*>(0x10000000000);
  const float* b = a + 1;
  auto* stream = reinterpret_cast<CUstream_st*>(0x5000);
  add(grid(4), block(256), stream, a, b, a, 1000);
  CHECK(has(last_launch(),
            "\"kernel\": \"vec_add\", \"grid\": [4, 1, 1], \"block\": [256, 1, 1], "
            "\"shared\": 0, \"stream\": 20480, \"device\": 0, \"attributes\": {}, "
            "\"params\": [\"0000000000010000\", \"0400000000010000\", "
            "\"0000000000010000\", \"e8030000\"]"));
  add(launch(grid(16, 2), block(32, 2, 2)).cluster(2, 2).shared_memory(100000).dependent(), a, b,
      nullptr, Word::kSeven);
  CHECK(has(last_launch(),
            "\"grid\": [16, 2, 1], \"block\": [32, 2, 2], \"shared\": 100000, "
            "\"stream\": 0, \"device\": 0"));
  CHECK(has(last_launch(), "\"4\": [2, 2, 1]"));  // CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
  CHECK(has(last_launch(), "\"6\": [1]"));        // programmatic stream serialization
  CHECK(has(last_launch(), "\"0000000000000000\", \"07000000\"]"));
  add(launch(grid(2), block(64)).cooperative().priority(-3), a, b, a, 1u);
  CHECK(has(last_launch(), "\"2\": [1]"));
  CHECK(has(last_launch(), "\"8\": [-3]"));
  struct {
    unsigned x = 3, y = 2, z = 1;
  } dims;  // as dim3
  add(grid(dims), block(dims), stream, a, b, a, 1);
  CHECK(has(last_launch(), "\"grid\": [3, 2, 1], \"block\": [3, 2, 1]"));

  TensorMap map =
      TensorMap::tiled(a, MapType::kFloat16, {{64, 32}, {8, 4, 128}}, {MapSwizzle::k64Bytes});
  module["structs"](grid(1), block(1), nullptr, 1, Three{5, 6, 7}, map, a);
  CHECK(has(last_launch(),
            "\"params\": [\"01000000\", \"050000000600000007000000\", \"00000000000"
            "1000006020002030000004000000000000000"));
  module["small"](grid(1), block(1), nullptr, true, 'x', short{3}, 1.5, '\0', a);
  CHECK(has(last_launch(), "\"01\", \"78\", \"0300\", \"000000000000f83f\", "));
  const auto typed = module.kernel<void(const float*, const float*, float*, int)>("vec_add");
  typed(grid(1), block(1), nullptr, a, b, a, int64_t{9});
  CHECK(has(last_launch(), "\"09000000\"]"));
  CHECK(module["fill"].name() == "_Z4fillIiEvPT_S0_");
  CHECK(module["fill<int>"].name() == module["void fill<int>(int*, int)"].name());
  CHECK(torch_cubin_v1_launches() == 7);
  const float* first = a;
  int n = 11;
  void* addresses[] = {&first, &first, &first, &n};
  add.launch_addresses(launch(grid(5), block(32)), addresses);
  CHECK(has(last_launch(), "\"grid\": [5, 1, 1], \"block\": [32, 1, 1]"));
  CHECK(has(last_launch(), "\"0b000000\"]"));
  add.launch_addresses(launch(grid(6), block(32)), static_cast<void**>(addresses), 4);
  CHECK(has(last_launch(), "\"grid\": [6, 1, 1]"));
  REFUSED("params", "vec_add", add.launch_addresses(launch(grid(1), block(1)), addresses, 3));
  CHECK(!add.try_launch_addresses(launch(grid(1), block(1)), addresses, 5));
  CHECK(torch_cubin_v1_launches() == 9);

  const auto attributes = add.attributes();
  CHECK(attributes.max_threads == 1024 && attributes.max_dynamic_shared == 232448);
  CHECK(add.occupancy(launch(grid(1), block(128))) == 2);
  CHECK(add.occupancy(launch(grid(1), block(128)).cluster(2)) == 60);
  CHECK(module["cluster"].occupancy(launch(grid(1), block(128))) == 60);
  CHECK(module["static_shared"].facts().max_block[0] == 128);
  module.preload();
  add.preload(0);
  fake<void(const char*, long)>("fake_global")("table", 64);
  Global<float[16]> table = module.global<float[16]>("table");
  float values[16] = {1, 2, 3}, read[16] = {};
  table.set(values);
  table.get(read);
  CHECK(read[2] == 3);
  REFUSED("params", "expected 64 bytes, got 4 bytes", module.global<float>("table"));
  REFUSED("no_kernel", "'tabel'", module.global<float>("tabel"));
  CHECK(module.unload());
}

void devices() {
  CHECK(device_count() == 2);
  CHECK(device_info(1).capability == 90 && device_info(1).multiprocessors == 132);
  Module module = several();
  Kernel add = module["vec_add"];
  float* none = nullptr;
  add(grid(1), block(1), nullptr, none, none, none, 1);
  CHECK(has(last_launch(), "\"device\": 0"));  // no context: the first
  for (int device : {1, 0, 1, 1}) {
    set_device(device);
    add(grid(1), block(1), nullptr, none, none, none, 1);
    CHECK(has(last_launch(), "\"device\": " + std::to_string(device)));
    add(launch(grid(1), block(1)).device(1 - device), none, none, none, 1);
    CHECK(has(last_launch(), "\"device\": " + std::to_string(1 - device)));
  }
  fake<void(long)>("fake_make_current")(0x2001);
  REFUSED("driver", "is not its device's primary one",
          add(grid(1), block(1), nullptr, none, none, none, 1));
  fake<void(long)>("fake_make_current")(0);
  REFUSED("no_device", "cuda:7", add(launch(grid(1), block(1)).device(7), none, none, none, 1));
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&, i] {
      set_device(i % 2);
      Kernel kernel = module["small"];
      for (int j = 0; j < 50; ++j) {
        kernel(grid(1), block(1), nullptr, true, 'x', short{3}, 1.5, '\0', none);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(module.unload());
}

void memory() {
  {
    Buffer<int> buffer(std::vector<int>{1, 2, 3});
    Buffer<int> moved = std::move(buffer);
    CHECK(moved.to_vector() == (std::vector<int>{1, 2, 3}));
    CHECK(fake<long()>("fake_memory_alive")() == 1);
    Module module = several();
    module["fill"](grid(1), block(1), nullptr, moved, 7);
    CHECK(module.unload());
  }
  CHECK(fake<long()>("fake_memory_alive")() == 0);
  REFUSED("oom", "cuMemAlloc", Buffer<char>(size_t{1} << 41));
}

void bad_arguments() {
  Module module = several();
  Kernel add = module["vec_add"];
  float* a = nullptr;
  REFUSED("params", "expected 4, got 3", add(grid(1), block(1), nullptr, a, a, a));
  REFUSED("params", "expected 4, got 5", add(grid(1), block(1), nullptr, a, a, a, 1, 2));
  REFUSED("params", "argument 3 of kernel 'vec_add' has another size",
          add(grid(1), block(1), nullptr, a, a, a, size_t{1}));
  REFUSED("params", "expected 8 bytes, got an integer of 4 bytes",
          add(grid(1), block(1), nullptr, 1, a, a, 1));
  REFUSED("params", "got a struct of 20 bytes",
          module["structs"](grid(1), block(1), nullptr, 1, Wrong{}, TensorMap(), a));
  REFUSED("params", "", (module.kernel<void(const float*, float)>("vec_add")));
  REFUSED("launch", "too many threads", add(grid(1), block(32, 64), nullptr, a, a, a, 1));
  REFUSED("launch", "no GPU runs", add(grid(1), block(1025), nullptr, a, a, a, 1));
  REFUSED("launch", "block (0, 1, 1)", add(grid(1), block(0, 1, 1), nullptr, a, a, a, 1));
  REFUSED("launch", "empty grid", add(grid(0), block(1), nullptr, a, a, a, 1));
  REFUSED("launch", "empty grid", add(grid(-5), block(1), nullptr, a, a, a, 1));
  REFUSED("launch", "too large a grid", add(grid(1, 70000), block(1), nullptr, a, a, a, 1));
  REFUSED("launch", "says no block", add(launch(grid(1)), a, a, a, 1));
  REFUSED("launch", "at most 128 threads",
          module["static_shared"](grid(1), block(129), nullptr, a));
  REFUSED("launch", "no whole number of clusters",
          module["cluster"](grid(3), block(1), nullptr, a));
  REFUSED("launch", "more shared memory",
          add(launch(grid(1), block(1)).shared_memory(232449), a, a, a, 1));
  REFUSED("launch", "out of range", add(launch(grid(1), block(1)).shared_memory(-1), a, a, a, 1));
  REFUSED("launch", "too large a cluster", add(launch(grid(64), block(1)).cluster(32), a, a, a, 1));
  REFUSED("launch", "is cooperative and does not fit",
          add(launch(grid(100000), block(1)).cooperative(), a, a, a, 1));
  REFUSED("launch", "priority", add(launch(grid(1), block(1)).priority(9), a, a, a, 1));
  REFUSED("launch", "occupancy", add.occupancy(launch(grid(1), block(2000))));
  REFUSED("input", "number of dims", TensorMap::tiled(a, MapType::kFloat32, {}));
  REFUSED("no_kernel", "expected 'vec_add'", module["vec_ad"]);
  REFUSED("no_kernel", "", module[""]);
  REFUSED("no_kernel", "", module[std::string(100000, 'x')]);
  // Names that are several kernels'.
  CHECK(module.unload());
  REFUSED("closed", "was unloaded", add(grid(1), block(1), nullptr, a, a, a, 1));
  REFUSED("closed", "was unloaded", module["vec_add"]);
  REFUSED("closed", "was unloaded", module.preload());
  REFUSED("closed", "was unloaded", add.attributes());
  // An old caller's struct, and flags of a newer one.
  torch_cubin_v1_launch_call call = launch(grid(1), block(1)).call();
  call.size = 8;
  torch_cubin_v1_kernel* handle = nullptr;
  torch_cubin_v1_module* opened = nullptr;
  const std::string path = g_folder + "/" + kSeveral;
  const char* paths[] = {path.c_str()};
  CHECK(torch_cubin_v1_module_open_files(paths, 1, 0, &opened) == nullptr);
  CHECK(torch_cubin_v1_module_kernel(opened, "no_params", 9, &handle) == nullptr);
  REFUSED("internal", "torch_cubin_v1_launch_call",
          detail::check(torch_cubin_v1_launch(handle, &call)));
  call.size = sizeof(call);
  call.flags = 1u << 20;
  REFUSED("internal", "flags", detail::check(torch_cubin_v1_launch(handle, &call)));
  torch_cubin_v1_module_release(opened);
  REFUSED("internal", "flags", Module::from_file(path, 1u << 20));
}

// A folder of Triton's cache: the notes beside the cubin say what the caller does not.
void triton_folder() {
  const std::string cache = g_folder + "/triton/cache_3.6.0_sm_90a";
  char name[] = "/tmp/check_cubin_XXXXXX";
  const std::string folder = mkdtemp(name);
  std::filesystem::copy(cache + "/add.cubin", folder);
  std::filesystem::copy(cache + "/add.json", folder);
  Module module = Module::from_file(folder);
  Kernel add = module["add"];
  CHECK(add.parameters().size() == 4);
  const int sizes[] = {8, 8, 8, 4, 8, 8};
  fake<void(const char*, int, const int*)>("fake_declare")("add", 6, sizes);
  auto* x = reinterpret_cast<float*>(0x10000000000);
  add(launch(grid(3)), x, x, x, 5);
  CHECK(has(last_launch(), "\"grid\": [3, 1, 1], \"block\": [128, 1, 1], \"shared\": 0"));
  CHECK(has(last_launch(), "\"05000000\", \"0000000000000000\", \"0000000000000000\"]"));
  add(launch(grid(1), block(128)).shared_memory(8192), x, x, x, 5);
  CHECK(has(last_launch(), "\"shared\": 8192"));
  CHECK(add.occupancy(launch(grid(1))) > 0);
  REFUSED("params", "expected 4, got 1", add(launch(grid(1)), x));
  REFUSED("params", "the last 2 parameters are hidden pointers",
          Module::from_file(folder + "/add.cubin")["add"](launch(grid(1)), x, x, x, 5));
  REFUSED("file", "add.cubin, copy_tile.cubin", Module::from_file(cache));
  REFUSED("file", "holds no kernel", Module::from_file(g_folder + "/triton"));
  {
    std::ofstream notes(folder + "/add.json");
    notes << R"({"name": "add", "num_warps": 4, "shared": 512, "launch_pdl": true,
                 "global_scratch_size": 0, "profile_scratch_size": 0})";
  }
  Module::from_file(folder)["add"](launch(grid(1)), x, x, x, 5);
  CHECK(has(last_launch(), "\"shared\": 512"));
  CHECK(has(last_launch(), "\"6\": [1]"));  // programmatic stream serialization
  std::filesystem::remove_all(folder);
}

void bad_images() {
  REFUSED("file", "could not be read", Module::from_file("/nowhere/x.cubin"));
  REFUSED("file", "", Module::from_file(g_folder));
  REFUSED("image", "null pointer", Module::from_memory(nullptr, 10));
  REFUSED("image", "null pointer", Module::from_memory(static_cast<const void*>(nullptr)));
  REFUSED("image", "no image", Module::from_images({}));
  REFUSED("image", "no image", Module::from_files({}));
  REFUSED("image", "", Module::from_memory("text that is nothing", 20, "mine"));
  REFUSED("image", "too large", Module::from_memory(&g_folder, uint64_t{1} << 40));
  const std::vector<unsigned char> whole = bytes_of(kSeveral);
  for (size_t size = 0; size < whole.size(); size += size < 128 ? 1 : 997) {
    // Exactly so many bytes: one read too far, and the sanitizer tells.
    const std::vector<unsigned char> part(whole.begin(), whole.begin() + static_cast<long>(size));
    REFUSED("image", "", Module::from_memory(part.data(), part.size()));
  }
  for (size_t i = 0; i < 64; ++i) {
    std::vector<unsigned char> damaged = whole;
    damaged[i] ^= 0xff;
    try {
      Module::from_memory(damaged).kernel_names();
    } catch (const Error& error) {
      CHECK(std::string(error.tag()) == "image");
    }
    // Without a size, with an arbitrary header: up to unreadable memory.
    const Pages pages(damaged);
    try {
      Module::from_memory(static_cast<const void*>(pages.image)).kernel_names();
    } catch (const Error& error) {
      CHECK(std::string(error.tag()) == "image");
    }
  }
  std::vector<unsigned char> longer = whole;
  longer[43] = 1;  // the section table lies 16 MB behind the start
  const Pages pages(longer);
  REFUSED("image", "reaches beyond the memory",
          Module::from_memory(static_cast<const void*>(pages.image)));
  REFUSED(
      "image", "neither PTX nor C source",
      Module::from_memory(static_cast<const void*>("nothing of the kind, whose end is unknown")));
  REFUSED("image", "PTX", Module::from_file(g_folder + "/pointers.ptx", Module::kNoPtx));
  Module elsewhere = Module::from_file(g_folder + "/vec_add.sm_120a.cuda130.cubin");
  float* a = nullptr;
  REFUSED("arch", "sm_120a", elsewhere["vec_add"](grid(1), block(1), nullptr, a, a, a, 1));
  REFUSED("image", "is embedded nowhere", Module::embedded("mine"));
  // Two files with different kernels of one name: the choice is ambiguous.
  const std::string other = g_folder + "/vec_add.sm_90a.cuda124.cubin";
  Module both = Module::from_files({g_folder + "/" + kSeveral, other});
  REFUSED("image", "is in two of the files", both["vec_add"]);
  CHECK(both["no_params"].name() == "no_params");
  Module twice = Module::from_files({other, other});
  CHECK(twice["vec_add"].name() == "vec_add");
}

void memory_images() {
  const std::vector<unsigned char> whole = bytes_of(kSeveral);
  const auto names = Module::from_file(g_folder + "/" + kSeveral).kernel_names();
  CHECK(names.size() == 8);
  CHECK(Module::from_memory(whole.data(), whole.size()).kernel_names() == names);
  CHECK(Module::from_memory(whole).kernel_names() == names);
  CHECK(Module::from_memory(static_cast<const void*>(whole.data())).kernel_names() == names);
  std::vector<uint64_t> words(whole.size() / 8 +
                              2);  // filled up with zeros, as arrays of words are
  std::memcpy(words.data(), whole.data(), whole.size());
  CHECK(Module::from_memory(words).kernel_names() == names);
  const auto ptx = bytes_of("pointers.ptx");
  const std::string text(ptx.begin(), ptx.end());
  CHECK(!Module::from_memory(text).kernel_names().empty());
  CHECK(!Module::from_memory(static_cast<const void*>(text.c_str())).kernel_names().empty());
  // Several architectures: the best one serves.
  const auto sm80 = bytes_of("vec_add.sm_80.cuda118.cubin");
  const auto sm90 = bytes_of("vec_add.sm_90a.cuda124.cubin");
  Module both =
      Module::from_images({{sm80.data(), sm80.size(), "a"}, {sm90.data(), sm90.size(), "b"}});
  float* a = nullptr;
  both["vec_add"](grid(1), block(1), nullptr, a, a, a, 1);
  CHECK(both.unload());
  // An embedded image by its name, one of a static never unloaded.
  static const Embedded mine("mine", whole.data(), whole.size());
  CHECK(Module::embedded("mine").kernel_names() == names);
  CHECK(embedded(mine).kernel_names() == names);
  REFUSED("image", "expected 'mine'", Module::embedded("yours"));
  KernelFamily family("vec_add.sm_{sm}{suffix}.cuda{toolkit}.cubin");
  for (const char* name : {"vec_add.sm_120a.cuda130.cubin", "vec_add.sm_90a.cuda124.cubin"}) {
    const auto image = bytes_of(name);
    family.add(name, image.data(), image.size());
  }
  CHECK(family.members().size() == 2 && family.members()[0].number("toolkit") == 130);
  CHECK(family.find({{"toolkit", "124"}}).name() == "vec_add");
  REFUSED("no_kernel", "has no kernel", family.find({{"toolkit", "1"}}));
  REFUSED("no_kernel", "has several", family.find({}));
  REFUSED("no_kernel", "'gemm'", family.add("gemm", whole.data(), whole.size()));
  KernelFamily symbols("{a}_{b}");
  CHECK(symbols.add(whole.data(), whole.size()) == 4);
  KernelFamily::Fields fields;
  CHECK(KernelFamily("{m}x{m}").match("64x64", fields) && fields["m"] == "64");
  CHECK(!KernelFamily("{m}x{m}").match("64x128", fields));
}

void without_exceptions() {
  Result<Module> none = Module::try_from_file("/nowhere");
  CHECK(!none && std::string(none.error().tag()) == "file");
  Module module = several();
  Result<Kernel> kernel = module.try_kernel("vec_add");
  CHECK(static_cast<bool>(kernel));
  CHECK(!module.try_kernel("vec"));
  float* a = nullptr;
  CHECK(static_cast<bool>(kernel->try_launch(grid(1), block(1), nullptr, a, a, a, 1)));
  Status refused = kernel->try_launch(grid(1), block(1), nullptr, a, a, a);
  CHECK(!refused && std::string(refused.error().expected()) == "4" &&
        std::string(refused.error().got()) == "3" &&
        std::string(refused.error().object()) == "kernel 'vec_add'");
  CHECK(!kernel->try_check<float*>());
  CHECK(static_cast<bool>(kernel->try_check<float*, float*, float*, int>()));
  CHECK(static_cast<bool>(kernel->try_preload()) && static_cast<bool>(module.try_preload()));
  CHECK(kernel->try_attributes()->max_threads == 1024);
  CHECK(kernel->try_occupancy(launch(grid(1), block(1))).value() == 2);
  CHECK(!module.try_global("none"));
  CHECK(!TensorMap::try_tiled(a, MapType::kFloat16, {}, {}));
  CHECK(module.try_unload().value());
}

// What mangled names and PTX state: checked by typed kernels and by launches.
void stated_types() {
  const char* const text =
      ".version 8.0\n.target sm_80\n.address_size 64\n"
      ".visible .entry _Z4tmplIfLi4EEvPT_i(.param .u64 a, .param .u32 b) { ret; }\n"
      ".visible .entry _Z5otherP6__halfPKvlh(.param .u64 a, .param .u64 b, .param .u64 c, "
      ".param .u8 d) { ret; }\n"
      ".visible .entry plain(.param .u64 a, .param .f32 b, .param .b32 c) { ret; }\n";
  Module module = Module::from_memory(text, std::strlen(text));
  CHECK(module["tmpl<float,4>"].name() == "_Z4tmplIfLi4EEvPT_i");
  CHECK(module["tmpl< float, 4 >(float *, int)"].name() == "_Z4tmplIfLi4EEvPT_i");
  module.kernel<void(float*, int)>("tmpl<float, 4>");
  module.kernel<void(const float*, unsigned)>("tmpl");
  module.kernel<void(void*, int)>("tmpl");
  module.kernel<void(uint64_t, int)>("tmpl");
  REFUSED("params", "", module.kernel<void(double*, int)>("tmpl"));
  REFUSED("params", "", module.kernel<void(__half*, int)>("tmpl"));
  REFUSED("params", "", module.kernel<void(float**, int)>("tmpl"));
  REFUSED("params", "", module.kernel<void(float*, float)>("tmpl"));
  REFUSED("params", "", module.kernel<void(float, int)>("tmpl"));
  float* x = nullptr;
  int* n = nullptr;
  REFUSED("params", "", module["tmpl"](grid(1), block(1), nullptr, x, 1.0F));
  REFUSED("params", "", module["tmpl"](grid(1), block(1), nullptr, n, 1));
  module.kernel<void(__half*, const float*, long long, bool)>("other");
  REFUSED("params", "", module.kernel<void(float*, const void*, long, bool)>("other"));
  REFUSED("params", "", module.kernel<void(__half*, const void*, double, bool)>("other"));
  module.kernel<void(double*, float, int)>("plain");
  REFUSED("params", "", module.kernel<void(double*, int, int)>("plain"));
  REFUSED("no_kernel", "", module["tmp"]);
}

// A caller that was compiled with a later header, whose structs have grown, and with one before the
// first: more bytes than the library knows, and too few.
void callers_of_other_versions() {
  Module module = several();
  struct {
    torch_cubin_v1_attributes known;
    char later[16];
  } grown{};
  std::memset(grown.later, 0x55, sizeof(grown.later));
  torch_cubin_v1_kernel* kernel = nullptr;
  torch_cubin_v1_module* handle = nullptr;
  const std::string path = g_folder + "/several.sm_90a.cuda130.cubin";
  const char* const paths[] = {path.c_str()};
  CHECK(torch_cubin_v1_module_open_files(paths, 1, 0, &handle) == nullptr);
  CHECK(torch_cubin_v1_module_kernel(handle, "vec_add", 7, &kernel) == nullptr);
  grown.known.size = sizeof(grown);
  CHECK(torch_cubin_v1_kernel_attributes(kernel, 0, &grown.known) == nullptr);
  CHECK(grown.known.size == sizeof(grown) && grown.known.max_threads > 0);
  for (const char byte : grown.later) CHECK(byte == 0x55);
  torch_cubin_v1_facts facts{};
  facts.size = sizeof(facts) - 8;  // no version ever had so few
  torch_cubin_v1_kernel_info(kernel, &facts);
  CHECK(facts.name == nullptr);
  torch_cubin_v1_device device{};
  device.size = 8;
  torch_cubin_v1_error* error = torch_cubin_v1_device_info(0, &device);
  CHECK(error != nullptr);
  const std::string text = torch_cubin_v1_error_part(error, TORCH_CUBIN_V1_MESSAGE);
  CHECK(text.find("torch_cubin_v1_device") != std::string::npos);
  torch_cubin_v1_error_free(error);
  torch_cubin_v1_module_release(handle);
}

int g_released = 0;

// What a caching allocator keeps is asked for once, and the driver once more.
void out_of_memory() {
  set_release_cache([](int32_t device) { g_released += 1 + device; });
  float* a = nullptr;
  Module module = several();
  fake<int(const char*, long, long, int)>("fake_fail")("cuLibraryLoadData", 0, 1, 2);
  module["vec_add"](grid(1), block(1), nullptr, a, a, a, 1);
  CHECK(g_released == 1);
  Module again = several();
  fake<int(const char*, long, long, int)>("fake_fail")("cuLibraryLoadData", 0, 2, 2);
  REFUSED("oom", "CUDA out of memory", again["vec_add"](grid(1), block(1), nullptr, a, a, a, 1));
  CHECK(g_released == 2);
  set_release_cache(nullptr);
}

void lifetimes() {
  // A module that stays loaded keeps its kernels; a kernel keeps its module.
  Kernel kernel;
  {
    Module module = several();
    kernel = module["vec_add"];
  }
  float* a = nullptr;
  kernel(grid(1), block(1), nullptr, a, a, a, 1);
  // What a CUDA graph captured is not unloaded.
  Module module = several();
  fake<void(const char*, long)>("fake_set")("capturing", 1);
  module["vec_add"](grid(1), block(1), reinterpret_cast<CUstream_st*>(0x5000), a, a, a, 1);
  fake<void(const char*)>("fake_unset")("capturing");
  CHECK(!module.unload());
  REFUSED("closed", "", module["vec_add"]);
  Module kept = several();
  kept.preload();
  CHECK(!kept.unload(/*keep=*/true));
  // Errors of the driver carry their code, and the next call succeeds.
  Module again = several();
  fake<int(const char*, long, long, int)>("fake_fail")("cuLibraryLoadData", 0, 1, 2);
  REFUSED("oom", "CUDA out of memory", again["vec_add"](grid(1), block(1), nullptr, a, a, a, 1));
  again["vec_add"](grid(1), block(1), nullptr, a, a, a, 1);
  fake<int(const char*, long, long, int)>("fake_fail")("cuLaunchKernelEx", 0, 1, 700);
  REFUSED("fault", "restart", again["vec_add"](grid(1), block(1), nullptr, a, a, a, 1));
  // Another thread captures a graph: the module is as it was before, and unloads afterwards.
  fake<int(const char*, long, long, int)>("fake_fail")("cuCtxSynchronize", 0, 1, 900);
  REFUSED("capture", "cuCtxSynchronize", again.unload());
  again["vec_add"](grid(1), block(1), nullptr, a, a, a, 1);
  CHECK(again.unload());
  REFUSED("closed", "", again["vec_add"]);
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 2) return 2;
  g_folder = arguments[1];
  try {
    launches();
    devices();
    memory();
    bad_arguments();
    triton_folder();
    bad_images();
    memory_images();
    without_exceptions();
    stated_types();
    callers_of_other_versions();
    out_of_memory();
    lifetimes();
  } catch (const std::exception& error) {
    std::printf("unexpected: %s\n", error.what());
    return 1;
  }
  const std::string violations = fake<const char*()>("fake_violations")();
  if (!violations.empty()) std::printf("violations: %s\n", violations.c_str());
  std::puts(g_failures == 0 && violations.empty() ? "right" : "WRONG");
  return g_failures == 0 && violations.empty() ? 0 : 1;
}
