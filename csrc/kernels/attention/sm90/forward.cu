// Attention forward on Hopper: a persistent, warp-specialised kernel of TMA and wgmma.
//
// The roles of the warps, shared memory and barriers are those of sm90/forward_block.cuh.
//
// A consumer issues the scores of the next block of keys before the product of this block's weights
// with V, and computes weights from the scores while that product runs. It does so across tiles:
// the next tile's first scores are in flight while a tile ends. Weights go from the accumulators of
// one wgmma to the operand registers of the other without a shuffle.
//
// `masked` kernels read the bits of a boolean mask (TC_MASKED), `added` ones the numbers of an
// additive mask (TC_ADDED too; sm90/added_mask.cuh). `general` and `general_added` kernels do the
// same, modify scores before the softmax (sm90/rule.cuh), and drop weights (TC_GENERAL). A single
// kernel for both sorts of masks had more branches in each step: 2 to 7% of the time with a boolean
// mask. They spill slightly more: 192 queries leave a consumer 160 registers, and with options and
// numbers a few words are read again in each step. Longer than files should be: the options are
// steps of one loop, whose registers they share.
#include "added_mask.cuh"
#include "common/dropout.cuh"
#include "common/dtype.cuh"
#include "forward_block.cuh"
#include "rule.cuh"
#include "softmax.cuh"
#include "wgmma_registers.cuh"

