// Matrix product on Hopper with at most 64 tokens (rows of A, or columns of B): bound by the
// bandwidth of reading the other operand, the weights.
//
// The operands are swapped: 64 rows of the weights are wgmma's M, and the tokens, padded to the
// kernel's 8 or more, its N. A block owns `rows` rows of the weights or, in a cluster of `splits`
// blocks, one part of their K. One thread keeps a ring of stages in flight; one warpgroup
// multiplies. The blocks of a cluster then exchange their sums through shared memory: groups of 64
// rows x 8 tokens are assigned to the blocks round-robin, and a group's owner adds the parts in the
// order of K.
//
// Or, in kernels that stream, each block has an equal range of the k blocks of all tiles, and the
// block with the last part of a tile adds the others' (sm90_split.cuh). A block computes its range
// from the end, so that the part that another block waits for comes first. Or, where each has at
// least a tile's worth of K, the next block continues the sums of a part where it ends, so that
// they are one chain. This is for weights whose rows are contiguous: their tiles are whole swizzle
// panels, which seldom fill all waves. Of more than 32 tokens pairs of blocks, a cluster, have a
// tile of 64 rows each and share the tokens, of which each block loads half for both: alone, it
// would load as much of them as of the weights.
//
// Or pairs of blocks have tiles of 64 and of 32 rows ("uneven"): two multiprocessors share a port,
// through which those of a pair then receive 96 rows, not 128, where each block has one tile.
//
// Several layers of the same tokens share a launch: their tiles follow one another. A gated tile
// has half of its rows from each of two layers; a thread holds both sums of an output, and a group
// is 64 rows of both.
//
//   shared memory:  stages x (weights, tokens) | parts of the sums
//   full[s]:   the producer's arrival and all bytes of the stage
//   empty[s]:  one arrival per consumer warp
//   sums:      the producer's arrival and the bytes that the cluster's blocks send
//
// dynamic_shared in the table is the maximum of a block; the host requests what the stages need.
//
// The order in which K is summed depends on `splits` and the k block only, not on the number of
// tokens: a row of out has the same bits regardless of the other rows. In kernels that stream it
// depends on the numbers of tiles and blocks, too, where parts are added.
//
// This file has over 500 lines because the table of its kernels, which says what each can do and
// costs, stands below the one loop that they all are.
//
// Measured on an H200 with rotated weights in a CUDA graph: 256 bytes of a row at a time instead of
// 128 gain 2 to 5%; the prefetch to L2 gains 1 to 3% for products under 30 us; multicasting up to
// 32 tokens to two blocks, clusters above 2, and stages of 512 bytes per row gain nothing.
#include "common/dtype.cuh"
#include "common/hopper.cuh"
#include "common/wgmma.cuh"
#include "sm90_gate.cuh"
#include "sm90_skinny_params.h"
#include "sm90_split.cuh"

namespace torch_cubin::TC_KERNEL {

using namespace sm90;

template <DType kDTypeValue, bool kRowsContiguousValue, int kBlocksValue, int kTokensValue,
          bool kGatedValue, int kStreamsValue>
struct SkinnyConfig {
  static constexpr DType kDType = kDTypeValue;  // a 16-bit type
  static constexpr WgmmaType kMath = kDType == DType::bfloat16 ? WgmmaType::bf16 : WgmmaType::f16;
  static constexpr bool kRowsContiguous = kRowsContiguousValue;
  static constexpr int kBlocks = kBlocksValue;  // of 64 rows
  static constexpr int kTokens = kTokensValue;
  static constexpr int kPanel = 64;  // elements per swizzled row of 128 bytes
  static constexpr int kPanels = 2;  // per k block
  static constexpr int kTileK = kPanels * kPanel;
  static constexpr u32 kEights = kTokens / 8;
  static constexpr bool kStreams = kStreamsValue != 0;
  static constexpr bool kPairs = kStreamsValue == 2;  // of blocks that share the tokens
  static constexpr u32 kTogether = kPairs ? 2 : 1;
  static constexpr bool kMayBeUneven = kRowsContiguous && !kStreams && kBlocks == 1;
  static constexpr bool kGated = kGatedValue;  // then kBlocks is 2: the gate's, and the up's
  static constexpr int kHalves = kGated ? 2 : 1;
  static constexpr u32 kGroups = kBlocks / kHalves * kEights;
  static_assert(!kGated || (kBlocks == 2 && !kRowsContiguous), "the halves of a gated tile");
  static_assert(!kGated || !kStreams, "gated tiles are whole");
};

constexpr int kSkinnyConsumers = kWarpgroup;
constexpr int kSkinnyMaxStages = 16;
constexpr int kSkinnyGroupBytes = kSkinnyConsumers * 16;  // the sums of 64 rows x 8 tokens

struct SkinnyBarriers {
  u64 full[kSkinnyMaxStages], empty[kSkinnyMaxStages], sums;
  u32 joined;  // a word of join_parts()
};

// What join_parts() adds up.
template <class C>
struct SkinnySums {
  static constexpr int kBlocksM = C::kBlocks, kTileM = 64 * kBlocksM, kTileN = C::kTokens;
  static constexpr bool kRowSums = false;
};

// ---- work of a block ----------------------------------------------------------------------------

// The sequence of a block's tiles.
template <class C>
struct SkinnySchedule {
  const Sm90SkinnyParams& p;
  int next, tile, k_begin, k_count;

