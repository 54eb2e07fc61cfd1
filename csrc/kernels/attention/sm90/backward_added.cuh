// Reads an additive mask in the layout of sm90/backward_added_mask.cu, for the warpgroups of keys
// of attention's backward on Hopper.
#pragma once

#include "attention/numbers.cuh"
#include "backward_keys.cuh"

namespace torch_cubin {
namespace sm90 {

// The producer's description of a step.
struct StepPlace {
  int query, head;  // query: the first one
  bool adds_mask;   // whether the mask is added to a warpgroup's 64 keys

  template <class C>
  static TC_DEVICE StepPlace read(u32 shared, u32 q, int group) {
    u32 first_row, head;
    load_shared(first_row, shared + C::kFirstRow + 4 * q);
    load_shared(head, shared + C::kHead + 4 * q);
    return {static_cast<int>(first_row / 8), static_cast<int>(head / 4), (head >> group & 1) != 0};
  }
};

TC_DEVICE void load_vector(u32 (&out)[4], const uint4* from) {
  asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "l"(from));
}

// for_each_added() for numbers of `kBytes`. Requests a few vectors at a time.
template <class C, int kBytes, class Add>
TC_DEVICE void add_numbers(const uint4* from, tc_int64 place, Add&& add) {
  constexpr int kThreads = 2 * C::kWorkKeys, kVectors = C::kRows * kBytes / 32, kEach = 16 / kBytes;
  constexpr int kTogether = kVectors % 3 == 0 ? 3 : 4;
  static_assert(kVectors % kTogether == 0);
  from += place * (kVectors * kThreads);
#pragma unroll
  for (int first = 0; first < kVectors; first += kTogether) {
    u32 vector[kTogether][4];
#pragma unroll
    for (int v = 0; v < kTogether; ++v) load_vector(vector[v], from + (first + v) * kThreads);
#pragma unroll
    for (int i = 0; i < kEach * kTogether; ++i) {
      u32 word = vector[i / kEach][i % kEach * kBytes / 4];
      add(kEach * first + i,
          kBytes == 4 ? __uint_as_float(word)
                      : DTypeTraits<C::kDType>::load(static_cast<u16>(word >> 16 * (i % 2))));
    }
  }
}

// Calls add(i, value) for each element i of this thread, for the 64 keys of `part` of the work
// item.
template <class C, class Add>
TC_DEVICE void for_each_added(const Sm90BackwardParams& p, const KeyBlock& work,
                              const StepPlace& of, int part, Add&& add) {
  MaskPlace at(p.bits, work.batch, of.head, of.query / C::kRows);
  tc_int64 place = (at.plane * p.bits.tiles + at.tile) * p.key_tiles + work.key_tile;
  auto from =
      reinterpret_cast<const uint4*>(p.bits.words) + kWarpgroup * part + threadIdx.x % kWarpgroup;
  if (p.mask_floats != 0) {
    add_numbers<C, 4>(from, place, add);
  } else {
    add_numbers<C, 2>(from, place, add);
  }
}

// Whether a mask's numbers are added to the 64 keys of `part` in the step of slot `q`.
template <class C>
TC_DEVICE bool adds_mask(const Sm90BackwardParams& p, u32 shared, u32 q, int part) {
  return C::kAdded && p.mask_added != 0 && StepPlace::read<C>(shared, q, part).adds_mask;
}

// A weight, 2^exponent, at most 1. If a mask moves all keys of a row by -1e9, for example, logits
// and logsumexp are rounded to multiples of 64, and their difference may be positive.
TC_DEVICE float weight_of(float exponent) {
  asm("min.NaN.f32 %0, %0, 0f00000000;" : "+f"(exponent));
  return exp2_approx(exponent);
}

// s = q.k becomes P with the mask's numbers added, or without if all are 0 (`adds` false). `from`:
// this thread's logsumexp of the step, a natural logit. Elements hidden by an additive -inf may
// have any value.
template <class C>
TC_DEVICE void exponentiate_added(float (&s)[C::kRows / 2], const Sm90BackwardParams& p, bool adds,
                                  u32 shared, const KeyBlock& work, u32 q, int part, u32 from) {
  if (!adds) {
#pragma unroll
    for (int j = 0; j < C::kRows / 8; ++j) {
      float lse[2];
      load_shared(lse, from + j * 32);
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        s[4 * j + r] = exp2_approx(fmaf(s[4 * j + r], p.unit, -lse[r % 2] * kLog2e));
      }
    }
    return;
  }
  float lse[2];
  for_each_added<C>(p, work, StepPlace::read<C>(shared, q, part), part, [&](int i, float value) {
    if (i % 4 == 0) load_shared(lse, from + i / 4 * 32);
    float weight = weight_of(fmaf(s[i], p.unit, (value - lse[i % 2]) * kLog2e));
    s[i] = value == -kInfinity ? 0.0f : weight;
  });
}

}  // namespace sm90
}  // namespace torch_cubin