namespace torch_cubin::TC_KERNEL {

using namespace sm90;

// ForwardBlock's kSharedQ: heads of more than 128 columns have memory for three buffers of queries.
// `adds`: with an additive mask alone, 80 keys a block need less time than 64 and a third buffer.
constexpr int shared_q(int columns, bool adds) { return columns > 128 && !adds ? 3 : 0; }

template <DType kDType_, int kD_, int kN_, int kTeams_, int kGroups_, int kQSlots_, int kStages_,
          bool kMasked_, bool kAdded_, bool kGeneral_>
struct AttentionConfig : ForwardBlock<kGroups_, kQSlots_, kStages_, (kD_ + 63) / 64 * 64 * 128,
                                      (kD_ + 63) / 64 * kN_ * 128,
                                      std::conditional_t<kMasked_ && !kAdded_ && !kGeneral_,
                                                         GroupedTile<kGroups_>, TileOf<kMasked_>>,
                                      shared_q(kD_, kAdded_ && !kGeneral_)> {
  using Block = typename AttentionConfig::ForwardBlock;
  using Params = Sm90AttentionParams;
  using Block::kGroups, Block::kStages;
  static constexpr DType kDType = kDType_;
  static constexpr bool kMasked = kMasked_, kAdded = kAdded_, kGeneral = kGeneral_;
  static_assert(kMasked || !(kAdded || kGeneral));
  static constexpr int kD = kD_, kN = kN_;
  static constexpr int kTeams = kTeams_;
  // The consumers take turns to issue their products, so that one's softmax overlaps with the
  // other's. Four consumers of two teams, which have too few registers for that, compute one step
  // after the other: the others' steps overlap.
  static constexpr bool kPingPong = kTeams == 1;
  // A warpgroup skips the tile's first block of keys, or its last one, if it sees nothing of it.
  // Both, of two tiles, may be adjacent while a product with the V before them is still pending,
  // which takes three stages. Of two warpgroups, the first skips first blocks alone, the second
  // last ones. With 128 keys a block, neither has any in causal attention of equal lengths.
  static constexpr bool kSkipsBlocks = !kMasked && (kGroups > 2 ? kStages > 2 : kD > 192);
  // Two warpgroups take no turns for a block that one of them skips. That one does not wait for the
  // block's V before its next scores either, because the V that is in the slot before may still
  // wait for its product. 0.97 of the time of windows of 1,024 at head_dim 256, 0.93 of 256 (H200).
  static constexpr bool kSkipsTurns = kSkipsBlocks && kGroups == 2;
  // Q is released before the weights of a tile's last block are computed, unless they may need its
  // scores once more. With the skipped blocks 0.97 to 0.99 of the time at head_dim 256 (H200).
  static constexpr bool kFreesQ = kQSlots_ == 1 && kD > 192 && !kMasked;
  // A warpgroup skips tiles of which it has no rows; of three, the other two are quicker then: 512
  // rows of 64 columns took 0.95 of the time, 2,048 0.96 (H200). With more columns, which are bound
  // by the memory if rows are few, that would spill more.
  static constexpr bool kSkipsTiles = kGroups == 2 ? kD <= 128 : !kMasked;
  static constexpr bool kRotates = kSkipsTiles && kGroups == 3;
  // The thread that loads K sends consumers the next block. Finding it in the classes of the mask,
  // in the dependency chain of every step, took 2 to 6% of the time.
  static constexpr bool kSendsNextBlock = kMasked && !kGeneral;
  // A warpgroup skips a tile's first and last blocks that a boolean mask or the band hides from it,
  // and reads bits only of blocks that it sees in part: 0.82 of the time for documents of 512 at
  // head_dim 64, where three warpgroups share a tile.
  static constexpr bool kSkipsEnds = kSendsNextBlock && !kAdded;
  static constexpr bool kOrders = kSendsNextBlock && (kSkipsEnds || kD > 64);
  // Two warpgroups overlap without turns where a mask makes their steps longer: 0.97 of the time of
  // boolean masks with 128 columns, 0.98 of numbers with 64 and 128; with 256, 1.00 to 1.06, and
  // with ALiBi 1.02 to 1.16 (H200).
  static constexpr bool kTakesTurns = !(kSendsNextBlock && kGroups == 2 && kD <= 128);
  // Steps of blocks of which nothing but a boolean mask hides keys have loops of their own, see
  // run_loops(): 0.89 to 0.97 of the time of 128 columns, 0.96 to 1.00 of 64, 0.89 of random masks;
  // with 16-bit numbers to add 0.77 to 0.96, ALiBi 0.83 to 0.90, dropout 0.91 to 0.95. With 256
  // columns 0.98 to 1.02, and with numbers or dropout spills: 1.07 to 1.14 (H200).
  static constexpr bool kLoops = kPingPong && kD <= 128 && !(kAdded && kGeneral);
  using Mask = std::conditional_t<kSkipsEnds, GroupMask<kGroups, kN_>,
                                  std::conditional_t<kSendsNextBlock, TileMask, NoMask>>;
  // Dropout's numbers are generated while scores are computed: 0.65 of the time at head_dim 256,
  // where the softmax overlaps with no other products. With 64 and 128 columns that took 1.1 to 1.3
  // of it, because the other warpgroup's softmax waits.
  static constexpr bool kDropsEarly = kGeneral && kD > 128;
  static_assert(!kGeneral || kN_ % 32 == 0);
  // ptxas moved the descriptors of these kernels to uniform registers before each product (R2UR).
  static constexpr bool kMovesDescriptors = kGroups == 2 && kD <= 64 && !kMasked;
  // Sinks would delay the end of tiles of 192 queries without a mask: 2% of the time of all calls.
  // `masked` kernels serve them.
  static constexpr bool kTakesSinks = kMasked || kD > 64;
  // Panels in shared memory, of 64 columns.
  static constexpr int kPanels = (kD + 63) / 64, kPanelColumns = 64, kPanelBytes = 128;
  static constexpr bool kTakesNext = kMasked, kKeepsKeys = !kMasked;
  // With 32, the warps that schedule tiles and load keys spill some words, most of all with a mask:
  // each is a tile or a few blocks ahead of the consumers, which spill nothing.
  static constexpr int kConsumers = kTeams * kGroups;
  static constexpr int kProducerRegisters = kConsumers == 2 ? 40 : 32;
  static constexpr int kConsumerRegisters = kConsumers == 2 ? 232 : kConsumers == 3 ? 160 : 112;
  static constexpr WgmmaType kType = kDType == DType::bfloat16 ? WgmmaType::bf16 : WgmmaType::f16;

  static constexpr int kNextBlock = Block::kBlockBytes;
  // The largest number for which a warp's part of an additive mask fits in shared memory.
  static constexpr int kNumberBytes = kD == 64 && kGroups == 2 ? 4 : 2;
  static constexpr int kAddedBytes = !kAdded || kD > 128 ? 0 : 16 * kN* kNumberBytes;
  static constexpr int kNumbers = (kNextBlock + (kSendsNextBlock ? 16 : 0) + 15) / 16 * 16;
  // Outputs pass through shared memory where there is enough of it for some columns of a tile
  // (store_rows()); elsewhere four lanes exchange them. 0.96 to 1.00 of the time of short rows of
  // 64 columns (H200).
  static constexpr int kOut = kNumbers + 4 * kGroups * kAddedBytes;
  static constexpr int kOutColumns = kD % 64 == 0 ? 64 : 32;
  static constexpr int kOutBytes = Block::kRows * out_pitch(kOutColumns);
  static constexpr bool kStoresRows = kD <= 128 && kTeams * (kOut + kOutBytes) <= kMostShared;
  static constexpr int kSharedBytes = kOut + (kStoresRows ? kOutBytes : 0);
  static constexpr int kTeamBytes = (kSharedBytes + 1023) / 1024 * 1024;
  static constexpr int kBlockThreads = kWarpgroup * (kConsumers + 1);
  static constexpr int kAllBytes = (kTeams - 1) * kTeamBytes + kSharedBytes;
  static_assert(4 * kStages <= 16, "one word of the next block for each stage of K");
  static_assert(kN % 16 == 0 && kD % 16 == 0);
  static_assert(kN <= 128, "a lane's keys of a block have a bit each in one word");

  static TC_DEVICE void describe_tile(typename Block::Tile& tile, const Params& p,
                                      const TilePlace& place) {
    describe<Block::kRows, kN, kMasked>(tile, p, place);
    if constexpr (kSkipsEnds) {
      Mask mask(p, tile);
      tile.words = p.mask.words + tile.batch * p.mask.word_stride[0] +
                   tile.head * p.mask.word_stride[1] + tile.row * p.mask.word_stride[2];
#pragma unroll 1
      for (int g = 0; g < kGroups; ++g) tile.seen[g] = mask.seen(g);
      tile.first = mask.flags(KeyBlocks<Block::kRows, true>(p, tile));
    }
  }
  static TC_DEVICE void load_values(const Params& p, const typename Block::Tile& tile, int block,
                                    u32 to, u32 arrived) {
    load_rows<AttentionConfig>(p.v, tile, block, to, arrived);
  }
};

// ---- consumers ----------------------------------------------------------------------------------

// What steps of a loop of run_loops() do to scores before the softmax: nothing; they hide keys by
// bits; they add 16-bit numbers; they cap them; they add ALiBi's; or dropout drops weights.
enum class Steps { kOpen, kBits, kNumbers, kCap, kAlibi, kDropped };

template <class C>
struct Consumer : ForwardConsumer<C> {
  static constexpr u32 kNoStep = ~0u;
  using Base = ForwardConsumer<C>;
  using Base::p, Base::shared, Base::tiles, Base::group, Base::warp, Base::lane, Base::number,
      Base::step;
  using Base::slot, Base::phase, Base::q_slot, Base::first_row, Base::thread_row, Base::release,
      Base::begin_turn, Base::end_turn, Base::moved;
  using Tile = typename C::Tile;
  u32 q_base, k_base, v_base;  // descriptors of slot 0, their low words
  float s[C::kN / 2], o[C::kD / 2];
  u32 w[C::kN / 16][4];
  RunningSoftmax<C::kGeneral || C::kAdded> softmax;
  float slope = 0.0f;  // ALiBi's
  u32 mask[2];         // bits of a boolean mask
  u32 kept[2];         // kDropsEarly: dropout's bits
  float unit;          // kAdded: the factor from this block's scores to powers of two
  u32 scored = 0;      // the last scored block of keys, if some are skipped
  // kSkipsTurns: the step of which only V is still to be skipped, and the tile's block of keys that
  // the other warpgroup skips.
  u32 skipped = kNoStep;
  int alone = -1;
  // Of this tile; its block is scored next.
  using Keys = std::conditional_t<C::kSendsNextBlock, ReceivedKeyBlocks<typename C::Mask>,
                                  KeyBlocks<C::kRows, C::kMasked>>;
  Keys keys;
  u32 next_block = 0;         // kSendsNextBlock: the next block of keys and its flags
  int open_first, open_last;  // blocks that this warpgroup sees entirely, apart from a mask

