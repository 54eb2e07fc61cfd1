// Products of 8-bit floats with scales on Hopper: a persistent, warp-specialized kernel with TMA
// and wgmma. sm90_scaled_params.h says what it computes.
//
//   shared memory: kStages x (A tile, B tile) | staging buffers | kStages x (scales of A's rows, of
//     B's columns) | full, empty, turn, landed, staged, stored barriers | kRing tiles
//   full[s]: the producer's arrival and all bytes of the stage; with scales of blocks also the
//     copies of 32 lanes. Of groups of K the former arrive at landed[s], and at full[s] the warps
//     that clear the stage
//   empty[s]: one arrival per warpgroup (warp, where warps read scales) that reads the stage
//   turn[g]: warpgroup g may multiply; arrivals of the 4 warps of the one before it
//   staged[b], stored[b]: of kStores, arrivals of the warps that have filled staging buffer b, and
//     of the thread that has stored it
//
// Sums of all of K: each warpgroup has a tile of its own, and stores it while the other one
// multiplies (ping-pong), unless there are few tiles. Promoted sums: the warpgroups share a tile,
// and one adds its part while the others, or its own next products, are multiplied.
//
// Warpgroups that share a tile read it from the ring of tiles, which the producer writes: where it
// is takes two divisions, and of groups a load, during which nothing would be multiplied.
//
// With kStores a thread beside the producer stores tiles by the TMA, so that consumers neither wait
// for a fence nor for the TMA: between two tiles nothing is multiplied, but by another warpgroup.
// For the same reason the most common calls have a loop of their own, without branches by the
// parameters (Plain), and with two parts the next tile's first part is multiplied while this one's
// last part is added and its sums are staged (consume_ahead).
//
// K runs forwards and each output is a sum of its own in every tile, so that a row's bits do not
// depend on the other rows.
//
// Of gated products a tile has 128 columns of the gate and the same 128 of the up, so that a lane
// has both sums of an output, and a quad of lanes a row of a block that is quantised with one
// scale.
//
// Where groups divide K, a tile belongs to one group. Its first and last blocks of K have elements
// of other groups, which two warps beside the producer overwrite with zeros in shared memory, so
// that consumers do not wait for it in their turn.
//
// A file of over 500 lines: both kinds of sums share the producer, the walk over tiles and the
// scales, and a kernel's template is one file.
#include "common/uniform.cuh"
#include "sm90_block.cuh"
#include "sm90_scaled_epilogue.cuh"
#include "sm90_scaled_gate.cuh"
#include "sm90_scaled_params.h"
#include "sm90_scaled_step.cuh"

namespace torch_cubin::TC_KERNEL {

using namespace sm90;

constexpr int kBlockK = 128;
// Groups divide the rows, and each has a B of its own; or they divide K, and each has an output.
constexpr bool kGroupsOfRows = TC_GROUPED == 1, kGroupsOfK = TC_GROUPED == 2;
constexpr bool kGrouped = kGroupsOfRows || kGroupsOfK;

struct Config {
  static constexpr Float8 kA = Float8::TC_A, kB = Float8::TC_B;
  static constexpr int kTileM = TC_TILE_M, kTileN = TC_TILE_N, kStages = TC_STAGES;
  static constexpr int kConsumers = TC_THREADS / kWarpgroup - 1;
  // Parts, of 128 of K, that are added in float32 at a time: 0, since all of K is one sum; or as
  // many as registers suffice for. Whether parts have scales of single columns.
  static constexpr int kParts = TC_PARTS;
  static constexpr bool kPromoted = kParts > 0, kColumns = TC_COLUMNS;
  // Whether floats are staged by stage_floats().
  static constexpr bool kSingleStores = kColumns && kParts == 1 && !kGroupsOfK;
  static constexpr bool kPingPong = TC_PING_PONG;
  // Whether the first half of a tile's columns are a gate's, and the other ones an up's; columns of
  // the output, and those that are multiplied at a time.
  static constexpr bool kGated = TC_GATED;
  // Whether calls may have scales of blocks, and others.
  static constexpr bool kAddsParts = !kColumns && !kGated;
  static constexpr bool kScalesParts =
      !kAddsParts || (kPromoted && !kGroupsOfK && kA == kB && kBlockK % kTileN == 0);
  // Whether copies of scales differ by constants where memory has those of neighbouring rows one
  // after the other. Not with scales of columns, where it gained nothing.
  static constexpr bool kByOffsets = kScalesParts && !kColumns;
  static constexpr int kHalves = kGated ? 2 : 1;
  static constexpr int kOutN = kTileN / kHalves, kPartN = kTileN / kHalves;
  static constexpr int kSharing = kPingPong ? 1 : kConsumers;  // warpgroups that share a tile
  static constexpr int kBlocksM = kTileM / (64 * kSharing);    // m64 blocks per warpgroup
  static constexpr int kBlocks = kBlocksM * kHalves;           // of sums
  // Whether two warpgroups alternate in multiplying: of promoted sums then one multiplies while the
  // other adds. With two parts, three warpgroups, or groups of K, that needs no order.
  static constexpr bool kTurns = kConsumers == 2 && (kPingPong || (kParts == 1 && !kGroupsOfK));
  static constexpr int kABytes = kTileM * kBlockK, kBBytes = kTileN * kBlockK;
  static constexpr int kStageBytes = kABytes + kBBytes;
  static constexpr int kFreeing = kPromoted ? 4 * kSharing : kSharing;
  static constexpr int kScaleColumns = kColumns ? kTileN : 1;
  static constexpr int kScaleBytes = !kPromoted ? 0 : kTileM * 4 + (kColumns ? kTileN * 4 : 16);
  static constexpr int kMostBuffers = 4;
  // Tiles that the producer passes to the consumers: more than it may be ahead of them. Those that
  // take turns in tiles find their own, while the others multiply.
  static constexpr int kTileBytes = 32;
  static constexpr int kRing = kPingPong ? 0 : kStages < 8 ? 8 : kStages < 16 ? 16 : 32;
  static_assert(kRing == 0 || kRing > kStages);
  // Of groups of K a stage has a third barrier: two warps clear it before they pass it on.
  static constexpr int kOwnBarriers = kStages * (kGroupsOfK ? 24 : 16) + 8 * kConsumers;
  // Of kStores: warpgroups that have buffers of their own, since they fill them at other times.
  static constexpr bool kStores = TC_STORES;
  static constexpr int kStoring = 2;  // the warp
  // Whether the most common calls have a loop over tiles of their own.
  static constexpr bool kMayBePlain = !kColumns && !kGated && kA == kB && (kStores || !kGrouped);
  // Blocks of K from which consume_ahead() is the quicker loop, of groups with scales of blocks: K
  // of 7168 by 4 x 8192 rows takes 0.95 of the time, 2048 by 16 uneven groups 1.03 (H200).
  static constexpr int kLeastAhead = 32;
  static constexpr int kOwners = kPingPong ? kConsumers : 1;
  static constexpr int kBarrierBytes = kOwnBarriers + (kStores ? 16 * kMostBuffers * kOwners : 0);
  static constexpr int kControlBytes =
      kStages * kScaleBytes + kBarrierBytes + 16 + kTileBytes * kRing;
  static constexpr int kLeft =
      (kMaxShared - kControlBytes - kStages * kStageBytes) / (4 * kConsumers) / 2048;
  // Of 16 rows of 128 bytes for each warp.
  static constexpr int kBuffers = kLeft > kMostBuffers ? kMostBuffers : kLeft;
  static constexpr int kWarpBytes = 2048 * kBuffers;
  static constexpr int kStaging = kStages * kStageBytes;
  static constexpr int kScales = kStaging + 4 * kConsumers * kWarpBytes;
  static constexpr int kBarriers = kScales + kStages * kScaleBytes;
  static constexpr int kTiles = (kBarriers + kBarrierBytes + 15) / 16 * 16;
  static constexpr int kSharedBytes = kTiles + kTileBytes * kRing;
  static_assert(kTileM == 64 * kSharing * kBlocksM && kTileN % 8 == 0);
  static_assert(kSharedBytes <= kMaxShared && kLeft >= 1, "shared memory of a block");
  static_assert(!kScalesParts || kPartN <= kBlockK, "a part has one column of B's blocks");
  static_assert(!kColumns || kPromoted);
  static_assert(!kGated || (kParts == 1 && !kColumns && kOutN == kBlockK && kBlocksM == 1));
  static constexpr int kSlots = kBuffers * kOwners;
  // With one buffer the thread that stores would wait for the next panel before it frees this one.
  static_assert(!kStores || (!kGated && kBuffers > 1));
};

// The tiles of a block, one after the other; producers and consumers walk through the same ones.
template <class C>
struct Walk {
  const Sm90ScaledParams& p;
  int step, tile, tiles_m;
  int m0, n0;  // of the output; the rows of groups of K follow one another
  // Of the tile: where its group's rows end, the group, and whether its end was wrong.
  int m_end;
  int group = 0;
  bool is_wrong = false;
  // Of groups of K.
  int k0 = 0, own_k_blocks = 0;
  int first_k = 0, k_end = kBlockK;  // the group's K: in the first block and, its end, in the last
  int first_scale = 0;               // the group's first block of scales, of kColumns

