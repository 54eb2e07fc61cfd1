// The totals of a thread's sums of float64 over the chains of K before, in local memory: registers
// and shared memory are full.
//
// NOTE: without `#pragma once`: the build compiles several kernels of a source together, and this
// file once in the namespace of each.

#include "chains_params.h"
#include "common/ptx.cuh"

namespace torch_cubin::TC_KERNEL {

template <int kCount>
struct ChainTotals {
  static_assert(kCount % 2 == 0);
  alignas(16) double totals[kCount];

  // By its address, so that it is no register.
  TC_DEVICE u64 address() {
    u64 address;
    asm volatile("cvta.to.local.u64 %0, %1;" : "=l"(address) : "l"(totals));
    return address;
  }

  // at(i): a reference to the thread's sum i.
  template <class At>
  TC_DEVICE void add_to(At&& at) {
    const u64 from = address();
#pragma unroll
    for (int i = 0; i < kCount; i += 2) {
      double first, second;
      asm volatile("ld.local.v2.f64 {%0, %1}, [%2];"
                   : "=d"(first), "=d"(second)
                   : "l"(from + i * 8)
                   : "memory");
      at(i) += first;
      at(i + 1) += second;
    }
  }

  // Adds the sums, of the first chain or a later one, which are zero then.
  template <class At>
  TC_DEVICE void move(bool is_first, At&& at) {
    if (!is_first) add_to(at);
    const u64 to = address();
#pragma unroll
    for (int i = 0; i < kCount; i += 2) {
      asm volatile("st.local.v2.f64 [%0], {%1, %2};" ::"l"(to + i * 8), "d"(at(i)), "d"(at(i + 1))
                   : "memory");
      at(i) = 0;
      at(i + 1) = 0;
    }
  }
};

}  // namespace torch_cubin::TC_KERNEL
