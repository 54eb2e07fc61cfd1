// The common parts of attention's backward kernels on Hopper (sm90/backward.cu,
// sm90/backward_wide.cu): a block's work items and shared memory, its producer, the warpgroup of dq
// and the path of dq to memory. The two files have the warpgroups of keys, which hold dk and dv.
// Longer than files should be: the roles share one step's barriers and shared memory, and none can
// be followed without the others.
//
//   producer   one thread loads k and v, and a step's q, grad_out and sums; two threads, for every
//              other step each, add dq, as it lies in shared memory, to dq_sum; a warp fetches the
//              next work item, and in some kernels rounds dq meanwhile (sm90/backward_round.cuh)
//   queries    dq, transposed, from dS in shared memory
//
//   shared memory:  k, v | k of the other block's keys (pair) | q: kQStages |
//                   grad_out: kGradStages | dS: kScoreStages | dq: kDqSlots pieces of 64 columns |
//                   P (wide, see there) | sums: kQStages | mask: kQStages | barriers |
//                   number of the work item (pair): 2 | work item: 2
//
// Blocks are persistent: they take one work item (128 or 64 keys of a head; a pair of blocks, 128)
// after the other, and the rings' steps and phases continue across work items. So the first loads
// of the next item are in flight while the last sums of the previous one are added and stored.
#pragma once

#include "backward_dq.cuh"
#include "backward_sums.cuh"
#include "wgmma_registers.cuh"

namespace torch_cubin {
namespace sm90 {

constexpr int kBackwardThreads = 4 * kWarpgroup;

// A block's rank in its pair; 0 without pairs.
struct PairPlace {
  u32 rank;
  u32 other;  // address of the other block's shared memory, for `shared::cluster` instructions
};

// A work item, which one thread passes to the others through shared memory.
struct KeyBlock : KeyTile {  // no tile: there are no more work items
  int first_tile;            // the number of the first tile of queries of the group's first head
  int begin, end;            // tiles of queries that attend to the keys
  int first;  // of the steps, in the order of Steps: its own are every p.parts-th from here on
  int steps;  // its own, without those that a mask hides
  int index;  // its number, for sm90/backward_parts.cuh
  // At a band's edges queries see only one half of the keys: the number of first steps that the
  // first half skips, and of last steps that the second half skips.
  int skipped[2];

  // Takes the next number, in one thread of the block or the pair. Not blockIdx.x: blocks wait for
  // the turns of earlier work items, which must have been taken.
  static TC_DEVICE u32 take(const Sm90BackwardParams& p) { return atomicAdd(p.ticket, 1u); }

  // In one thread. Consecutive work items have the same keys of `together` parts of heads; then
  // come the next keys. Each number is stored in its place at once: this thread has few registers.
  TC_DEVICE void set(const Sm90BackwardParams& p, u32 number, int rows, int keys) {
    int kv_heads = p.heads / p.group;
    bool packed = p.order != nullptr;
    WorkItems items(p);
    if (number >= items.heads * items.places) {
      key_tile = -1;
      return;
    }
    index = static_cast<int>(number);
    u32 each = static_cast<u32>(p.together) * items.places;
    u32 set = number / each, rest = number % each;
    u32 here = items.together(set * p.together);
    u32 part = set * p.together + rest % here, pair = part / p.parts;
    int first_step = static_cast<int>(part % p.parts), tile = static_cast<int>(rest / here);
    int of_batch = static_cast<int>(pair / kv_heads), of_head = static_cast<int>(pair % kv_heads);
    first = first_step;
    head = of_head;
    if (packed) {
      Sm90OrderPlace place = p.order->places[tile];
      tile = place.tile;
      of_batch = place.sequence;
    }
    key_tile = tile;
    batch = of_batch;
    Sm90Sequence of(p.lengths, of_batch);
    sequence = of;
    SeenTiles seen(of, tile, rows, keys);
    begin = seen.begin;
    end = seen.end;
    int all = max(0, seen.end - seen.begin) * p.group;
    steps = p.bits.steps == nullptr ? (all + p.parts - 1 - first_step) / p.parts : 0;
    SeenTiles low(of, 2 * tile, rows, keys / 2), high(of, 2 * tile + 1, rows, keys / 2);
    bool has_high = tile * keys + keys / 2 < of.columns;
    skipped[0] = steps_from(p, low.end);
    skipped[1] = steps - max(skipped[0], has_high ? steps_from(p, high.begin) : 0);
    first_tile = packed ? of_head * p.group * p.tiles +
                              first_query_tile(p.lengths.cu_seqlens_q, of_batch, rows)
                        : (of_batch * p.heads + of_head * p.group) * p.tiles;
  }

