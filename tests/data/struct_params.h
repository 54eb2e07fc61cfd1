// The parameter of the kernel of tests/gpu/test_cuda_structs.py: what a partial reader gets wrong.
#pragma once
constexpr int kCount = 1 + 1;
struct Base {
  int base;
  char tag;
};
struct alignas(16) Params : Base {
  char small;
  int v[kCount];
#if 1
  int n = 7;
#else
  double n;
#endif
  unsigned mode : 3, rest : 13;
  union {
    float f;
    int i;
  };
  struct Pair {
    const float* x;
    long long scale;
  } pairs[2];
  float* out;
};