  TC_DEVICE Consumer(const Sm90AttentionParams& params, u32 memory, const Tile* ring, int own_group)
      : Base(params, memory, ring, own_group) {
    q_base = static_cast<u32>(wgmma_descriptor(shared + group * C::kQBytes, 0, 1024));
    k_base = static_cast<u32>(wgmma_descriptor(shared + C::kK, 0, 1024));
    v_base = static_cast<u32>(wgmma_descriptor(shared + C::kV, C::kN * 128, 1024));
    if (C::kLoops) v_base = uniform(v_base);  // or ptxas computes it anew in each step
  }

  // Whether the 64 queries from `row` on see nothing of the tile's last block of keys, with which
  // it begins, or of its first one.
  static TC_DEVICE bool hides_last(const Tile& tile, int row) {
    int last, blocks;
    key_blocks<C::kN>(tile.sequence, row, 64, last, blocks);
    return last < tile.last_block;
  }
  static TC_DEVICE bool hides_first(const Tile& tile, int row) {
    int last, blocks;
    key_blocks<C::kN>(tile.sequence, row, 64, last, blocks);
    return last - blocks > tile.last_block - tile.blocks;
  }

  // False after the last tile, and for a tile without rows for this warpgroup.
  TC_DEVICE bool begin() {
    barrier_wait(Base::q_full(), Base::q_phase());
    const Tile& tile = tiles[number % C::kRing];
    int row = first_row(tile);
    if (tile.blocks == 0 || (C::kSkipsTiles && row >= tile.sequence.rows)) return false;
    keys = Keys(p, tile);
    const Sm90Sequence& q = tile.sequence;
    open_last = (min(row + q.last, q.columns - 1) + 1) / C::kN - 1;
    open_first = (max(row + 63 + q.first, 0) + C::kN - 1) / C::kN;
    if constexpr (C::kSkipsTurns) {
      bool above = hides_last(tile, tile.row) && tile.blocks > 1;
      bool below = hides_first(tile, tile.row + 64) && tile.blocks > 1;
      keys.skip(above && group == 0, below && group == 1);
      alone = group == 1 ? (above ? tile.last_block : -1)
                         : (below ? tile.last_block - tile.blocks + 1 : -1);
    } else if constexpr (C::kSkipsBlocks) {
      int last, blocks;
      key_blocks<C::kN>(q, row, 64, last, blocks);
      bool above = last < tile.last_block;
      bool below = last - blocks > tile.last_block - tile.blocks;
      if (tile.blocks > above + below) keys.skip(above, below);
    }
    if (C::kGeneral && has_alibi(p.score)) slope = *slope_of(p.score, tile.batch, tile.head);
    return true;
  }

  // Whether this warpgroup skips the tile's first block, or its last one.
  TC_DEVICE bool skips_first() const {
    return C::kSkipsBlocks && keys.block != tiles[number % C::kRing].last_block;
  }
  TC_DEVICE bool skips_last() const {
    const Tile& tile = tiles[number % C::kRing];
    return C::kSkipsBlocks && keys.block != tile.last_block - tile.blocks + 1;
  }

  // Takes part in the barriers of a skipped block. Every warp waits for it; otherwise it could
  // mistake a later phase of the slot, of equal parity, for the next.
  TC_DEVICE void skip_block() {
    if constexpr (C::kTakesTurns && !C::kSkipsTurns) {
      begin_turn();
      end_turn();
    }
    barrier_wait(shared + C::kKFull + 8 * slot(step), phase(step));
    receive_next();
    __syncwarp();  // one lane arrives for the warp; elsewhere a product orders this
    release(shared + C::kKEmpty + 8 * slot(step));
    if constexpr (C::kSkipsTurns) {
      skipped = step;
    } else {
      skip_values(step);
    }
    ++step;
  }

  TC_DEVICE void skip_values(u32 of_step) {
    barrier_wait(shared + C::kVFull + 8 * slot(of_step), phase(of_step));
    __syncwarp();
    release(shared + C::kVEmpty + 8 * slot(of_step));
  }

  // kSkipsTurns: the rest of skip_block().
  TC_DEVICE void end_skip() {
    if (!C::kSkipsTurns || skipped == kNoStep) return;
    skip_values(skipped);
    skipped = kNoStep;
  }

  TC_DEVICE bool takes_turn() const {
    return C::kTakesTurns && (!C::kSkipsTurns || keys.block != alone);
  }

  // After K of this step has arrived: the thread that loads it has written the next block before.
  TC_DEVICE void receive_next() {
    if constexpr (C::kSendsNextBlock) {
      load_shared(next_block, shared + C::kNextBlock + 4 * slot(step));
    }
  }

  TC_DEVICE void next_keys() {
    if constexpr (C::kSendsNextBlock) {
      keys.next(next_block);
    } else {
      keys.next();
    }
  }

  // Takes part in the barriers of tiles without rows for this warpgroup: few queries, and the ends
  // of sequences. False after the last tile.
  TC_DEVICE bool skip_tiles() {
#pragma unroll 1
    while (!begin()) {
      const Tile& tile = tiles[number % C::kRing];
      if (!C::kSkipsTiles || tile.blocks == 0) return false;
      __syncwarp();
      release_q();
      keys = Keys(p, tile);
#pragma unroll 1
      for (;; next_keys()) {
        bool last = keys.is_last();
        skip_block();
        if (last) break;
      }
      ++number;
    }
    return true;
  }