  TC_DEVICE SkinnySchedule(const Sm90SkinnyParams& params, u32 split) : p(params) {
    const u32 k_blocks = (p.k + C::kTileK - 1) / C::kTileK;
    next = blockIdx.x / p.splits;
    k_begin = k_blocks * split / p.splits;
    k_count = static_cast<int>(k_blocks * (split + 1) / p.splits) - k_begin;
  }

  TC_DEVICE bool get() {
    tile = next;
    next += gridDim.x / p.splits;
    return tile < p.tiles;
  }
};

// The sequence of a block's parts of tiles, or of a pair's, whose tiles have twice the rows.
template <class C>
struct SkinnyStream {
  const Sm90SkinnyParams& p;
  const u32 k_blocks = (p.k + C::kTileK - 1) / C::kTileK;
  u32 next, end;  // k blocks of all tiles
  int tile, k_begin, k_count;

  TC_DEVICE SkinnyStream(const Sm90SkinnyParams& params, u32) : p(params) {
    next = first_unit(cluster());
    end = first_unit(cluster() + 1);
  }

  TC_DEVICE static u32 cluster() { return blockIdx.x / C::kTogether; }
  TC_DEVICE static u32 clusters() { return gridDim.x / C::kTogether; }
  TC_DEVICE static u32 rank() { return blockIdx.x % C::kTogether; }
  TC_DEVICE u32 all_units() const { return p.tiles * k_blocks; }
  TC_DEVICE u32 first_unit(u32 of_cluster) const { return of_cluster * all_units() / clusters(); }
  // The cluster that has a k block.
  TC_DEVICE int cluster_of(u32 unit) const { return ((unit + 1) * clusters() - 1) / all_units(); }

  TC_DEVICE bool get() {
    if (next >= end) return false;
    tile = (end - 1) / k_blocks;
    const u32 begin = tile * k_blocks, from = max(next, begin);
    k_begin = from - begin;
    k_count = end - from;
    end = from;
    return true;
  }

  TC_DEVICE bool has_part() const { return k_count < static_cast<int>(k_blocks); }
  TC_DEVICE bool has_end() const { return k_begin + k_count == static_cast<int>(k_blocks); }
  // The tile's parts. A block may have a part of two tiles: of one it is the last block, and of the
  // other one not, so that its two tiles of `partial` are for these.
  TC_DEVICE void parts(Work& w) const {
    const u32 begin = tile * k_blocks;
    const int first = cluster_of(begin), last = cluster_of(begin + k_blocks - 1);
    w.parts = last - first + 1;
    w.finisher = last == static_cast<int>(cluster());
    w.first_part = part(first, 0);
    w.last_part = part(last, 1);
    w.part = part(cluster(), w.finisher);
    w.counter = last * C::kTogether + rank();
  }
  TC_DEVICE static int part(int of_cluster, int of_finisher) {
    return (2 * of_cluster + of_finisher) * C::kTogether + rank();
  }
};

template <class C>
using SkinnyWork = std::conditional_t<C::kStreams, SkinnyStream<C>, SkinnySchedule<C>>;

// Rows of the weights that a stage holds: whole swizzle panels if the rows are contiguous.
template <class C>
TC_DEVICE int stage_rows(const Sm90SkinnyParams& p) {
  return C::kRowsContiguous ? (p.rows + 63) / 64 * 64 : p.rows;
}

// ---- producer -----------------------------------------------------------------------------------

// A tile of all layers, as one of its own layer.
template <class C>
struct SkinnyTile {
  TC_DEVICE SkinnyTile(const Sm90SkinnyParams& p, int tile) {
    while (layer + 1 < p.layers_count && tile >= p.layers[layer + 1].first_tile) ++layer;
    row = (tile - p.layers[layer].first_tile) * (p.rows / C::kHalves);
    rows = p.rows / C::kHalves;
    if constexpr (C::kMayBeUneven) {
      if (p.uneven) {
        is_thin = tile % 2 != 0;
        row = tile / 2 * 96 + (is_thin ? 64 : 0);
        if (is_thin) rows = 32;
      }
    }
    if constexpr (C::kPairs) row = 2 * row + blockIdx.x % 2 * p.rows;
  }

