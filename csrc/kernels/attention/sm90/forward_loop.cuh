// What a consumer warpgroup of attention's forward on Hopper computes, for 16-bit types
// (sm90/forward.cu) and for e4m3 (sm90/e4m3.cu). Each file has a config, and `Products`: how
// weights become an operand, and where their product with V goes: multiply(), within a turn, issues
// it and the next scores, add_sums() what may follow the turn, multiply_last() a tile's last one.
//
// A step scores a block of keys, and multiplies V of the block before by its weights. It does so
// across tiles: the next tile's first scores are in flight while a tile ends. With outputs in
// wgmma's accumulators the scores come first, and weights are computed from them while the product
// with V runs. Products that are added to the outputs in float32 (kAddsSums) come first, in
// registers that the scores need later.
//
// Longer than files should be: the options are steps of one loop, whose registers they share.
#pragma once

#include "added_mask.cuh"
#include "common/dropout.cuh"
#include "common/dtype.cuh"
#include "common/wgmma_e4m3.cuh"
#include "forward_block.cuh"
#include "rule.cuh"
#include "softmax.cuh"

namespace torch_cubin {
namespace sm90 {

// The products of a consumer with Q and K.
template <class C>
struct ForwardScores : ForwardConsumer<C> {
  using Base = ForwardConsumer<C>;
  using Base::shared, Base::number, Base::step, Base::group, Base::warp, Base::lane;
  using Base::slot, Base::phase, Base::q_slot, Base::moved;
  u32 q_base, k_base, v_base;  // descriptors of slot 0, their low words
  float s[C::kN / 2], o[C::kD / 2];

  TC_DEVICE ForwardScores(const typename C::Params& params, u32 memory,
                          const typename C::Tile* ring, int own_group)
      : Base(params, memory, ring, own_group) {
    q_base = static_cast<u32>(k_major_descriptor<C::kPanelBytes>(shared + group * C::kQBytes));
    k_base = static_cast<u32>(k_major_descriptor<C::kPanelBytes>(shared + C::kK));
  }

  // The high word is the same for all.
  template <int kRowBytes>
  static TC_DEVICE u64 descriptor(u32 low, u32 bytes) {
    return k_major_descriptor<kRowBytes>(0) | (low + (bytes >> 4));
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
    for (int i = 0; i < C::kScoreSteps; ++i) {
      C::score(s, descriptor<C::kPanelBytes>(q, k_major_bytes<C::kPanelBytes, 64>(i)),
               descriptor<C::kPanelBytes>(k, k_major_bytes<C::kPanelBytes, C::kN>(i)), i > 0);
    }
    wgmma_commit();
  }

  // Computes the same scores in one warp, for the rare case that the softmax needs them again after
  // overwriting them with weights.
  TC_DEVICE void score_again() {
    u32 q = shared + q_slot() * C::kQBytes + (16 * warp + lane % 16) * C::kPanelBytes;
    u32 k = shared + C::kK + slot(step) * C::kKvBytes + (lane / 16 * 8 + lane % 8) * C::kPanelBytes;
    u32 swizzle = lane % 8 * C::kPanelBytes / 128 * 16;
#pragma unroll
    for (int i = 0; i < C::kN / 2; ++i) s[i] = 0.0f;
#pragma unroll 1
    for (int i = 0; i < C::kScoreSteps; ++i) {
      constexpr int kSteps = C::kPanelBytes / 32;  // of a panel
      u32 a[4], b[4];
      ldmatrix<false>(a, q + i / kSteps * (64 * C::kPanelBytes) +
                             ((i % kSteps * 32 + lane / 16 * 16) ^ swizzle));
#pragma unroll
      for (int j = 0; j < C::kN / 16; ++j) {
        ldmatrix<false>(b, k + i / kSteps * (C::kN * C::kPanelBytes) + j * (16 * C::kPanelBytes) +
                               ((i % kSteps * 32 + lane / 8 % 2 * 16) ^ swizzle));
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float (&d)[4] = *reinterpret_cast<float (*)[4]>(&s[8 * j + 4 * half]);
          C::score_part(d, a, b[2 * half], b[2 * half + 1]);
        }
      }
    }
  }
};

// What steps of a loop of run_loops() do to scores before the softmax: nothing; they hide keys by
// bits; they add 16-bit numbers; they cap them; they add ALiBi's; or dropout drops weights.
enum class Steps { kOpen, kBits, kNumbers, kCap, kAlibi, kDropped };

template <class C, template <class> class Products>
struct ForwardLoop : Products<C> {
  static constexpr u32 kNoStep = ~0u;
  using Base = Products<C>;
  using Base::p, Base::shared, Base::tiles, Base::group, Base::warp, Base::lane, Base::number,
      Base::step, Base::s, Base::o;
  using Base::slot, Base::phase, Base::q_slot, Base::first_row, Base::thread_row, Base::release,
      Base::begin_turn, Base::end_turn, Base::score, Base::score_again, Base::pack, Base::scale_out;
  using Tile = typename C::Tile;
  typename C::Softmax softmax;
  using Sums = typename C::Softmax::Sums;
  float slope = 0.0f;  // ALiBi's
  u32 mask[2];         // bits of a boolean mask
  u32 kept[2];         // kDropsEarly: dropout's bits
  float unit;          // kAdded, kAddsSums: the factor from this block's scores to powers of two
  float multiplier;    // kAddsSums: the factor of the scores if the tile's unit cannot be used
  bool multiplies;
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

