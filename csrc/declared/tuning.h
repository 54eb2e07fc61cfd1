// The interface of torch_cubin.tune to declared ops: recorded calls, and tuned tables in this
// process and in files.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>

#include "declared/tuned_calls.h"

namespace torch_cubin {

class Contract;

// How torch_cubin.tune handles this thread's calls of one op: records them, or forces a kernel.
struct CallWatch {
  const Contract* contract = nullptr;
  int32_t forced = -1;  // a kernel's number
  // [{"device", "key", "chosen": the kernel without a table, "fits": [all kernels that support the
  // call], "same": [those with the condition of `chosen`]}]
  nlohmann::json calls = nlohmann::json::array();
};
CallWatch& call_watch();

// Records this thread's calls of that op only; null stops.
void watch_op(const Contract* contract);

// The file in which tune() stores its results for that op and device, which a process reads at the
// op's first call: {"path" (null without a cache folder), "gpu", "driver", "op", "hash"}. Both its
// name and its contents identify the GPU, the driver, and the op's contract and images.
nlohmann::json tuned_file(const Contract& contract, int32_t device);

// The table in that file; empty if it is missing, damaged, or belongs to something else.
TunedCalls read_tuned_file(const Contract& contract, int32_t device);

// Activates a table {"version", "gpu", "driver", "ops": [{"op", "hash", "calls"}]} in addition to
// the active ones. Throws [input] for a GPU or driver that this process does not have, and for an
// op that is not declared or has another hash.
void add_tuned_calls(const nlohmann::json& table);

}  // namespace torch_cubin
