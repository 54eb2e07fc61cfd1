// The parameter of order.cu, shared by host and device code.
//
// `ids` has `k` experts of each token, one token after the other. In the experts' order, tokens of
// an expert follow one another as they do in `ids`; ids that are no expert's come last.
//   tokens[i]: the token of the place i in that order
//   places[j]: the place of ids[j]; -1 if that is no expert's
//   ends[e]: the place after the last one of expert e
//
// A block orders a chunk of the ids. Of several chunks, a first launch with `counts_only` writes
// counts[chunk][expert], with one more for ids of no expert, which the second launch reads.
#pragma once

namespace torch_cubin {

constexpr int kOrderChunk = 1024;  // ids
constexpr int kMostOrderedExperts = 1024;

struct ExpertOrderParams {
  const void* ids;
  int* tokens;
  int* places;
  int* ends;
  int* counts;
  int size;  // of ids
  int k, experts;
  int wide_ids;  // 64-bit
  int counts_only;
};

}  // namespace torch_cubin
