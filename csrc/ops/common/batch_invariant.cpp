#include "ops/common/batch_invariant.h"

namespace torch_cubin {
namespace {

thread_local bool t_batch_invariant = false;

}  // namespace

bool batch_invariant() { return t_batch_invariant; }

bool set_batch_invariant(bool on) {
  const bool before = t_batch_invariant;
  t_batch_invariant = on;
  return before;
}

}  // namespace torch_cubin
