// Declared ops: schemas, expressions, contracts, packages, and calls with tensors of any shape.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <memory>
#include <nlohmann/json.hpp>
#include <thread>

#include "cubin/sha256.h"
#include "declared/contract.h"
#include "declared/declared_package.h"
#include "declared/expression.h"
#include "declared/schema.h"
#include "declared/tuning.h"
#include "json_mutator.h"
#include "package/package.h"
#include "target.h"
#include "torch_shims.h"

namespace fuzz {
namespace {

using nlohmann::json;
using torch_cubin::Contract;
using torch_cubin::ContractImages;
using torch_cubin::Schema;
using torch_cubin::Value;
using torch_cubin::ValueType;

// Bytes as decisions; zeros where they end.
class Decisions {
 public:
  Decisions(const uint8_t* data, size_t size) : at_(data), end_(data + size) {}
  uint8_t byte() { return at_ < end_ ? *at_++ : 0; }
  size_t below(size_t bound) { return byte() % bound; }
  bool done() const { return at_ == end_; }
  int64_t integer() {
    static constexpr int64_t kOdd[] = {0,
                                       1,
                                       2,
                                       3,
                                       8,
                                       -1,
                                       255,
                                       256,
                                       int64_t{1} << 31,
                                       INT32_MAX,
                                       INT64_MAX,
                                       INT64_MIN,
                                       int64_t{1} << 32,
                                       int64_t{1} << 62,
                                       7,
                                       64};
    const uint8_t choice = byte();
    return choice < 128 ? kOdd[choice % 16] : choice % 32;
  }
  double number() {
    static constexpr double kOdd[] = {0.0, -0.0, 1.0, 0.5, -2.75, 1e300, -1e-300, 3.0, 70000.0};
    const uint8_t choice = byte();
    if (choice < 64) return kOdd[choice % 9];
    return choice < 80 ? NAN : choice < 96 ? -INFINITY : choice / 7.0;
  }

