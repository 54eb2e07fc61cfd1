#include "ops/common/serving.h"

#include <array>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>

#include "cubin/error.h"
#include "ops/common/batch_invariant.h"
#include "ops/common/device_tables.h"
#include "ops/common/thread_objects.h"
#include "package/catalog.h"
#include "pytorch/settings.h"

namespace torch_cubin {
namespace {

using nlohmann::json;

std::atomic<Policy> g_process_policy{Policy::kOff};
std::atomic<bool> g_flash_implementation{false};
// Number of threads with a policy of their own. While it is 0, no call looks for the policy of the
// thread that called backward().
std::atomic<int> g_threads{0};
thread_local Policy t_policy = Policy::kOff;
thread_local int t_serving = 0;
thread_local Measuring t_measuring = Measuring::kNo;

Policy policy_of_backward() {
  static const auto* const all = new std::string("torch_cubin.drop_in.all");
  static const auto* const fastest = new std::string("torch_cubin.drop_in.fastest");
  if (thread_object_exists(*fastest)) return Policy::kFastest;
  return thread_object_exists(*all) ? Policy::kAll : Policy::kOff;
}

// --- the known speed of our kernels ---

struct KnownSpeed {
  std::mutex mutex;  // guards the rows
  json rows = json::array();
};

KnownSpeed& known_speed() {
  static auto* const known = new KnownSpeed;  // leaked on purpose: calls may run during exit
  return *known;
}

// float32 has two entries, because TF32 has its own kernels.
enum SpeedType : int { kHalf, kBFloat16, kTF32, kFloat32, kFloat64, kFloat8, kSpeedTypes };
constexpr const char* kSpeedTypeNames[] = {"float16", "bfloat16", "tf32",
                                           "float32", "float64",  "float8"};
constexpr const char* kCallKindNames[] = {"product", "batched", "vector", "attention",
                                          "scaled",  "sum",     "norm"};
static_assert(std::size(kSpeedTypeNames) == kSpeedTypes && std::size(kCallKindNames) == kCallKinds);

int speed_type(ScalarType dtype, CallKind kind) {
  const bool is_float8 = dtype == ScalarType::Float8_e4m3fn || dtype == ScalarType::Float8_e5m2;
  if (is_float8 || kind == CallKind::kScaled) {
    return is_float8 && kind == CallKind::kScaled ? kFloat8 : -1;
  }
  switch (dtype) {
    case ScalarType::Half:
      return kHalf;
    case ScalarType::BFloat16:
      return kBFloat16;
    case ScalarType::Float:
      return tf32_allowed() ? kTF32 : kFloat32;
    default:
      return dtype == ScalarType::Double ? kFloat64 : -1;
  }
}

// The known speed of calls on one device.
struct DeviceSpeed {
  const char* no_kernels = nullptr;  // the reason if this GPU has no kernels at all
  bool measured = false;
  bool quick[kCallKinds][kSpeedTypes] = {};