  // Whether the block comes before the first one of the tile that this warpgroup computes.
  TC_DEVICE bool leads() const {
    if constexpr (C::kSkipsEnds) return keys.block != tiles[number % C::kRing].seen[group].x;
    return false;
  }

  // Begins the next tile, while a product is pending. False after the last tile, and where blocks
  // are skipped first.
  TC_DEVICE bool begin_next(bool& trailing) {
    if constexpr (C::kSkipsEnds) {
      trailing = !keys.is_last();
      return !trailing && begin() && !leads();
    } else {
      return begin();
    }
  }

  // No product is pending, because the V of one would keep the loads of the skipped blocks waiting.
  TC_DEVICE void skip_leading() {
#pragma unroll 1
    while (leads()) {
      skip_block();
      next_keys();
    }
  }
  TC_DEVICE void skip_trailing() {
#pragma unroll 1
    while (!keys.is_last()) {
      next_keys();
      skip_block();
    }
  }

  // Whether this is the last block of the tile that this warpgroup computes.
  TC_DEVICE bool is_last() const {
    if constexpr (C::kSkipsEnds) return keys.is_groups_last(group);
    return keys.is_last();
  }

  // The high word is the same for all.
  static TC_DEVICE u64 descriptor(u32 low, u32 bytes) {
    return wgmma_descriptor(0, 0, 1024) | (low + (bytes >> 4));
  }

  TC_DEVICE void score() {
    u32 q = moved(C::kSharesQ ? q_base + (Base::q_slot() - group) * (C::kQBytes >> 4)
                              : q_base + number % C::kQSlots * (C::kGroups * C::kQBytes >> 4));
    u32 k = moved(k_base + slot(step) * (C::kKvBytes >> 4));
    // Otherwise ptxas computes all descriptors of Q before the loop, and spills them.
    if constexpr (C::kSkipsBlocks && C::kQSlots == 1) asm volatile("" : "+r"(q));
    barrier_wait(shared + C::kKFull + 8 * slot(step), phase(step));
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < C::kD / 16; ++i) {
      Wgmma<C::kN>::template run<C::kType, 0, 0>(s, descriptor(q, k_major_offset(i, 64)),
                                                 descriptor(k, k_major_offset(i, C::kN)), i > 0);
    }
    wgmma_commit();
  }

  // The previously scored step.
  TC_DEVICE u32 before() const { return C::kSkipsBlocks ? scored : step - 1; }