 private:
  // The number of steps whose tiles of queries are `tile` or later ones.
  TC_DEVICE int steps_from(const Sm90BackwardParams& p, int tile) const {
    return min(max((end - tile) * p.group - first + p.parts - 1, 0) / p.parts, steps);
  }
};

template <DType kDType_, int kRows_, int kD_, int kQStages_, int kGradStages_, bool kGeneral_,
          bool kAdded_, bool kPair_ = false>
struct BackwardConfig {
  static constexpr DType kDType = kDType_;
  // kAdded: the mask, if any, may be additive. Testing it in each step took 4 to 5% of the time at
  // head_dim 128.
  static constexpr bool kGeneral = kGeneral_, kAdded = kAdded_;
  // Wide: two warpgroups only have the registers for dk and dv of 64 keys, so each holds one.
  static constexpr bool kWide = kD_ > 128;
  // Two blocks of a cluster have adjacent keys, and share dq: see sm90/backward_wide.cu.
  static constexpr bool kPair = kPair_;
  static constexpr bool kRounds = false;          // a RoundingConfig, see sm90/backward_round.cuh
  static constexpr int kRows = kRows_, kD = kD_;  // queries of a step, columns of every operand
  static constexpr int kQStages = kQStages_, kGradStages = kGradStages_,
                       kScoreStages = kPair ? 1 : 2, kDqStages = 2, kWorkItems = 2;
  static constexpr int kKeys = kWide ? 64 : 128, kKeyGroups = kKeys / 64,
                       kThreads = kBackwardThreads;
  static constexpr int kBlocks = kPair ? 2 : 1, kWorkKeys = kBlocks * kKeys;  // of a work item
  static constexpr int kPanels = (kD + 63) / 64, kRowPanels = (kRows + 63) / 64;
  static constexpr int kPieces = kPanels / kBlocks;  // of dq, that a block adds to
  // Numbers of arrivals: readers of q or grad_out, writers of dS, and readers of dS.
  static constexpr int kReaders = kWide ? 8 : 2, kScoreWriters = 4 * kKeyGroups,
                       kScoreReaders = 4 * kBlocks;
  // Warps that multiply k; those that multiply v; and, beside the 12 warps that multiply, the
  // threads of the producer that read work items.
  static constexpr int kKeyReaders = kWide ? 8 : 12, kValueReaders = kWide ? 4 : 8,
                       kWorkReaders = 12 + 1 + kDqStages;
  static constexpr int kProducerRegisters = 32, kKeyRegisters = kD == 64 ? 200 : 208;
  static constexpr int kQueryRegisters = 512 - kProducerRegisters - 2 * kKeyRegisters;
  static constexpr WgmmaType kType = kDType == DType::bfloat16 ? WgmmaType::bf16 : WgmmaType::f16;

  static constexpr int kPanelBytes = kKeys * 128;  // of k and v
  static constexpr int kScorePanelBytes = kWorkKeys * 128;
  static constexpr int kKeyBytes = kPanels * kPanelBytes, kQBytes = kPanels * kRows * 128;
  static constexpr int kScoreBytes = kRowPanels * kScorePanelBytes, kPieceBytes = 64 * kRows * 4;
  static constexpr int kSumBytes = 2 * kRows * 4;
  // For a thread that multiplies keys: a bit for each of its scores.
  static constexpr int kMaskWords = (kRows / 2 + 31) / 32;
  static constexpr int kMaskBytes = 2 * kKeys * kMaskWords * 4;
  // Buffers of dq's pieces: of two steps, if 208 KB suffice beside them, or of one.
  static constexpr bool kTwoStepsFit = 2 * kKeyBytes + (kQStages + kGradStages) * kQBytes +
                                           kScoreStages * kScoreBytes +
                                           kDqStages * kPieces * kPieceBytes <=
                                       208 * 1024;
  static constexpr int kDqSlots = kPair ? 1 : kWide ? 2 : (kTwoStepsFit ? kDqStages : 1) * kPieces;
  // For a pair: the other block's keys, in the columns whose dq this block computes.
  static constexpr int kOtherBytes = kPair ? kPieces * kPanelBytes : 0;
  static constexpr int kK = 0, kV = kKeyBytes, kOther = 2 * kKeyBytes, kQ = kOther + kOtherBytes,
                       kGrad = kQ + kQStages * kQBytes;
  static constexpr int kScore = kGrad + kGradStages * kQBytes;
  static constexpr int kDq = kScore + kScoreStages * kScoreBytes;
  static constexpr int kWeights = kDq + kDqSlots * kPieceBytes;
  static constexpr int kSums = kWeights + (kWide ? 64 * kRows * 4 : 0);
  static constexpr int kMask = kSums + kQStages * kSumBytes;
  static constexpr int kKeysFull = kMask + kQStages * kMaskBytes, kKeysEmpty = kKeysFull + 8;
  static constexpr int kValuesFull = kKeysEmpty + 8, kValuesEmpty = kValuesFull + 8;
  static constexpr int kWorkFull = kValuesEmpty + 8, kWorkEmpty = kWorkFull + 8 * kWorkItems;
  static constexpr int kWanted = kWorkEmpty + 8 * kWorkItems;  // requests the next work item
  static constexpr int kNumberFull = kWanted + 8,
                       kNumberEmpty = kNumberFull + 8 * kWorkItems * kPair;
  static constexpr int kQFull = kNumberEmpty + 8 * kWorkItems * kPair,
                       kQEmpty = kQFull + 8 * kQStages;
  static constexpr int kGradFull = kQEmpty + 8 * kQStages, kGradEmpty = kGradFull + 8 * kGradStages;
  static constexpr int kScoreFull = kGradEmpty + 8 * kGradStages;
  static constexpr int kScoreEmpty = kScoreFull + 8 * kScoreStages;
  static constexpr int kDqFull = kScoreEmpty + 8 * kScoreStages,
                       kDqEmpty = kDqFull + 8 * kDqStages * kPieces;
  static constexpr int kWeightsFull = kDqEmpty + 8 * kDqStages * kPieces,
                       kWeightsEmpty = kWeightsFull + (kWide ? 8 : 0);
  // For each slot of q: 8 times the first row, a bit for each 64 keys of which some must be hidden,
  // and a bit that is set if there are mask bits; and 4 times the head, and a bit for each 64 keys
  // to which a mask's numbers are added.
  static constexpr int kFirstRow = kWeightsEmpty + (kWide ? 8 : 0);
  static constexpr int kHead = kFirstRow + 4 * kQStages;
  static constexpr int kNumber =
      (kHead + 4 * kQStages + 15) / 16 * 16;  // of work items, 16 bytes each
  static constexpr int kWork = kNumber + 16 * kWorkItems * kPair;
  static constexpr int kSharedBytes =
      kWork + (kWorkItems * static_cast<int>(sizeof(KeyBlock)) + 15) / 16 * 16;
  static_assert(kPanels <= 4 && kRows % 16 == 0);
  static_assert(!kPair || (kWide && kRows == 64));