  // Every `every`-th of the block's tiles, from number `first` on.
  TC_DEVICE explicit Walk(const Sm90ScaledParams& params, int first = 0, int every = 1)
      : p(params), step(every * gridDim.x), tile(blockIdx.x + first * gridDim.x - step) {
    tiles_m = kGroupsOfRows ? p.rows[0].m0 : p.tiles_m;
    m_end = p.m;
  }

  TC_DEVICE int k_blocks() const { return kGroupsOfK ? own_k_blocks : p.k_blocks; }
  TC_DEVICE int tiles_of_group() const { return tiles_m * p.tiles_n; }
  TC_DEVICE int groups_of_k() const { return kGroupsOfK ? p.rows[0].m0 : 1; }

  // Blocks of K of a tile of any group; a group without K has one, of zeros.
  TC_DEVICE int k_blocks_of(int any_tile) const {
    if constexpr (!kGroupsOfK) return p.k_blocks;
    const int own = any_tile / tiles_of_group();
    return own < groups_of_k() ? blocks_of(p.rows[1 + own]) : 0;
  }

  // Where a group's first block of K begins.
  TC_DEVICE int begin_of(const GroupRow& own) const {
    if constexpr (C::kColumns) return own.place ? own.m0 : own.m0 & ~(kBlockK - 1);
    return own.m0 & ~(p.flags & kScaledWholeLines ? kBlockK - 1 : 15);
  }

  TC_DEVICE int blocks_of(const GroupRow& own) const {
    return max(1, (own.m_end - begin_of(own) + kBlockK - 1) / kBlockK);
  }

  // Bands of `group` rows of tiles, column by column, with columns reversed in every other one. Of
  // groups of rows bands are the table's.
  TC_DEVICE bool next() {
    tile += step;
    if (tile >= groups_of_k() * tiles_of_group()) return false;
    if constexpr (kGroupsOfRows) {
      const int any = tile / p.tiles_n;  // a row of the band: bands follow one another
      const GroupRow of_band = p.rows[1 + any];
      const int first = any - of_band.place, inside = tile - first * p.tiles_n;
      int column = inside / of_band.height;
      const GroupRow own = p.rows[1 + first + inside - column * of_band.height];
      if (of_band.backwards) column = p.tiles_n - 1 - column;
      n0 = column * C::kOutN;
      m0 = own.m0;
      m_end = own.m_end;
      group = own.group;
      is_wrong = own.is_wrong;
      return true;
    }
    if constexpr (kGroupsOfK) group = tile / tiles_of_group();
    const int of_group = kGroupsOfK ? tile - group * tiles_of_group() : tile;
    const int band = of_group / (p.group * p.tiles_n);
    const int inside = of_group - band * p.group * p.tiles_n;
    const int height = min(p.group, tiles_m - band * p.group);
    int column = inside / height;
    const int row = band * p.group + inside - column * height;
    if (band & 1) column = p.tiles_n - 1 - column;
    n0 = column * C::kOutN;
    if constexpr (kGroupsOfK) {
      const GroupRow own = p.rows[1 + group];
      m0 = group * p.m + row * C::kTileM;
      m_end = (group + 1) * p.m;
      is_wrong = own.is_wrong;
      k0 = begin_of(own);
      own_k_blocks = blocks_of(own);
      first_k = own.m0 - k0;
      first_scale = own.group;
      k_end = own.m_end == 0 ? 0 : own.m_end - k0 - (own_k_blocks - 1) * kBlockK;
    } else {
      m0 = row * C::kTileM;
    }
    return true;
  }

  // Passes the tile to the consumers by shared memory.
  TC_DEVICE void store(u32 to) const {
    u32 place[4] = {u32(m0), u32(n0), u32(m_end), u32(group)};
    u32 of_group[4] = {u32(is_wrong), u32(own_k_blocks), u32(first_k), u32(k_end)};
    store_shared(to, place);
    if constexpr (kGrouped) store_shared(to + 16, of_group);
  }

  // Whether there is a next tile; load() reads it.
  TC_DEVICE bool advance() {
    tile += step;
    return tile < groups_of_k() * tiles_of_group();
  }

