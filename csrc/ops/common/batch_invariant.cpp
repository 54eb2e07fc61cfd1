#include "ops/common/batch_invariant.h"

#include <atomic>
#include <string>

#include "ops/common/thread_objects.h"

namespace torch_cubin {
namespace {

std::atomic<bool> g_invariant_process{false};
std::atomic<bool> g_keeps_k_whole{false};
// Number of threads whose own state is 1. While it is 0, no call looks for the state of the thread
// that called backward().
std::atomic<int> g_invariant_threads{0};
thread_local int t_invariant = -1;

}  // namespace

bool batch_invariant() {
  static auto* const key = new std::string("torch_cubin.batch_invariant");  // leaked on purpose
  if (t_invariant >= 0) return t_invariant != 0;
  if (g_invariant_threads.load(std::memory_order_relaxed) > 0 && thread_object_exists(*key))
    return true;
  return g_invariant_process.load(std::memory_order_relaxed);
}

int set_batch_invariant(int state) {
  const int before = t_invariant;
  g_invariant_threads += (state == 1) - (before == 1);
  t_invariant = state;
  return before;
}

void set_process_batch_invariant(bool on) { g_invariant_process.store(on); }

bool keeps_k_whole() { return g_keeps_k_whole.load(std::memory_order_relaxed); }

void set_process_keeps_k_whole(bool on) { g_keeps_k_whole.store(on); }

}  // namespace torch_cubin
