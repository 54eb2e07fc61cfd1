// What the seams of attention's kernels for Hopper share: tensor maps of operands of 16-bit types, as
// (batch, head, row, column), in boxes of 64 columns and some rows under the 128-byte swizzle; lengths;
// and the order of packed sequences' tiles.
#pragma once

#include <cstdint>

#include "kernels/attention/attention_params.h"
#include "kernels/attention/sm90_order_params.h"
#include "kernels/attention/sm90_params.h"
#include "ops/attention/portable.h"
#include "ops/common/launch.h"

namespace torch_cubin {

// `stride`: batch, head, row; in elements, whole 16 bytes each. `packed`: rows of sequences one behind
// the other; then `rows` counts those of all, and `batch` is of no meaning.
struct Sm90MapRows {
  const void* data;
  const tc_int64 (&stride)[3];
  int64_t columns, rows, heads, batch;
  bool packed;
};

void encode_sm90_map(Sm90AttentionMap& out, const AttentionRow& kernel, const Sm90MapRows& rows,
                     int64_t box_rows, const Device& device);

// The lengths and the band of a launch; of packed sequences the band as it is before any shift.
Sm90Lengths sm90_lengths(const AttentionParams& all);

// Strides of logsumexp: batch and head.
void sm90_logsumexp_strides(const AttentionParams& all, tc_int64 (&stride)[2]);

// What `general` kernels do to the scores, but for the mask.
Sm90ScoreRule sm90_score_params(const AttentionParams& all);

// The order of packed sequences' tiles (sm90_order.cu), which a kernel before the others makes. It also
// clears the rows of no sequence that `params` names.
class Sm90TileOrder {
 public:
  // `capacity`: the most tiles that there can be.
  Sm90TileOrder(const Device& device, int64_t capacity)
      : memory_(device, kHeader + capacity * static_cast<int64_t>(sizeof(Sm90OrderPlace))),
        capacity_(capacity) {}

  // Launches it. `params` has all but the order, the lengths and what follows from `all`.
  void make(PackageKernel& kernel, const Device& device, const AttentionParams& all,
            const FusedOperands& operands, Sm90OrderParams& params) const;

  Sm90Order* data() const { return reinterpret_cast<Sm90Order*>(memory_.data()); }

 private:
  static constexpr int64_t kHeader = sizeof(Sm90Order) - sizeof(Sm90OrderPlace);
  Workspace memory_;
  int64_t capacity_;
};

// A tensor whose rows of no sequence become zeros.
Sm90RowsOfNone sm90_rows_of_none(void* data, const tc_int64 (&stride)[3], int64_t heads,
                                 int64_t columns, bool of_keys);

}  // namespace torch_cubin