  TC_DEVICE void load(u32 from) {
    u32 place[4], of_group[4];
    load_shared(place, from);
    m0 = place[0];
    n0 = place[1];
    m_end = place[2];
    group = place[3];
    if constexpr (kGrouped) {
      load_shared(of_group, from + 16);
      is_wrong = of_group[0];
      own_k_blocks = of_group[1];
      first_k = of_group[2];
      k_end = of_group[3];
    }
  }

  TC_DEVICE int row_of_a() const { return kGroupsOfK ? m0 - group * p.m : m0; }

  TC_DEVICE const float* scale_b() const {
    return kGrouped ? p.scale_b + group * p.b_group_stride : p.scale_b;
  }

  // Of gated products.
  TC_DEVICE const float* scale_ups() const {
    const float* ups = static_cast<const float*>(p.bias);
    return kGrouped ? ups + group * p.b_group_stride : ups;
  }
};

// A place in the ring of stages.
template <class C>
struct Stage {
  int number = 0;
  u32 phase = 0;

  TC_DEVICE void advance() {
    if (++number == C::kStages) {
      number = 0;
      phase ^= 1;
    }
  }

  TC_DEVICE void advance(int count) {
    const int next = number + count;
    phase ^= next / C::kStages & 1;
    number = next % C::kStages;
  }
};

// Addresses of a block's shared memory.
template <class C>
struct Shared {
  u32 base;
  TC_DEVICE u32 tiles(int stage) const { return base + stage * C::kStageBytes; }
  TC_DEVICE u32 scales(int stage) const { return base + C::kScales + stage * C::kScaleBytes; }
  TC_DEVICE u32 full(int stage) const { return base + C::kBarriers + 8 * stage; }
  TC_DEVICE u32 empty(int stage) const { return full(C::kStages + stage); }
  TC_DEVICE u32 turn(int group) const { return full(2 * C::kStages + group); }
  // What a stage's copies by the TMA arrive at.
  TC_DEVICE u32 landed(int stage) const {
    return kGroupsOfK ? turn(C::kConsumers) + 8 * stage : full(stage);
  }
  // Of buffer `own` of a warpgroup, or of those that share a tile.
  TC_DEVICE u32 staged(int owner, int own) const {
    return base + C::kBarriers + C::kOwnBarriers + 8 * (owner * C::kBuffers + own);
  }
  TC_DEVICE u32 stored(int owner, int own) const { return staged(owner, own) + 8 * C::kSlots; }
  // Buffer `own` of a warpgroup, with the rows of its warps one after the other.
  TC_DEVICE u32 buffer(int group, int own) const {
    return base + C::kStaging + (group * C::kBuffers + own) * (4 * 2048);
  }
  // Of the block's tile `number`.
  TC_DEVICE u32 tile(int number) const {
    return base + C::kTiles + (number & (C::kRing - 1)) * C::kTileBytes;
  }
};

// ---- producers ----------------------------------------------------------------------------------

template <class C>
TC_DEVICE void load_tiles(const Sm90ScaledParams& p, const Shared<C>& shared) {
  Walk<C> walk(p);
  Stage<C> stage;
  for (int number = 0; walk.next(); ++number) {
#pragma unroll 1
    for (int i = 0; i < walk.k_blocks(); ++i, stage.advance()) {
      barrier_wait_bounded(shared.empty(stage.number), stage.phase ^ 1);
      if (C::kRing > 0 && i == 0) walk.store(shared.tile(number));
      const u32 arrived = shared.landed(stage.number), to = shared.tiles(stage.number);
      const int k = walk.k0 + i * kBlockK;
      barrier_expect(arrived, p.stage_bytes);
      tma_load(to, &p.a, arrived, k, walk.row_of_a());
#pragma unroll
      for (int half = 0; half < C::kHalves; ++half) {
        const u32 to_b = to + C::kABytes + half * C::kPartN * kBlockK;
        const Sm90ScaledMap* b = half == 0 ? &p.b : &p.out_map;
        if constexpr (kGroupsOfRows) {
          tma_load(to_b, b, arrived, k, walk.n0, walk.group, 0, 0);
        } else {
          tma_load(to_b, b, arrived, k, walk.n0);
        }
      }
    }
  }
}

// Executed by one thread: stores the tiles that the consumers stage. A buffer is free when the TMA
// has read it, which is awaited after the next one is stored.
template <class C>
TC_DEVICE void store_tiles(const Sm90ScaledParams& p, const Shared<C>& shared) {
  using O = Output<C, DType::bfloat16>;  // or float16, which has the same panels
  Walk<C> walk(p);
  u32 read = 0;  // the barrier of the last buffer
  for (int tile = 0; walk.next(); ++tile) {
    const int owner = tile % C::kOwners;
    int number = tile / C::kOwners * C::kBlocksM * O::kPanels;  // of the owner's panels
#pragma unroll 1
    for (int block = 0; block < C::kBlocksM; ++block) {
#pragma unroll 1
      for (int panel = 0; panel < O::kPanels; ++panel, ++number) {
        const int own = number % C::kBuffers, n = walk.n0 + O::column(panel);
        barrier_wait_bounded(shared.staged(owner, own), number / C::kBuffers & 1);
        fence_async_proxy();
#pragma unroll
        for (int warp = 0; warp < 4 * C::kSharing; ++warp) {
          const u32 from = shared.buffer(owner + warp / 4, own) + warp % 4 * O::kPanelBytes;
          const int m = walk.m0 + (warp / 4 * C::kBlocksM + block) * 64 + warp % 4 * 16;
          // Fewer than 16 rows of a group its warp stores.
          const bool exists = kGrouped ? m + 16 <= walk.m_end : m < walk.m_end;
          if (exists && n < p.n) tma_store(&p.out_map, from, n, m, kEvictFirst);
        }
        tma_store_commit();
        tma_store_wait_read<1>();
        if (read != 0) barrier_arrive(read);
        read = shared.stored(owner, own);
      }
    }
  }
  tma_store_wait_read<0>();
}

// Executed by one warp: scales of blocks of K. kContiguous: of ScaleCopies.
template <class C, bool kContiguous>
TC_DEVICE void load_scales(const Sm90ScaledParams& p, const Shared<C>& shared) {
  Walk<C> walk(p);
  Stage<C> stage;
  while (walk.next()) {
    const int m_end = kGroupsOfK ? p.m : walk.m_end;
    const int k = C::kColumns ? walk.first_scale : walk.k0 / kBlockK;
    ScaleCopies<C::kTileM, kContiguous> rows(p.scale_a + k * p.a_stride_k, walk.row_of_a(), m_end,
                                             p.a_shift, p.a_stride);
    ScaleCopies<C::kScaleColumns, false> columns(walk.scale_b() + k * p.b_stride_k, walk.n0, p.n,
                                                 p.b_shift, p.b_stride);
    ScaleCopies<1, false> ups(walk.scale_ups() + k * p.b_stride_k, walk.n0, p.n, p.b_shift,
                              p.b_stride);
#pragma unroll 1
    for (int i = 0; i < walk.k_blocks(); ++i, stage.advance()) {
      u32 full = shared.full(stage.number);
      if constexpr (C::kByOffsets) full = uniform(full);  // else a loop over lanes' barriers
      barrier_wait_bounded(shared.empty(stage.number), stage.phase ^ 1);
      const u32 to = shared.scales(stage.number);
      rows.copy(to, p.a_stride_k);
      columns.copy(to + C::kTileM * 4, p.b_stride_k);
      if constexpr (C::kGated) ups.copy(to + C::kTileM * 4 + 4, p.b_stride_k);
      arrive_after_copies(full);
    }
  }
}

// A mask of a word's bytes from `first` to `end` - 1.
TC_DEVICE u32 kept_bytes(int first, int end) {
  const auto below = [](int byte) { return (u64{1} << 8 * min(max(byte, 0), 4)) - 1; };
  return static_cast<u32>(below(end) & ~below(first));
}

// Executed by two warps: passes on the stages of groups of K, whose rows of A and of B have zeros
// in place of other groups' K, where NaN may be. Of a group without K no product is used.
template <class C>
TC_DEVICE void clear_stages(const Sm90ScaledParams& p, const Shared<C>& shared) {
  constexpr int kThreads = 64, kVector = 16;
  Walk<C> walk(p);
  Stage<C> stage;
  while (walk.next()) {
#pragma unroll 1
    for (int i = 0; i < walk.k_blocks(); ++i, stage.advance()) {
      const int first = i == 0 ? walk.first_k : 0;
      const int end = i == walk.k_blocks() - 1 ? walk.k_end : kBlockK;
      barrier_wait_bounded(shared.landed(stage.number), stage.phase);
      if (end > 0 && (first > 0 || end < kBlockK)) {
#pragma unroll 1
        for (int row = threadIdx.x % kThreads; row < C::kTileM + C::kTileN; row += kThreads) {
          const u32 line = shared.tiles(stage.number) + row * kBlockK;
          const auto at = [&](int vector) { return line + (vector ^ (row & 7)) * kVector; };
          const u32 zeros[4] = {0, 0, 0, 0};
          const auto clear_part = [&](int vector) {
            u32 words[4];
            const int k = vector * kVector;
            load_shared(words, at(vector));
#pragma unroll
            for (int j = 0; j < 4; ++j) words[j] &= kept_bytes(first - k - 4 * j, end - k - 4 * j);
            store_shared(at(vector), words);
          };
#pragma unroll 1
          for (int vector = 0; vector < first / kVector; ++vector) store_shared(at(vector), zeros);
          if (first % kVector != 0) clear_part(first / kVector);
          if (end % kVector != 0) clear_part(end / kVector);
#pragma unroll 2
          for (int vector = (end + kVector - 1) / kVector; vector < kBlockK / kVector; ++vector) {
            store_shared(at(vector), zeros);
          }
        }
        fence_async_proxy();
      }
      __syncwarp();
      if (threadIdx.x % 32 == 0) barrier_arrive(shared.full(stage.number));
    }
  }
}

// ---- consumers ----------------------------------------------------------------------------------

// The calls that a loop over tiles is compiled for: any; those whose output is bfloat16, stored by
// the TMA, without a bias, with factors, or with scales of blocks.
enum Plain { kAnyCall, kPlainFactors, kPlainBlocks };

template <class C>
struct Consumer {
  using Sum = float[C::kBlocks][C::kPartN / 2];