  int layer = 0, row, rows;
  bool is_thin = false;  // of an uneven pair
};

// Calls body(map, x, y, offset) for each box of a stage's weights, with its offset in the stage.
template <class C, class Body>
TC_DEVICE void for_each_box(const Sm90SkinnyParams& p, const SkinnyTile<C>& tile, int k,
                            Body&& body) {
  const Sm90SkinnyMap* map = &p.weights[tile.layer + (tile.is_thin ? 1 : 0)];
  if constexpr (C::kRowsContiguous) {
#pragma unroll
    for (int block = 0; block < C::kBlocks; ++block) {
      if (block * 64 < p.rows) body(map, tile.row + block * 64, k, block * C::kTileK * 128);
    }
  } else {
#pragma unroll
    for (int panel = 0; panel < C::kPanels; ++panel) {
#pragma unroll
      for (int half = 0; half < C::kHalves; ++half) {
        body(map + half, k + panel * C::kPanel, tile.row,
             (panel * p.rows + half * (p.rows / C::kHalves)) * 128);
      }
    }
  }
}

template <class C>
TC_DEVICE void produce(const Sm90SkinnyParams& p, SkinnyWork<C> schedule, u32 ring, u32 full,
                       u32 empty) {
  const u32 weight_bytes = stage_rows<C>(p) * 128 * C::kPanels;
  const u32 stage_bytes = weight_bytes + C::kTokens * 128 * C::kPanels;
  int stage = 0;
  u32 parity = 1;
  while (schedule.get()) {
    const SkinnyTile<C> tile(p, schedule.tile);
    // Half of each swizzled row stays as it is where a tile has 32 rows.
    const u32 loaded_bytes = stage_bytes - (tile.is_thin ? weight_bytes / 2 : 0);
    for (int i = 0; i < schedule.k_count; ++i) {
      int k = (schedule.k_begin + i) * C::kTileK;
      u32 to = ring + stage * stage_bytes, barrier = full + 8 * stage;
      barrier_wait_bounded(empty + 8 * stage, parity);
      barrier_expect(barrier, loaded_bytes);
      for_each_box(p, tile, k, [&](const Sm90SkinnyMap* map, int x, int y, u32 offset) {
        tma_load(to + offset, map, barrier, x, y, kEvictFirst);
      });
      if constexpr (C::kPairs) {  // each block brings one of the panels to both
        const int panel = blockIdx.x % 2;
        tma_multicast(to + weight_bytes + panel * C::kTokens * 128, &p.tokens, barrier, 3,
                      k + panel * C::kPanel, 0);
      } else {
#pragma unroll
        for (int panel = 0; panel < C::kPanels; ++panel) {
          tma_load(to + weight_bytes + panel * C::kTokens * 128, &p.tokens, barrier,
                   k + panel * C::kPanel, 0, kEvictLast);
        }
      }
      if (++stage == p.stages) {
        stage = 0;
        parity ^= 1;
      }
    }
  }
}

// ---- consumers ----------------------------------------------------------------------------------

// The output elements of a consumer warp's lane. Of a group of 64 rows x 8 tokens it holds the sums
// of rows lane / 4 + {0, 8} of its warp's 16 and of tokens lane % 4 * 2 + {0, 1}. If out's rows are
// contiguous, 8x8 elements are transposed among the lanes, so that each has two contiguous ones.
template <class C>
struct SkinnyOutput {
  using Traits = DTypeTraits<C::kDType>;

