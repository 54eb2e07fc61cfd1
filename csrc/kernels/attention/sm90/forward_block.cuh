// A block of attention's forward on Hopper, for 16-bit types (sm90/forward.cu) and for e4m3
// (sm90/e4m3.cu): its roles, shared memory and barriers. The warps that schedule and load are
// sm90/forward_producers.cuh, what a consumer computes is sm90/forward_loop.cuh, or its kernel's
// (sm90/forward_few.cu).
//
// A block is a producer warpgroup and two or three consumer warpgroups of 64 queries each. Of the
// producer's warps one schedules the tiles and loads Q, one loads K and one V; or one loads both,
// and two convert V.
//
// A block may have two such teams of consumers, each with tiles and shared memory of its own and
// two of the producer's warps, of which one loads K and V, and converts V: while one team waits,
// the other computes. Two blocks of a multiprocessor are no substitute: if a kernel is launched
// with the registers of half a multiprocessor, ptxas gives its consumers no more than those.
//
//   shared memory:  Q: kQBuffers x 64 rows | K: kStages | V: kStages | rows of V: kRowStages
//                   | barriers | tiles
//   full barriers:  the producer's arrival and all bytes of the slot
//   empty barriers: one arrival of each warp that reads the slot: those of one consumer warpgroup
//                   for Q, of all for K and V
#pragma once

#include "common/uniform.cuh"
#include "forward_producers.cuh"

namespace torch_cubin {
namespace sm90 {

// The shared memory of a block. `kQBytes`: 64 queries, `kKvBytes`: a block of keys, or of values.
//
// Kernels' configs inherit it. They also have: Params; kN, the keys of a block; kPanels of
// kPanelColumns each, kPanelBytes a row; kPingPong (consumers take turns), kMasked, kTakesNext (of
// AttentionSchedule), kKeepsKeys (a tile may find the keys of the one before in the ring),
// kSendsNextBlock, kNextBlock and Mask (ReceivedKeyBlocks), kMovesDescriptors (moved()); the
// registers of both sorts of warps; kOut and kOutColumns (store_rows()); describe_tile(), which
// fills a Tile, and load_values(), which loads a block of values, or convert_values(). For
// sm90/forward_loop.cuh: kAddsSums (a block's product with V is added to the outputs in float32),
// kEndsTurnEarly (that product ends its turn), kFewestSkipped (blocks of a tile that is skipped).
//
// `kSharedQ`: 0 if each consumer has kQSlots buffers of queries of its own. Otherwise all consumers
// share this number of buffers, in order: with three for two consumers, the first one's next
// queries load during its tile, and the second one's when the first has ended it.
//
// `kRowStages`: 0 if V is loaded as wgmma reads it. Otherwise its panels, of kRowBytes, are loaded
// to this number of slots, and two warps (of two teams: one of each) write them to V:
// convert_values(from, to, half), each half of a panel's columns.
template <int kGroups_, int kQSlots_, int kStages_, int kQBytes_, int kKvBytes_, class Tile_,
          int kSharedQ = 0, int kRowStages_ = 0, int kRowBytes_ = 0>
struct ForwardBlock {
  using Tile = Tile_;
  using Mask = NoMask;
  static constexpr bool kRotates = false, kOrders = false;  // of AttentionSchedule
  static constexpr bool kAddsSums = false, kEndsTurnEarly = false;
  static constexpr int kFewestSkipped = 0;
  static constexpr int kGroups = kGroups_, kQSlots = kQSlots_, kStages = kStages_, kRing = 8;
  static constexpr int kRows = 64 * kGroups;
  static constexpr int kQBytes = kQBytes_, kKvBytes = kKvBytes_;
  static constexpr bool kSharesQ = kSharedQ > 0;
  static constexpr int kQBuffers = kSharesQ ? kSharedQ : kQSlots * kGroups;
  static constexpr int kK = kQBuffers * kQBytes, kV = kK + kStages * kKvBytes;
  static constexpr int kRowStages = kRowStages_, kRowBytes = kRowBytes_;
  static constexpr int kVRows = kV + kStages * kKvBytes;
  static constexpr int kQFull = kVRows + kRowStages * kRowBytes, kQEmpty = kQFull + 8 * kQBuffers;
  static constexpr int kKFull = kQEmpty + 8 * kQBuffers, kKEmpty = kKFull + 8 * kStages;
  static constexpr int kVFull = kKEmpty + 8 * kStages, kVEmpty = kVFull + 8 * kStages;
  static constexpr int kRowsFull = kVEmpty + 8 * kStages, kRowsEmpty = kRowsFull + 8 * kRowStages;
  static constexpr int kTileFull = kRowsEmpty + 8 * kRowStages;
  static constexpr int kConverters = kRowStages > 0 ? 2 : 0;  // warps
  static constexpr int kTeams = 1;
  static constexpr int kTiles = (kTileFull + 8 * kRing + 15) / 16 * 16;
  static constexpr int kBlockBytes = kTiles + kRing * static_cast<int>(sizeof(Tile));
};

// Of a launch: the bytes of a team's shared memory and of a block's, and its threads.
template <class C>
constexpr int kTeamBytes = (C::kSharedBytes + 1023) / 1024 * 1024;
template <class C>
constexpr int kAllBytes = (C::kTeams - 1) * kTeamBytes<C> + C::kSharedBytes;
template <class C>
constexpr int kBlockThreads = kWarpgroup * (C::kTeams * C::kGroups + 1);

// ---- consumers ----------------------------------------------------------------------------------

constexpr int kMostShared = 227 << 10;  // bytes of a block's shared memory

// Bytes between rows of outputs in shared memory: stmatrix writes eight of them at once, to
// different banks.
constexpr TC_DEVICE int out_pitch(int columns) { return 2 * columns + 16; }

// nvcc splits some stores of a uint4 that depend on a condition into words.
TC_DEVICE void store_global_if(bool condition, void* global, const u32 (&v)[4]) {
  asm volatile(
      "{ .reg .pred stores; setp.ne.u32 stores, %5, 0;"
      " @stores st.global.v4.b32 [%0], {%1, %2, %3, %4}; }" ::"l"(global),
      "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]), "r"(static_cast<u32>(condition))
      : "memory");
}

// What a consumer warpgroup of any kernel knows of its place: tiles, slots, barriers, turns.
template <class C>
struct ForwardConsumer {
  const typename C::Params& p;
  u32 shared;
  const typename C::Tile* tiles;
  int group, warp, lane;
  u32 number = 0;  // of the tile whose scores are computed
  u32 step = 0;    // blocks of keys scored so far, in all tiles

