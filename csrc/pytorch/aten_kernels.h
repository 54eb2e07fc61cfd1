// PyTorch's own kernels of matrix products, called through its C shims, which are below the
// dispatcher: what install() does not serve runs there, and cannot come back to our kernels.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

namespace torch_cubin {

// Functions of libtorch_cpu or libtorch_cuda; null where this PyTorch lacks one.
struct AtenProducts {
  using Product = AOTITorchError (*)(AtenTensorHandle out, AtenTensorHandle, AtenTensorHandle);
  using Sum = AOTITorchError (*)(AtenTensorHandle out, AtenTensorHandle self, AtenTensorHandle,
                                 AtenTensorHandle, double beta, double alpha);
  using NewSum = AOTITorchError (*)(AtenTensorHandle self, AtenTensorHandle, AtenTensorHandle,
                                    double beta, double alpha, AtenTensorHandle* result);
  // Null pointers, or pointers to an optional tensor or number.
  using Scaled = AOTITorchError (*)(AtenTensorHandle self, AtenTensorHandle,
                                    AtenTensorHandle scale_a, AtenTensorHandle scale_b,
                                    AtenTensorHandle* bias, AtenTensorHandle* scale_result,
                                    int32_t* out_dtype, int32_t use_fast_accum,
                                    AtenTensorHandle* result);
  Product mm_out, bmm_out;
  Sum addmm_out, baddbmm_out;
  NewSum addmv;
  Scaled scaled_mm;
};

const AtenProducts& aten_products(bool on_cuda);

// PyTorch's fused attentions, of libtorch_cuda alone: null on a CPU build. An optional tensor is a
// null pointer or points to a handle.
struct AtenAttentions {
  using Handle = AtenTensorHandle;
  // Results: out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, and three more tensors.
  using Flash = AOTITorchError (*)(Handle query, Handle key, Handle value, double dropout_p,
                                   int32_t is_causal, int32_t return_debug_mask, double* scale,
                                   Handle*, Handle*, Handle*, Handle*, int64_t*, int64_t*, Handle*,
                                   Handle*, Handle*);
  using FlashBackward = AOTITorchError (*)(Handle grad_out, Handle query, Handle key, Handle value,
                                           Handle out, Handle logsumexp, Handle cum_seq_q,
                                           Handle cum_seq_k, int64_t max_q, int64_t max_k,
                                           double dropout_p, int32_t is_causal, Handle seed,
                                           Handle offset, double* scale, Handle*, Handle*, Handle*);
  // Results: out, logsumexp, seed and offset.
  using Efficient = AOTITorchError (*)(Handle query, Handle key, Handle value, Handle* bias,
                                       int32_t compute_logsumexp, double dropout_p,
                                       int32_t is_causal, double* scale, Handle*, Handle*, Handle*,
                                       Handle*);
  using EfficientBackward = AOTITorchError (*)(Handle grad_out, Handle query, Handle key,
                                               Handle value, Handle bias, Handle out,
                                               Handle logsumexp, Handle seed, Handle offset,
                                               double dropout_p, const int32_t* wanted,
                                               int64_t wanted_count, int32_t is_causal,
                                               double* scale, Handle*, Handle*, Handle*, Handle*);
  using Cudnn = AOTITorchError (*)(Handle query, Handle key, Handle value, Handle* bias,
                                   int32_t compute_logsumexp, double dropout_p, int32_t is_causal,
                                   int32_t return_debug_mask, double* scale, Handle*, Handle*,
                                   Handle*, Handle*, int64_t*, int64_t*, Handle*, Handle*, Handle*);
  using CudnnBackward = AOTITorchError (*)(Handle grad_out, Handle query, Handle key, Handle value,
                                           Handle out, Handle logsumexp, Handle seed, Handle offset,
                                           Handle bias, Handle cum_seq_q, Handle cum_seq_k,
                                           int64_t max_q, int64_t max_k, double dropout_p,
                                           int32_t is_causal, double* scale, Handle*, Handle*,
                                           Handle*);
  Flash flash;
  FlashBackward flash_backward;
  Efficient efficient;
  EfficientBackward efficient_backward;
  // Results: out, logsumexp and three more tensors. `Paged` is that of torch 2.12 and newer.
  using Packed = AOTITorchError (*)(Handle query, Handle key, Handle value, Handle* cum_seq_q,
                                    Handle* cum_seq_k, int64_t max_q, int64_t max_k,
                                    double dropout_p, int32_t is_causal, int32_t return_debug_mask,
                                    double* scale, int64_t* window_left, int64_t* window_right,
                                    Handle* seqused_k, Handle* alibi_slopes, Handle*, Handle*,
                                    Handle*, Handle*, Handle*);
  using Paged = AOTITorchError (*)(Handle query, Handle key, Handle value, Handle* cum_seq_q,
                                   Handle* cum_seq_k, int64_t max_q, int64_t max_k,
                                   double dropout_p, int32_t is_causal, int32_t return_debug_mask,
                                   double* scale, int64_t* window_left, int64_t* window_right,
                                   Handle* seqused_k, Handle* alibi_slopes, Handle* block_table,
                                   int64_t* num_splits, Handle*, Handle*, Handle*, Handle*,
                                   Handle*);
  // Into `out`; the result is the logsumexp.
  using Into = AOTITorchError (*)(Handle out, Handle query, Handle key, Handle value,
                                  Handle* cum_seq_q, Handle* cum_seq_k, int64_t max_q,
                                  int64_t max_k, double dropout_p, int32_t is_causal,
                                  int32_t return_debug_mask, double* scale, int64_t* window_left,
                                  int64_t* window_right, Handle* seqused_k, Handle* alibi_slopes,
                                  Handle* block_table, int64_t* num_splits, Handle*);
  using PackedBackward = AOTITorchError (*)(Handle grad_out, Handle query, Handle key, Handle value,
                                            Handle out, Handle logsumexp, Handle cum_seq_q,
                                            Handle cum_seq_k, int64_t max_q, int64_t max_k,
                                            double dropout_p, int32_t is_causal, Handle rng_state,
                                            Handle unused, double* scale, int64_t* window_left,
                                            int64_t* window_right, Handle*, Handle*, Handle*);
  Cudnn cudnn;
  CudnnBackward cudnn_backward;
  Packed packed;
  Paged paged;
  Into into;
  PackedBackward packed_backward;
};

const AtenAttentions& aten_attentions();

// Throws PyTorch's IndexError, which Python knows as such, unless a tensor of so many dims has this
// one. Does nothing where this PyTorch lacks the function: its kernels then raise RuntimeError.
void check_aten_dim(int64_t dim, int64_t rank);

// Throws PyTorch's error as it is, which the user's own call to PyTorch raised.
void check_aten(AOTITorchError error, const char* op);

}  // namespace torch_cubin
