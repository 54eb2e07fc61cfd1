// The state of torch_cubin.batch_invariant() and install(batch_invariant=True): whether a row's
// bits must not depend on the number of other rows.
#pragma once

namespace torch_cubin {

// The state of this thread's calls: its own; else, in a thread of backward(), that of the calling
// thread; else the process's. Ops read it when they run, so compiled code obeys the context it is
// called in.
bool batch_invariant();

// Sets this thread's state: 0 or 1, or -1 for none of its own. Returns the previous one.
int set_batch_invariant(int state);

void set_process_batch_invariant(bool on);  // install()

// Whether batch-invariant products add K up in one chain, however many columns they have: with
// install(tensor_parallel=N), where the number of columns of a rank depends on the number of ranks.
bool keeps_k_whole();
void set_process_keeps_k_whole(bool on);

}  // namespace torch_cubin