  const Sm90SkinnyParams& p;
  const Sm90SkinnyLayer& layer;
  const int tile_row;
  const bool turned;       // the lane's two contiguous elements are rows, not tokens
  const int row, token;    // of the lane's first element, in the tile
  const int rows, tokens;  // that exist
  u16* const out;          // the lane's first element

  TC_DEVICE SkinnyOutput(const Sm90SkinnyParams& p, const SkinnyTile<C>& tile)
      : p(p),
        layer(p.layers[tile.layer]),
        tile_row(tile.row),
        turned(layer.out_stride_row == 1),
        row(threadIdx.x / 32 * 16 + (turned ? threadIdx.x % 4 * 2 : threadIdx.x % 32 / 4)),
        token(turned ? threadIdx.x % 32 / 4 : threadIdx.x % 4 * 2),
        rows(min(tile.rows, layer.rows_count - tile_row)),
        tokens(p.tokens_count),
        out(static_cast<u16*>(layer.out) +
            (static_cast<tc_int64>(tile_row) + row) * layer.out_stride_row +
            token * layer.out_stride_token) {}

  TC_DEVICE float bias(int r, int t) const {
    if (r >= rows || t >= tokens) return 0.0f;
    tc_int64 at = (tile_row + r) * layer.bias_stride_row + t * layer.bias_stride_token;
    return Traits::load(static_cast<const u16*>(layer.bias)[at]);
  }

  // Stores a lane's sums of a group: of a gated one, those of both layers.
  TC_DEVICE void store(float (&sum)[4 * C::kHalves], u32 group) const {
    if constexpr (C::kGated) apply_gate<4, true>(sum, p.activation, p.curve);
    const int block = group / C::kEights, eight = group % C::kEights;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int r = block * 64 + half * 8, t = eight * 8;
      float first_sum = sum[2 * half], second_sum = sum[2 * half + 1];
      if (layer.bias != nullptr) {
        int own_row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + r;
        int own_token = threadIdx.x % 4 * 2 + t;
        first_sum += bias(own_row, own_token);
        second_sum += bias(own_row, own_token + 1);
      }
      u32 pair = Traits::pack(first_sum, second_sum);
      if (turned) pair = transpose_8x8(pair);
      bool first = row + r < rows && token + t < tokens;
      bool second = first && (turned ? row + r + 1 < rows : token + t + 1 < tokens);
      u16* to = out + r * layer.out_stride_row + t * layer.out_stride_token;
      if (p.pairs) {
        if (first) *reinterpret_cast<u32*>(to) = pair;
      } else {
        if (first) to[0] = static_cast<u16>(pair);
        if (second) to[turned ? 1 : layer.out_stride_token] = static_cast<u16>(pair >> 16);
      }
    }
  }
};

// A lane's four sums of a group, of one of its layers.
template <class C>
TC_DEVICE const float* sums_of(const float (&sum)[C::kBlocks][C::kTokens / 2], u32 group,
                               int half) {
  return &sum[C::kGated ? half : group / C::kEights][group % C::kEights * 4];
}

// Sends this block's sums to their owners in the cluster, and adds and stores those that it owns.
template <class C>
TC_DEVICE void finish_split(const Sm90SkinnyParams& p, const SkinnyOutput<C>& output,
                            const float (&sum)[C::kBlocks][C::kTokens / 2], u32 split, u32 parts,
                            u32 barrier) {
  const u32 splits = p.splits, mine = threadIdx.x * 16;
  cluster_wait();  // the other blocks have initialized their barriers
  u32 owner = 0, slot = 0;
#pragma unroll
  for (u32 group = 0; group < C::kGroups; ++group) {
#pragma unroll
    for (int half = 0; half < C::kHalves; ++half) {
      u32 to = parts + ((slot * splits + split) * C::kHalves + half) * kSkinnyGroupBytes + mine;
      store_remote_async(map_to_rank(to, owner), sums_of<C>(sum, group, half),
                         map_to_rank(barrier, owner));
    }
    if (++owner == splits) {
      owner = 0;
      ++slot;
    }
  }
  if (split >= C::kGroups) return;
  barrier_wait_remote(barrier, 0);
  u32 from = parts + mine;
#pragma unroll 1
  for (u32 group = split; group < C::kGroups; group += splits) {
    float total[4 * C::kHalves] = {};
#pragma unroll 4
    for (u32 part = 0; part < splits; ++part) {
#pragma unroll
      for (int half = 0; half < C::kHalves; ++half) {
        float value[4];
        asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(value[0]), "=f"(value[1]), "=f"(value[2]), "=f"(value[3])
                     : "r"(from));
        from += kSkinnyGroupBytes;
#pragma unroll
        for (int i = 0; i < 4; ++i) total[4 * half + i] += value[i];
      }
    }
    output.store(total, group);
  }
}