  // dq's pieces take turns in kDqSlots buffers. The step whose piece had a piece's buffer before: 0
  // the same one, 1 the previous one.
  static constexpr TC_DEVICE int dq_lag(int piece) {
    return piece >= kDqSlots ? 0 : (kDqSlots - piece + kPieces - 1) / kPieces;
  }
  static constexpr TC_DEVICE int dq_before(int piece) {
    return (piece + kPieces * dq_lag(piece) - kDqSlots) % kPieces;
  }
};

// The entry of Sm90MaskSteps::steps for a step; 0 without a mask.
TC_DEVICE u32 mask_step(const Sm90BackwardParams& p, const KeyBlock& work, int head, int tile) {
  if (p.bits.steps == nullptr) return kStepHidesNone;
  MaskPlace at(p.bits, work.batch, work.head * p.group + head, tile);
  return __ldg(p.bits.steps + at.step(p, work.key_tile));
}

// The steps of a work item: tiles of queries, the last one first, each for all heads of the group;
// of these, every p.parts-th. With one head after the other, blocks of keys with few queries would
// wait, for the next head's turns, for blocks with many. Steps that a mask hides are included.
struct Steps {
  int tile, head;
  u32 word;  // its entry of Sm90MaskSteps::steps

  TC_DEVICE Steps(const Sm90BackwardParams& p, const KeyBlock& work)
      : tile(work.end - 1), head(work.first) {
    look(p, work);
  }
  // Advances. NOTE: call before this step's waits, so that they hide its load.
  TC_DEVICE void next(const Sm90BackwardParams& p, const KeyBlock& work) {
    head += p.parts;
    look(p, work);
  }

 private:
  TC_DEVICE void look(const Sm90BackwardParams& p, const KeyBlock& work) {
    for (; head >= p.group; head -= p.group) --tile;
    // After the last step there may be no tile.
    word = mask_step(p, work, head, max(tile, 0));
  }
};

// Trims a work item to the steps that a mask leaves, in a whole warp. Otherwise the steps before
// the first of them would be stepped through before the first loads.
TC_DEVICE void skip_hidden(const Sm90BackwardParams& p, KeyBlock& work, u32 lane) {
  int all = max(0, work.end - work.begin) * p.group, own = 0, first = all;
#pragma unroll 2
  for (int i = work.first + lane * p.parts; i < all; i += 32 * p.parts) {
    int tile = work.end - 1 - i / p.group;
    if (step_class(mask_step(p, work, i % p.group, tile)) < kStepHidesAll) {
      ++own;
      first = min(first, i);
    }
  }
  own = __reduce_add_sync(~0u, own);
  first = __reduce_min_sync(~0u, first);
  if (lane == 0) {
    work.steps = own;
    work.end -= first / p.group;
    work.first = first % p.group;
  }
}

// The slot of step `step` in a ring, and the parity of its phase.
template <int kStages>
TC_DEVICE u32 slot(u32 step) {
  return step % kStages;
}

template <int kStages>
TC_DEVICE u32 phase(u32 step) {
  return step / kStages % 2;
}

// Waits until work item `number` is known. False if there is none.
template <class C>
TC_DEVICE bool wait_for_work(u32 shared, const KeyBlock* items, u32 number) {
  u32 at = slot<C::kWorkItems>(number);
  barrier_wait(shared + C::kWorkFull + 8 * at, phase<C::kWorkItems>(number));
  return items[at].key_tile >= 0;
}

// NOTE: a value that a whole warp has read from shared memory, so that ptxas knows it is uniform.
// Without it every lane computes each product's descriptors, which costs 4% of the speed.
TC_DEVICE u32 whole_warp(u32 value) { return __shfl_sync(~0u, value, 0); }

// wait_for_work() in a whole warp.
template <class C>
TC_DEVICE bool begin_work(u32 shared, const KeyBlock* items, u32 number) {
  return whole_warp(wait_for_work<C>(shared, items, number)) != 0;
}

// Called after the last read of work item `number`: by a warp's first lane, or by a single thread.
template <class C>
TC_DEVICE void release_work(u32 shared, u32 number) {
  barrier_arrive(shared + C::kWorkEmpty + 8 * slot<C::kWorkItems>(number));
}

// ---- producer -----------------------------------------------------------------------------------

// barrier_arrive_remote after this thread's earlier loads. Otherwise the other block may write new
// data before a load whose value is not used yet: pairs took different work items, and waited for
// each other forever, where several processes shared a GPU.
TC_DEVICE void barrier_release_remote(u32 remote) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(remote)
               : "memory");
}

