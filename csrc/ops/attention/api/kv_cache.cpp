// flash_attention_with_kvcache on CUDA: check -> launch. Under batch_invariant() the sequences are
// packed and attended to as packed ones, by the kernels of a prefill, whose bits it then has.
#include "cubin/error.h"
#include "ops/attention/api/attention.h"
#include "ops/attention/plan/plan.h"
#include "ops/attention/problem/operands.h"
#include "ops/common/batch_invariant.h"
#include "ops/common/stable_ops.h"
#include "pytorch/aten_kernels.h"

namespace torch_cubin {
namespace {

// A contiguous tensor's memory with other sizes.
template <size_t kDim>
Tensor with_sizes(const Tensor& tensor, const int64_t (&sizes)[kDim]) {
  int64_t strides[kDim], next = 1;
  for (size_t i = kDim; i-- > 0; next *= sizes[i]) strides[i] = next;
  AtenTensorHandle made = nullptr;
  check_aten(aoti_torch__reinterpret_tensor(tensor.get(), kDim, sizes, strides, 0, &made),
             "flash_attention_with_kvcache");
  return Tensor(made);
}

Tensor attend_packed(const KvCacheCall& call, const PackedKvCache& packed) {
  const KvCacheShape& shape = call.shape;
  const Tensor q = with_sizes(torch::stable::contiguous(packed.q),
                              {shape.batch * shape.seqlen_q, shape.heads, shape.head_dim});
  AttentionOptions options{call.of_attention()};
  options.cu_seqlens_q = packed.cu_seqlens_q;
  options.cu_seqlens_k = packed.cu_seqlens_k;
  options.max_seqlen_q = shape.seqlen_q;
  options.max_seqlen_k = shape.capacity;
  const auto [out, logsumexp] = attention_forward_cuda(
      {"flash_attention_with_kvcache", q, packed.k, packed.v, std::move(options)}, false);
  return with_sizes(torch::stable::contiguous(out),
                    {shape.batch, shape.seqlen_q, shape.heads, shape.head_dim_v});
}

}  // namespace

Tensor flash_attention_with_kvcache_cuda(KvCacheArguments arguments) {
  KvCacheCall call(std::move(arguments));
  const KvCacheShape& shape = call.shape;
  const int64_t sizes[] = {shape.batch, shape.seqlen_q, shape.heads, shape.head_dim_v};
  call.out = empty_cuda(sizes, 4, call.dtype, call.device_index);
  if (shape.batch == 0 || (!shape.has_queries() && shape.new_columns == 0)) return call.out;
  call.q = vector_rows(call.q);
  for (OptionalTensor* rows : {&call.k, &call.v}) {
    if (*rows) *rows = vector_rows(**rows);
  }
  for (OptionalTensor* whole : {&call.rotary_cos, &call.rotary_sin, &call.cache_seqlens,
                                &call.cache_batch_idx, &call.block_table}) {
    *whole = contiguous(*whole);
  }
  make_heads_contiguous(call);
  PackedKvCache packed;
  const bool packs = batch_invariant() && !shape.e4m3 && shape.has_queries() && shape.capacity > 0;
  for (const auto& kernels : attention_kernels(device(call.device_index)).kv_cache) {
    if (kernels->run(call, packs ? &packed : nullptr)) {
      return packs ? attend_packed(call, packed) : call.out;
    }
  }
  const std::string head_dims = "none for head_dim " + std::to_string(shape.head_dim) + " and " +
                                std::to_string(shape.head_dim_v);
  if (shape.e4m3) {
    fail({"no_kernel", "flash_attention_with_kvcache", "has no kernel for caches of float8_e4m3fn",
          "kernels of float8_e4m3fn, which sm_90a has", head_dims,
          "Keep the caches in " + dtype_name(call.dtype) + " on this GPU."});
  }
  fail({"no_kernel", "flash_attention_with_kvcache", "has no kernel for these tensors",
        "kernels of the kind decode for " + dtype_name(call.dtype), head_dims,
        "Build the kernels with the library."});
}

}  // namespace torch_cubin