// Each warp frees a stage in its block, and in the one with which it shares the tokens.
template <class C>
TC_DEVICE void free_skinny_stage(u32 empty) {
  const u32 lane = threadIdx.x % 32;
  if constexpr (C::kPairs) {
    if (lane < 2) barrier_arrive_remote(map_to_rank(empty, lane));
  } else {
    if (lane == 0) barrier_arrive(empty);
  }
}

// Where the sums of a tile's part lie that does not end K, of a cluster's last tile, and the
// counter that is 1 when they do: for the next cluster, which continues them.
template <class C>
struct SkinnyRelay {
  float4* sums;
  int* counter;

  TC_DEVICE SkinnyRelay(const Sm90SkinnyParams& p, u32 cluster) {
    const u32 block = cluster * C::kTogether + SkinnyStream<C>::rank();
    sums = reinterpret_cast<float4*>(p.partial) + threadIdx.x +
           static_cast<tc_int64>(block) * (64 * C::kBlocks * C::kTokens / 4);
    counter = p.counters + block;
  }

  TC_DEVICE void send(float (&sum)[C::kBlocks][C::kTokens / 2]) const {
    move_part<SkinnySums<C>, Move::store>(sums, sum);
    named_sync(kGroupBarrier, kWarpgroup);
    if (threadIdx.x == 0) count_part(counter);
  }

  TC_DEVICE void wait() const {
    if (threadIdx.x == 0) {
      // Blocks start in their order, and each computes first what it sends.
      while (!wait_for_parts(counter, 1, 0)) {
      }
      *counter = 0;  // for the next launch
    }
    named_sync(kGroupBarrier, kWarpgroup);
  }

  // Loads the sums if `receives`. NOTE: by predicates: where two branches define the sums, ptxas
  // serialises the products.
  TC_DEVICE void load_if(bool receives, float (&sum)[C::kBlocks][C::kTokens / 2]) const {
#pragma unroll
    for (int i = 0; i < C::kBlocks * C::kTokens / 8; ++i) {
      float* s = &sum[i / (C::kTokens / 8)][i % (C::kTokens / 8) * 4];
      asm volatile(
          "{\n\t.reg .pred p;\n\tsetp.ne.s32 p, %5, 0;\n"
          "\t@p ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];\n\t}"
          : "+f"(s[0]), "+f"(s[1]), "+f"(s[2]), "+f"(s[3])
          : "l"(sums + i * kWarpgroup), "r"(static_cast<int>(receives))
          : "memory");
    }
  }
};

TC_DEVICE u64 skinny_descriptor(u32 units) { return wgmma_descriptor(0, 16, 1024) | units; }