// The number of a pair's next work item: the first block takes it, and sends it to the other.
template <class C>
TC_DEVICE u32 take_together(const Sm90BackwardParams& p, u32 shared, u32 number, PairPlace pair) {
  u32 at = slot<C::kWorkItems>(number), index;
  u32 word = C::kNumber + 16 * at, full = C::kNumberFull + 8 * at, empty = C::kNumberEmpty + 8 * at;
  if (pair.rank == 0) {
    index = KeyBlock::take(p);
    barrier_sleep(shared + empty, phase<C::kWorkItems>(number) ^ 1);
    float words[4] = {__uint_as_float(index), 0.0f, 0.0f, 0.0f};
    store_remote_async(pair.other + word, words, pair.other + full);
  } else {
    barrier_expect(shared + full, 16);
    barrier_sleep_remote(shared + full, phase<C::kWorkItems>(number));
    load_shared(index, shared + word);
    barrier_release_remote(pair.other + empty);
  }
  return index;
}

// A whole warp: fetches work item `number`, whose place is free. False if there are no more.
template <class C>
TC_DEVICE bool fetch_work_item(const Sm90BackwardParams& p, u32 shared, KeyBlock* items, u32 number,
                               PairPlace pair, u32 lane) {
  u32 at = slot<C::kWorkItems>(number);
  KeyBlock& work = items[at];
  if (lane == 0) {
    u32 index = C::kPair ? take_together<C>(p, shared, number, pair) : KeyBlock::take(p);
    work.set(p, index, C::kRows, C::kWorkKeys);
    // A pair's blocks take every step, each warpgroup of them.
    if (C::kPair && !C::kWide) work.skipped[0] = work.skipped[1] = 0;
  }
  __syncwarp();
  bool any = work.key_tile >= 0;
  // With 64 columns only: a gain of 1 to 2% there, a loss of up to 4% with 256.
  if (C::kPanels == 1 && any && lane < 2) {
    const Sm90Sequence& s = work.sequence;
    tma_prefetch(lane == 0 ? &p.k : &p.v, 0, s.k.place + work.key_tile * C::kKeys, work.head,
                 s.k.batch, s.wrap);
  }
  if (any && p.bits.steps != nullptr) skip_hidden(p, work, lane);
  if (lane == 0) barrier_arrive(shared + C::kWorkFull + 8 * at);
  return any;
}

// A whole warp: fetches one work item after the other, each when it is requested. If items were
// taken long before they begin, blocks would wait for their turns.
template <class C>
TC_DEVICE void fetch_work_items(const Sm90BackwardParams& p, u32 shared, KeyBlock* items,
                                PairPlace pair) {
#pragma unroll 1
  for (u32 number = 0;; ++number) {
    u32 at = slot<C::kWorkItems>(number);
    if (number > 0 && pair.rank == 0) barrier_sleep(shared + C::kWanted, phase<1>(number) ^ 1);
    barrier_sleep(shared + C::kWorkEmpty + 8 * at, phase<C::kWorkItems>(number) ^ 1);
    if (!fetch_work_item<C>(p, shared, items, number, pair, threadIdx.x % 32)) return;
  }
}

template <class C>
TC_DEVICE void load_panels(u32 to, int panel_bytes, const Sm90AttentionMap& map, u32 barrier,
                           MapPlace at, int row, int head, int wrap) {
#pragma unroll
  for (int panel = 0; panel < C::kPanels; ++panel) {
    tma_load(to + panel * panel_bytes, &map, barrier, 64 * panel, at.place + row, head, at.batch,
             wrap);
  }
}

// Whether the warpgroup whose first key is `key` must hide some of a step's scores.
template <class C>
TC_DEVICE bool hides(const Sm90Sequence& s, int key, int row) {
  return key + 63 >= s.columns || row + C::kRows > s.rows || row + s.last < key + 63 ||
         row + C::kRows - 1 + s.first > key;
}

// Waits until the previous work item no longer needs v or k, and arrives at the barrier, which it
// returns, for that many bytes. v is free first, since k is an operand of dq, too.
template <class C>
TC_DEVICE u32 begin_values(u32 shared, u32 number, u32 bytes) {
  barrier_sleep(shared + C::kValuesEmpty, phase<1>(number) ^ 1);
  barrier_expect(shared + C::kValuesFull, bytes);
  return shared + C::kValuesFull;
}

template <class C>
TC_DEVICE u32 begin_keys(u32 shared, u32 number, u32 bytes) {
  barrier_sleep(shared + C::kKeysEmpty, phase<1>(number) ^ 1);
  barrier_expect(shared + C::kKeysFull, bytes);
  return shared + C::kKeysFull;
}

// The next work item is requested before the loads of a work item's last steps, since some 4000
// cycles pass until it is known.
constexpr int kStepsAhead = 2;

// In the block that takes a pair's work items.
template <class C>
TC_DEVICE void request_work(u32 shared, PairPlace pair) {
  if (pair.rank == 0) barrier_arrive(shared + C::kWanted);
}