  using Base::Base;

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

  // Whether it is not worth to skip the tile.
  static TC_DEVICE bool has_few(const Tile& tile) {
    return C::kFewestSkipped > 0 && tile.blocks < C::kFewestSkipped;
  }

  // False after the last tile, and for a tile without rows for this warpgroup.
  TC_DEVICE bool begin() {
    barrier_wait(Base::q_full(), Base::q_phase());
    const Tile& tile = tiles[number % C::kRing];
    int row = first_row(tile);
    if (tile.blocks == 0 || (C::kSkipsTiles && row >= tile.sequence.rows && !has_few(tile))) {
      return false;
    }
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
    if constexpr (C::kAddsSums) {
      multiplier = tile.unit;
      multiplies = !(multiplier >= 1.1754944e-38f && multiplier < kInfinity);
      unit = multiplies ? 1.0f : multiplier;
    }
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
    // A unit that is not a positive normal number does not keep the order of the scores, and -inf
    // times 0 is not -inf.
    if constexpr (C::kAddsSums) {
      if (__builtin_expect(multiplies, 0)) multiply_scores(multiplier);
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
  TC_DEVICE auto added_mask() const {
    return AddedMask<C::kDType, C::kN, C::kAddedBytes>{
        p.added, shared + C::kNumbers + (4 * group + warp) * C::kAddedBytes};
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

  // Whether this warpgroup sees all of the block, apart from a mask.
  TC_DEVICE bool is_open() const { return keys.block >= open_first && keys.block <= open_last; }

  // Sets scores outside of the band, and masked ones, to `value`. Blocks that are entirely visible
  // pay one comparison.
  TC_DEVICE void hide(float value = -kInfinity) {
    bool open = keys.block >= open_first && keys.block <= open_last;  // other code of is_open()
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

  TC_DEVICE float unit_of_block() const { return C::kAdded || C::kAddsSums ? unit : p.unit; }

  // The scores of a tile's first block to weights.
  TC_DEVICE void weigh_first(float (&factor)[2]) {
    softmax.reset();
    if constexpr (C::kAddsSums) {
      weigh(factor);
    } else {
      change();
      hide();
      softmax.weigh_first(s, unit_of_block());
    }
  }

  // This block's scores to weights. Returns whether previous outputs must be multiplied by
  // `factor`.
  TC_DEVICE bool weigh(float (&factor)[2]) {
    bool moves = C::kAddsSums && is_open();
#pragma unroll 1
    for (;;) {
      change();
      hide();
      if (__builtin_expect(softmax.weigh(s, unit_of_block(), factor, moves), 1)) return moves;
      score_again();
    }
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
      inverse[h] = totals[h] == 0.0f ? 0.0f : C::out_factor(tile, factor[h], totals[h]);
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
    if constexpr (C::kSkipsBlocks) Base::scored = step;
    ++step;
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
        if (!C::kAddsSums && __builtin_expect(moves && add != 0, 0)) scale_out(factor);
        pack();
        if constexpr (C::kAddsSums) {
          if (add == 0) Base::begin_out();
          Base::multiply_last(add, factor);
          if (last) break;
        } else {
          Base::multiply_v(add);
          if (last) break;
          Base::end_product();
        }
      }
      const Tile& tile = tiles[number % C::kRing];
      finish_sums(tile, factor);
      if constexpr (!C::kAddsSums) Base::end_product();
      store(tile, factor);
      ++number;
      __syncwarp();
    }
  }

  // The products of a step, with a turn.
  TC_DEVICE void begin_products(int add, float (&factor)[2]) {
    if (takes_turn()) begin_turn();
    Base::multiply(add, factor);
    if (takes_turn() && !C::kEndsTurnEarly) end_turn();
    Base::add_sums(factor);
  }

  // Waits for the step's scores.
  TC_DEVICE void wait_for_scores() {
    wgmma_wait<C::kAddsSums ? 0 : 1>();
    keep_in_place(s);
  }

  // Ends what a step has begun, after its weights.
  TC_DEVICE void end_products(bool freed = false) {
    if constexpr (C::kAddsSums) {
      end_step();
    } else {
      u32 multiplied = Base::before();
      end_step(freed);
      wgmma_wait<0>();
      keep_in_place(o);
      keep_in_place(s);
      release(shared + C::kVEmpty + 8 * slot(multiplied));
    }
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

  // Whether a maximum is wanted is a branch of its own in kernels in which that may last, or the
  // scores would be computed twice in each step; it took 2 to 5% of the time of the others.
  TC_DEVICE bool looks() const { return (C::kMasked || C::kAddsSums) && softmax.looks; }

  // Runs steps, `left` of them without a mask. Returns false in the middle of one for which a
  // maximum is wanted, or whose weights are not small.
  template <Steps kSteps>
  TC_DEVICE bool run_loop(int left, int& add, float (&factor)[2], Sums& block) {
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
      begin_products(add, factor);
      add = 1;
      if constexpr (C::kAddsSums) factor[0] = factor[1] = 1.0f;
      receive_next();
      if constexpr (kSteps == Steps::kDropped) choose_kept();
      wait_for_scores();
      if (looks()) return false;
      change_by<kSteps>();
      float unit = kSteps == Steps::kNumbers ? kLog2e : C::kAddsSums ? this->unit : p.unit;
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
  TC_DEVICE void end_rare_step(Sums& block, float (&factor)[2]) {
    factor[0] = factor[1] = 1.0f;
    bool moves = true, has_scores = looks();
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
    Sums block;
#pragma unroll 1
    for (;;) {
      if constexpr (C::kSendsNextBlock) {
        if (is_next<false>()) {
          if (run_loop<Steps::kOpen>(0, add, factor, block)) continue;
        } else if (is_next<true>()) {
          if (run_loop<C::kAdded ? Steps::kNumbers : Steps::kBits>(0, add, factor, block)) continue;
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
          if (run_loop<Steps::kCap>(left, add, factor, block)) return;
        } else if (adds) {
          if (run_loop<Steps::kAlibi>(left, add, factor, block)) return;
        } else {
          if (p.has_rule || run_loop<Steps::kDropped>(left, add, factor, block)) return;
        }
      } else {
        // A block of which some keys are hidden wants a maximum of the next.
        if constexpr (C::kAddsSums) {
          if (multiplies || !is_open()) return;
        }
        int left = open_blocks();
        if (left <= 0 || run_loop<Steps::kOpen>(left, add, factor, block)) return;
      }
      end_rare_step(block, factor);
    }
  }

  TC_DEVICE void run() {
    if constexpr (!C::kPingPong) return run_in_order();
    if (C::kTakesTurns) Base::open_turns();
#pragma unroll 1
    while (skip_tiles()) {
      float factor[2] = {1.0f, 1.0f}, tile_factor[2];
      // Sums are multiplied by the last block's factor after the tile's has been found.
      float (&inverse)[2] = C::kAddsSums ? tile_factor : factor;
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
      weigh_first(factor);
      drop();
      end_step();
      end_skip();
      pack();
      Base::begin_out();
      int add = 0;
      bool trailing = false;  // the tile has blocks after the last one of this warpgroup
#pragma unroll 1
      for (;;) {
        bool fresh = is_last();
        if constexpr (!C::kAddsSums) factor[0] = factor[1] = 1.0f;
        if (__builtin_expect(fresh, 0)) {
          if (skips_last()) skip_block();
          ++number;
          // The next tile's loads are in flight while sums are added.
          bool more = begin_next(trailing);
          finish_sums(tiles[(number - 1) % C::kRing], inverse);
          if (!more) break;
          softmax.reset();
          if (skips_first()) skip_block();
        } else {
          next_keys();
        }
        load_mask();
        begin_products(add, factor);
        if constexpr (C::kAddsSums) {
          if (__builtin_expect(fresh, 0)) {
            store(tiles[(number - 1) % C::kRing], inverse);
            Base::begin_out();
          }
          factor[0] = factor[1] = 1.0f;
        }
        add = !fresh;
        receive_next();
        choose_kept();
        wait_for_scores();
        bool freed = free_q();
        bool moves = weigh(factor);
        drop();
        end_products(freed);
        if constexpr (!C::kAddsSums) {
          if (__builtin_expect(fresh, 0)) {
            end_skip();
            store(tiles[(number - 1) % C::kRing], inverse);
          } else if (__builtin_expect(moves, 0)) {
            scale_out(factor);
          }
        }
        pack();
        if constexpr (C::kLoops) run_loops(add, factor);
      }
      Base::multiply_last(add, factor);
      end_skip();
      store(tiles[(number - 1) % C::kRing], inverse);
      if (C::kSkipsEnds && trailing) skip_trailing();
      if (!C::kSkipsTiles && !C::kSkipsEnds) break;
      // NOTE: without it ptxas keeps the descriptors of all products in registers of each thread,
      // and moves them one by one (1.03 to 1.04 of the time): it does not see that warps converge.
      __syncwarp();
    }
    if (C::kTakesTurns) Base::close_turns();
  }
};

}  // namespace sm90
}  // namespace torch_cubin