  TC_DEVICE void multiply_v(int add) {
    u32 v = moved(v_base + slot(before()) * (C::kKvBytes >> 4));
    barrier_wait(shared + C::kVFull + 8 * slot(before()), phase(before()));
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < C::kN / 16; ++i) {
      WgmmaRegisters<C::kD>::template run<C::kType, 1>(o, w[i], descriptor(v, i * kMnMajorStep),
                                                       i > 0 ? 1 : add);
    }
    wgmma_commit();
  }

  // Computes the same scores in one warp, for the rare case that the softmax needs them again after
  // overwriting them with weights.
  TC_DEVICE void score_again() {
    u32 q = shared + q_slot() * C::kQBytes + (16 * warp + lane % 16) * 128;
    u32 k = shared + C::kK + slot(step) * C::kKvBytes + (lane / 16 * 8 + lane % 8) * 128;
    u32 swizzle = lane % 8 * 16;
#pragma unroll
    for (int i = 0; i < C::kN / 2; ++i) s[i] = 0.0f;
#pragma unroll 1
    for (int i = 0; i < C::kD / 16; ++i) {
      u32 a[4], b[4];
      ldmatrix<false>(a, q + i / 4 * 8192 + ((i % 4 * 32 + lane / 16 * 16) ^ swizzle));
#pragma unroll
      for (int j = 0; j < C::kN / 16; ++j) {
        ldmatrix<false>(
            b, k + i / 4 * (C::kN * 128) + j * 2048 + ((i % 4 * 32 + lane / 8 % 2 * 16) ^ swizzle));
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float (&d)[4] = *reinterpret_cast<float (*)[4]>(&s[8 * j + 4 * half]);
          if constexpr (C::kDType == DType::bfloat16) {
            mma_bf16(d, a, b[2 * half], b[2 * half + 1]);
          } else {
            mma_f16(d, a, b[2 * half], b[2 * half + 1]);
          }
        }
      }
    }
  }

  // Scores to logits, if they differ by more than a factor.
  TC_DEVICE void change() {
    if constexpr (C::kGeneral) {
      if (p.has_rule) apply_rule();
    }
    if constexpr (C::kAdded) {
      bool adds = keys.is_masked();
      if (adds) added_mask().add(s, mask_part(), p.added_scale);
      unit = adds ? kLog2e : p.unit;
    }
  }

  TC_DEVICE TileRule<false> rule() const {
    const Tile& tile = tiles[number % C::kRing];
    int query = thread_row(tile), key = keys.block * C::kN + lane % 4 * 2;
    return {p.score, tile.sequence, query, key, slope};
  }

  TC_DEVICE void apply_rule() {
    if constexpr (C::kGeneral) {
      if (p.score.softcap != 0.0f) {
        hide(0.0f);  // so that what hidden keys have does not change the bits of others
        cap_scores(s, p.score);
      } else {
        multiply_scores(p.score.scale);
      }
      if (has_alibi(p.score)) add_alibi();
    }
  }

  TC_DEVICE void multiply_scores(float factor) {
#pragma unroll
    for (int i = 0; i < C::kN / 2; ++i) s[i] = __fmul_rn(s[i], factor);
  }

  TC_DEVICE void add_alibi() {
    TileRule<false> of = rule();
#pragma unroll
    for (int i = 0; i < C::kN / 2; ++i) s[i] = of.alibi(s[i], i / 2 % 2, i / 4 * 8 + i % 2);
  }

  // Whether bits say which keys of the block are visible.
  TC_DEVICE bool has_bits() const {
    if constexpr (C::kSkipsEnds) return keys.is_masked(group);
    return !C::kAdded && keys.is_masked();
  }
  TC_DEVICE AddedMask<C::kDType, C::kN, C::kAddedBytes> added_mask() const {
    return {p.added, shared + C::kNumbers + (4 * group + warp) * C::kAddedBytes};
  }
  TC_DEVICE MaskPart mask_part() const {
    const Tile& tile = tiles[number % C::kRing];
    return {tile.batch,         tile.head,          first_row(tile) + 16 * warp,
            tile.sequence.rows, keys.block * C::kN, tile.sequence.columns};
  }

  // Loads the bits of this thread's keys of the next block to score, or its warp's numbers.
  // Requested before its product is issued, which takes until the previous product has run.
  TC_DEVICE void load_mask() {
    if constexpr (C::kAdded) {
      if (keys.is_masked()) added_mask().load(mask_part());
    } else if constexpr (C::kMasked) {
      if (!has_bits()) return;
      if constexpr (C::kSkipsEnds) return load_bits();
      const Tile& tile = tiles[number % C::kRing];
      int row = thread_row(tile);
      auto from = p.mask.words + tile.batch * p.mask.word_stride[0] +
                  tile.head * p.mask.word_stride[1] + keys.block * 4 + lane % 4;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        mask[h] = __ldg(from + min(row + 8 * h, tile.sequence.rows - 1) * p.mask.word_stride[2]);
      }
    }
  }

  TC_DEVICE void load_bits() {
    if constexpr (C::kSkipsEnds) {
      const Tile& tile = tiles[number % C::kRing];
      u32 row = thread_row(tile) - tile.row, last = tile.sequence.rows - 1 - tile.row;
      auto from = tile.words + keys.block * 4 + lane % 4;
      auto stride = static_cast<u32>(p.mask.word_stride[2]);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        mask[h] = __ldg(from + static_cast<u64>(min(row + 8 * h, last)) * stride);
      }
    }
  }

  // Calls function(h, i, kept) for each weight of the next block that may be dropped, with its row
  // and bit in `mask`.
  template <class Function>
  TC_DEVICE void for_each_kept(Function&& function) const {
    const Tile& tile = tiles[number % C::kRing];
    int row = thread_row(tile), head = tile.batch * p.heads + tile.head;
    int word = keys.block * C::kN / 32;
    u64 seed = *p.score.dropout_seed;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int j = 0; j < C::kN / 32; ++j) {
        DropoutBits bits(seed, head, row + 8 * h, word + j, lane % 4);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          function(h, 8 * j + i, bits.kept(i / 2, i % 2, p.score.drop_below));
        }
      }
    }
  }

  // Determines the weights of the next block that dropout keeps, while its scores are computed.
  TC_DEVICE void choose_kept() {
    if constexpr (C::kDropsEarly) {
      if (p.score.drop_below == 0) return;
      kept[0] = kept[1] = 0;
      for_each_kept([&](int h, int i, bool keeps) { kept[h] |= keeps ? 1u << i : 0u; });
    }
  }

  // Sets dropped weights to 0; their sums are complete.
  TC_DEVICE void drop() {
    if constexpr (C::kGeneral) {
      if (p.score.drop_below != 0) drop_weights();
    }
  }
  TC_DEVICE void drop_weights() {
    if constexpr (C::kGeneral) {
      if constexpr (C::kDropsEarly) {
        replace_where_clear(s, kept, 0.0f);
      } else {
        for_each_kept([&](int h, int i, bool keeps) {
          if (!keeps) s[i / 2 * 4 + 2 * h + i % 2] = 0.0f;
        });
      }
    }
  }

  // Sets scores outside of the band, and masked ones, to `value`. Blocks that are entirely visible
  // pay one comparison.
  TC_DEVICE void hide(float value = -kInfinity) {
    bool open = keys.block >= open_first && keys.block <= open_last;
    if (__builtin_expect(open && !has_bits(), 1)) return;
    if (C::kMasked && !C::kAdded && open) return replace_where_clear(s, mask, value);
    const Tile& tile = tiles[number % C::kRing];
    const Sm90Sequence& q = tile.sequence;
    int column = keys.block * C::kN + lane % 4 * 2;
    u32 seen[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      int row = thread_row(tile) + 8 * h;
      seen[h] = bits_up_to(min(row + q.last, q.columns - 1) - column) &
                ~bits_up_to(row + q.first - 1 - column);
      if (has_bits()) seen[h] &= mask[h];
    }
    replace_where_clear(s, seen, value);
  }

  // This block's scores to weights. Returns whether previous outputs must be multiplied by
  // `factor`.
  TC_DEVICE bool weigh(float (&factor)[2]) {
    bool moves;
#pragma unroll 1
    for (;;) {
      change();
      hide();
      if (__builtin_expect(softmax.weigh(s, C::kAdded ? unit : p.unit, factor, moves), 1))
        return moves;
      score_again();
    }
  }

  TC_DEVICE void pack() {
#pragma unroll
    for (int i = 0; i < C::kN / 16; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        w[i][j] = DTypeTraits<C::kDType>::pack(s[8 * i + 2 * j], s[8 * i + 2 * j + 1]);
      }
  }

  TC_DEVICE void scale_out(const float (&factor)[2]) {
#pragma unroll
    for (int i = 0; i < C::kD / 2; ++i) o[i] *= factor[i / 2 % 2];
  }

  // Ends a tile's sums: writes logsumexp, and returns the factor of the outputs.
  TC_DEVICE void finish_sums(const Tile& tile, float (&inverse)[2]) {
    float totals[2] = {quad_sum(softmax.sum[0]), quad_sum(softmax.sum[1])};
    float factor[2] = {1.0f, 1.0f};
    if constexpr (C::kTakesSinks) {
      float sink = p.score.sinks == nullptr ? -kInfinity : p.score.sinks[tile.head];
      softmax.join(sink, totals, factor);
    }
    if constexpr (C::kGeneral) {
      factor[0] *= p.score.keep_scale;
      factor[1] *= p.score.keep_scale;
    }
    float logarithm[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      inverse[h] = totals[h] == 0.0f ? 0.0f : factor[h] * reciprocal_approx(totals[h]);
      logarithm[h] = (softmax.reference[h] + log2_approx(totals[h])) * kLn2;
    }
    if (p.logsumexp == nullptr || lane % 4 != 0) return;
    auto out = p.logsumexp + tile.batch * p.logsumexp_stride[0] +
               tile.head * p.logsumexp_stride[1] + tile.sequence.q_row;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      int i = thread_row(tile) + 8 * h;
      if (i < tile.sequence.rows) out[i] = logarithm[h];
    }
  }

  TC_DEVICE u32 pack_out(int at, float inverse) const {
    return DTypeTraits<C::kDType>::pack(o[at] * inverse, o[at + 1] * inverse);
  }

  TC_DEVICE void store(const Tile& tile, const float (&inverse)[2]) {
    if constexpr (C::kStoresRows) {
      return Base::store_rows(tile, [&](int at) { return pack_out(at, inverse[at / 2 % 2]); });
    }
    int column = lane % 4 * 8;  // of each 32
    auto out = static_cast<u16*>(p.out) + tile.batch * p.out_stride[0] +
               tile.head * p.out_stride[1] + tile.sequence.q_row * p.out_stride[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      int i = thread_row(tile) + 8 * h;
      u16* to = out + i * p.out_stride[2] + column;
#pragma unroll
      for (int a = 0; a < C::kD / 32; ++a) {
        u32 word[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) word[j] = pack_out(16 * a + 4 * j + 2 * h, inverse[h]);
        quad_transpose(word);
        store_global_if(i < tile.sequence.rows && 32 * a + column < p.head_dim_v, to + 32 * a,
                        word);
      }
    }
  }

  TC_DEVICE void release_q() { release(shared + C::kQEmpty + 8 * q_slot()); }

  // kFreesQ: releases Q after a tile's last scores, if they are not needed once more.
  TC_DEVICE bool free_q() {
    if constexpr (C::kFreesQ) {
      if (!is_last() || !softmax.are_near(s, p.unit)) return false;
      release_q();
      return true;
    }
    return false;
  }

  // Releases K, and with a tile's last block Q, unless it is free; the next step begins.
  TC_DEVICE void end_step(bool freed = false) {
    if constexpr (C::kSendsNextBlock) __syncwarp();  // one lane arrives for all reads of next_block
    release(shared + C::kKEmpty + 8 * slot(step));
    if (is_last() && !freed) release_q();
    if (C::kSkipsBlocks) scored = step;
    ++step;
  }

  TC_DEVICE void end_product() {
    wgmma_wait<0>();
    keep_in_place(o);
    release(shared + C::kVEmpty + 8 * slot(before()));
  }

  // Without turns: a step's weights are computed before the next step's scores.
  TC_DEVICE void run_in_order() {
#pragma unroll 1
    while (skip_tiles()) {
      softmax.reset();
      float factor[2];
#pragma unroll 1
      for (int add = 0;; add = 1, next_keys()) {
        score();
        wgmma_wait<0>();
        keep_in_place(s);
        factor[0] = factor[1] = 1.0f;
        bool moves = weigh(factor), last = is_last();
        end_step();
        if (__builtin_expect(moves && add != 0, 0)) scale_out(factor);
        pack();
        multiply_v(add);
        if (last) break;
        end_product();
      }
      const Tile& tile = tiles[number % C::kRing];
      finish_sums(tile, factor);
      end_product();
      store(tile, factor);
      ++number;
      __syncwarp();
    }
  }

  // Ends what a step has begun, after its weights.
  TC_DEVICE void end_products() {
    u32 multiplied = before();
    end_step();
    wgmma_wait<0>();
    keep_in_place(o);
    keep_in_place(s);
    release(shared + C::kVEmpty + 8 * slot(multiplied));
  }

  // kLoops, without a mask: the number of blocks from the next one on that hide nothing.
  TC_DEVICE int open_blocks() const {
    if constexpr (C::kSendsNextBlock) return 0;
    if (keys.block > open_last + 1) return 0;
    return __shfl_sync(~0u, keys.block - max(open_first, keys.last()), 0);
  }

  // kLoops, with a mask: whether the next block exists, and nothing but the mask hides keys of it:
  // whether it has numbers or hides some, or not.
  template <bool kMask>
  TC_DEVICE bool is_next() const {
    bool masked = (next_block & C::Mask::kMaskedBlock << (C::kAdded ? 0 : group)) != 0;
    int block = static_cast<int>(next_block & C::Mask::kBlockNumber);
    if (C::kAdded && kMask && p.added.floats) return false;
    return __all_sync(~0u,
                      !is_last() && masked == kMask && block >= open_first && block <= open_last);
  }

  template <Steps kSteps>
  TC_DEVICE void change_by() {
    if constexpr (kSteps == Steps::kBits) replace_where_clear(s, mask, -kInfinity);
    if constexpr (kSteps == Steps::kNumbers) {
      added_mask().add_16_bit(s, mask_part(), p.added_scale);
    }
    if constexpr (kSteps == Steps::kCap) cap_scores(s, p.score);
    if constexpr (kSteps == Steps::kAlibi) {
      multiply_scores(p.score.scale);
      add_alibi();
    }
  }

  // Runs steps, `left` of them without a mask. Returns false in the middle of one for which a
  // maximum is wanted, or whose weights are not small.
  template <Steps kSteps>
  TC_DEVICE bool run_loop(int left, int& add, float (&block)[2]) {
    // Whether a maximum is wanted is a branch of its own in kernels in which that may last, or the
    // scores would be computed twice in each step; it took 2 to 5% of the time of the others.
    float limit = C::kMasked ? kMost : softmax.limit();
#pragma unroll 1
    for (;;) {
      if constexpr (C::kGeneral) {
        --keys.block;  // no mask hides any
      } else {
        next_keys();
      }
      if constexpr (kSteps == Steps::kBits) load_bits();
      if constexpr (kSteps == Steps::kNumbers) added_mask().load_16_bit(mask_part());
      if (takes_turn()) begin_turn();
      score();
      multiply_v(add);
      if (takes_turn()) end_turn();
      add = 1;
      receive_next();
      if constexpr (kSteps == Steps::kDropped) choose_kept();
      wgmma_wait<1>();
      keep_in_place(s);
      if (C::kMasked && softmax.looks) return false;
      change_by<kSteps>();
      float unit = kSteps == Steps::kNumbers ? kLog2e : p.unit;
      if (!softmax.weigh_small(s, unit, limit, block)) return false;
      if constexpr (kSteps == Steps::kDropped) drop_weights();
      end_products();
      pack();
      if constexpr (C::kSendsNextBlock) {
        if (!is_next<kSteps != Steps::kOpen>()) return true;
      } else {
        if (--left == 0) return true;
      }
    }
  }

  // Ends a step that run_loop() has left.
  TC_DEVICE void end_rare_step(float (&block)[2], float (&factor)[2]) {
    factor[0] = factor[1] = 1.0f;
    bool moves = true, has_scores = C::kMasked && softmax.looks;
    if (!softmax.weigh_large(s, block, factor)) {
      if (!has_scores) score_again();
      moves = weigh(factor);
    }
    drop();
    end_products();
    if (moves) scale_out(factor);
    pack();
  }

  // Steps like those of run(), of blocks of which only bits hide keys. ptxas leaves code that is
  // rarely needed inside the loop that needs it, and to jump over it took a tenth of the time: here
  // it lies outside of the loops. A warp that needs it comes back to the loop in which the others
  // of its warpgroup are, all of which must execute the same wgmma.
  TC_DEVICE void run_loops(int& add, float (&factor)[2]) {
    float block[2];
#pragma unroll 1
    for (;;) {
      if constexpr (C::kSendsNextBlock) {
        if (is_next<false>()) {
          if (run_loop<Steps::kOpen>(0, add, block)) continue;
        } else if (is_next<true>()) {
          if (run_loop<C::kAdded ? Steps::kNumbers : Steps::kBits>(0, add, block)) continue;
        } else {
          return;
        }
      } else if constexpr (C::kGeneral) {
        bool caps = p.score.softcap != 0.0f, adds = has_alibi(p.score);
        bool drops = p.score.drop_below != 0;
        if (p.mask.classes != nullptr || caps + adds + drops != 1) return;
        int left = open_blocks();
        if (left <= 0) return;
        if (caps) {
          if (run_loop<Steps::kCap>(left, add, block)) return;
        } else if (adds) {
          if (run_loop<Steps::kAlibi>(left, add, block)) return;
        } else {
          if (p.has_rule || run_loop<Steps::kDropped>(left, add, block)) return;
        }
      } else {
        int left = open_blocks();
        if (left <= 0 || run_loop<Steps::kOpen>(left, add, block)) return;
      }
      end_rare_step(block, factor);
    }
  }

  TC_DEVICE void run() {
    if constexpr (!C::kPingPong) return run_in_order();
    if (C::kTakesTurns) Base::open_turns();
#pragma unroll 1
    while (skip_tiles()) {
      skip_leading();
      if (skips_first()) skip_block();
      load_mask();
      if (takes_turn()) begin_turn();
      score();
      if (takes_turn()) end_turn();
      receive_next();
      choose_kept();
      wgmma_wait<0>();
      keep_in_place(s);
      softmax.reset();
      change();
      hide();
      softmax.weigh_first(s, C::kAdded ? unit : p.unit);
      drop();
      end_step();
      end_skip();
      pack();
      int add = 0;
      float factor[2];
      bool trailing = false;  // the tile has blocks after the last one of this warpgroup
#pragma unroll 1
      for (;;) {
        bool fresh = is_last();
        factor[0] = factor[1] = 1.0f;
        if (__builtin_expect(fresh, 0)) {
          if (skips_last()) skip_block();
          ++number;
          // The next tile's loads are in flight while sums are added.
          bool more = begin_next(trailing);
          finish_sums(tiles[(number - 1) % C::kRing], factor);
          if (!more) break;
          softmax.reset();
          if (skips_first()) skip_block();
        } else {
          next_keys();
        }
        load_mask();
        if (takes_turn()) begin_turn();
        score();
        multiply_v(add);
        if (takes_turn()) end_turn();
        add = !fresh;
        receive_next();
        choose_kept();
        wgmma_wait<1>();
        keep_in_place(s);
        u32 multiplied = before();
        bool freed = free_q();
        bool moves = weigh(factor);
        drop();
        end_step(freed);
        wgmma_wait<0>();
        keep_in_place(o);
        keep_in_place(s);
        release(shared + C::kVEmpty + 8 * slot(multiplied));
        if (__builtin_expect(fresh, 0)) {
          end_skip();
          store(tiles[(number - 1) % C::kRing], factor);
        } else if (__builtin_expect(moves, 0)) {
          scale_out(factor);
        }
        pack();
        if constexpr (C::kLoops) run_loops(add, factor);
      }
      multiply_v(add);
      wgmma_wait<0>();
      keep_in_place(o);
      release(shared + C::kVEmpty + 8 * slot(before()));
      end_skip();
      store(tiles[(number - 1) % C::kRing], factor);
      if (C::kSkipsEnds && trailing) skip_trailing();
      if (!C::kSkipsTiles && !C::kSkipsEnds) break;
      // NOTE: without it ptxas keeps the descriptors of all products in registers of each thread,
      // and moves them one by one (1.03 to 1.04 of the time): it does not see that warps converge.
      __syncwarp();
    }
    if (C::kTakesTurns) Base::close_turns();
  }
};

