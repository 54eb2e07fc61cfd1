#include "ops/matmul/tuned.h"

#include <atomic>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <tuple>

#include "cubin/error.h"
#include "package/fields.h"

namespace torch_cubin {
namespace {

using nlohmann::json;

constexpr int kTunedVersion = 1;

// float16 and bfloat16 run alike: a config of the one serves the other, where it has no type in its
// name.
constexpr const char* kTunedMathNames[kMathCount] = {"16_bit", "16_bit", "tf32", "float32",
                                                     "float64"};
// By Access; then those of operands whose rows begin at lines of the cache.
constexpr const char* kTunedAccessNames[] = {"k_vectors",  "own_vectors", "own_elements",
                                             "k_elements", "k_lines",     "own_lines"};

int tuned_access(Access access, bool lines) { return lines ? kAccessCount + access : access; }

// m, n, k, batch, math, a, b
using TunedProduct = std::tuple<int64_t, int64_t, int64_t, int64_t, int, int, int>;

int tuned_math(Math math) { return math == kMathBFloat16 ? kMathFloat16 : math; }

TunedProduct product_of(const MatmulCase& c) {
  return {c.m,
          c.n,
          c.k,
          c.batch,
          tuned_math(c.math),
          tuned_access(c.a, c.a_lines),
          tuned_access(c.b, c.b_lines)};
}

template <size_t N>
int tuned_index(const std::string& text, const char* const (&names)[N]) {
  for (size_t i = 0; i < N; ++i) {
    if (text == names[i]) return static_cast<int>(i);
  }
  throw std::runtime_error("'" + text + "' is not known");
}

// NOTE: json::get of a float that is out of range is undefined.
int64_t size_of(const json& line, const char* key) {
  const json& size = line.at(key);
  if (size.is_number_unsigned() && size.get<uint64_t>() <= uint64_t{INT64_MAX}) {
    return size.get<int64_t>();
  }
  throw std::runtime_error(std::string(key) + " " + size.dump());
}

std::atomic<uint64_t> g_generation{1};

class TunedTables {
 public:
  using Configs = std::map<TunedProduct, std::string>;

  std::string config(const Device& device, const MatmulCase& problem) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto of_gpu = by_gpu_.find(device.name);
    if (of_gpu == by_gpu_.end()) return "";
    const auto found = of_gpu->second.find(product_of(problem));
    return found == of_gpu->second.end() ? "" : found->second;
  }

  void add(const json& table) {
    const std::string gpu = checked_gpu(table);
    devices_of_table(gpu);  // throws where there is none
    std::lock_guard<std::mutex> lock(mutex_);
    Configs configs = by_gpu_[gpu];  // a copy: a malformed table adds nothing
    read_lines(table, configs);
    by_gpu_[gpu] = std::move(configs);
    g_generation.fetch_add(1, std::memory_order_release);
  }

 private:
  static std::string checked_gpu(const json& table) {
    try {
      if (!table.is_object() || !table.contains("version") || !table.contains("gpu")) {
        throw std::runtime_error("no 'version' and 'gpu'");
      }
      const json& version = table.at("version");
      if (!version.is_number_integer() || version != kTunedVersion) {
        throw std::runtime_error("version " + version.dump());
      }
      if (!table.at("gpu").is_string()) throw std::runtime_error("no name of a GPU");
      return table.at("gpu").get<std::string>();
    } catch (const std::exception& error) {
      refuse(error);
    }
  }

  [[noreturn]] static void refuse(const std::exception& error) {
    fail({"input", "a tuned table", "cannot be used", "version 1, as torch_cubin.tune writes it",
          printable(error.what()), "Tune again."});
  }

  static void read_line(const json& line, Configs& configs) {
    try {
      configs[product_of(tuned_case(line))] = line.at("way").get<std::string>();
    } catch (const json::exception&) {
      throw std::runtime_error("the line " + shown_json(line));
    }
  }

  static void read_lines(const json& table, Configs& configs) {
    try {
      if (!table.contains("products") || !table.at("products").is_array()) {
        throw std::runtime_error("no list of products");
      }
      for (const json& line : table.at("products")) read_line(line, configs);
    } catch (const Error&) {
      throw;
    } catch (const std::exception& error) {
      refuse(error);
    }
  }

  std::mutex mutex_;                       // guards what follows
  std::map<std::string, Configs> by_gpu_;  // by its name
};

TunedTables& tuned_tables() {
  static auto* const all = new TunedTables;  // leaked on purpose: used until exit
  return *all;
}

}  // namespace

std::string tuned_config(const Device& device, const MatmulCase& problem) {
  return tuned_tables().config(device, problem);
}

uint64_t tuned_generation() { return g_generation.load(std::memory_order_acquire); }

void add_tuned_table(const json& table) { tuned_tables().add(table); }

MatmulCase tuned_case(const json& line) {
  MatmulCase c{};
  c.m = size_of(line, "m");
  c.n = size_of(line, "n");
  c.k = size_of(line, "k");
  c.batch = size_of(line, "batch");
  c.math = static_cast<Math>(tuned_index(line.at("math").get<std::string>(), kTunedMathNames));
  const int a = tuned_index(line.at("a").get<std::string>(), kTunedAccessNames);
  const int b = tuned_index(line.at("b").get<std::string>(), kTunedAccessNames);
  c.a = static_cast<Access>(a % kAccessCount);
  c.b = static_cast<Access>(b % kAccessCount);
  c.a_lines = a >= kAccessCount;
  c.b_lines = b >= kAccessCount;
  return c;
}

json tuned_product(const MatmulCase& c) {
  return {{"m", c.m},
          {"n", c.n},
          {"k", c.k},
          {"batch", c.batch},
          {"math", kTunedMathNames[c.math]},
          {"a", kTunedAccessNames[tuned_access(c.a, c.a_lines)]},
          {"b", kTunedAccessNames[tuned_access(c.b, c.b_lines)]}};
}

}  // namespace torch_cubin
