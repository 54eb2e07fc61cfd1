// Attention forward on Hopper: a persistent, warp-specialised kernel of TMA and wgmma.
//
// The roles of the warps, shared memory and barriers are those of sm90/forward_block.cuh, what a
// consumer computes is sm90/forward_loop.cuh.
//
// Weights go from the accumulators of one wgmma to the operand registers of the other without a
// shuffle.
//
// `masked` kernels read the bits of a boolean mask (TC_MASKED), `added` ones the numbers of an
// additive mask (TC_ADDED too; sm90/added_mask.cuh). `general` and `general_added` kernels do the
// same, modify scores before the softmax (sm90/rule.cuh), and drop weights (TC_GENERAL). A single
// kernel for both sorts of masks had more branches in each step: 2 to 7% of the time with a boolean
// mask. They spill slightly more: 192 queries leave a consumer 160 registers, and with options and
// numbers a few words are read again in each step.
#include "forward_loop.cuh"
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
  static constexpr int kScoreSteps = kD / 16;  // of 32 bytes of a row
  using Softmax = RunningSoftmax<kGeneral || kAdded>;
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
  static TC_DEVICE float out_factor(const typename Block::Tile&, float factor, float total) {
    return factor * reciprocal_approx(total);
  }
  static TC_DEVICE void score(float (&s)[kN / 2], u64 q, u64 k, int add) {
    Wgmma<kN>::template run<kType, 0, 0>(s, q, k, add);
  }
  static TC_DEVICE void score_part(float (&s)[4], const u32 (&q)[4], u32 k0, u32 k1) {
    if constexpr (kDType == DType::bfloat16) {
      mma_bf16(s, q, k0, k1);
    } else {
      mma_f16(s, q, k0, k1);
    }
  }
  static TC_DEVICE void load_values(const Params& p, const typename Block::Tile& tile, int block,
                                    u32 to, u32 arrived) {
    load_rows<AttentionConfig>(p.v, tile, block, to, arrived);
  }
};

// ---- consumers ----------------------------------------------------------------------------------

// Outputs stay in wgmma's accumulators.
template <class C>
struct Products : ForwardScores<C> {
  using Base = ForwardScores<C>;
  using Base::shared, Base::s, Base::o, Base::v_base, Base::slot, Base::phase;
  u32 w[C::kN / 16][4];
  u32 scored = 0;  // the last scored block of keys, if some are skipped

  TC_DEVICE Products(const Sm90AttentionParams& params, u32 memory, const typename C::Tile* ring,
                     int own_group)
      : Base(params, memory, ring, own_group) {
    v_base = static_cast<u32>(wgmma_descriptor(shared + C::kV, C::kN * 128, 1024));
    if (C::kLoops) v_base = uniform(v_base);  // or ptxas computes it anew in each step
  }

  // The previously scored step.
  TC_DEVICE u32 before() const { return C::kSkipsBlocks ? scored : Base::step - 1; }

  TC_DEVICE void multiply_v(int add) {
    u32 v = Base::moved(v_base + slot(before()) * (C::kKvBytes >> 4));
    barrier_wait(shared + C::kVFull + 8 * slot(before()), phase(before()));
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < C::kN / 16; ++i) {
      WgmmaRegisters<C::kD>::template run<C::kType, 1>(
          o, w[i], Base::template descriptor<128>(v, i * kMnMajorStep), i > 0 ? 1 : add);
    }
    wgmma_commit();
  }

  TC_DEVICE void end_product() {
    wgmma_wait<0>();
    keep_in_place(o);
    Base::release(shared + C::kVEmpty + 8 * slot(before()));
  }

  TC_DEVICE void begin_out() {}
  TC_DEVICE void multiply(int add, const float (&)[2]) {
    Base::score();
    multiply_v(add);
  }
  TC_DEVICE void add_sums(const float (&)[2]) {}
  TC_DEVICE void multiply_last(int add, const float (&)[2]) {
    multiply_v(add);
    end_product();
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
};

template <class C>
using Consumer = ForwardLoop<C, Products>;

extern "C" __global__ void __launch_bounds__(TC_THREADS, 1)
    TC_KERNEL(const __grid_constant__ Sm90AttentionParams p) {
  constexpr int kGroups = TC_TILE_M / 64, kTeams = (TC_THREADS / kWarpgroup - 1) / kGroups;
  using C = AttentionConfig<DType::TC_DTYPE, TC_TILE_K, TC_TILE_N, kTeams, kGroups, TC_Q_SLOTS,
                            TC_STAGES, TC_MASKED, TC_ADDED, TC_GENERAL>;
  static_assert(kBlockThreads<C> == TC_THREADS && kAllBytes<C> == TC_DYNAMIC_SHARED);
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