  const Sm90ScaledParams& p;
  Shared<C> shared;
  const Walk<C>* walk = nullptr;  // to the warpgroup's tile
  int group, lane;
  int first_row;  // of the warpgroup, in the tile
  int own_row;    // the lane's first
  bool frees;
  u64 a0, b0;
  Stage<C> stage;
  u32 turn_phase;

  TC_DEVICE Consumer(const Sm90ScaledParams& params, const Shared<C>& memory, int warp)
      : p(params), shared(memory), group(warp / 4), lane(threadIdx.x % 32) {
    first_row = C::kPingPong ? 0 : group * C::kBlocksM * 64;
    own_row = first_row + warp % 4 * 16 + lane / 4;
    // Where scales are read, each warp frees a stage, since nothing else keeps the warps together;
    // else one of the warpgroup, whose warps wgmma keeps together.
    frees = lane == 0 && (C::kPromoted || warp % 4 == 0);
    a0 = wgmma_descriptor(shared.tiles(0) + first_row * kBlockK, 8192, 1024);
    b0 = wgmma_descriptor(shared.tiles(0) + C::kABytes, 8192, 1024);
    turn_phase = group == 0;  // the first turn is the first warpgroup's
  }

  TC_DEVICE void wait_for_stage() { barrier_wait(shared.full(stage.number), stage.phase); }

  TC_DEVICE void release(int number) {
    if (C::kPromoted) __syncwarp();
    if (frees) barrier_arrive(shared.empty(number));
  }

  // NOTE: an mbarrier, because ptxas moves additions past a bar.sync, and so into the next turn.
  TC_DEVICE void wait_for_turn() {
    if (C::kTurns) barrier_wait(shared.turn(group), turn_phase);
    turn_phase ^= 1;
  }

  TC_DEVICE void pass_turn() {
    const int next = group + 1 == C::kConsumers ? 0 : group + 1;
    if (C::kTurns && lane == 0) barrier_arrive(shared.turn(next));
  }

  // What the stage adds to the descriptors of stage 0.
  TC_DEVICE u32 offset_of_stage() const { return stage.number * (C::kStageBytes >> 4); }

  // Issues the products of block i of the stage at `offset`, of 64 rows and kPartN columns, and
  // neither commits nor waits. Blocks side by side follow one another.
  TC_DEVICE void multiply(float (&sum)[C::kPartN / 2], u32 offset, int i, int add) {
    const u32 of_b = i % C::kHalves * (C::kPartN * kBlockK >> 4);
    multiply_stage<C::kPartN, C::kA, C::kB>(sum, a0 + offset + i / C::kHalves * (8192 >> 4),
                                            b0 + offset + of_b, add);
  }

  template <bool kScales>
  TC_DEVICE void issue(Part<C>& part, int i) {
    const u32 offset = offset_of_stage();
    wgmma_fence();
    multiply(part.sum, offset, i, 0);
    wgmma_commit();
    read_scales<kScales>(part, i);
  }

  template <bool kScales>
  TC_DEVICE void read_scales(Part<C>& part, int i) {
    part.stage = stage.number;
    if constexpr (kScales) {
      part.load_scales(shared.scales(stage.number), own_row + i / C::kHalves * 64, i % C::kHalves);
    }
  }