template <class C>
TC_DEVICE void consume(const Sm90SkinnyParams& p, SkinnyWork<C> schedule, u32 split, u32 ring,
                       u32 full, u32 empty, u32 sums, u32 joined) {
  const u32 weight_bytes = stage_rows<C>(p) * 128 * C::kPanels;
  const u32 stage_bytes = weight_bytes + C::kTokens * 128 * C::kPanels;
  int stage = 0, before = 0;
  u32 parity = 0;
  // Of the second block of rows in a panel, in the units of descriptors.
  const u32 block_step = C::kGated ? p.rows / 2 * 8 : 512;
  while (schedule.get()) {
    float sum[C::kBlocks][C::kTokens / 2];
#pragma unroll
    for (int block = 0; block < C::kBlocks; ++block) {
#pragma unroll
      for (int i = 0; i < C::kTokens / 2; ++i) sum[block][i] = 0.0f;
    }
    if constexpr (C::kStreams) {
      const bool receives = p.splits == 0 && schedule.k_begin > 0;
      const SkinnyRelay<C> relay(p, schedule.cluster() - receives);
      if (receives) relay.wait();
      relay.load_if(receives, sum);
    }
    for (int i = 0; i < schedule.k_count; ++i) {
      barrier_wait_bounded(full + 8 * stage, parity);
      // In units of 16 bytes, as in descriptors; uniform over the warp.
      u32 weights = __shfl_sync(0xffffffff, ring + stage * stage_bytes, 0) / 16;
      u32 tokens = weights + weight_bytes / 16;
      wgmma_fence();
#pragma unroll
      for (int j = 0; j < 4 * C::kPanels; ++j) {  // 32 bytes of K
        u64 b = skinny_descriptor(tokens + (j / 4 * C::kTokens * 128 + j % 4 * 32) / 16);
#pragma unroll
        for (int block = 0; block < C::kBlocks; ++block) {
          // If `rows` ends within a block of 64, the bytes after it are multiplied too; those sums
          // are never stored.
          u32 a = C::kRowsContiguous
                      ? weights + (block * C::kTileK * 128 + j * kMnMajorStep) / 16
                      : weights + block * block_step + j % 4 * 2 + j / 4 * (p.rows * 8);
          Wgmma<C::kTokens>::template run<C::kMath, C::kRowsContiguous, 0>(
              sum[block], skinny_descriptor(a), b, 1);
        }
      }
      wgmma_commit();
      // The products of this stage run while the next one's are issued.
      if (i > 0) {
        wgmma_wait<1>();
        free_skinny_stage<C>(empty + 8 * before);
      }
      before = stage;
      if (++stage == p.stages) {
        stage = 0;
        parity ^= 1;
      }
    }
    wgmma_wait<0>();
    free_skinny_stage<C>(empty + 8 * before);
    if constexpr (C::kStreams) {
      if (p.splits == 0) {
        if (!schedule.has_end()) {
          SkinnyRelay<C>(p, schedule.cluster()).send(sum);
          continue;
        }
      } else if (schedule.has_part()) {
        Work w;
        schedule.parts(w);
        const Parts parts = {reinterpret_cast<float4*>(p.partial) + threadIdx.x, nullptr,
                             p.counters + w.counter, 2 * C::kTogether, p.polls};
        float no_rows[C::kBlocks];
        if (!join_parts<SkinnySums<C>>(parts, w, 0, joined, sum, false, no_rows)) continue;
      }
    }
    SkinnyOutput<C> output(p, SkinnyTile<C>(p, schedule.tile));
    if (!C::kStreams && p.splits > 1) {
      finish_split<C>(p, output, sum, split, ring + p.ring_bytes, sums);
    } else {
#pragma unroll
      for (u32 group = 0; group < C::kGroups; ++group) {
        float value[4 * C::kHalves];
#pragma unroll
        for (int i = 0; i < 4 * C::kHalves; ++i) value[i] = sums_of<C>(sum, group, i / 4)[i % 4];
        output.store(value, group);
      }
    }
  }
}

// Grid: tiles * splits blocks in clusters of `splits`; without splits a block may compute several
// tiles, or parts of them.
template <class C>
TC_DEVICE void run_skinny(const Sm90SkinnyParams& p) {
  extern __shared__ __align__(1024) unsigned char memory[];
  __shared__ SkinnyBarriers barriers;
  const u32 splits = C::kStreams ? 1 : p.splits, split = splits > 1 ? cluster_rank() : 0;
  const SkinnyWork<C> schedule(p, split);
  const u32 ring = shared_address(memory);
  const u32 full = shared_address(barriers.full), empty = shared_address(barriers.empty);
  const u32 sums = shared_address(&barriers.sums);
  const bool producer = threadIdx.x == kSkinnyConsumers;

  // Safe this early: every block waits for the previous kernel before it ends, and the next kernel
  // waits for this one.
  launch_next_grid();
  if (producer) {
    if (ring % 1024 != 0) asm volatile("trap;");
    for (int s = 0; s < p.stages; ++s) {
      barrier_init(full + 8 * s, 1);
      barrier_init(empty + 8 * s, kSkinnyConsumers / 32 * C::kTogether);
    }
    barrier_init(sums, 1);
    fence_barrier_init();
    u32 own = C::kGroups > split ? (C::kGroups - split + splits - 1) / splits : 0;
    barrier_expect(sums, own * splits * C::kHalves * kSkinnyGroupBytes);
    SkinnyWork<C> first = schedule;
    if (first.get()) {
      const SkinnyTile<C> tile(p, first.tile);
      for (int i = 0; i < min(first.k_count, p.prefetched); ++i) {
        for_each_box(p, tile, (first.k_begin + i) * C::kTileK,
                     [&](const Sm90SkinnyMap* map, int x, int y, u32) { tma_prefetch(map, x, y); });
      }
    }
    prefetch_tensor_map(&p.tokens);
  }
  __syncthreads();
  if (splits > 1) cluster_arrive();
  if constexpr (C::kPairs) cluster_meet();
  wait_for_previous_grid();
  if (threadIdx.x < kSkinnyConsumers) {
    consume<C>(p, schedule, split, ring, full, empty, sums, shared_address(&barriers.joined));
  } else {
    if (producer) produce<C>(p, schedule, ring, full, empty);
    __syncwarp();
    if (splits > 1) cluster_wait();
  }
  // A block must not exit while the other one may still write to its shared memory.
  if constexpr (C::kPairs) cluster_meet();
}