 private:
  const uint8_t* at_;
  const uint8_t* end_;
};

// --- schemas ---

void run_schema(const uint8_t* data, size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  accepts({"input"}, [&] {
    const Schema schema = torch_cubin::parse_schema(text);
    const std::string plain = schema.text();
    require(torch_cubin::parse_schema(plain).text() == plain);
    accepts({"input"}, [&] { torch_cubin::check_schema(schema); });
    accepts({"input"}, [&] { torch_cubin::check_differentiable(schema); });
    accepts({"input"}, [&] { torch_cubin::check_gradient_names(schema); });
  });
}

// --- expressions ---

// A tree of any types: each byte chooses a node.
json tree_of(Decisions& decisions, int depth) {
  static const char* const kNames[] = {"x", "xs[1]", "n", "alpha", "flag", "mode", "k?", "nothing"};
  static const char* const kOne[] = {"neg", "abs", "sqrt", "float", "not"};
  static const char* const kTwo[] = {"add", "sub", "mul", "floordiv", "mod", "truediv", "min",
                                     "max", "lt",  "le",  "eq",       "ne",  "and",     "or"};
  static const char* const kLeaves[] = {"number",     "numel", "dim",    "itemsize", "defined",
                                        "contiguous", "size",  "stride", "is",       "is_dtype"};
  const uint8_t choice = decisions.byte();
  const bool leaf = depth > 70 || decisions.done();
  if (leaf || choice < 40) return decisions.integer();
  if (choice < 50) return decisions.number();
  if (choice < 56) return choice < 53;
  if (choice < 60) return json::array({choice < 58 ? "sm" : "multiprocessors"});
  const auto sub = [&] { return tree_of(decisions, depth + 1); };
  if (choice < 130) {
    const size_t which = choice % 10;
    json node = {kLeaves[which], kNames[decisions.below(8)]};
    if (which == 6 || which == 7) node.push_back(decisions.integer() % 4);
    if (which > 7) node.push_back(decisions.below(2) == 0 ? "float16" : "relu");
    return node;
  }
  if (choice < 150) return json::array({kOne[choice % 5], sub()});
  if (choice < 160) return json::array({"select", sub(), sub(), sub()});
  json first = sub();
  return json::array({kTwo[choice % 14], std::move(first), sub()});
}

void run_expression(const uint8_t* data, size_t size) {
  static const auto* const scope = new torch_cubin::Scope{{"x", "xs[1]"},
                                                          {{"n", ValueType::kInt},
                                                           {"alpha", ValueType::kFloat},
                                                           {"flag", ValueType::kBool},
                                                           {"k", ValueType::kInt},
                                                           {"k?", ValueType::kBool}},
                                                          {"mode"}};
  Decisions decisions(data, size);
  const int64_t sizes[] = {decisions.integer() & INT64_MAX, decisions.integer() & INT64_MAX};
  const int64_t strides[] = {decisions.integer(), decisions.integer()};
  torch_cubin::TensorFacts facts[2] = {{sizes, strides, 2, 4, "float16", true}, {}};
  const bool has_k = decisions.below(2) == 0;
  const Value none{ValueType::kNone, 0, 0};
  const Value numbers[] = {Value::of(decisions.integer()), Value::of(decisions.number()),
                           Value::of(decisions.below(2) == 0),
                           has_k ? Value::of(decisions.integer()) : none, Value::of(has_k)};
  const std::string_view texts[] = {"relu"};
  const json tree = tree_of(decisions, 0);
  accepts({"input"}, [&] {
    const torch_cubin::Expression expression(tree, *scope, "a test");
    require(!expression.text().empty());
    accepts({"input"}, [&] {
      const Value value = expression.evaluate({facts, numbers, 90, 132, texts});
      require(value.type == expression.type() || value.type == ValueType::kNone);
      require(value.type != ValueType::kBool || value.integer == 0 || value.integer == 1);
    });
  });
}

// --- contracts and calls ---

std::vector<uint8_t> read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    std::fprintf(stderr, "cannot open %s\n", path.c_str());
    std::exit(2);
  }
  return {std::istreambuf_iterator<char>(file), {}};
}

constexpr const char* kImages[] = {"several.sm_90a.cuda130.cubin", "launch.sm_90a.cuda130.cubin"};

// Both test images, whose kernels the stand-in driver knows.
ContractImages& images() {
  static ContractImages* const made = [] {
    auto* const all = new ContractImages;
    for (const char* name : kImages) {
      std::vector<uint8_t> bytes = read(std::string(FUZZ_DATA "/") + name);
      declare_kernels(bytes);
      all->add(std::move(bytes), std::string("file '") + name + "'");
    }
    return all;
  }();
  return *made;
}

// The contracts whose calls are tried.
const std::vector<std::unique_ptr<Contract>>& contracts() {
  static const auto* const made = [] {
    auto* const all = new std::vector<std::unique_ptr<Contract>>;
    const std::vector<uint8_t> text = read(FUZZ_DATA "/../fuzz/contracts.json");
    for (const json& definition : json::parse(text)) {
      all->push_back(std::make_unique<Contract>(definition, images()));
    }
    return all;
  }();
  return *made;
}