// Loads the keys of a work item, and then its steps; `next` is the first step's number.
template <class C>
TC_DEVICE void load_work(const Sm90BackwardParams& p, u32 shared, const KeyBlock& work, u32 number,
                         u32& next, PairPlace pair) {
  Steps steps(p, work);
  const Sm90Sequence& s = work.sequence;
  int keys = work.key_tile * C::kWorkKeys, key = keys + static_cast<int>(pair.rank) * C::kKeys;
  auto load_keys = [&] {
    u32 full = begin_values<C>(shared, number, C::kKeyBytes);
    load_panels<C>(shared + C::kV, C::kPanelBytes, p.v, full, s.k, key, work.head, s.wrap);
    full = begin_keys<C>(shared, number, C::kKeyBytes + C::kOtherBytes);
    load_panels<C>(shared + C::kK, C::kPanelBytes, p.k, full, s.k, key, work.head, s.wrap);
    if constexpr (C::kPair) {
#pragma unroll
      for (int i = 0; i < C::kPieces; ++i) {
        tma_load(shared + C::kOther + i * C::kPanelBytes, &p.k, full,
                 64 * (static_cast<int>(pair.rank) * C::kPieces + i),
                 s.k.place + keys + static_cast<int>(pair.rank ^ 1) * C::kKeys, work.head,
                 s.k.batch, s.wrap);
      }
    }
  };
  u32 first = next, end = next + work.steps;
  u32 last = end - min(work.steps, kStepsAhead);
  if (work.steps == 0) {  // no step needs them
    begin_values<C>(shared, number, 0);
    begin_keys<C>(shared, number, 0);
    request_work<C>(shared, pair);
  }
#pragma unroll 1
  while (next != end) {
    const Steps now = steps;
    steps.next(p, work);
    u32 what = step_class(now.word);
    if (what >= kStepHidesAll) continue;
    if (next == last) request_work<C>(shared, pair);
    if (C::kPair) what = what >> pair.rank & 1;  // of this block's 64 keys
    int row = now.tile * C::kRows, head = work.head * p.group + now.head;
    u32 q = slot<C::kQStages>(next), grad = slot<C::kGradStages>(next);
    u32 full = shared + C::kQFull + 8 * q;
    u32 added = 0;  // for the two warpgroups: whether a mask's numbers are added
    if (C::kAdded && p.mask_added != 0) {
      added = what;
      what = kStepHidesNone;
    }
    u32 hidden = 8 * row + (what != kStepHidesNone ? 4 : 0) + (what | hides<C>(s, key, row));
    if (C::kKeyGroups == 2) hidden |= 2 * hides<C>(s, key + 64, row);
    barrier_sleep(shared + C::kQEmpty + 8 * q, phase<C::kQStages>(next) ^ 1);
    store_shared(shared + C::kFirstRow + 4 * q, hidden);
    if (C::kGeneral || C::kAdded) {
      store_shared(shared + C::kHead + 4 * q, 4 * static_cast<u32>(head) + added);
    }
    barrier_expect(full, C::kQBytes + C::kSumBytes + (what != kStepHidesNone ? C::kMaskBytes : 0));
    if (what != kStepHidesNone) {
      MaskPlace at(p.bits, work.batch, head, now.tile);
      tc_int64 from = (at.plane * p.bits.tiles + at.tile) * p.key_tiles + work.key_tile;
      from = from * C::kBlocks + pair.rank;
      bulk_load(shared + C::kMask + q * C::kMaskBytes, p.bits.words + from * (C::kMaskBytes / 4),
                C::kMaskBytes, full);
    }
    load_panels<C>(shared + C::kQ + q * C::kQBytes, C::kRows * 128, p.q, full, s.q, row, head,
                   s.wrap);
    tc_int64 tile = work.first_tile + now.head * p.tiles + now.tile;
    bulk_load(shared + C::kSums + q * C::kSumBytes, p.sums + tile * (2 * C::kRows), C::kSumBytes,
              full);
    full = shared + C::kGradFull + 8 * grad;
    barrier_sleep(shared + C::kGradEmpty + 8 * grad, phase<C::kGradStages>(next) ^ 1);
    barrier_expect(full, C::kQBytes);
    load_panels<C>(shared + C::kGrad + grad * C::kQBytes, C::kRows * 128, p.grad_out, full, s.q,
                   row, head, s.wrap);
    // After a step's loads, which wait for less of the previous work item.
    if (next++ == first) load_keys();
  }
}

template <class C>
TC_DEVICE void load(const Sm90BackwardParams& p, u32 shared, const KeyBlock* items,
                    PairPlace pair) {
  u32 step = 0;
#pragma unroll 1
  for (u32 number = 0;; ++number) {
    if (!wait_for_work<C>(shared, items, number)) return;
    const KeyBlock& work = items[slot<C::kWorkItems>(number)];
    load_work<C>(p, shared, work, number, step, pair);
    release_work<C>(shared, number);
  }
}

