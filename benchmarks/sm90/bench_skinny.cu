// All kernels of bench_skinny.py in one cubin; SKINNY_LIST has one SKINNY(...) per kernel.
#define TC_KERNEL bench  // the namespace for the definitions in sm90_skinny.cu
#include "matmul/sm90_skinny.cu"

#define SKINNY(NAME, TYPE, CONTIGUOUS, BLOCKS, TOKENS)                           \
  extern "C" __global__ void __launch_bounds__(160) NAME(                        \
      const __grid_constant__ torch_cubin::Sm90SkinnyParams p) {                 \
    using namespace torch_cubin::bench;                                          \
    run_skinny<SkinnyConfig<torch_cubin::DType::TYPE, CONTIGUOUS, BLOCKS, TOKENS>>(p);    \
  }

#include SKINNY_LIST