  // Adds a part whose products are complete; the stage is free after its `last` one.
  template <bool kScales>
  TC_DEVICE void finish(Part<C>& part, float (&sum)[C::kPartN / 2], bool last) {
    keep_in_place(part.sum);
    if (last && !C::kColumns) release(part.stage);
    add<kScales>(part, sum);
    if (last && C::kColumns) release(part.stage);
  }

  template <bool kScales>
  TC_DEVICE void add(const Part<C>& part, float (&sum)[C::kPartN / 2]) {
    if constexpr (kScales) {
      part.add_scaled_to(sum, shared.scales(part.stage));
    } else {
      part.add_to(sum);
    }
  }

  // Sums of all of K by the tensor cores.
  TC_DEVICE void sum_all(Sum& sum) {
    int previous = 0;
    // NOTE: a wait for a stage cannot tell a phase from the one two before it, so that no warpgroup
    // may wait for stages that come after those of the other one's tile.
    wait_for_turn();
#pragma unroll 1
    for (int k = 0; k < walk->k_blocks(); ++k) {
      wait_for_stage();
      const u32 offset = offset_of_stage();
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < C::kBlocksM; ++i) multiply(sum[i], offset, i, k > 0);
      wgmma_commit();
      if (k > 0) {
        wgmma_wait<1>();
        release(previous);
      }
      previous = stage.number;
      stage.advance();
    }
    pass_turn();
    wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < C::kBlocksM; ++i) keep_in_place(sum[i]);
    release(previous);
  }

  // Promoted sums; another warpgroup multiplies while this one adds.
  template <bool kScales>
  TC_DEVICE void sum_one_part(Sum& sum) {
#pragma unroll 1
    for (int k = 0; k < walk->k_blocks(); ++k) {
      wait_for_stage();
#pragma unroll
      for (int i = 0; i < C::kBlocks; ++i) {
        Part<C> part;
        wait_for_turn();
        issue<kScales>(part, i);
        pass_turn();
        wgmma_wait<0>();
        finish<kScales>(part, sum[i], i == C::kBlocks - 1);
      }
      stage.advance();
    }
  }

  // The same for up to two warpgroups, whose registers suffice for it: the next stage is awaited,
  // and where its operands are is found, before the additions end, so that little comes between a
  // stage's arrival and its products (H200: gated products, and those with scales of single
  // columns, 0.86 to 1.00 of the time; 192x128, of three warpgroups, 1.05 to 1.12). The first
  // products do not wait for their stage: consume() has waited for it to read the work item, which
  // it does only if there is a ring of them.
  //
  // NOTE: ptxas 13.0 lets every other addition yield to the other warps, but only of additions that
  // follow a wgmma in the same basic block; hence the loop begins with the products (H200: gated
  // products 0.97 to 0.99 of the time). Not where columns have scales, whose sums became slower by
  // 2 to 3%.
  template <bool kScales>
  TC_DEVICE void sum_one_part_ahead(Sum& sum) {
    static_assert(C::kRing > 0, "consume() has waited for the first stage");
    constexpr bool kBeginsLoop = !C::kColumns;
    Part<C> part;
    const auto at_stage = [&](u64 descriptor) {
      const int low = static_cast<int>(descriptor) + stage.number * (C::kStageBytes >> 4);
      return Descriptor{static_cast<u32>(uniform(low)), static_cast<u32>(descriptor >> 32)};
    };
    Descriptor a = at_stage(a0), b = at_stage(b0);
    const auto begin = [&](int i) {
      wait_for_turn();
      wgmma_fence();
      multiply_stage<C::kPartN, C::kA, C::kB>(part.sum, advance(a, i / C::kHalves * 8192),
                                              advance(b, i % C::kHalves * (C::kPartN * kBlockK)),
                                              0);
      wgmma_commit();
      pass_turn();
      read_scales<kScales>(part, i);
    };
    if constexpr (!kBeginsLoop) begin(0);
#pragma unroll 1
    for (int left = walk->k_blocks() - 1;; --left) {
#pragma unroll
      for (int i = 0; i < C::kBlocks; ++i) {
        const bool last = i == C::kBlocks - 1;
        if constexpr (kBeginsLoop) begin(i);
        if (last) {
          stage.advance();
          a = at_stage(a0);
          b = at_stage(b0);
        }
        wgmma_wait<0>();
        keep_in_place(part.sum);
        if (last && !C::kColumns) release(part.stage);
        const bool ready =
            !last || (left > 0 && barrier_try(shared.full(stage.number), stage.phase));
        add<kScales>(part, sum[i]);
        if (last && C::kColumns) release(part.stage);
        if (last && left == 0) return;
        if (!ready) wait_for_stage();
        if constexpr (!kBeginsLoop) begin((i + 1) % C::kBlocks);
      }
    }
  }

  // Promoted sums; while the tensor cores multiply one part, the other one is added.
  template <bool kScales>
  TC_DEVICE void sum_two_parts(float (&sum)[C::kPartN / 2]) {
    Part<C> first, second;
    const auto begin = [&](Part<C>& part) {
      wait_for_stage();
      issue<kScales>(part, 0);
      stage.advance();
    };
    const auto finish_part = [&](Part<C>& part) { finish<kScales>(part, sum, true); };
    begin(first);
    int left = walk->k_blocks() - 1;
#pragma unroll 1
    for (; left >= 2; left -= 2) {
      begin(second);
      wgmma_wait<1>();
      finish_part(first);
      begin(first);
      wgmma_wait<1>();
      finish_part(second);
    }
    if (left == 1) {
      begin(second);
      wgmma_wait<1>();
      finish_part(first);
      wgmma_wait<0>();
      finish_part(second);
    } else {
      wgmma_wait<0>();
      finish_part(first);
    }
  }

  template <Plain kPlain>
  TC_DEVICE void sum_parts(Sum& sum) {
#pragma unroll
    for (int i = 0; i < C::kBlocks; ++i) {
#pragma unroll
      for (int j = 0; j < C::kPartN / 2; ++j) sum[i][j] = 0.0f;
    }
    // Parts are added without a factor where they have none: 2 to 9% of a product's time.
    const bool any = kPlain == kAnyCall && C::kScalesParts;
    if constexpr (kPlain == kPlainBlocks) {
      sum_parts_of<true>(sum);
    } else if (any && (!C::kAddsParts || p.flags & kScaledBlocks)) {
      sum_parts_of<true>(sum);
    } else if constexpr (C::kAddsParts) {
      sum_parts_of<false>(sum);
    }
  }

  template <bool kScales>
  TC_DEVICE void sum_parts_of(Sum& sum) {
    if constexpr (C::kParts == 2) {
      static_assert(C::kBlocks == 1, "registers for two parts");
      sum_two_parts<kScales>(sum[0]);
    } else if constexpr (C::kConsumers == 3) {
      sum_one_part<kScales>(sum);
    } else {
      sum_one_part_ahead<kScales>(sum);
    }
  }
};