AtenTensorHandle tensor_of(Decisions& decisions) {
  static constexpr int64_t kSizes[] = {0,         1, 2, 3, 4, 5, 8, 64, 256, int64_t{1} << 31,
                                       INT64_MAX, 3};
  FakeTensor* const tensor = new_tensor();
  const uint8_t kind = decisions.byte();
  size_t dim = kind % 5;
  if (kind == 255) dim = 65;
  static constexpr int32_t kDtypes[] = {6, 6, 6, 6, 5, 15, 4, 0, 11, 23, 12, 44, 7};
  tensor->dtype = kDtypes[kind < 128 ? 0 : decisions.below(13)];
  int64_t step = 1;
  for (size_t i = 0; i < dim; ++i) tensor->sizes.push_back(kSizes[decisions.below(12)]);
  tensor->strides.resize(dim);
  for (size_t i = dim; i-- > 0;) {
    tensor->strides[i] = step;
    if (tensor->sizes[i] > 1 && __builtin_mul_overflow(step, tensor->sizes[i], &step)) step = 0;
  }
  const uint8_t how = decisions.byte();
  if (how % 4 == 1) {
    for (int64_t& stride : tensor->strides) stride = decisions.integer() & INT64_MAX;
  }
  if (how % 4 == 2 && dim > 1) {
    const size_t other = decisions.below(dim);
    std::swap(tensor->sizes[0], tensor->sizes[other]);
    std::swap(tensor->strides[0], tensor->strides[other]);
  }
  tensor->device_index = how / 4 % 16 == 1 ? 1 : 0;
  if (how / 4 % 16 == 2) tensor->device_type = 0, tensor->device_index = -1;
  const bool empty =
      std::find(tensor->sizes.begin(), tensor->sizes.end(), 0) != tensor->sizes.end();
  const uint64_t base =
      (uint64_t{1} << 40) * static_cast<uint64_t>(tensor->device_index + 1) + 4096;
  static constexpr uint64_t kOffsets[] = {0, 0, 0, 0, 4, 8, 16, 1};
  if (!empty) tensor->data = reinterpret_cast<void*>(base + kOffsets[how / 32]);
  if (how == 255) tensor->data = nullptr;
  static constexpr bool kTrue = true;
  if (how == 254) tensor->requires_grad = &kTrue;
  return handle_of(tensor);
}

template <class T>
StableIValue boxed(T value) {
  return torch::stable::detail::from(value);
}

// An argument of the schema's type, as PyTorch puts it on the stack.
StableIValue argument_of(const torch_cubin::SchemaArgument& argument, Decisions& decisions) {
  using torch_cubin::ArgumentType;
  const auto optional = [&](StableIValue value) {
    return boxed(new StableIValue(value));  // a cell that the kernel owns
  };
  const StableIValue absent = boxed(static_cast<StableIValue*>(nullptr));
  switch (argument.type) {
    case ArgumentType::kTensor:
      return boxed(tensor_of(decisions));
    case ArgumentType::kOptionalTensor:
      return decisions.below(3) == 0 ? absent : optional(boxed(tensor_of(decisions)));
    case ArgumentType::kTensorList: {
      std::vector<AtenTensorHandle> items(decisions.below(5));
      for (AtenTensorHandle& item : items) item = tensor_of(decisions);
      return boxed(new_list(items));
    }
    case ArgumentType::kInt:
      return boxed(decisions.integer());
    case ArgumentType::kOptionalInt:
      return decisions.below(2) == 0 ? absent : optional(boxed(decisions.integer()));
    case ArgumentType::kFloat:
      return boxed(decisions.number());
    case ArgumentType::kOptionalFloat:
      return decisions.below(2) == 0 ? absent : optional(boxed(decisions.number()));
    case ArgumentType::kBool:
      return boxed(decisions.below(2) == 0);
    case ArgumentType::kOptionalBool:
      return decisions.below(2) == 0 ? absent : optional(boxed(decisions.below(2) == 0));
    case ArgumentType::kString: {
      static const char* const kTexts[] = {"relu", "gelu", "", "\xc3\xa9"};
      return boxed(new_string(kTexts[decisions.below(4)]));
    }
    default:
      return boxed(static_cast<int32_t>(decisions.below(48)));  // a dtype
  }
}

const std::initializer_list<std::string_view> kCallTags = {"input", "params", "launch", "oom",
                                                           "arch"};

