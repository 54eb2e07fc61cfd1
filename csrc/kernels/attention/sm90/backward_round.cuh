// Rounds dq while other work items still run, in the warp of sm90/backward.cu that fetches work
// items and mostly waits: a tile of queries after the other, from when the last block of keys has
// added to it. sm90/backward_convert.cu rounds the tiles that are left when a block has no more
// work items: mostly those of the last heads.
//
// A block has every gridDim.x-th tile in the order of rounded_tile(), and rounds them in this
// order. Sums come through shared memory, so that the next ones are loaded meanwhile: this warp
// has few registers.
#pragma once

#include "backward_block.cuh"
#include "backward_convert.cuh"

namespace torch_cubin {
namespace sm90 {

// In a whole warp: whether the phase with this parity has completed. Unlike barrier_try, it never
// waits.
TC_DEVICE bool has_completed(u32 barrier, u32 parity) {
  u32 done;
  asm volatile(
      "{ .reg .pred done; mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;"
      " selp.b32 %0, 1, 0, done; }"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return whole_warp(done) != 0;
}

// Waits for it, no longer than about a number of nanoseconds.
TC_DEVICE void sleep_until(u32 barrier, u32 parity, u32 nanoseconds) {
  asm volatile(
      "{ .reg .pred done; mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1, %2; }" ::"r"(
          barrier),
      "r"(parity), "r"(nanoseconds)
      : "memory");
}

// NOTE: not threadIdx.x, which ptxas then reads anew in every step of all warps (S2R): 1.08 of the
// time with 64 columns.
TC_DEVICE int own_lane() {
  int lane;
  asm("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

// A BackwardConfig and the memory of a DqRounder.
template <class Base>
struct RoundingConfig : Base {
  static constexpr bool kRounds = true;
  // A part of a tile: 16 queries and 64 columns. Each 16 columns are contiguous; they lie 64 bytes
  // apart, so that a load of 32 columns uses all banks.
  static constexpr int kRoundColumns = 16 * 16 * 4, kRoundPitch = kRoundColumns + 64;
  static constexpr int kRoundBuffers = 2, kRoundBytes = 4 * kRoundPitch;
  static constexpr int kRound = (Base::kSharedBytes + 127) / 128 * 128;
  static constexpr int kRoundFull = kRound + kRoundBuffers * kRoundBytes;
  static constexpr int kSharedBytes = kRoundFull + 8 * kRoundBuffers;
  static_assert(!Base::kWide && Base::kRows % 16 == 0);
};

// All of a warp's lanes call each function.
template <class C>
class DqRounder {
 public:
  TC_DEVICE DqRounder(const Sm90BackwardParams& params, u32 memory) : p(params), shared(memory) {
    if (own_lane() == 0) {
#pragma unroll
      for (int i = 0; i < C::kRoundBuffers; ++i) barrier_init(full(i), 1);
      fence_barrier_init();
    }
    __syncwarp();
  }

  // Whether a tile is rounded in part.
  TC_DEVICE bool is_busy() const { return unit_ != kUnits; }

  // Rounds a part of a tile. False, having done nothing, if none is complete.
  TC_DEVICE bool round() {
    if (!is_busy()) return begin_tile();
    u32 buffer = loads_ % C::kRoundBuffers;
    barrier_wait(full(buffer), loads_ / C::kRoundBuffers % 2);
    round_unit(shared + C::kRound + buffer * C::kRoundBytes);
    __syncwarp();
    load(unit_ + C::kRoundBuffers, buffer);
    ++loads_;
    if (++unit_ == kUnits && own_lane() == 0) store_turn(p.turns + tile_, kRounded);
    return true;
  }

 private:
  static constexpr int kRowUnits = C::kRows / 16, kUnits = C::kPanels * kRowUnits;

  TC_DEVICE u32 full(u32 buffer) const { return shared + C::kRoundFull + 8 * buffer; }

  // Looks for the next tile to which a block adds: the last kernel stores zeros to others.
  TC_DEVICE void find_tile() {
    if (p.order != nullptr || p.parts > 1 || p.sets > 1) return;
    u32 tiles = static_cast<u32>(p.tiles) * p.heads * p.batch;
#pragma unroll 1
    for (; index_ < tiles && additions_ == 0; index_ += gridDim.x) {
      tile_ = rounded_tile(p, index_);
      QueryTile place = QueryTile::of_equals(p, tile_);
      additions_ = sm90::additions(p, place, Sm90Sequence::of_equals(p.lengths, place.batch), 0);
    }
  }

  TC_DEVICE bool begin_tile() {
    if (additions_ == 0) find_tile();
    if (additions_ == 0 || whole_warp(load_turn(p.turns + tile_)) != static_cast<u32>(additions_)) {
      return false;
    }
    fence_async_proxy_everywhere();
    additions_ = unit_ = 0;
    QueryTile place = QueryTile::of_equals(p, tile_);
    int row = place.tile * C::kRows + own_lane() / 4;
    rows_ = p.lengths.seqlen_q - row;
    to_ = static_cast<u16*>(p.dq) + place.batch * p.dq_stride[0] + place.head * p.dq_stride[1] +
          row * p.dq_stride[2] + own_lane() % 4 * 8;
#pragma unroll
    for (int i = 0; i < C::kRoundBuffers; ++i) load(i, (loads_ + i) % C::kRoundBuffers);
    return true;
  }

  // Requests a unit's sums.
  TC_DEVICE void load(int unit, u32 buffer) {
    if (unit >= kUnits || own_lane() != 0) return;
    tc_int64 piece = static_cast<tc_int64>(tile_) * C::kPanels + unit / kRowUnits;
    const float* from = p.dq_sum + piece * (64 * C::kRows) + unit % kRowUnits * 256;
    barrier_expect(full(buffer), 4 * C::kRoundColumns);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      bulk_load(shared + C::kRound + buffer * C::kRoundBytes + i * C::kRoundPitch,
                from + i * (16 * C::kRows), C::kRoundColumns, full(buffer));
    }
  }

  // `buffer`: a unit's sums, in the order of sm90/backward_dq.cuh. A lane has 8 columns of a query
  // at a time.
  TC_DEVICE void round_unit(u32 buffer) {
    int query = own_lane() / 4, eighth = own_lane() % 4;
    int octet = unit_ % kRowUnits * 2, column = 64 * (unit_ / kRowUnits);
    u32 from =
        buffer + eighth / 2 * C::kRoundPitch + query / 2 * 16 + eighth % 2 * 8 + query % 2 * 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      int first = 8 * (octet + i);
      u16* to = to_ + first * p.dq_stride[2] + column;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float x[8];
#pragma unroll
        for (int g = 0; g < 8; ++g) {
          u32 bits;
          load_shared(bits, from + 2 * half * C::kRoundPitch + i * 512 + g * 64);
          x[g] = __uint_as_float(bits) * p.scale;
        }
        if (first < rows_ && column + 8 * eighth + 32 * half < p.head_dim) {
          using Traits = DTypeTraits<C::kDType>;
          *reinterpret_cast<uint4*>(to + 32 * half) =
              make_uint4(Traits::pack(x[0], x[1]), Traits::pack(x[2], x[3]),
                         Traits::pack(x[4], x[5]), Traits::pack(x[6], x[7]));
        }
      }
    }
  }

  const Sm90BackwardParams& p;
  u32 shared;
  u32 index_ = blockIdx.x;        // of the tile after this one
  u32 tile_ = 0, loads_ = 0;      // this one's number; units rounded of all tiles
  int additions_ = 0;             // that this tile waits for; 0: there is none yet
  int unit_ = kUnits, rows_ = 0;  // rows_: of this tile, from this lane's first one on
  u16* to_ = nullptr;             // this lane's first row and columns
};

// fetch_work_items() of a block that rounds dq too.
template <class C>
TC_DEVICE void fetch_and_round(const Sm90BackwardParams& p, u32 shared, KeyBlock* items,
                               PairPlace pair) {
  constexpr u32 kNanoseconds = 2000;  // between two looks at a tile that is not complete
  DqRounder<C> rounder(p, shared);
  constexpr u32 kEnd = ~0u;
  // Twice a work item's number, and 1 when it has been requested.
#pragma unroll 1
  for (u32 stage = 1; stage != kEnd || rounder.is_busy();) {
    u32 number = stage / 2, barrier = shared + C::kWanted, parity = phase<1>(number) ^ 1;
    if (stage % 2 != 0) {
      barrier = shared + C::kWorkEmpty + 8 * slot<C::kWorkItems>(number);
      parity = phase<C::kWorkItems>(number) ^ 1;
    }
    if (stage != kEnd && has_completed(barrier, parity)) {
      bool ends = stage % 2 != 0 && !fetch_work_item<C>(p, shared, items, number, pair, own_lane());
      stage = ends ? kEnd : stage + 1;
    } else if (!rounder.round()) {
      sleep_until(barrier, parity, kNanoseconds);
    }
  }
}

struct RoundingRoles : BlockRoles {
  template <class C>
  static TC_DEVICE void fetch(const Sm90BackwardParams& p, u32 shared, KeyBlock* items,
                              PairPlace pair) {
    if constexpr (C::kRounds) {
      fetch_and_round<C>(p, shared, items, pair);
    } else {
      fetch_work_items<C>(p, shared, items, pair);
    }
  }
};

}  // namespace sm90
}  // namespace torch_cubin
