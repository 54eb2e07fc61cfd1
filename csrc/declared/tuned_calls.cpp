#include "declared/tuned_calls.h"

#include <pwd.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>

#include "cubin/error.h"
#include "cubin/sha256.h"
#include "declared/contract.h"
#include "declared/slots.h"
#include "package/fields.h"
#include "package/files.h"
#include "package/package.h"
#include "runtime/device.h"

namespace torch_cubin {
namespace {

using nlohmann::json;

constexpr int kTableVersion = 1;
constexpr size_t kMaxTableBytes = 16u << 20;
constexpr size_t kMaxCalls = size_t{1} << 16;
constexpr int64_t kAbsent = -1;

int64_t word_of_dtype(const char* text) {
  return static_cast<int64_t>(reinterpret_cast<intptr_t>(text));  // one address for each dtype
}

json list_of(const int64_t* values, int64_t count) {
  return std::vector<int64_t>(values, values + count);
}

void read_integers(const json& list, const std::string& label, std::vector<int64_t>& out) {
  if (!list.is_array() || list.size() > static_cast<size_t>(kMaxDims)) {
    refuse_json(label, "a list of integers", list);
  }
  for (const json& one : list) {
    if (!one.is_number_integer()) refuse_json(label, "a list of integers", list);
    out.push_back(one.get<int64_t>());
  }
}

// Of the user, where HOME is not set; "" where it has none.
std::string password_home() {
  std::vector<char> text(1u << 14);
  passwd entry{};
  passwd* found = nullptr;
  const int error = getpwuid_r(getuid(), &entry, text.data(), text.size(), &found);
  return error != 0 || found == nullptr || entry.pw_dir == nullptr ? "" : entry.pw_dir;
}

// "" where there is none.
std::string cache_folder() {
  const auto given = [](const char* name) {
    const char* const value = std::getenv(name);
    return std::string(value == nullptr ? "" : value);
  };
  const std::string named = given("TORCH_CUBIN_CACHE");
  if (named == "0") return "";
  if (!named.empty()) return named;
  const std::string base = given("XDG_CACHE_HOME");
  if (!base.empty()) return base + "/torch_cubin";
  std::string home = given("HOME");
  if (home.empty()) home = password_home();
  return home.empty() ? "" : home + "/.cache/torch_cubin";
}

std::string sha256_of(const std::string& text) {
  return sha256_hex(reinterpret_cast<const uint8_t*>(text.data()), text.size());
}

}  // namespace

size_t CallKey::write(const CallState& state, const Words& words, int64_t* out) const {
  size_t n = 0;
  for (const Part& part : parts_) {
    if (n + 3 > kMostWords) return 0;
    switch (part.kind) {
      case Part::kTensor: {
        const TensorFacts& facts = state.facts[part.place];
        if (!facts.defined) {
          out[n++] = kAbsent;
          break;
        }
        const auto dim = static_cast<size_t>(facts.dim);
        if (n + 2 + 2 * dim > kMostWords) return 0;
        out[n++] = word_of_dtype(facts.dtype);
        out[n++] = facts.dim;
        for (size_t i = 0; i < dim; ++i) out[n++] = facts.sizes[i];
        for (size_t i = 0; has_strides_ && i < dim; ++i) out[n++] = facts.strides[i];
        break;
      }
      case Part::kNumber: {
        const Value& value = state.numbers[part.place];
        out[n++] = static_cast<int64_t>(value.type);  // 1 and 1.0 are two
        out[n++] = value.type == ValueType::kNone ? 0 : value.bits();
        break;
      }
      case Part::kText: {
        const auto found = std::find(words.begin(), words.end(), state.texts[part.place]);
        if (found == words.end()) return 0;
        out[n++] = found - words.begin();
      }
    }
  }
  return n;
}

json CallKey::shown(const CallState& state) const {
  json key = json::object();
  for (const Part& part : parts_) {
    json& shown = key[part.name];  // null, unless the call gives it
    switch (part.kind) {
      case Part::kTensor: {
        const TensorFacts& facts = state.facts[part.place];
        if (!facts.defined) break;
        shown = {facts.dtype, list_of(facts.sizes, facts.dim)};
        if (has_strides_) shown.push_back(list_of(facts.strides, facts.dim));
        break;
      }
      case Part::kNumber: {
        const Value& value = state.numbers[part.place];
        if (value.type == ValueType::kInt) shown = value.integer;
        if (value.type == ValueType::kBool) shown = value.integer != 0;
        if (value.type == ValueType::kFloat) shown = value.number;
        break;
      }
      case Part::kText:
        shown = std::string(state.texts[part.place]);
    }
  }
  return key;
}

std::vector<int64_t> CallKey::read(const json& key, const std::string& label, Words& words) const {
  std::vector<int64_t> out;
  if (!key.is_object() || key.size() != parts_.size()) {
    refuse_json(label, counted(parts_.size(), "value") + " by name", key);
  }
  for (const Part& part : parts_) {
    const std::string at = label + "." + part.name;
    const auto found = key.find(part.name);
    if (found == key.end()) refuse_json(at, "a value", json());
    const json& value = *found;
    switch (part.kind) {
      case Part::kTensor: {
        if (value.is_null()) {
          out.push_back(kAbsent);
          break;
        }
        ScalarType dtype{};
        const bool right = value.is_array() && value.size() == (has_strides_ ? 3U : 2U) &&
                           value[0].is_string() &&
                           find_dtype(value[0].get<std::string>(), &dtype) && value[1].is_array();
        if (!right) refuse_json(at, "a dtype and sizes", value);
        out.push_back(word_of_dtype(dtype_text(dtype)));
        out.push_back(static_cast<int64_t>(value[1].size()));
        read_integers(value[1], at, out);
        if (has_strides_) read_integers(value[2], at, out);
        break;
      }
      case Part::kNumber: {
        Value number;
        if (value.is_null()) {
          number.type = ValueType::kNone;
        } else if (value.is_boolean()) {
          number = Value::of(value.get<bool>());
        } else if (value.is_number_integer()) {
          number = Value::of(value.get<int64_t>());
        } else if (value.is_number_float()) {
          number = Value::of(value.get<double>());
        } else {
          refuse_json(at, "a number", value);
        }
        out.push_back(static_cast<int64_t>(number.type));
        out.push_back(number.bits());
        break;
      }
      case Part::kText: {
        if (!value.is_string()) refuse_json(at, "a string", value);
        const std::string text = value.get<std::string>();
        const auto known = std::find(words.begin(), words.end(), text);
        out.push_back(known - words.begin());
        if (known == words.end()) words.push_back(text);
      }
    }
  }
  return out;
}

TunedCalls::TunedCalls(const json& calls, const CallKey& key, size_t kernels,
                       const std::string& label, OnBadLine on_bad_line) {
  if (!calls.is_array() || calls.size() > kMaxCalls) {
    refuse_json(label, "a list of at most " + std::to_string(kMaxCalls), calls);
  }
  keys_ = KeyTable(calls.size());
  for (size_t i = 0; i < calls.size(); ++i) {
    try {
      add(calls[i], key, kernels, label + "[" + std::to_string(i) + "]");
    } catch (const Error&) {
      if (on_bad_line == kThrow) throw;
    }
  }
}

void TunedCalls::add(const json& call, const CallKey& key, size_t kernels,
                     const std::string& label) {
  const auto has_kernel = [&](const char* name) {
    return call.contains(name) && call[name].is_number_integer() && call[name] >= 0 &&
           call[name] < kernels;
  };
  const bool right =
      call.is_object() && call.contains("key") && has_kernel("kernel") && has_kernel("instead_of");
  if (!right) {
    refuse_json(label, "a key, the number of a kernel and that of the one it stands in for", call);
  }
  std::vector<int64_t> words = key.read(call["key"], label + ".key", words_);
  words.push_back(call["instead_of"].get<int64_t>());
  const int32_t known = keys_.add(words.data(), words.size());
  if (known < 0) {
    kernels_.emplace_back();
    calls_.push_back(nullptr);
  }
  const size_t place = known < 0 ? kernels_.size() - 1 : static_cast<size_t>(known);
  kernels_[place] = call["kernel"].get<int32_t>();
  calls_[place] = call;
}

int32_t TunedCalls::find(const CallState& state, const CallKey& key, size_t instead_of) const {
  int64_t words[CallKey::kMostWords + 1];
  const size_t count = key.write(state, words_, words);
  if (count == 0) return -1;
  words[count] = static_cast<int64_t>(instead_of);
  const int32_t found = keys_.find(words, count + 1);
  return found < 0 ? -1 : kernels_[static_cast<size_t>(found)];
}

CallWatch& call_watch() {
  // Leaked by thread on purpose: tuning is rare, and an op may run while a thread ends.
  static thread_local auto* const watch = new CallWatch;
  return *watch;
}

void watch_op(const Contract* contract) {
  CallWatch& watch = call_watch();
  if (watch.contract != nullptr) watch.contract->watch(-1);
  watch = CallWatch{};
  watch.contract = contract;
  if (contract != nullptr) contract->watch(1);
}

json tuned_file(const Contract& contract, int32_t index) {
  const std::string& gpu = device(index).name;
  const std::string driver = driver_version();
  const std::string hash = sha256_of(contract.identity());
  const std::string folder = cache_folder();
  json path;
  if (!folder.empty()) {
    const std::string name = sha256_of(gpu + "\n" + driver + "\n" + hash);
    path = folder + "/tuned/" + name.substr(0, 32) + ".json";
  }
  return {{"path", path},
          {"gpu", gpu},
          {"driver", driver},
          {"op", contract.schema().qualified_name()},
          {"hash", hash}};
}

TunedCalls read_tuned_file(const Contract& contract, int32_t index) {
  const json file = tuned_file(contract, index);
  if (!file["path"].is_string()) return {};
  const std::string path = file["path"].get<std::string>();
  if (!is_regular_file(path)) return {};
  try {
    const std::vector<uint8_t> bytes = read_file(path, kMaxTableBytes);
    const json table = parse_json(std::string(bytes.begin(), bytes.end()), path);
    if (table.at("version") != kTableVersion) return {};
    for (const char* field : {"gpu", "driver"}) {
      if (table.at(field) != file[field]) return {};
    }
    for (const json& op : table.at("ops")) {
      if (op.at("op") == file["op"] && op.at("hash") == file["hash"]) {
        return contract.tuned_table(op.at("calls"), TunedCalls::kSkip);
      }
    }
  } catch (const Error&) {
    // A damaged file counts as absent, as in every cache, and so does a line that is damaged.
  } catch (const json::exception&) {
  }
  return {};
}

void add_tuned_calls(const json& table) {
  const std::string label = "a tuned table";
  const auto text = [&](const json& object, const char* name) {
    const auto found = object.is_object() ? object.find(name) : object.end();
    if (!object.is_object() || found == object.end() || !found->is_string()) {
      fail({"input", label, "cannot be used", std::string("'") + name + "', a string",
            shown_json(object), "Tune again."});
    }
    return found->get<std::string>();
  };
  const std::string gpu = text(table, "gpu"), driver = text(table, "driver");
  if (!table.contains("version") || table["version"] != kTableVersion) {
    fail({"input", label, "cannot be used", "version 1, as torch_cubin.tune writes it",
          shown_json(table.value("version", json())), "Tune again."});
  }
  if (!table.contains("ops") || !table["ops"].is_array()) {
    fail({"input", label, "cannot be used", "'ops', a list", shown_json(table.value("ops", json())),
          "Tune again."});
  }
  std::vector<int> devices;
  for (int i = 0; i < device_count(); ++i) {
    if (device(i).name == gpu) devices.push_back(i);
  }
  if (devices.empty()) {
    fail({"input", label, "was measured on a GPU that this process does not have",
          device_count() > 0 ? device(0).name : "a GPU", printable(gpu), "Tune on this GPU."});
  }
  if (driver != driver_version()) {
    fail({"input", label, "was measured with another driver", "CUDA " + driver_version(),
          "CUDA " + printable(driver), "Tune again."});
  }
  std::vector<std::pair<const Contract*, const json*>> found;
  for (const json& op : table["ops"]) {
    const Contract& contract = find_contract(text(op, "op"));
    const std::string hash = text(op, "hash"), own = sha256_of(contract.identity());
    if (hash != own) {
      fail({"input", label,
            "was measured with other kernels of op '" + contract.schema().qualified_name() + "'",
            own, printable(hash), "Tune again."});
    }
    if (!op.contains("calls")) refuse_json(label + ".calls", "a list", json());
    contract.tuned_table(op["calls"]);  // throws, before any is used
    found.emplace_back(&contract, &op["calls"]);
  }
  for (const auto& [contract, calls] : found) {
    for (const int i : devices) contract->add_tuned(i, *calls);
  }
}

}  // namespace torch_cubin