// NOTE: neither acquires nor releases. A block stores a turn when its additions are complete in the
// L2 cache, and the next block's are not issued before it has seen that; fences would add 1 us to
// each turn.
TC_DEVICE int load_turn(const int* at) {
  int value;
  asm volatile("ld.relaxed.gpu.global.b32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
}

TC_DEVICE void store_turn(int* at, int value) {
  asm volatile("st.relaxed.gpu.global.b32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}

// The blocks of a pair add to separate columns, and have halves of a turn.
TC_DEVICE int load_turn(const u16* at) {
  u16 value;
  asm volatile("ld.relaxed.gpu.global.b16 %0, [%1];" : "=h"(value) : "l"(at) : "memory");
  return value;
}

TC_DEVICE void store_turn(u16* at, int value) {
  asm volatile("st.relaxed.gpu.global.b16 [%0], %1;" ::"l"(at), "h"(static_cast<u16>(value))
               : "memory");
}

template <class Turn>
TC_DEVICE void wait_for_turn(const Turn* at, int rank) {
  WaitBound bound;
  while (load_turn(at) != rank) bound.check();
}

// Adds the dq of every kDqStages-th step to dq_sum, each tile of queries when it is this block's
// turn. One thread for each stage: from the begin of an addition to the next block's turn some 2 us
// pass, more than a step.
template <class C>
TC_DEVICE void add_dq_of_work(const Sm90BackwardParams& p, u32 shared, const KeyBlock& work,
                              u32 stage, u32& next, PairPlace pair) {
  using Turn = std::conditional_t<C::kPair, u16, int>;
  Steps steps(p, work);
  u32 full = shared + C::kDqFull + 8 * C::kPieces * stage;
  u32 empty = shared + C::kDqEmpty + 8 * C::kPieces * stage;
  u32 from = shared + C::kDq + stage * C::kPieces % C::kDqSlots * C::kPieceBytes;
  auto turns = reinterpret_cast<Turn*>(p.turns) + pair.rank;
#pragma unroll 1
  for (u32 end = next + work.steps; next != end;) {
    const Steps now = steps;
    steps.next(p, work);
    if (step_class(now.word) >= kStepHidesAll) continue;
    u32 i = next++;
    if (i % C::kDqStages != stage) continue;
    int set = work.key_tile / p.set_keys;
    tc_int64 tile = work.first_tile + now.head * p.tiles + now.tile +
                    static_cast<tc_int64>(set) * p.query_tiles;
    int first = first_key_tile_of(p, set, work.sequence, now.tile, C::kRows, C::kWorkKeys);
    int rank = work.key_tile - first;
    if (p.bits.steps != nullptr) {
      MaskPlace at(p.bits, work.batch, work.head * p.group + now.head, now.tile);
      rank = step_rank_from(p, at, first, now.word);
    }
    float* to =
        p.dq_sum + tile * (C::kRows * C::kPanels * 64) + pair.rank * (C::kPieces * 64 * C::kRows);
    Turn* turn = turns + tile * C::kBlocks;
    if (rank > 0) {
      wait_for_turn(turn, rank);
      fence_async_proxy_everywhere();
    }
#pragma unroll
    for (int piece = 0; piece < C::kPieces; ++piece) {
      barrier_sleep(full + 8 * piece, phase<C::kDqStages>(i));
      float* there = to + piece * (64 * C::kRows);
      u32 here = from + piece % C::kDqSlots * C::kPieceBytes;
      if (rank > 0) {
        bulk_add(there, here, C::kPieceBytes);
      } else {
        bulk_store(there, here, C::kPieceBytes);
      }
      tma_store_commit();
      if constexpr (C::kDqSlots < C::kPieces) {  // the next ones wait for this buffer
        tma_store_wait_read<0>();
        barrier_arrive(empty + 8 * piece);
      }
    }
    if constexpr (C::kDqSlots >= C::kPieces) {
      if constexpr (C::kPieces == 2) {
        tma_store_wait_read<1>();
        barrier_arrive(empty);
      }
      tma_store_wait_read<0>();
      barrier_arrive(empty + 8 * (C::kPieces - 1));
    }
    tma_store_wait<0>();
    fence_async_proxy_everywhere();
    store_turn(turn, rank + 1);
  }
}

template <class C>
TC_DEVICE void add_dq(const Sm90BackwardParams& p, u32 shared, const KeyBlock* items, u32 stage,
                      PairPlace pair) {
  u32 step = 0;
#pragma unroll 1
  for (u32 number = 0;; ++number) {
    if (!wait_for_work<C>(shared, items, number)) return;
    const KeyBlock& work = items[slot<C::kWorkItems>(number)];
    add_dq_of_work<C>(p, shared, work, stage, step, pair);
    release_work<C>(shared, number);
  }
}

// ---- consumers ----------------------------------------------------------------------------------

// The high word of a descriptor is the same for all whose leading-byte offset is ignored.
TC_DEVICE u64 descriptor(u64 base, u32 low, u32 bytes) { return base | (low + (bytes >> 4)); }

// The low word for that address. NOTE: in a cluster addresses have the block's rank above their 18
// bits, which would become part of the leading-byte offset.
template <class C>
TC_DEVICE u32 descriptor_low(u32 shared) {
  return (C::kPair ? shared & 0x3FFFF : shared) >> 4;
}

// In a warp, whose other lanes have read, or written, too.
TC_DEVICE void release_in_warp(u32 barrier) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) barrier_arrive(barrier);
}

// What the warpgroup of dq does in Queries: its product, and what else a kernel has it do, before a
// work item's keys have arrived, then, and before a step.
template <class C>
struct DqProduct {
  static TC_DEVICE void begin_item(u32 /*shared*/, u32 /*step*/, u32 /*end*/) {}
  static TC_DEVICE void begin_keys(u32 /*shared*/) {}
  static TC_DEVICE void begin_step(u32 /*shared*/, u32 /*step*/, u32 /*end*/) {}

  // 64 columns of dq, transposed: k^T dS^T, of the work item's keys kBegin to kEnd - 1.
  template <int kBegin = 0, int kEnd = C::kWorkKeys>
  static TC_DEVICE void multiply(float (&dq)[C::kRows / 2], u32 shared, u32 scores, int piece,
                                 PairPlace pair) {
    const u64 high_a = wgmma_descriptor(0, 0, 1024);
    const u64 high_b =
        wgmma_descriptor(0, C::kScorePanelBytes, 1024);  // 64 queries: one panel further
    u32 own = shared + C::kK + piece * C::kPanelBytes, b = descriptor_low<C>(scores);
    u32 a[2] = {own >> 4, own >> 4};  // for the keys of the work item's two blocks, if it has two
    if constexpr (C::kPair) {
      own += pair.rank * (C::kPieces * C::kPanelBytes);
      u32 other = shared + C::kOther + piece * C::kPanelBytes;
      a[0] = descriptor_low<C>(pair.rank == 0 ? own : other);
      a[1] = descriptor_low<C>(pair.rank == 0 ? other : own);
    }
    wgmma_fence();
#pragma unroll
    for (int k = kBegin / 16; k < kEnd / 16; ++k) {
      Wgmma<C::kRows>::template run<C::kType, 1, 1>(
          dq, descriptor(high_a, a[k / (C::kKeys / 16)], kMnMajorStep * (k % (C::kKeys / 16))),
          descriptor(high_b, b, kMnMajorStep * k), k > kBegin / 16);
    }
    wgmma_commit();
  }
};

template <class C, class Product>
struct Queries {
  const Sm90BackwardParams& p;
  u32 shared;
  PairPlace pair;
  u32 low_begin = 0,
      high_end = 0;  // of two warpgroups of keys: steps from and up to which each has dS
  float dq[C::kRows / 2];

  static TC_DEVICE int lane() { return threadIdx.x % 32; }

  TC_DEVICE void store(int stage, int piece) {
    u32 buffer = (C::kPieces * stage + piece) % C::kDqSlots;
    u32 to = shared + C::kDq + buffer * C::kPieceBytes +
             threadIdx.x % kWarpgroup / 32 * (C::kPieceBytes / 4) + lane() * 16;
#pragma unroll
    for (int j = 0; j < C::kRows / 8; ++j) {
      store_shared(to + j * 512, *reinterpret_cast<float (*)[4]>(&dq[4 * j]));
    }
    fence_async_proxy();
    release_in_warp(shared + C::kDqFull + 8 * (C::kPieces * stage + piece));
  }

  TC_DEVICE void run(const KeyBlock* items) {
    u32 step = 0;
#pragma unroll 1
    for (u32 number = 0;; ++number) {
      if (!begin_work<C>(shared, items, number)) return;
      step = whole_warp(step);
      const KeyBlock& work = items[slot<C::kWorkItems>(number)];
      u32 end = step + whole_warp(work.steps);
      if (C::kKeyGroups == 2) {
        low_begin = step + whole_warp(work.skipped[0]);
        high_end = end - whole_warp(work.skipped[1]);
      }
      if (lane() == 0) release_work<C>(shared, number);
      Product::begin_item(shared, step, end);
      barrier_wait(shared + C::kKeysFull, phase<1>(number));
      if (step == end) {
        release_in_warp(shared + C::kKeysEmpty);
      } else {
        Product::begin_keys(shared);
      }
      run_steps(step, end);
      step = end;
    }
  }

 private:
  // Both blocks of a pair store to both blocks' dS.
  TC_DEVICE void release_scores(u32 score) {
    __syncwarp();
    if (lane() == 0) barrier_arrive(shared + C::kScoreEmpty + 8 * score);
    if (lane() == 1) barrier_arrive_remote(pair.other + C::kScoreEmpty + 8 * score);
  }

  TC_DEVICE void run_steps(u32 step, u32 end) {
#pragma unroll 1
    for (; step != end; ++step) {
      Product::begin_step(shared, step, end);
      u32 score = slot<C::kScoreStages>(step), out = slot<C::kDqStages>(step);
      barrier_wait(shared + C::kScoreFull + 8 * score, phase<C::kScoreStages>(step));
#pragma unroll
      for (int piece = 0; piece < C::kPieces; ++piece) {
        u32 scores = shared + C::kScore + score * C::kScoreBytes;
        if (C::kKeyGroups == 2 && step < low_begin) {
          Product::template multiply<64>(dq, shared, scores, piece, pair);
        } else if (C::kKeyGroups == 2 && step >= high_end) {
          Product::template multiply<0, 64>(dq, shared, scores, piece, pair);
        } else {
          Product::multiply(dq, shared, scores, piece, pair);
        }
        if constexpr (C::kPair) {  // dS of both blocks, which must not wait for dq's stores
          wgmma_wait<0>();
          keep_in_place(dq);
          if (piece == C::kPieces - 1) release_scores(score);
        }
        u32 before = step + C::kDqStages - C::dq_lag(piece);
        barrier_wait(shared + C::kDqEmpty +
                         8 * (C::kPieces * slot<C::kDqStages>(before) + C::dq_before(piece)),
                     phase<C::kDqStages>(before) ^ 1);
        if constexpr (!C::kPair) {
          wgmma_wait<0>();
          keep_in_place(dq);
          if (piece == C::kPieces - 1) release_in_warp(shared + C::kScoreEmpty + 8 * score);
        }
        if (piece == C::kPieces - 1 && step + 1 == end) release_in_warp(shared + C::kKeysEmpty);
        store(out, piece);
      }
    }
  }
};

// ---- block --------------------------------------------------------------------------------------

// What the warps of a block do, apart from run(), the code of the two warpgroups of keys.
struct BlockRoles {
  template <class C>
  static TC_DEVICE void load(const Sm90BackwardParams& p, u32 shared, const KeyBlock* items,
                             PairPlace pair) {
    sm90::load<C>(p, shared, items, pair);
  }

  template <class C>
  static TC_DEVICE void fetch(const Sm90BackwardParams& p, u32 shared, KeyBlock* items,
                              PairPlace pair) {
    fetch_work_items<C>(p, shared, items, pair);
  }

  template <class C>
  using Dq = DqProduct<C>;
};

template <class C, class Roles>
TC_DEVICE void run(const Sm90BackwardParams& p) {
  extern __shared__ __align__(1024) unsigned char memory[];
  u32 shared = shared_address(memory);
  int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  PairPlace pair = {0, shared};
  if constexpr (C::kPair) {
    pair.rank = cluster_rank();
    pair.other = map_to_rank(shared, pair.rank ^ 1);
  }

  if (threadIdx.x == 0) {
    if (shared % 1024 != 0) asm volatile("trap;");
    prefetch_tensor_map(&p.q);
    prefetch_tensor_map(&p.k);
    prefetch_tensor_map(&p.v);
    prefetch_tensor_map(&p.grad_out);
    if (!C::kWide) {
      prefetch_tensor_map(&p.dk_map);
      prefetch_tensor_map(&p.dv_map);
    }
    barrier_init(shared + C::kKeysFull, 1);
    barrier_init(shared + C::kKeysEmpty, C::kKeyReaders);
    barrier_init(shared + C::kValuesFull, 1);
    barrier_init(shared + C::kValuesEmpty, C::kValueReaders);
    barrier_init(shared + C::kWanted, 1);
    for (int i = 0; i < C::kWorkItems; ++i) {
      barrier_init(shared + C::kWorkFull + 8 * i, 1);
      barrier_init(shared + C::kWorkEmpty + 8 * i, C::kWorkReaders);
    }
    for (int i = 0; i < C::kQStages; ++i) {
      barrier_init(shared + C::kQFull + 8 * i, 1);
      barrier_init(shared + C::kQEmpty + 8 * i, C::kReaders);
    }
    for (int i = 0; i < C::kGradStages; ++i) {
      barrier_init(shared + C::kGradFull + 8 * i, 1);
      barrier_init(shared + C::kGradEmpty + 8 * i, C::kReaders);
    }
    for (int i = 0; i < C::kScoreStages; ++i) {
      barrier_init(shared + C::kScoreFull + 8 * i, C::kScoreWriters);
      barrier_init(shared + C::kScoreEmpty + 8 * i, C::kScoreReaders);
    }
    for (int i = 0; i < C::kDqStages * C::kPieces; ++i) {
      barrier_init(shared + C::kDqFull + 8 * i, 4);
      barrier_init(shared + C::kDqEmpty + 8 * i, 1);
    }
    if (C::kWide) {
      barrier_init(shared + C::kWeightsFull, 4);
      barrier_init(shared + C::kWeightsEmpty, 4);
    }
    for (int i = 0; C::kPair && i < C::kWorkItems; ++i) {
      barrier_init(shared + C::kNumberFull + 8 * i, 1);
      barrier_init(shared + C::kNumberEmpty + 8 * i, 1);
    }
    fence_barrier_init();
  }
  wait_for_previous_grid();
  launch_next_grid();
  __syncthreads();
  if constexpr (C::kPair) cluster_sync_unaligned();  // the other block's barriers exist too
  auto items = reinterpret_cast<KeyBlock*>(memory + C::kWork);
  if (warp < 4) {
    fewer_registers<C::kProducerRegisters>();
    if (threadIdx.x == 0) Roles::template load<C>(p, shared, items, pair);
    if (warp > 0 && warp <= C::kDqStages && threadIdx.x % 32 == 0) {
      add_dq<C>(p, shared, items, warp - 1, pair);
    }
    if (warp == 3) Roles::template fetch<C>(p, shared, items, pair);
    __syncwarp();
  } else if (warp < 12) {
    more_registers<C::kKeyRegisters>();
    Roles::template run<C>(p, shared, items, warp / 4 - 1, pair);
  } else {
    fewer_registers<C::kQueryRegisters>();
    Queries<C, typename Roles::template Dq<C>>{p, shared, pair}.run(items);
  }
  // No block exits while the other may still write to its memory.
  if constexpr (C::kPair) cluster_sync_unaligned();
}

}  // namespace sm90
}  // namespace torch_cubin
