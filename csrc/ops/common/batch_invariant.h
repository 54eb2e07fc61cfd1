// The state of torch_cubin.batch_invariant(): whether a row's bits must not depend on the number of
// other rows of the product.
#pragma once

namespace torch_cubin {

// This thread's state. Ops read it when they run, so compiled code obeys the context it is called
// in.
bool batch_invariant();

// Sets this thread's state; returns the previous one.
bool set_batch_invariant(bool on);

}  // namespace torch_cubin
