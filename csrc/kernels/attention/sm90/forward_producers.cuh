// The producers of attention's forward on Hopper (sm90/forward_block.cuh): the warps that schedule
// tiles, load Q, K and V, and convert V. `C` is a kernel's config.
#pragma once

#include "schedule.cuh"

namespace torch_cubin {
namespace sm90 {

template <int kStages>
struct Slot {
  int stage = 0;
  u32 phase = 0;
  TC_DEVICE void next() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

// A whole warp: schedules tiles, and loads each tile's Q. The first tile is found before the
// previous kernel has ended, where no memory is needed for it; later waits return at once.
template <class C>
TC_DEVICE void produce_q(const typename C::Params& p, u32 shared, typename C::Tile* tiles,
                         int team) {
  AttentionSchedule<C::kRows, C::kN, C::kTakesNext, C::kTeams, C::kRotates, C::kOrders> schedule(
      p, team);
  bool elected = threadIdx.x % 32 == 0;
  Slot<C::kSharesQ ? C::kQBuffers : C::kQSlots> slot;
  TilePlace place{};
  for (int number = 0;; ++number) {
    bool any = schedule.next(place);
    if (elected) {
      // Consumers read a tile's entry until they have stored it; by then they are at most three
      // tiles behind, the number of slots of Q and K.
      typename C::Tile& tile = tiles[number % C::kRing];
      if (any) {
        C::describe_tile(tile, p, place);
      } else {
        tile.blocks = 0;
      }
      barrier_arrive(shared + C::kTileFull + 8 * (number % C::kRing));
    }
    wait_for_previous_grid();
    if (elected) {
      const typename C::Tile& tile = tiles[number % C::kRing];
#pragma unroll
      for (int g = 0; g < C::kGroups; ++g) {
        int i = C::kSharesQ ? slot.stage : slot.stage * C::kGroups + g;
        u32 full = shared + C::kQFull + 8 * i, to = shared + i * C::kQBytes;
        barrier_sleep(shared + C::kQEmpty + 8 * i, slot.phase ^ 1);
        if constexpr (C::kSharesQ) slot.next();
        if (!any) {
          barrier_arrive(full);
          continue;
        }
        barrier_expect(full, C::kQBytes);
#pragma unroll
        for (int panel = 0; panel < C::kPanels; ++panel) {
          const Sm90Sequence& s = tile.sequence;
          tma_load(to + panel * (64 * C::kPanelBytes), &p.q, full, C::kPanelColumns * panel,
                   s.q.place + tile.row + 64 * g, tile.head, s.q.batch, s.wrap);
        }
      }
    }
    __syncwarp();
    if (!any) return;
    if constexpr (!C::kSharesQ) slot.next();
  }
}

// Whether a tile's blocks of keys are those of the previous tile, which then are in the same slots.
template <class C>
TC_DEVICE bool has_same_keys(const typename C::Tile& tile, const typename C::Tile& previous) {
  return C::kKeepsKeys && tile.blocks == C::kStages && previous.blocks == C::kStages &&
         tile.last_block == previous.last_block && tile.kv_head == previous.kv_head &&
         tile.batch == previous.batch;
}

// Keys, or values as rows like them, of one block.
template <class C>
TC_DEVICE void load_rows(const Sm90AttentionMap& map, const typename C::Tile& tile, int block,
                         u32 to, u32 arrived) {
#pragma unroll
  for (int panel = 0; panel < C::kPanels; ++panel) {
    const Sm90Sequence& s = tile.sequence;
    tma_load(to + panel * (C::kN * C::kPanelBytes), &map, arrived, C::kPanelColumns * panel,
             s.k.place + block * C::kN, tile.kv_head, s.k.batch, s.wrap);
  }
}

// One thread: loads the blocks of K, or of V, of one tile after the other.
template <class C, bool kIsValues>
TC_DEVICE void produce_keys(const typename C::Params& p, u32 shared,
                            const typename C::Tile* tiles) {
  u32 ring = shared + (kIsValues ? C::kV : C::kK);
  u32 full = shared + (kIsValues ? C::kVFull : C::kKFull);
  u32 empty = shared + (kIsValues ? C::kVEmpty : C::kKEmpty);
  Slot<C::kStages> slot;
  for (int number = 0;; ++number) {
    int entry = number % C::kRing;
    barrier_sleep(shared + C::kTileFull + 8 * entry, number / C::kRing % 2);
    wait_for_previous_grid();
    if (tiles[entry].blocks == 0) return;
    bool loaded = number > 0 && has_same_keys<C>(tiles[entry], tiles[(number - 1) % C::kRing]);
    KeyBlocks<C::kRows, C::kMasked> blocks(p, tiles[entry]);
    [[maybe_unused]] std::conditional_t<kIsValues, NoMask, typename C::Mask> mask(p, tiles[entry]);
    typename C::Tile tile = tiles[entry];
#pragma unroll 1
    for (;; blocks.next()) {
      u32 arrived = full + 8 * slot.stage, to = ring + slot.stage * C::kKvBytes;
      [[maybe_unused]] u32 next = 0;
      if constexpr (C::kSendsNextBlock && !kIsValues) {
        next = ReceivedKeyBlocks<typename C::Mask>::describe_next(blocks, mask);
      }
      barrier_sleep(empty + 8 * slot.stage, slot.phase ^ 1);
      if constexpr (C::kSendsNextBlock && !kIsValues) {
        store_shared(shared + C::kNextBlock + 4 * slot.stage, next);
      }
      if (loaded) {
        barrier_arrive(arrived);
      } else {
        barrier_expect(arrived, C::kKvBytes);
        if constexpr (kIsValues) {
          C::load_values(p, tile, blocks.block, to, arrived);
        } else {
          load_rows<C>(p.k, tile, blocks.block, to, arrived);
        }
      }
      slot.next();
      if (blocks.is_last()) break;
    }
  }
}

// One thread: loads the blocks of K and of V.
template <class C>
TC_DEVICE void produce_keys_and_values(const typename C::Params& p, u32 shared,
                                       const typename C::Tile* tiles) {
  Slot<C::kStages> slot;
  for (int number = 0;; ++number) {
    int entry = number % C::kRing;
    barrier_sleep(shared + C::kTileFull + 8 * entry, number / C::kRing % 2);
    wait_for_previous_grid();
    if (tiles[entry].blocks == 0) return;
    const typename C::Tile& tile = tiles[entry];
    KeyBlocks<C::kRows, C::kMasked> blocks(p, tile);
#pragma unroll 1
    for (;; blocks.next()) {
      u32 barrier = 8 * slot.stage, to = shared + slot.stage * C::kKvBytes;
      barrier_sleep(shared + C::kKEmpty + barrier, slot.phase ^ 1);
      barrier_expect(shared + C::kKFull + barrier, C::kKvBytes);
      load_rows<C>(p.k, tile, blocks.block, to + C::kK, shared + C::kKFull + barrier);
      barrier_sleep(shared + C::kVEmpty + barrier, slot.phase ^ 1);
      barrier_expect(shared + C::kVFull + barrier, C::kKvBytes);
      load_rows<C>(p.v, tile, blocks.block, to + C::kV, shared + C::kVFull + barrier);
      slot.next();
      if (blocks.is_last()) break;
    }
  }
}

// One thread: loads the blocks of K, and panel by panel those of V that two warps convert.
template <class C>
TC_DEVICE void produce_keys_and_rows(const typename C::Params& p, u32 shared,
                                     const typename C::Tile* tiles) {
  Slot<C::kStages> key;
  Slot<C::kRowStages> row;
  for (int number = 0;; ++number) {
    int entry = number % C::kRing;
    barrier_sleep(shared + C::kTileFull + 8 * entry, number / C::kRing % 2);
    wait_for_previous_grid();
    if (tiles[entry].blocks == 0) return;
    const typename C::Tile& tile = tiles[entry];
    KeyBlocks<C::kRows, false> blocks(p, tile);
#pragma unroll 1
    for (;; blocks.next()) {
      u32 arrived = shared + C::kKFull + 8 * key.stage;
      barrier_sleep(shared + C::kKEmpty + 8 * key.stage, key.phase ^ 1);
      barrier_expect(arrived, C::kKvBytes);
      load_rows<C>(p.k, tile, blocks.block, shared + C::kK + key.stage * C::kKvBytes, arrived);
      key.next();
#pragma unroll 1
      for (int panel = 0; panel < C::kPanels; ++panel) {
        arrived = shared + C::kRowsFull + 8 * row.stage;
        barrier_sleep(shared + C::kRowsEmpty + 8 * row.stage, row.phase ^ 1);
        barrier_expect(arrived, C::kRowBytes);
        const Sm90Sequence& s = tile.sequence;
        tma_load(shared + C::kVRows + row.stage * C::kRowBytes, &p.v, arrived,
                 C::kPanelColumns * panel, s.k.place + blocks.block * C::kN, tile.kv_head,
                 s.k.batch, s.wrap);
        row.next();
      }
      if (blocks.is_last()) break;
    }
  }
}

// Each of two whole warps: converts half of each panel of V.
template <class C>
TC_DEVICE void convert_rows(u32 shared, const typename C::Tile* tiles, int half) {
  Slot<C::kRowStages> row;
  Slot<C::kStages> value;
  bool elected = threadIdx.x % 32 == 0;
  for (int number = 0;; ++number) {
    int entry = number % C::kRing;
    barrier_sleep(shared + C::kTileFull + 8 * entry, number / C::kRing % 2);
    int blocks = tiles[entry].blocks;
    if (blocks == 0) return;
#pragma unroll 1
    for (; blocks > 0; --blocks) {
      barrier_sleep(shared + C::kVEmpty + 8 * value.stage, value.phase ^ 1);
#pragma unroll 1
      for (int panel = 0; panel < C::kPanels; ++panel) {
        barrier_sleep(shared + C::kRowsFull + 8 * row.stage, row.phase);
        C::convert_values(shared + C::kVRows + row.stage * C::kRowBytes,
                          shared + C::kV + value.stage * C::kKvBytes + panel * C::kRowBytes, half);
        __syncwarp();
        if (elected) barrier_arrive(shared + C::kRowsEmpty + 8 * row.stage);
        row.next();
      }
      fence_async_proxy();  // of what this thread has written: wgmma reads V by that proxy
      __syncwarp();
      if (elected) barrier_arrive(shared + C::kVFull + 8 * value.stage);
      value.next();
    }
  }
}

// A whole warp of a team: loads the blocks of K, and of V as rows, a block ahead of the one that it
// converts.
template <class C>
TC_DEVICE void produce_and_convert(const typename C::Params& p, u32 shared,
                                   const typename C::Tile* tiles) {
  static_assert(C::kPanels == 1 && C::kRowStages == 2);
  bool elected = threadIdx.x % 32 == 0;
  wait_for_previous_grid();
  Slot<C::kStages> key, value;
  Slot<C::kRowStages> row;
  int number = -1, left = 0, block = 0;  // the tile that is loaded, and its blocks
  u32 loaded = 0, converted = 0;         // blocks of all tiles
  for (bool more = true; more || loaded != converted;) {
    if (more && left == 0) {
      ++number;
      barrier_sleep(shared + C::kTileFull + 8 * (number % C::kRing), number / C::kRing % 2);
      left = tiles[number % C::kRing].blocks;
      block = tiles[number % C::kRing].last_block;
      more = left != 0;
    }
    if (more) {
      if (elected) {
        const typename C::Tile& tile = tiles[number % C::kRing];
        u32 arrived = shared + C::kKFull + 8 * key.stage;
        barrier_sleep(shared + C::kKEmpty + 8 * key.stage, key.phase ^ 1);
        barrier_expect(arrived, C::kKvBytes);
        load_rows<C>(p.k, tile, block, shared + C::kK + key.stage * C::kKvBytes, arrived);
        u32 stage = loaded % C::kRowStages;  // this warp has converted what it had
        arrived = shared + C::kRowsFull + 8 * stage;
        barrier_expect(arrived, C::kRowBytes);
        load_rows<C>(p.v, tile, block, shared + C::kVRows + stage * C::kRowBytes, arrived);
      }
      key.next();
      ++loaded;
      --left;
      --block;
    }
    if (loaded - converted > (more ? 1 : 0)) {
      barrier_sleep(shared + C::kVEmpty + 8 * value.stage, value.phase ^ 1);
      barrier_sleep(shared + C::kRowsFull + 8 * row.stage, row.phase);
#pragma unroll 1
      for (int half = 0; half < 2; ++half) {
        C::convert_values(shared + C::kVRows + row.stage * C::kRowBytes,
                          shared + C::kV + value.stage * C::kKvBytes, half);
      }
      fence_async_proxy();  // of what this thread has written: wgmma reads V by that proxy
      __syncwarp();
      if (elected) barrier_arrive(shared + C::kVFull + 8 * value.stage);
      row.next();
      value.next();
      ++converted;
    }
  }
}

}  // namespace sm90
}  // namespace torch_cubin