  void add(const json& row);
};

bool lists(const json& list, const char* name) {
  for (const json& each : list) {
    if (each == name) return true;
  }
  return false;
}

void DeviceSpeed::add(const json& row) {
  measured = true;
  for (int kind = 0; kind < kCallKinds; ++kind) {
    for (int type = 0; type < kSpeedTypes; ++type) {
      quick[kind][type] |= lists(row.at("kinds"), kCallKindNames[kind]) &&
                           lists(row.at("dtypes"), kSpeedTypeNames[type]);
    }
  }
}

const DeviceSpeed* read_speed(const Device& device) {
  auto* const speed = new DeviceSpeed;
  try {
    catalog().arch_for(device);
  } catch (const Error& error) {
    if (error.tag() != "arch") {
      delete speed;
      throw;  // an unreadable catalog must not be hidden
    }
    speed->no_kernels =
        (new std::string("no kernels for sm_" + std::to_string(device.sm)))->c_str();
    return speed;
  }
  KnownSpeed& known = known_speed();
  std::lock_guard<std::mutex> lock(known.mutex);
  for (const json& row : known.rows) {
    if (device.name.find(row.at("gpu").get<std::string>()) != std::string::npos) speed->add(row);
  }
  return speed;
}

const DeviceSpeed& speed_of(int index) {
  static auto* const tables = new DeviceTables<DeviceSpeed>;
  return tables->get(device(index), &read_speed);
}

// --- calibration ---

struct Calibration {
  std::atomic<bool> asked{false};
  std::atomic<const DeviceSpeed*> speed{nullptr};  // never freed: calls may read it
};

Calibration& calibration_of(int index) {
  static auto* const all = new Calibration[kMaxDevices];  // leaked on purpose, as above
  return all[index];
}

std::atomic<Calibrate> g_calibrate{nullptr};

// Null if the GPU has not been calibrated. No lock is held while it is: other threads' calls go to
// PyTorch meanwhile.
const DeviceSpeed* calibrated_speed(int index) {
  if (deterministic_algorithms()) return nullptr;
  Calibration& own = calibration_of(index);
  if (const DeviceSpeed* speed = own.speed.load(std::memory_order_acquire)) return speed;
  const Calibrate calibrate = g_calibrate.load();
  if (calibrate == nullptr || own.asked.exchange(true)) return nullptr;
  if (calibrate(index) == 0) own.asked.store(false);
  return own.speed.load(std::memory_order_acquire);
}

constexpr const char* kNotMeasured = "this GPU has not been measured";
constexpr const char* kSlower[] = {
    "float16, which is not known to be quicker",
    "bfloat16, which is not known to be quicker",
    "float32 by TF32, which is not known to be quicker",
    "float32 without TF32, which is not known to be quicker",
    "float64, which is not known to be quicker",
    "8-bit floats, which are not known to be quicker",
};

// --- counts ---

struct Declined {
  std::mutex mutex;  // guards the map
  std::map<std::pair<const char*, const char*>, int64_t> calls;
};

Declined& declined() {
  static auto* const all = new Declined;  // leaked on purpose, as above
  return *all;
}

const char* dtype_reason(ScalarType dtype) {
  constexpr int kMost = 64;
  static auto* const reasons = [] {
    auto* const texts = new std::array<std::string, kMost>;
    for (int i = 0; i < kMost; ++i) {
      (*texts)[i] = "dtype " + dtype_name(static_cast<ScalarType>(i));
    }
    return texts;
  }();
  const auto number = static_cast<size_t>(dtype);
  return number < kMost ? (*reasons)[number].c_str() : "a dtype newer than this library";
}

}  // namespace

Policy serving_policy() {
  if (t_serving > 0) return Policy::kOff;
  if (t_measuring != Measuring::kNo) {
    return t_measuring == Measuring::kOurs ? Policy::kAll : Policy::kOff;
  }
  Policy policy = t_policy;
  if (policy == Policy::kOff && g_threads.load(std::memory_order_relaxed) > 0) {
    policy = policy_of_backward();
  }
  if (policy == Policy::kOff) policy = g_process_policy.load(std::memory_order_relaxed);
  // PyTorch's kernels are not batch-invariant.
  return policy == Policy::kFastest && batch_invariant() ? Policy::kAll : policy;
}

bool is_flash_implementation() {
  return g_flash_implementation.load(std::memory_order_relaxed) && t_serving == 0 &&
         t_measuring == Measuring::kNo;
}

void set_flash_implementation(bool on) { g_flash_implementation.store(on); }

void set_process_policy(Policy policy) { g_process_policy.store(policy); }

Policy set_thread_policy(Policy policy) {
  const Policy before = t_policy;
  g_threads += (policy != Policy::kOff) - (before != Policy::kOff);
  t_policy = policy;
  return before;
}

void set_measuring(Measuring state) {
  t_measuring = state;
  OpCalls::count_in_this_thread(state == Measuring::kNo);
}

Policy thread_object_policy() { return policy_of_backward(); }

void set_known_speed(const json& table) {
  KnownSpeed& known = known_speed();
  std::lock_guard<std::mutex> lock(known.mutex);
  known.rows = table.at("rows");
}

const char* why_not_tensor(const TensorView& tensor, CallKind kind, Policy policy) {
  const int type = speed_type(tensor.dtype, kind);
  if (type < 0) return dtype_reason(tensor.dtype);
  if (!tensor.on_cuda()) return nullptr;  // the reference, for which no speed is promised
  const DeviceSpeed& speed = speed_of(tensor.device_index);
  if (speed.no_kernels != nullptr) return speed.no_kernels;
  if (policy == Policy::kAll || speed.quick[static_cast<int>(kind)][type]) return nullptr;
  if (speed.measured) return kSlower[type];
  const DeviceSpeed* const calibrated = calibrated_speed(tensor.device_index);
  if (calibrated == nullptr) return kNotMeasured;
  return calibrated->quick[static_cast<int>(kind)][type] ? nullptr : kSlower[type];
}

void set_calibrate(Calibrate calibrate) { g_calibrate.store(calibrate); }

void set_calibrated_speed(int device, const json& table) {
  auto* const speed = new DeviceSpeed;
  speed->measured = true;
  for (const json& row : table.at("rows")) speed->add(row);
  calibration_of(device).speed.store(speed, std::memory_order_release);
}

void count_declined(const char* op, const char* reason) {
  if (t_measuring != Measuring::kNo) return;
  Declined& all = declined();
  std::lock_guard<std::mutex> lock(all.mutex);
  ++all.calls[{op, reason}];
}

json declined_calls(bool clear) {
  Declined& all = declined();
  std::lock_guard<std::mutex> lock(all.mutex);
  json found = json::array();
  for (const auto& [names, calls] : all.calls) {
    found.push_back({{"op", names.first}, {"reason", names.second}, {"calls", calls}});
  }
  if (clear) all.calls.clear();
  return found;
}

int64_t& calls_served() {
  static thread_local int64_t calls = 0;
  return calls;
}

ServedCall::ServedCall() { ++t_serving; }
ServedCall::~ServedCall() { --t_serving; }

AtenOp::AtenOp(const char* name, CallKind kind)
    : name(name), kind(kind), cpu(op_calls_of(name, "cpu")), cuda(op_calls_of(name, "cuda")) {}

}  // namespace torch_cubin