  TC_DEVICE ForwardConsumer(const typename C::Params& params, u32 memory,
                            const typename C::Tile* ring, int own_group)
      : p(params), shared(memory), tiles(ring), group(own_group) {
    warp = threadIdx.x / 32 % 4;
    lane = threadIdx.x % 32;
  }

  // The slots, and the parities of their phases.
  TC_DEVICE u32 q_slot() const {
    if constexpr (C::kSharesQ) return (number * C::kGroups + group) % C::kQBuffers;
    return number % C::kQSlots * C::kGroups + group;
  }
  TC_DEVICE u32 q_full() const { return shared + C::kQFull + 8 * q_slot(); }
  TC_DEVICE u32 q_phase() const {
    if constexpr (C::kSharesQ) return (number * C::kGroups + group) / C::kQBuffers % 2;
    return number / C::kQSlots % 2;
  }
  static TC_DEVICE u32 slot(u32 of_step) { return of_step % C::kStages; }
  static TC_DEVICE u32 phase(u32 of_step) { return of_step / C::kStages % 2; }

  // The first row of this warpgroup in a tile, and of this thread.
  TC_DEVICE int first_row(const AttentionTile& tile) const { return tile.row + 64 * group; }
  TC_DEVICE int thread_row(const AttentionTile& tile) const {
    return first_row(tile) + 16 * warp + lane / 4;
  }

  // The low word of a descriptor, the same in all lanes: one move for all products that use it.
  static TC_DEVICE u32 moved(u32 low) { return C::kMovesDescriptors ? uniform(low) : low; }

  TC_DEVICE void release(u32 barrier) {
    if (lane == 0) barrier_arrive(barrier);
  }

  // Stores the warp's 16 rows of a tile's outputs. They pass through shared memory, kOutColumns at
  // a time, so that eight lanes write a line of memory. pack(i): this thread's outputs i and i + 1.
  template <class Pack>
  TC_DEVICE void store_rows(const AttentionTile& tile, Pack&& pack) {
    constexpr int kPitch = out_pitch(C::kOutColumns), kLanes = C::kOutColumns / 8;  // of a row
    constexpr int kRowsAtOnce = 32 / kLanes, kTimes = 16 / kRowsAtOnce;
    int row = lane / kLanes, column = lane % kLanes * 8;
    u32 rows = shared + C::kOut + (4 * group + warp) * (16 * kPitch);
    u32 to = rows + lane % 16 * kPitch + lane / 16 * 16, from = rows + row * kPitch + 2 * column;
    row += first_row(tile) + 16 * warp;
    auto out = static_cast<u16*>(p.out) + tile.batch * p.out_stride[0] +
               tile.head * p.out_stride[1] + (tile.sequence.q_row + row) * p.out_stride[2] + column;
    tc_int64 step = kRowsAtOnce * p.out_stride[2];
#pragma unroll
    for (int first = 0; first < C::kD; first += C::kOutColumns) {
#pragma unroll
      for (int i = 0; i < C::kOutColumns; i += 16) {
        int at = (first + i) / 2;
        stmatrix(to + 2 * i, pack(at), pack(at + 2), pack(at + 4), pack(at + 6));
      }
      __syncwarp();
      u32 v[kTimes][4];
#pragma unroll
      for (int j = 0; j < kTimes; ++j) load_shared(v[j], from + j * (kRowsAtOnce * kPitch));
      int last = first + column < p.head_dim_v ? tile.sequence.rows : 0;
#pragma unroll
      for (int j = 0; j < kTimes; ++j) {
        store_global_if(row + j * kRowsAtOnce < last, out + j * step + first, v[j]);
      }
      __syncwarp();
    }
  }