using KernelConfig = SkinnyConfig<DType::TC_DTYPE, TC_ROWS_CONTIGUOUS, TC_TILE_N / 64, TC_TILE_M,
                                  TC_GATED, TC_STREAMS>;
static_assert(TC_TILE_K == KernelConfig::kTileK && TC_TILE_N % 64 == 0,
              "the table's tile is wrong");

extern "C" __global__ void __launch_bounds__(TC_THREADS)
    TC_KERNEL(const __grid_constant__ Sm90SkinnyParams p) {
  run_skinny<KernelConfig>(p);
}

}  // namespace torch_cubin::TC_KERNEL

/* torch_cubin kernels
{"virtual_arch": ["90a"],
 "defaults": {
  "block": [160, 1, 1], "stages": 2, "dynamic_shared": 231424, "cost": {"fixed": 2400},
  "defines": {"TC_DTYPE": "{d.dtype}"}, "for": {"d": "f16 bf16"}},
 "kernels": [
  {"name": "sm90_skinny_matmul_{d.short}_nt_{tokens}x{rows}", "kind": "sm90_skinny", "layout": "nt",
   "tile": ["{tokens}", "{rows}", 128], "gated": 0, "streams": 0,
   "defines": {"TC_ROWS_CONTIGUOUS": "false", "TC_GATED": "false", "TC_STREAMS": 0},
   "for": {"tokens": [8, 16, 32, 64], "rows": [64, 128]}},
  {"name": "sm90_skinny_matmul_{d.short}_nn_{tokens}x{rows}", "kind": "sm90_skinny", "layout": "nn",
   "tile": ["{tokens}", "{rows}", 128], "gated": 0, "streams": 0,
   "defines": {"TC_ROWS_CONTIGUOUS": "true", "TC_GATED": "false", "TC_STREAMS": 0},
   "for": {"tokens": [8, 16, 32, 64], "rows": [64, 192]}},
  {"name": "sm90_skinny_matmul_{d.short}_nn_{tokens}x{rows}_streamed", "kind": "sm90_skinny",
   "layout": "nn", "tile": ["{tokens}", "{rows}", 128], "gated": 0, "streams": 1,
   "defines": {"TC_ROWS_CONTIGUOUS": "true", "TC_GATED": "false", "TC_STREAMS": 1},
   "for": {"tokens": [8, 16, 32], "rows": [64, 128]}},
  {"name": "sm90_skinny_matmul_{d.short}_nn_64x64_pairs", "kind": "sm90_skinny", "layout": "nn",
   "tile": [64, 64, 128], "gated": 0, "streams": 2,
   "defines": {"TC_ROWS_CONTIGUOUS": "true", "TC_GATED": "false", "TC_STREAMS": 2}},
  {"name": "sm90_skinny_matmul_gated_{d.short}_nt_{tokens}x128", "kind": "sm90_skinny_gated",
   "layout": "nt", "tile": ["{tokens}", 128, 128], "gated": 1, "streams": 0,
   "defines": {"TC_ROWS_CONTIGUOUS": "false", "TC_GATED": "true", "TC_STREAMS": 0},
   "for": {"tokens": [8, 16, 32, 64]}}]}
*/