template <class C>
TC_DEVICE Outbox<C> outbox_of(const Shared<C>& shared, int group) {
  const int owner = C::kPingPong ? group : 0;
  return {shared.buffer(group, 0), shared.staged(owner, 0), shared.stored(owner, 0)};
}

template <class C, Plain kPlain>
TC_DEVICE void consume(const Sm90ScaledParams& p, const Shared<C>& shared, int warp) {
  Consumer<C> own(p, shared, warp);
  Walk<C> walk(p, C::kPingPong ? own.group : 0, C::kPingPong ? C::kConsumers : 1);
  own.walk = &walk;
  if (C::kPingPong && own.group == 1) own.stage.advance(walk.k_blocks_of(blockIdx.x));
  const u32 staging = shared.base + C::kStaging + warp * C::kWarpBytes;
  int turn = 0;  // of the warp's staging buffers
  Outbox<C> outbox{};
  if constexpr (C::kStores) outbox = outbox_of(shared, own.group);
  const auto next = [&](int number) {
    if constexpr (C::kRing == 0) return walk.next();
    if (!walk.advance()) return false;
    barrier_wait(shared.full(own.stage.number), own.stage.phase);
    walk.load(shared.tile(number));
    return true;
  };
  for (int number = 0; next(number); ++number) {
    Columns<C::kTileN> columns;
    float rows[C::kBlocksM][2];
    // NOTE: a branch around all of it, because predicated instructions take a tile 290 ns, in which
    // nothing is multiplied: K of 512 by 128x128 175 -> 157 us, of 1536 306 -> 288 (H200).
    constexpr bool kMayBeOne = kPlain == kAnyCall && C::kScalesParts && !C::kGated;
    if (kPlain == kPlainBlocks || (kMayBeOne && p.flags & kScaledBlocks && p.bias == nullptr)) {
      columns.set_to_one();
#pragma unroll
      for (int i = 0; i < C::kBlocksM; ++i) rows[i][0] = rows[i][1] = 1.0f;
    } else {
      if constexpr (!C::kGated) {
        columns.template load<kPlain == kPlainFactors>(p, walk.scale_b(), walk.n0);
      }
#pragma unroll
      for (int i = 0; i < C::kBlocksM; ++i) {
        load_rows<kPlain == kPlainFactors>(rows[i], p, walk.m0 + own.own_row + i * 64, walk.m_end);
      }
    }
    if (walk.is_wrong) {
#pragma unroll
      for (int i = 0; i < C::kBlocksM; ++i) rows[i][0] = rows[i][1] = __int_as_float(0x7fc00000);
    }

    typename Consumer<C>::Sum sum;
    if constexpr (C::kPromoted) {
      own.template sum_parts<kPlain>(sum);
    } else {
      own.sum_all(sum);
    }
    if (kGroupsOfK && walk.k_end == 0) {  // whatever the scales of the first block
#pragma unroll
      for (int i = 0; i < C::kBlocks; ++i) {
#pragma unroll
        for (int j = 0; j < C::kPartN / 2; ++j) sum[i][j] = 0.0f;
      }
    }
    const int m = walk.m0 + own.first_row + warp % 4 * 16;
    if constexpr (C::kGated) {
      gate_and_store_rows(p, walk.n0, staging, m, walk.m_end, rows[0][0], sum[0], sum[1]);
    } else {
      // A loop, so that the second block's instructions are in the cache.
      static_assert(C::kBlocksM <= 2);
#pragma unroll 1
      for (int i = 0; i < C::kBlocksM; ++i) {
        if constexpr (kPlain == kAnyCall) {
          scale_and_store_rows<C, kGrouped>(p, walk.n0, staging, turn, outbox, m + 64 * i,
                                            walk.m_end, walk.is_wrong, rows[0], columns, sum[0]);
        } else {
          if constexpr (kPlain == kPlainFactors) {
            columns.template apply<C::kTileN, false>(sum[0], 0, rows[0]);
          } else if (kGrouped && walk.is_wrong) {
#pragma unroll
            for (int j = 0; j < C::kTileN / 2; ++j) sum[0][j] = __int_as_float(0x7fc00000);
          }
          using O = Output<C, DType::bfloat16>;
          const int own_m = m + 64 * i;
          if constexpr (C::kStores) {
            outbox.template put<O, kGrouped>(p, walk.n0, own_m, walk.m_end, sum[0]);
          } else if (own_m < walk.m_end) {
            store_aligned<O>(p, walk.n0, staging, turn, own_m, sum[0]);
          }
        }
        if (i == C::kBlocksM - 1) break;
#pragma unroll
        for (int j = 0; j < C::kTileN / 2; ++j) sum[0][j] = sum[C::kBlocksM - 1][j];
#pragma unroll
        for (int j = 0; j < 2; ++j) rows[0][j] = rows[C::kBlocksM - 1][j];
      }
    }
    if (C::kPingPong) own.stage.advance(walk.k_blocks_of(walk.tile + gridDim.x));
  }
  if (own.lane == 0) tma_store_wait_read<0>();
}

// consume() for two parts and an even number of blocks of K: the next tile's first part is
// multiplied while this one's last part is added and its sums are staged.
//
// NOTE: ptxas serialises the products (C7514, C7515) if the loop over tiles is apart from that over
// K, if the next tile's first products are in a branch, or if parts have no use after the loop.
template <class C, bool kBlocks>
TC_DEVICE void consume_ahead(const Sm90ScaledParams& p, const Shared<C>& shared, int warp) {
  using O = Output<C, DType::bfloat16>;
  Consumer<C> own(p, shared, warp);
  Walk<C> walk(p);
  own.walk = &walk;
  Outbox<C> outbox = outbox_of(shared, own.group);
  const int first_m = own.first_row + warp % 4 * 16;
  Part<C> first, second;
  float sum[C::kPartN / 2], rows[2];
  Columns<C::kTileN> columns;
  int left = 0, number = 0;  // pairs of parts, tiles
  const auto begin = [&](Part<C>& part) {
    own.template issue<kBlocks>(part, 0);
    own.stage.advance();
  };
  const auto finish = [&](Part<C>& part) { own.template finish<kBlocks>(part, sum, true); };
  const auto begin_tile = [&] {
    if constexpr (!kBlocks) {
      columns.template load<true>(p, walk.scale_b(), walk.n0);
      load_rows<true>(rows, p, walk.m0 + own.own_row, walk.m_end);
    }
#pragma unroll
    for (int j = 0; j < C::kPartN / 2; ++j) sum[j] = 0.0f;
    left = p.k_blocks / 2;
    ++number;
  };
  bool more = walk.advance();
  if (kGrouped && !more) return;  // else a block has a tile
  own.wait_for_stage();
  walk.load(shared.tile(0));
  begin(first);
  begin_tile();
#pragma unroll 1
  while (true) {
    own.wait_for_stage();
    begin(second);
    wgmma_wait<1>();
    finish(first);
    if (--left == 0) more = walk.advance();
    // Without a next tile the products are of what the stage has had, and nothing uses them.
    if (more) own.wait_for_stage();
    begin(first);
    wgmma_wait<1>();
    finish(second);
    if (left > 0) continue;
    if constexpr (!kBlocks) columns.template apply<C::kTileN, false>(sum, 0, rows);
    if (kGrouped && walk.is_wrong) {
#pragma unroll
      for (int j = 0; j < C::kPartN / 2; ++j) sum[j] = __int_as_float(0x7fc00000);
    }
    outbox.template put<O, kGrouped>(p, walk.n0, walk.m0 + first_m, walk.m_end, sum);
    if (!more) break;
    walk.load(shared.tile(number));
    begin_tile();
  }
  if (p.k_blocks % 2 != 0) {  // never: uses of the parts, see above
    begin(second);
    wgmma_wait<1>();
    finish(first);
    wgmma_wait<0>();
    finish(second);
    outbox.template put<O, kGrouped>(p, walk.n0, walk.m0, walk.m_end, sum);
  } else {
    wgmma_wait<0>();
  }
}

