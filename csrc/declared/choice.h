// Selects the kernel of a declared op for a call, or throws the error that explains why none fits.
#pragma once

#include <vector>

#include "declared/call_state.h"
#include "declared/contract.h"

namespace torch_cubin {

class Contract::Choice {
 public:
  // `state`: the call's, whose arguments must be bound before the selection.
  Choice(const Contract& contract, const CallState& state) : contract_(contract), state_(state) {}

  // The kernel of an op with a single one. The launch checks whether an image runs on the device.
  const Launch& only() const {
    const Launch& launch = contract_.launches_[0];
    if (!launch.takes(state_)) refuse_choice();
    return launch;
  }

  // Of several kernels the one that tune() found, else the first that fits.
  const Launch& choose() const;

 private:
  // While torch_cubin.tune measures: this thread's calls take its forced kernel, or are recorded.
  // Tuned tables are ignored.
  const Launch& watched_choice() const;

  // Whether the device allows the launch's shared memory. Sizes that depend on outputs are checked
  // by the launch: outputs are not allocated yet.
  bool has_shared_memory(const Launch& launch) const;

  const Launch& first_choice() const;

  // Throws the error that lists the unmet conditions of each kernel for the device; of many
  // kernels, those of the nearest.
  [[noreturn]] void refuse_choice() const;

  KernelLookup::Difference difference(const Launch& launch) const;

  // The kernels with the fewest unmet conditions and requirements, in their order.
  std::vector<const Launch*> nearest(const std::vector<const Launch*>& launches,
                                     size_t count) const;

  const Contract& contract_;
  const CallState& state_;
};

}  // namespace torch_cubin
