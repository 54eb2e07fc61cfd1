// Which of a declared op's kernels a call takes, and what is said where none does.
#pragma once

#include <vector>

#include "declared/call_state.h"
#include "declared/contract.h"

namespace torch_cubin {

class Contract::Choice {
 public:
  // `state`: of a call whose arguments are bound when it asks.
  Choice(const Contract& contract, const CallState& state) : contract_(contract), state_(state) {}

  // The kernel of an op that has one. Whether an image runs on the device is left to the launch, whose
  // error says it.
  const Launch& only() const {
    const Launch& launch = contract_.launches_[0];
    if (!launch.takes(state_)) refuse_choice();
    return launch;
  }

  // Of several kernels the one that tune() found, or else the first that fits.
  const Launch& choose() const;

 private:
  // While torch_cubin.tune measures: its thread's calls take the kernel that it says, or are written
  // down. No table is asked.
  const Launch& watched_choice() const;

  // Whether a block may have so much. What reads an output's sizes is left to the launch: outputs are
  // not there yet.
  bool has_shared_memory(const Launch& launch) const;

  const Launch& first_choice() const;

  // Says of each kernel that runs on the device what it wants and does not get; of many, of those
  // that lack least.
  [[noreturn]] void refuse_choice() const;

  KernelLookup::Difference difference(const Launch& launch) const;

  // Those whose conditions and requirements lack least, in their order.
  std::vector<const Launch*> nearest(const std::vector<const Launch*>& launches,
                                     size_t count) const;

  const Contract& contract_;
  const CallState& state_;
};

}  // namespace torch_cubin