// The loop over tiles for the call.
template <class C>
TC_DEVICE void consume_call(const Sm90ScaledParams& p, const Shared<C>& shared, int warp) {
  if constexpr (C::kMayBePlain) {
    const bool blocks = C::kScalesParts && p.flags & kScaledBlocks;
    if (is_stored_together(p) && p.out_type == kScaledBFloat16 && p.bias == nullptr) {
      if constexpr (C::kStores && C::kParts == 2) {
        if (p.k_blocks % 2 == 0 && (!kGrouped || p.k_blocks >= C::kLeastAhead)) {
          if constexpr (C::kScalesParts) {
            if (blocks) return consume_ahead<C, true>(p, shared, warp);
          }
          if constexpr (!kGrouped) return consume_ahead<C, false>(p, shared, warp);
        }
      }
      if constexpr (C::kScalesParts) {
        if (blocks) return consume<C, kPlainBlocks>(p, shared, warp);
      }
      return consume<C, kPlainFactors>(p, shared, warp);
    }
  }
  consume<C, kAnyCall>(p, shared, warp);
}

template <class C>
TC_DEVICE void run(const Sm90ScaledParams& p) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const Shared<C> shared{shared_address(memory)};
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  const bool blocks = p.flags & kScaledBlocks;

  const auto initialize = [&] {
    if (shared.base % 1024 != 0) asm volatile("trap;");
    prefetch_tensor_map(&p.a);
    prefetch_tensor_map(&p.b);
    if (!C::kGated && !(p.flags & kScaledOutUnaligned)) prefetch_tensor_map(&p.out_map);
    for (int s = 0; s < C::kStages; ++s) {
      const int arrivals = C::kPromoted && blocks ? 33 : 1;
      barrier_init(shared.full(s), kGroupsOfK ? arrivals + 1 : arrivals);
      if (kGroupsOfK) barrier_init(shared.landed(s), 1);
      barrier_init(shared.empty(s), C::kFreeing);
    }
    for (int i = 0; i < C::kConsumers; ++i) barrier_init(shared.turn(i), 4);
    if constexpr (C::kStores) {
      for (int i = 0; i < C::kSlots; ++i) {
        barrier_init(shared.staged(0, i), 4 * C::kSharing);
        barrier_init(shared.stored(0, i), 1);
      }
    }
    fence_barrier_init();
  };
  if constexpr (C::kStores) {
    start_alone<4, C::kConsumers>(warp, initialize);
  } else {
    if (threadIdx.x == 0) initialize();
    __syncthreads();
  }

  // The next grid's blocks may start as soon as they fit; they wait for the end of this grid.
  launch_next_grid();
  if (warp < 4) {
    if constexpr (C::kConsumers > 1) fewer_registers<C::kConsumers == 2 ? 40 : 32>();
    wait_for_previous_grid();
    if constexpr (C::kStores) {
      if (warp == 0 && elect_one()) load_tiles<C>(p, shared);
      if (warp == C::kStoring && is_stored_together(p) && elect_one()) store_tiles<C>(p, shared);
    } else {
      if (threadIdx.x == 0) load_tiles<C>(p, shared);
    }
    if (C::kPromoted && blocks && warp == 1) {
      if (C::kByOffsets && p.a_stride == 1 && p.a_shift == 0) {
        load_scales<C, true>(p, shared);
      } else {
        load_scales<C, false>(p, shared);
      }
    }
    if constexpr (kGroupsOfK) {
      if (warp >= 2) clear_stages<C>(p, shared);
    }
  } else {
    if constexpr (C::kConsumers > 1) more_registers<C::kConsumers == 2 ? 232 : 160>();
    wait_for_previous_grid();
    consume_call<C>(p, shared, warp - 4);
  }
}

extern "C" __global__ void __launch_bounds__(TC_THREADS, 1)
    TC_KERNEL(const __grid_constant__ Sm90ScaledParams p) {
  static_assert(Config::kSharedBytes == TC_DYNAMIC_SHARED && TC_TILE_K == kBlockK);
  run<Config>(p);
}

}  // namespace torch_cubin::TC_KERNEL

