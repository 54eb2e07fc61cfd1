#include "declared/tuning.h"

#include <pwd.h>
#include <unistd.h>

#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

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

// The user's home folder from the password database, if HOME is not set; "" if unknown.
std::string password_home() {
  std::vector<char> text(1u << 14);
  passwd entry{};
  passwd* found = nullptr;
  const int error = getpwuid_r(getuid(), &entry, text.data(), text.size(), &found);
  return error != 0 || found == nullptr || entry.pw_dir == nullptr ? "" : entry.pw_dir;
}

// "" if there is none.
std::string cache_folder() {
  const auto given = [](const char* name) {
    const char* const value = std::getenv(name);
    return std::string(value == nullptr ? "" : value);
  };
  std::string named = given("TORCH_CUBIN_CACHE");
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
    // Damaged files and lines are ignored, as in every cache.
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
  const std::vector<int> devices = devices_of_table(gpu);
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
    contract.tuned_table(op["calls"]);  // throws before any table is activated
    found.emplace_back(&contract, &op["calls"]);
  }
  for (const auto& [contract, calls] : found) {
    for (const int i : devices) contract->add_tuned(i, *calls);
  }
}

}  // namespace torch_cubin