void call(const Contract& contract, Decisions& decisions) {
  const Schema& schema = contract.schema();
  std::vector<StableIValue> stack(std::max(schema.arguments.size(), schema.returns.size()));
  const int64_t alive = objects_alive();
  set_grad_mode(decisions.below(4) == 1);
  for (size_t i = 0; i < schema.arguments.size(); ++i) {
    stack[i] = argument_of(schema.arguments[i], decisions);
  }
  if (accepts(kCallTags, [&] { contract.call(stack.data()); })) {
    for (size_t i = 0; i < schema.returns.size(); ++i) {
      aoti_torch_delete_tensor_object(torch::stable::detail::to<AtenTensorHandle>(stack[i]));
    }
  }
  require(objects_alive() == alive);  // arguments are released once, outputs handed over once
}

void run_call(const uint8_t* data, size_t size) {
  Decisions decisions(data, size);
  call(*contracts()[decisions.below(contracts().size())], decisions);
}

// Calls of a contract that goes away: a thread remembers its last calls by the contract's address,
// which elsewhere stays for good.
template <class Body>
void in_a_thread(Body&& body) {
  std::thread(body).join();
}

// A definition, and then calls of the op whose arguments follow from its text.
void run_contract(const uint8_t* data, size_t size) {
  json definition = json::parse(data, data + size, nullptr, false);
  if (definition.is_discarded()) return;
  ContractImages& all = images();
  accepts({"input", "params", "no_kernel", "image"}, [&] {
    const Contract contract(definition, all);
    require(!contract.identity().empty());
    in_a_thread([&] {
      uint32_t state = static_cast<uint32_t>(size);
      for (int i = 0; i < 3; ++i) {
        uint8_t bytes[64];
        for (uint8_t& byte : bytes) {
          state = state * 1664525u + 1013904223u + data[(state >> 8) % size];
          byte = static_cast<uint8_t>(state >> 24);
        }
        Decisions decisions(bytes, sizeof bytes);
        call(contract, decisions);
      }
    });
  });
}

// --- packages ---

class Files : public torch_cubin::PackageFiles {
 public:
  Files(const uint8_t* data, size_t size) : manifest_(data, data + size) {}
  std::vector<uint8_t> read(const std::string& name, size_t) const override {
    if (name == "manifest.json") return manifest_;
    torch_cubin::fail(
        {"file", "file '" + torch_cubin::printable(name) + "'", "is not there", "", "", ""});
  }
  std::string origin(const std::string& name) const override { return "file '" + name + "'"; }

 private:
  std::vector<uint8_t> manifest_;
};

// A folder in memory with one image; each input becomes its manifest.
const std::string& package_folder() {
  static const auto* const made = [] {
    auto* const path = new std::string("/dev/shm/torch_cubin_fuzz_XXXXXX");
    if (mkdtemp(path->data()) == nullptr) std::exit(2);
    const std::vector<uint8_t> bytes = read(std::string(FUZZ_DATA "/") + kImages[0]);
    std::ofstream(*path + "/a.cubin", std::ios::binary)
        .write(reinterpret_cast<const char*>(bytes.data()), static_cast<long>(bytes.size()));
    std::atexit([] {
      for (const char* name : {"/a.cubin", "/manifest.json", ""}) {
        std::remove((package_folder() + name).c_str());
      }
    });
    return path;
  }();
  return *made;
}

