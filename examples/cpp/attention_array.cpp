// Fused attention whose cubin is an array in fmha_packed_sm90a.cubin.cpp, as in TensorRT-LLM: one
// parameter, a struct by value, and Q, K and V packed into one tensor.
#include <torch_cubin/cubin.h>

#include "fmha_params.h"
#include "support.h"

using namespace torch_cubin;

extern const unsigned char fmha_packed_sm_90a_cubin[];
extern const unsigned int fmha_packed_sm_90a_cubin_len;

namespace {

constexpr int kBatch = 2, kSeqlen = 77, kHeads = 3, kHeadDim = 64;

std::vector<double> reference(const std::vector<uint16_t>& qkv, double scale, bool is_causal) {
  const auto at = [&](int batch, int row, int part, int head, int i) {
    const size_t position = static_cast<size_t>(batch * kSeqlen + row) * 3 + part;
    return double{example::to_float(qkv[(position * kHeads + head) * kHeadDim + i])};
  };
  std::vector<double> out;
  for (int b = 0; b < kBatch; ++b) {
    for (int query = 0; query < kSeqlen; ++query) {
      for (int h = 0; h < kHeads; ++h) {
        std::vector<double> row(kHeadDim);
        double total = 0;
        for (int key = 0; key < (is_causal ? query + 1 : kSeqlen); ++key) {
          double score = 0;
          for (int i = 0; i < kHeadDim; ++i) score += at(b, query, 0, h, i) * at(b, key, 1, h, i);
          const double weight = std::exp(score * scale);
          total += weight;
          for (int i = 0; i < kHeadDim; ++i) row[i] += weight * at(b, key, 2, h, i);
        }
        for (const double value : row) out.push_back(value / total);
      }
    }
  }
  return out;
}

}  // namespace

int main() {
  try {
    Module module = Module::from_memory(fmha_packed_sm_90a_cubin, fmha_packed_sm_90a_cubin_len,
                                        "fmha_packed_sm90a.cubin.cpp");
    Kernel fmha = module["fmha_packed"];
    fmha.check<FmhaParams>();  // 48 bytes, as the binary's table says

    std::vector<uint16_t> packed(size_t{kBatch} * kSeqlen * 3 * kHeads * kHeadDim);
    for (size_t i = 0; i < packed.size(); ++i) {
      packed[i] = example::to_half(0.25f * static_cast<float>(example::small_number(i)));
    }
    Buffer<uint16_t> qkv(packed), out(packed.size() / 3);
    int wrong = 0;
    for (const bool is_causal : {false, true}) {
      FmhaParams params{};
      params.qkv = qkv.data();
      params.out = out.data();
      params.row_stride = 3 * kHeads * kHeadDim;
      params.batch = kBatch;
      params.seqlen = kSeqlen;
      params.heads = kHeads;
      params.scale = 0.125f;
      params.is_causal = is_causal;
      fmha(grid(cdiv(kSeqlen, 4), kHeads, kBatch), block(128), nullptr, params);
      std::vector<float> got;
      for (const uint16_t half : out.to_vector()) got.push_back(example::to_float(half));
      wrong += example::compare(is_causal ? "fmha_packed, causal" : "fmha_packed", got,
                                reference(packed, params.scale, is_causal), 2e-3);
    }
    return wrong == 0 ? 0 : 1;
  } catch (const Error& error) {
    std::printf("%s\n", error.what());
    return 1;
  }
}
