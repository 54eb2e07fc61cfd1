#include "ops/common/op_calls.h"

#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "pytorch/tensor.h"

namespace torch_cubin {
namespace {

struct AllOpCalls {
  std::mutex mutex;  // guards the map, not the counts
  std::map<std::pair<std::string, std::string>, OpCalls> of;
};

AllOpCalls& all_op_calls() {
  static auto* const all = new AllOpCalls;  // leaked on purpose: ops may run while the process ends
  return *all;
}

thread_local bool t_counts = true;

}  // namespace

void OpCalls::count_in_this_thread(bool on) noexcept { t_counts = on; }

int OpCalls::slot(AtenTensorHandle tensor) noexcept {
  if (!t_counts) return -1;
  int32_t dtype = -1;
  if (aoti_torch_get_dtype(tensor, &dtype) != AOTI_TORCH_SUCCESS) return -1;
  return dtype < kDtypes ? dtype : -1;
}

OpCalls& op_calls_of(const char* op, const char* device) {
  AllOpCalls& all = all_op_calls();
  std::lock_guard<std::mutex> lock(all.mutex);
  return all.of[{op, device}];
}

nlohmann::json op_calls(bool clear) {
  AllOpCalls& all = all_op_calls();
  std::lock_guard<std::mutex> lock(all.mutex);
  nlohmann::json found = nlohmann::json::array();
  for (auto& [names, calls] : all.of) {
    for (int dtype = 0; dtype < OpCalls::kDtypes; ++dtype) {
      std::atomic<int64_t>& count = calls.calls_[dtype];
      const int64_t number = clear ? count.exchange(0) : count.load();
      if (number == 0) continue;
      found.push_back({{"op", names.first},
                       {"device", names.second},
                       {"dtype", dtype_name(static_cast<ScalarType>(dtype))},
                       {"calls", number}});
    }
  }
  return found;
}

}  // namespace torch_cubin
