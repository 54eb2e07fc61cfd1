// What torch_cubin.tune asks of declared ops: calls that are watched, and tables of what it found, in this
// process and in files.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>

#include "declared/tuned_calls.h"

namespace torch_cubin {

class Contract;

// What torch_cubin.tune asks of this thread's calls of one op: each is written down, or is made to run
// one kernel.
struct CallWatch {
  const Contract* contract = nullptr;
  int32_t forced = -1;  // a kernel's number
  // [{"device", "key", "chosen": the kernel that it takes without a table, "fits": [kernels that take
  // it], "same": [those of them with the condition of `chosen`]}]
  nlohmann::json calls = nlohmann::json::array();
};
CallWatch& call_watch();

// Watches this thread's calls of that op, and of no other; null ends it.
void watch_op(const Contract* contract);

// The file in which tune() keeps what it measured of that op on that device, and a process finds it at
// the op's first call: {"path" (null without a cache folder), "gpu", "driver", "op", "hash"}.
// Its name says GPU, driver and what the op does with which images, and so does what it holds.
nlohmann::json tuned_file(const Contract& contract, int32_t device);

// The table in that file; an empty one where there is none, or a damaged one, or one of anything else.
TunedCalls read_tuned_file(const Contract& contract, int32_t device);

// Uses a table {"version", "gpu", "driver", "ops": [{"op", "hash", "calls"}]} from now on, beside what
// is used already. Throws [input] for one of a GPU or driver that this process does not have, or of
// an op that is not declared, or is another one.
void add_tuned_calls(const nlohmann::json& table);

}  // namespace torch_cubin