void run_manifest(const uint8_t* data, size_t size) {
  // As a package of kernels, which only reads it; then as one of ops, with its images and
  // contracts.
  accepts({"file", "arch", "image", "input"}, [&] {
    torch_cubin::Package package(std::make_shared<Files>(data, size), "a package");
    package.read_kernels();
  });
  const int file = open((package_folder() + "/manifest.json").c_str(),
                        O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  const bool written = write(file, data, size) == static_cast<ssize_t>(size);
  close(file);
  if (!written) std::exit(2);
  accepts({"file", "hash", "image", "input", "params", "no_kernel"},
          [&] { torch_cubin::load_package(package_folder()); });
}

// --- tuned tables ---

// A folder for the cache, in memory.
const std::string& cache_folder() {
  static const auto* const made = [] {
    auto* const path = new std::string("/dev/shm/torch_cubin_fuzz_XXXXXX");
    if (mkdtemp(path->data()) == nullptr) std::exit(2);
    mkdir((*path + "/tuned").c_str(), 0700);
    setenv("TORCH_CUBIN_CACHE", path->c_str(), 1);
    std::atexit([] {
      rmdir((cache_folder() + "/tuned").c_str());
      rmdir(cache_folder().c_str());
    });
    return path;
  }();
  return *made;
}

// Names that only this process knows and the table lacks: without them they would never be tried.
void complete(json& table, const json& file) {
  if (!table.is_object()) return;
  table.emplace("version", 1);
  table.emplace("gpu", file["gpu"]);
  table.emplace("driver", file["driver"]);
  const auto ops = table.find("ops");
  if (ops == table.end() || !ops->is_array()) return;
  for (json& op : *ops) {
    if (!op.is_object()) continue;
    op.emplace("op", file["op"]);
    op.emplace("hash", file["hash"]);
  }
}

// What a call's arguments follow from: the numbers under "call", or the input itself.
std::vector<uint8_t> decisions_of(const json& table, const uint8_t* data, size_t size) {
  std::vector<uint8_t> bytes;
  if (table.is_object() && table.contains("call")) {
    for (const json& one : table["call"]) {
      if (one.is_number_integer()) bytes.push_back(static_cast<uint8_t>(one.get<int64_t>()));
    }
  }
  return bytes.empty() ? std::vector<uint8_t>(data, data + size) : bytes;
}

// A table as a file of the cache, in which damage counts as absence, and as load_tuned() takes it.
// Then a call that looks into it, and one that takes each of the kernels that a watch found to fit.
void run_tuned(const uint8_t* data, size_t size) {
  cache_folder();
  static const auto* const definition = [] {
    const std::vector<uint8_t> text = read(FUZZ_DATA "/../fuzz/contracts.json");
    return new json(json::parse(text)[1]);  // of two kernels, with arguments of every kind
  }();
  const Contract contract(*definition, images());
  const json file = torch_cubin::tuned_file(contract, 0);
  std::string text(reinterpret_cast<const char*>(data), size);
  json table = json::parse(text, nullptr, false);
  if (!table.is_discarded()) {
    complete(table, file);
    text = table.dump(-1, ' ', false, json::error_handler_t::replace);
  }
  const std::string path = file["path"].get<std::string>();
  std::ofstream(path, std::ios::binary).write(text.data(), static_cast<long>(text.size()));
  const bool read = accepts({}, [&] { torch_cubin::read_tuned_file(contract, 0); });
  std::remove(path.c_str());
  require(read);
  if (table.is_discarded()) return;
  set_tuned_contract(&contract);
  accepts({"input"}, [&] { torch_cubin::add_tuned_calls(table); });
  const std::vector<uint8_t> bytes = decisions_of(table, data, size);
  const auto try_call = [&] {
    Decisions decisions(bytes.data(), bytes.size());
    call(contract, decisions);
  };
  in_a_thread([&] {
    try_call();
    torch_cubin::watch_op(&contract);
    try_call();
    const json seen = torch_cubin::call_watch().calls;
    torch_cubin::watch_op(nullptr);
    for (const json& one : seen) {
      for (const json& kernel : one["fits"]) {
        json line = {{"key", one["key"]}, {"kernel", kernel}, {"instead_of", one["chosen"]}};
        json op = {{"calls", json::array({std::move(line)})}};
        json found = {{"ops", json::array({std::move(op)})}};
        complete(found, file);
        require(accepts({}, [&] { torch_cubin::add_tuned_calls(found); }));
        try_call();
      }
    }
  });
  set_tuned_contract(nullptr);
}

const Register kSchema({"schema", run_schema, nullptr});
const Register kExpression({"expression", run_expression, nullptr});
const Register kContract({"contract", run_contract, mutate_json});
const Register kManifest({"manifest", run_manifest, mutate_json});
const Register kCall({"call", run_call, nullptr});
const Register kTuned({"tuned", run_tuned, mutate_json});

}  // namespace
}  // namespace fuzz
