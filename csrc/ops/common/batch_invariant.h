// The switch behind torch_cubin.batch_invariant(): whether a row's bits may depend on how many other
// rows a product has.
#pragma once

namespace torch_cubin {

// How the switch of this thread stands. Ops read it when they run, so that code compiled outside of the switch obeys it.
bool batch_invariant();

// Turns the switch of this thread; returns how it stood before.
bool set_batch_invariant(bool on);

}  // namespace torch_cubin