  static constexpr int kTurn = 1;  // named barriers start here: one for each consumer's turn
  TC_DEVICE void begin_turn() {
    if (C::kPingPong) named_sync(kTurn + group, 2 * kWarpgroup);
  }
  TC_DEVICE void end_turn() {
    if (C::kPingPong) named_arrive(kTurn + (group + 1) % C::kGroups, 2 * kWarpgroup);
  }
  // The first turn is the first warpgroup's, and nobody takes the one after the last.
  TC_DEVICE void open_turns() {
    if (C::kPingPong && group == C::kGroups - 1) named_arrive(kTurn, 2 * kWarpgroup);
  }
  TC_DEVICE void close_turns() {
    if (C::kPingPong && group == 0) named_sync(kTurn, 2 * kWarpgroup);
  }
};

// The whole kernel.
template <class C, template <class> class Consumer>
TC_DEVICE void run_block(const typename C::Params& p) {
  extern __shared__ __align__(1024) unsigned char memory[];
  int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), team = 0, offset = 0;
  if constexpr (C::kTeams == 2) {
    team = warp < 4 ? warp / 2 : (warp / 4 - 1) / C::kGroups;
    offset = team * kTeamBytes<C>;
  }
  u32 shared = shared_address(memory) + offset;
  auto tiles = reinterpret_cast<typename C::Tile*>(memory + offset + C::kTiles);

  if (threadIdx.x % 64 == 0 && threadIdx.x / 64 < C::kTeams) {
    if (shared % 1024 != 0) asm volatile("trap;");
    prefetch_tensor_map(&p.q);
    prefetch_tensor_map(&p.k);
    prefetch_tensor_map(&p.v);
    for (int i = 0; i < C::kQBuffers; ++i) {
      barrier_init(shared + C::kQFull + 8 * i, 1);
      barrier_init(shared + C::kQEmpty + 8 * i, 4);
    }
    for (int i = 0; i < C::kStages; ++i) {
      barrier_init(shared + C::kKFull + 8 * i, 1);
      barrier_init(shared + C::kVFull + 8 * i, C::kConverters > 0 ? C::kConverters : 1);
      barrier_init(shared + C::kKEmpty + 8 * i, 4 * C::kGroups);
      barrier_init(shared + C::kVEmpty + 8 * i, 4 * C::kGroups);
    }
    for (int i = 0; i < C::kRowStages; ++i) {
      barrier_init(shared + C::kRowsFull + 8 * i, 1);
      barrier_init(shared + C::kRowsEmpty + 8 * i, C::kConverters);
    }
    for (int i = 0; i < C::kRing; ++i) barrier_init(shared + C::kTileFull + 8 * i, 1);
    fence_barrier_init();
  }
  __syncthreads();

  // The next grid's blocks may start as soon as they fit: they wait for the end of this one.
  launch_next_grid();
  if (warp < 4) {
    fewer_registers<C::kProducerRegisters>();
    if (warp == 1 || (C::kTeams == 2 && warp == 3)) {
      produce_q<C>(p, shared, tiles, team);
    } else if constexpr (C::kTeams == 2 && C::kConverters > 0) {
      produce_and_convert<C>(p, shared, tiles);
    } else if constexpr (C::kConverters > 0) {
      if (threadIdx.x == 0) {
        produce_keys_and_rows<C>(p, shared, tiles);
      } else {
        wait_for_previous_grid();
        if (warp >= 4 - C::kConverters) convert_rows<C>(shared, tiles, warp % C::kConverters);
      }
    } else if constexpr (C::kTeams == 2) {
      if (threadIdx.x % 32 == 0) {
        produce_keys_and_values<C>(p, shared, tiles);
      } else {
        wait_for_previous_grid();
      }
    } else if (threadIdx.x == 0) {
      produce_keys<C, false>(p, shared, tiles);
    } else if (threadIdx.x == 64) {
      produce_keys<C, true>(p, shared, tiles);
    } else {
      wait_for_previous_grid();
    }
    __syncwarp();
  } else {
    more_registers<C::kConsumerRegisters>();
    wait_for_previous_grid();
    Consumer<C>(p, shared, tiles, warp / 4 - 1 - team * C::kGroups).run();
  }
}

}  // namespace sm90
}  // namespace torch_cubin