extern "C" __global__ void __launch_bounds__(TC_THREADS, 1)
    TC_KERNEL(const __grid_constant__ Sm90AttentionParams p) {
  constexpr int kGroups = TC_TILE_M / 64, kTeams = (TC_THREADS / kWarpgroup - 1) / kGroups;
  using C = AttentionConfig<DType::TC_DTYPE, TC_TILE_K, TC_TILE_N, kTeams, kGroups, TC_Q_SLOTS,
                            TC_STAGES, TC_MASKED, TC_ADDED, TC_GENERAL>;
  static_assert(C::kBlockThreads == TC_THREADS && C::kAllBytes == TC_DYNAMIC_SHARED);
  run_block<C, Consumer>(p);
}

}  // namespace torch_cubin::TC_KERNEL
/* torch_cubin kernels
{"virtual_arch": ["90a"],
 "kernels": [
  {"name": "sm90_attention_{d.short}_{of.{t.of}.name}{t.tile.0}x{t.tile.1}x{t.tile.2}",
   "kind": "forward", "takes": "{of.{t.of}.takes}", "tile": "{t.tile}",
   "block": ["{t.threads}", 1, 1], "stages": "{t.stages}", "dynamic_shared": "{t.shared}",
   "accepted_spill": {"sm_90a": "{t.spill}"},
   "cost": {"k_tile": "{t.k_tile}", "fixed": "{t.fixed}", "teams": "{t.teams}"},
   "defines": {"TC_DTYPE": "{d.dtype}", "TC_Q_SLOTS": "{t.q_slots}",
               "TC_MASKED": "{of.{t.of}.masked}", "TC_ADDED": "{of.{t.of}.added}",
               "TC_GENERAL": "{of.{t.of}.general}"},
   "for": {
    "d": "bf16 f16",
    "of": [{
     "plain": {"name": "", "masked": 0, "added": 0, "general": 0, "takes": ["plain"]},
     "teams": {"name": "teams_", "masked": 0, "added": 0, "general": 0, "takes": ["plain"]},
     "sinks": {"name": "", "masked": 0, "added": 0, "general": 0,
               "takes": ["plain", "unmasked", "sinks"]},
     "masked": {"name": "masked_", "masked": 1, "added": 0, "general": 0,
                "takes": ["unmasked", "bool_mask", "sinks"]},
     "added": {"name": "added_", "masked": 1, "added": 1, "general": 0,
               "takes": ["added_alone", "float_mask", "sinks"]},
     "general": {"name": "general_", "masked": 1, "added": 0, "general": 1,
                 "takes": ["unmasked", "bool_mask", "sinks", "rule"]},
     "general_added": {"name": "general_added_", "masked": 1, "added": 1, "general": 1,
                       "takes": ["added_mask", "float_mask", "sinks", "rule"]}}],
    "t": [
     ["of", "tile", "q_slots", "stages", "threads", "shared", "spill", "k_tile", "fixed", "teams"],
     ["plain",         [128, 128, 32],  2, 2, 384, 109280,   0, 2150, 1700, null],
     ["teams",         [128, 128, 32],  2, 2, 640, 218848,  64, 3300, 2900,    2],
     ["plain",         [192, 128, 64],  2, 3, 512, 175904, 200, 2830, 3030, null],
     ["plain",         [128, 128, 64],  2, 2, 384, 117472,   0, 2370, 1930, null],
     ["plain",         [128, 96, 64],   2, 2, 640, 202464,  72, 3050, 4950,    2],
     ["plain",         [128, 64, 64],   2, 3, 640, 202496,  64, 2200, 4200,    2],
     ["plain",         [128, 128, 96],  2, 2, 384, 207584,   0, 2750, 3000, null],
     ["plain",         [192, 96, 96],   2, 2, 512, 212736,  40, 3050, 3600, null],
     ["sinks",         [128, 128, 128], 2, 2, 384, 215776,   0, 3120, 3960, null],
     ["plain",         [128, 96, 160],  1, 2, 384, 221904,   0, 3000, 5400, null],
     ["plain",         [128, 96, 192],  1, 2, 384, 221904,   0, 3300, 6000, null],
     ["sinks",         [128, 64, 256],  1, 2, 384, 230096,   0, 2750, 7000, null],
     ["masked",        [192, 128, 64],  2, 3, 512, 176272, 440, 3100, 3500, null],
     ["masked",        [128, 128, 128], 2, 2, 384, 216080, 136, 3500, 4300, null],
     ["masked",        [128, 64, 256],  1, 2, 384, 230400,  96, 2960, 7400, null],
     ["added",         [128, 128, 64],  2, 2, 384, 183056,  16, 2600, 2300, null],
     ["added",         [128, 128, 128], 2, 2, 384, 230160,  16, 3500, 4300, null],
     ["added",         [128, 80, 256],  1, 2, 384, 230128,   0, 3700, 7700, null],
     ["general",       [128, 128, 64],  2, 2, 384, 117504,  16, 3500, 2500, null],
     ["general",       [128, 128, 128], 2, 2, 384, 215808,  16, 4200, 4500, null],
     ["general",       [128, 64, 256],  1, 2, 384, 230128,   0, 3360, 7700, null],
     ["general_added", [128, 128, 64],  2, 2, 384, 183040,   0, 3500, 2500, null],
     ["general_added", [128, 128, 128], 2, 2, 384, 230144,   0, 4200, 4500, null],
     ["general_added", [128, 64, 256],  1, 2, 384, 230128,   0, 3360, 7700, null]]}}]}
*/