// Costs in nanoseconds on an H200 (2026-11-29): each 128 of K of a tile, the rest of a tile, and of
// ping-pong once the last tile's epilogue, which nothing hides. What spills is not used in the
// loop.
/* torch_cubin kernels
{"virtual_arch": ["90a"],
 "defaults": {
  "family": "scaled", "kind": "sm90_scaled", "dtype": "float8_e4m3fn", "math": "{t.math}",
  "layout": "nt", "tile": "{t.tile}", "block": ["{t.threads}", 1, 1], "stages": "{t.stages}",
  "dynamic_shared": "{t.shared}", "accepted_spill": {"sm_90a": 160}, "a": "{d.a}", "b": "{d.b}",
  "grouped": "{g.grouped}", "gated": "{g.gated}",
  "defines": {"TC_A": "{d.a}", "TC_B": "{d.b}", "TC_PARTS": "{t.parts}",
              "TC_COLUMNS": "{t.columns}", "TC_PING_PONG": "{t.ping_pong}",
              "TC_GROUPED": "{g.grouped}", "TC_GATED": "{g.gated}", "TC_STORES": "{t.stores}"}},
 "kernels": [
  {"name": "sm90_scaled_matmul_{g.prefix}e4m3_{t.math}_{t.tile.0}x{t.tile.1}{t.name}",
   "cost": {"k_tile": "{t.k_tile}", "fixed": "{t.fixed}", "once": "{t.once}"},
   "for": {
    "d": [{"a": "e4m3", "b": "e4m3"}],
    "g": [
     ["grouped", "gated", "prefix"],
     [0, 0, ""],
     [1, 0, "grouped_"]],
    "t": [
     ["math", "parts", "columns", "ping_pong", "name", "stores", "tile", "stages", "threads",
      "shared", "k_tile", "fixed", "once"],
     ["fast",     0, 0, 1, "_ping_pong", 1, [128, 128, 128], 5, 384, 229600, 388,  830, 1000],
     ["fast",     0, 0, 0, "",           0, [64, 128, 128],  8, 256, 230032, 220, 1395, null],
     ["promoted", 2, 0, 0, "",           1, [128, 128, 128], 5, 384, 232432, 437,  800, null],
     ["promoted", 2, 0, 0, "",           0, [64, 128, 128],  8, 256, 232208, 245, 1400, null]]}},
  {"name": "sm90_scaled_matmul_e4m3_{t.math}_{t.tile.0}x{t.tile.1}{t.name}",
   "cost": {"k_tile": "{t.k_tile}", "fixed": "{t.fixed}", "once": "{t.once}"},
   "for": {
    "d": [{"a": "e4m3", "b": "e4m3"}], "g": [{"grouped": 0, "gated": 0}],
    "t": [
     ["math", "parts", "columns", "ping_pong", "name", "stores", "tile", "stages", "threads",
      "shared", "k_tile", "fixed", "once"],
     ["fast",     0, 0, 1, "_ping_pong", 0, [128, 160, 128],  5, 384, 217184, 470, 1300, 2500],
     ["fast",     0, 0, 1, "_ping_pong", 0, [128, 176, 128],  5, 384, 227424, 515, 1600, 1500],
     ["fast",     0, 0, 1, "_ping_pong", 0, [128, 112, 128],  7, 384, 231552, 345, 1000, 1500],
     ["fast",     0, 0, 0, "",           0, [192, 192, 128],  4, 512, 221536, 900, 2850, 2000],
     ["fast",     0, 0, 0, "",           0, [128, 64, 128],   8, 384, 230032, 250,  900, null],
     ["fast",     0, 0, 0, "",           0, [64, 64, 128],   12, 256, 230096, 150,  700, null],
     ["fast",     0, 0, 0, "",           0, [64, 32, 128],   16, 256, 230672, 127,  700, null],
     ["promoted", 1, 0, 0, "",           0, [192, 128, 128],  4, 512, 216480, 655, 1300, null],
     ["promoted", 2, 0, 0, "",           0, [128, 112, 128],  6, 384, 220624, 405, 1100, null],
     ["promoted", 2, 0, 0, "",           1, [128, 136, 128],  5, 384, 221168, 478, 1235, null],
     ["promoted", 2, 0, 0, "",           0, [128, 64, 128],   8, 384, 217872, 280,  600, null],
     ["promoted", 2, 0, 0, "",           0, [64, 64, 128],   12, 256, 225168, 165,  700, null],
     ["promoted", 2, 0, 0, "",           0, [64, 32, 128],   16, 256, 226832, 140,  720, null],
     ["columns",  1, 1, 0, "",           0, [128, 128, 128],  5, 384, 218464, 660, 2000, null],
     ["columns",  2, 1, 0, "",           0, [64, 64, 128],   12, 256, 228048, 250,  900, null]]}},
  {"name": "sm90_scaled_matmul_gated_e4m3_{t.math}_{t.tile.0}x{t.tile.1}",
   "cost": {"k_tile": "{t.k_tile}", "fixed": "{t.fixed}"},
   "for": {
    "d": [{"a": "e4m3", "b": "e4m3"}], "g": [{"grouped": 0, "gated": 1}],
    "t": [
     ["math", "parts", "columns", "ping_pong", "stores", "tile", "stages", "threads", "shared",
      "k_tile", "fixed"],
     ["promoted", 1, 0, 0, 0, [128, 256, 128], 4, 384, 231824, 905, 2900],
     ["promoted", 1, 0, 0, 0, [64, 256, 128],  5, 256, 231088, 550, 3000]]}},
  {"name": "sm90_scaled_matmul_grouped_gated_e4m3_{t.math}_{t.tile.0}x{t.tile.1}",
   "cost": {"k_tile": "{t.k_tile}", "fixed": "{t.fixed}"},
   "for": {
    "d": [{"a": "e4m3", "b": "e4m3"}], "g": [{"grouped": 1, "gated": 1}],
    "t": [
     ["math", "parts", "columns", "ping_pong", "stores", "tile", "stages", "threads", "shared",
      "k_tile", "fixed"],
     ["promoted", 1, 0, 0, 0, [128, 256, 128], 4, 384, 231824, 905, 2900],
     ["promoted", 1, 0, 0, 0, [64, 256, 128],  5, 256, 231088, 550, 3000]]}},
  {"name": "sm90_scaled_matmul_groups_of_k_e4m3_{t.math}_{t.tile.0}x{t.tile.1}{t.name}",
   "cost": {"k_tile": "{t.k_tile}", "fixed": "{t.fixed}"},
   "for": {
    "d": [{"a": "e4m3", "b": "e4m3"}], "g": [{"grouped": 2, "gated": 0}],
    "t": [
     ["math", "parts", "columns", "ping_pong", "name", "stores", "tile", "stages", "threads",
      "shared", "k_tile", "fixed"],
     ["fast",     0, 0, 1, "_ping_pong", 0, [128, 128, 128], 5, 384, 229520, 389, 1400],
     ["fast",     0, 0, 0, "",           0, [192, 192, 128], 4, 512, 221568, 900, 2300],
     ["promoted", 1, 0, 0, "",           0, [192, 128, 128], 4, 512, 216512, 640, 1200],
     ["promoted", 2, 0, 0, "",           0, [128, 128, 128], 5, 384, 232416, 430, 1300],
     ["columns",  1, 1, 0, "",           0, [192, 128, 128], 4, 512, 218496, 855, 1300]]}},
  {"name": "sm90_scaled_matmul_{d.a}_{d.b}_{t.math}_{t.tile.0}x{t.tile.1}",
   "cost": {"k_tile": "{t.k_tile}", "fixed": "{t.fixed}"},
   "for": {
    "d": [{"a": "e4m3", "b": "e5m2"}, {"a": "e5m2", "b": "e4m3"}],
    "g": [{"grouped": 0, "gated": 0}],
    "t": [
     ["math", "parts", "columns", "ping_pong", "stores", "tile", "stages", "threads", "shared",
      "k_tile", "fixed"],
     ["promoted", 2, 0, 0, 0, [128, 128, 128], 5, 384, 232368, 450, 1100]]}}]}
*/
