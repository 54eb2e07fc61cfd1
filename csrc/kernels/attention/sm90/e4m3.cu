// Attention forward on Hopper for queries, keys and values of e4m3: sm90/forward.cu in bytes.
//
// The roles of the warps and the barriers are those of sm90/forward_block.cuh, the loop is that of
// sm90/forward_loop.cuh. The differences to sm90/forward.cu:
//   - wgmma needs both 8-bit operands K-major, so values come as (column, key):
//     sm90/e4m3_values.cu transposes them before, in the order of keys in which weights lie in
//     registers. In kernels for fewer keys, and all of 64 columns, (TC_TRANSPOSES) two warps of the
//     producers do so in shared memory (sm90/e4m3_values.cuh), for each tile of queries anew: that
//     saves 20 us for 32 MB, and takes 5% longer for each block of 128 columns.
//   - Weights become e4m3, whose range is small: sm90/e4m3_softmax.cuh.
//   - The factors q_descale, k_descale and v_descale are read by the warp that schedules the tiles:
//     the scores' go into the softmax's unit, the values' into the division by the row's sum.
//   - wgmma's sums of e4m3 have some 14 bits (common/wgmma_e4m3.cuh), so a block's product with V
//     is added to the outputs in float32, in the registers of the scores: a consumer multiplies by
//     V, then scores the next block, and computes weights from the scores while the others
//     multiply. They take turns.
//
// The sums of weights, and so the logsumexp, are float32.
#include "common/wgmma_e4m3.cuh"
#include "e4m3_layout.cuh"
#include "e4m3_params.h"
#include "e4m3_softmax.cuh"
#include "e4m3_values.cuh"
#include "forward_loop.cuh"

namespace torch_cubin::TC_KERNEL {

using namespace sm90;

// A tile, with its head's factors.
template <bool kTransposes>
struct E4m3Tile : AttentionTile {
  int values;  // the first key of the sequence among the values
  float unit;  // from products to powers of two
  float v_descale;
};
template <>
struct E4m3Tile<true> : AttentionTile {
  float unit, v_descale;
};

TC_DEVICE float descale_of(const Sm90Descale& descale, int batch, int head) {
  if (descale.data == nullptr) return 1.0f;
  return __ldg(descale.data + batch * descale.stride[0] + head * descale.stride[1]);
}

template <int kD_, int kN_, int kTeams_, int kGroups_, int kQSlots_, int kStages_,
          bool kTransposes_>
struct E4m3Config
    : ForwardBlock<kGroups_, kQSlots_, kStages_, 64 * kD_, kN_ * kD_, E4m3Tile<kTransposes_>, 0,
                   (kTransposes_ ? 2 : 0), kN_*(kD_ < 128 ? 64 : 128)> {
  using Tile = typename E4m3Config::ForwardBlock::Tile;
  using Block = typename E4m3Config::ForwardBlock;
  using Params = Sm90E4m3Params;
  using Block::kGroups, Block::kKvBytes;
  static constexpr int kD = kD_, kN = kN_;
  using Softmax = E4m3Softmax;
  static constexpr DType kDType = DType::bfloat16;  // of the outputs
  static constexpr int kTeams = kTeams_;            // without turns, as in sm90/forward.cu
  static constexpr bool kPingPong = kTeams == 1, kTakesTurns = kPingPong, kAddsSums = true;
  // Masks, the options of `general` kernels, sinks, and the skipped blocks of 16-bit types.
  static constexpr bool kMasked = false, kAdded = false, kGeneral = false, kTakesSinks = false;
  static constexpr bool kSendsNextBlock = false, kKeepsKeys = false, kDropsEarly = false;
  static constexpr bool kSkipsBlocks = false, kSkipsTurns = false, kSkipsEnds = false;
  static constexpr bool kFreesQ = false;
  static constexpr bool kTransposes = kTransposes_;
  static constexpr int kConverters = kTransposes ? 2 / kTeams : 0;  // of a team
  static constexpr bool kTakesNext = !kTransposes;
  // A consumer skips tiles of which it has no rows: the other two are quicker then. Full attention
  // of 1,024 rows of 128 columns took 0.93 of the time of tiles of 128 queries; longer rows, which
  // the kernels without kTransposes have, nothing less (H200).
  static constexpr bool kSkipsTiles = kGroups == 3 && kTransposes, kRotates = kSkipsTiles;
  static constexpr int kFewestSkipped = 4;  // blocks of keys
  // Bytes of a row of Q and K, and of a row of the values, in one panel.
  static constexpr int kPanelBytes = kD < 128 ? 64 : 128, kPanels = kD / kPanelBytes;
  static constexpr int kPanelColumns = kPanelBytes, kScoreSteps = kD / 32;
  static constexpr int kKeyPanel = kN % 128 == 0 ? 128 : 64, kKeyPanels = kN / kKeyPanel;
  static constexpr bool kMovesDescriptors = kGroups == 2 && kD == 64;  // as in forward.cu
  // Where values of 256 columns are transposed here, a consumer ends its turn before it adds a
  // block's product with V, so that the other one's products run meanwhile: 0.94 to 0.98 of the
  // time, with fewer columns 1.0 to 1.08 (H200).
  static constexpr bool kEndsTurnEarly = kTransposes && kD > 128;
  // With fewer than 40 the warp that schedules tiles spills, which delays no other; with 160, a few
  // outputs are spilled, and three consumers are still quicker than two.
  static constexpr int kConsumers = kTeams * kGroups;
  static constexpr int kProducerRegisters = kConsumers == 2 ? 40 : kConsumers == 3 ? 32 : 64;
  static constexpr int kConsumerRegisters = kConsumers == 2 ? 232 : kConsumers == 3 ? 160 : 104;

  // As in forward.cu, for 64 columns: 0.93 to 1.01 of the time. With more, ptxas spills more: 0.95
  // to 1.05 of 128, 1.1 to 1.5 of 256 (H200).
  static constexpr bool kLoops = kD == 64 && kPingPong;
  // As in forward.cu, but where ptxas would spill more: 1.02 of the time from 4,096 rows on for 192
  // queries of 128 columns (H200).
  static constexpr int kOut = Block::kBlockBytes, kOutColumns = 64;
  static constexpr bool kStoresRows = kGroups * kD <= 256;
  static constexpr int kSharedBytes =
      kOut + (kStoresRows ? Block::kRows * out_pitch(kOutColumns) : 0);
  static_assert(kN % 64 == 0 && kD % 64 == 0 && kKvBytes % 1024 == 0);

  static TC_DEVICE void describe_tile(Tile& tile, const Params& p, const TilePlace& place) {
    describe<Block::kRows, kN, false>(tile, p, place);
    wait_for_previous_grid();
    if constexpr (!kTransposes) {
      tile.values =
          p.lengths.cu_seqlens_k == nullptr ? 0 : values_place(tile.sequence.k_row, tile.batch, kN);
    }
    tile.unit = p.unit * descale_of(p.q_descale, tile.batch, tile.kv_head) *
                descale_of(p.k_descale, tile.batch, tile.kv_head);
    tile.v_descale = descale_of(p.v_descale, tile.batch, tile.kv_head);
  }

  // The values are transposed before.
  static TC_DEVICE void load_values(const Params& p, const Tile& tile, int block, u32 to,
                                    u32 arrived) {
    int batch = p.lengths.cu_seqlens_k == nullptr ? tile.batch : 0;
#pragma unroll
    for (int panel = 0; panel < kKeyPanels; ++panel) {
      tma_load(to + panel * (kD * kKeyPanel), &p.v, arrived,
               tile.values + block * kN + kKeyPanel * panel, 0, tile.kv_head, batch, 0);
    }
  }
  // The values are transposed here.
  static TC_DEVICE void convert_values(u32 from, u32 to, int half) {
    transpose_values<kPanelBytes, kN, kGroups == 3 ? 2 : 3>(from, to, half);
  }

  static TC_DEVICE void score(float (&s)[kN / 2], u64 q, u64 k, int add) {
    WgmmaE4m3<kN>::run(s, q, k, add);
  }
  static TC_DEVICE void score_part(float (&s)[4], const u32 (&q)[4], u32 k0, u32 k1) {
    mma_e4m3(s, q, k0, k1);
  }
  static TC_DEVICE float out_factor(const Tile& tile, float, float total) {
    return tile.v_descale / total;
  }
};

// ---- consumers ----------------------------------------------------------------------------------

// A block's product with V is added to the outputs in float32: accumulated by wgmma over 16,384
// keys, sums of equal weights and values of one sign lost 27%; over one block nothing is lost.
template <class C>
struct Products : ForwardScores<C> {
  using Base = ForwardScores<C>;
  using Base::shared, Base::step, Base::s, Base::o, Base::v_base, Base::slot, Base::phase;
  float even[32], odd[32];  // a block's product with V: 64 columns, and the next ones
  u32 w[C::kN / 32][4];
  static constexpr int kChunks = C::kD / 64;
  // The next scores are computed while a block's product with V is added, if there are registers
  // for both.
  static constexpr bool kScoresMeanwhile = C::kConsumers == 2 && kChunks <= 2;

  TC_DEVICE Products(const Sm90E4m3Params& params, u32 memory, const typename C::Tile* ring,
                     int own_group)
      : Base(params, memory, ring, own_group) {
    v_base = static_cast<u32>(k_major_descriptor<C::kKeyPanel>(shared + C::kV));
  }

  // Columns 64 * chunk and on of the product of the weights, for the step before the one that is
  // scored next.
  TC_DEVICE void multiply_v(float (&sums)[32], int chunk) {
    u32 v = Base::moved(v_base + slot(step - 1) * (C::kKvBytes >> 4)) +
            chunk * (64 * C::kKeyPanel >> 4);
    if (chunk == 0) barrier_wait(shared + C::kVFull + 8 * slot(step - 1), phase(step - 1));
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < C::kN / 32; ++i) {
      WgmmaE4m3Registers<64>::run(
          sums, w[i],
          Base::template descriptor<C::kKeyPanel>(v, k_major_bytes<C::kKeyPanel, C::kD>(i)), i > 0);
    }
    wgmma_commit();
  }

  // out = out * factor + sums.
  TC_DEVICE void add_to_out(float (&sums)[32], int chunk, const float (&factor)[2]) {
    keep_in_place(sums);
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      float& out = o[32 * chunk + i];
      out = fmaf(out, factor[i / 2 % 2], sums[i]);
    }
  }

  // Multiplies and adds chunk after chunk, in registers that the scores do not need meanwhile.
  template <bool kEndsTurn>
  TC_DEVICE void accumulate_v(const float (&factor)[2]) {
    multiply_v(even, 0);
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      if (chunk + 1 == kChunks) {
        wgmma_wait<0>();
      } else {
        multiply_v(chunk % 2 == 0 ? odd : even, chunk + 1);
        if (kEndsTurn && chunk + 2 == kChunks) Base::end_turn();
        wgmma_wait<1>();
      }
      add_to_out(chunk % 2 == 0 ? even : odd, chunk, factor);
    }
    Base::release(shared + C::kVEmpty + 8 * slot(step - 1));
  }

  TC_DEVICE void multiply(int, const float (&factor)[2]) {
    if constexpr (kScoresMeanwhile) {
      multiply_v(even, 0);
      if constexpr (kChunks == 2) multiply_v(odd, 1);
    } else {
      accumulate_v<C::kEndsTurnEarly>(factor);
    }
    Base::score();
  }
  TC_DEVICE void add_sums(const float (&factor)[2]) {
    if constexpr (kScoresMeanwhile) {
      wgmma_wait<kChunks>();
      add_to_out(even, 0, factor);
      if constexpr (kChunks == 2) {
        wgmma_wait<1>();
        add_to_out(odd, 1, factor);
      }
      Base::release(shared + C::kVEmpty + 8 * slot(step - 1));
    }
  }
  TC_DEVICE void multiply_last(int, const float (&factor)[2]) { accumulate_v<false>(factor); }

  TC_DEVICE void pack() {
#pragma unroll
    for (int i = 0; i < C::kN / 32; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        int at = 16 * i + j / 2 * 8 + j % 2 * 2;
        w[i][j] = pack_e4m3(s[at], s[at + 1], s[at + 4], s[at + 5]);
      }
  }

  TC_DEVICE void begin_out() {
#pragma unroll
    for (int i = 0; i < C::kD / 2; ++i) o[i] = 0.0f;
  }
  TC_DEVICE void scale_out(const float (&)[2]) {}  // the addition of the next sums does
};

template <class C>
using Consumer = ForwardLoop<C, Products>;

extern "C" __global__ void __launch_bounds__(TC_THREADS, 1)
    TC_KERNEL(const __grid_constant__ Sm90E4m3Params p) {
  constexpr int kGroups = TC_TILE_M / 64, kTeams = (TC_THREADS / kWarpgroup - 1) / kGroups;
  using C = E4m3Config<TC_TILE_K, TC_TILE_N, kTeams, kGroups, TC_Q_SLOTS, TC_STAGES, TC_TRANSPOSES>;
  static_assert(kBlockThreads<C> == TC_THREADS && kAllBytes<C> == TC_DYNAMIC_SHARED);
  run_block<C, Consumer>(p);
}

}  // namespace torch_cubin::TC_KERNEL
/* torch_cubin kernels
{"virtual_arch": ["90a"],
 "kernels": [
  {"name": "sm90_e4m3_attention_{t.name}{t.tile.0}x{t.tile.1}x{t.tile.2}", "kind": "forward",
   "dtype": "float8_e4m3fn", "math": "bfloat16", "takes": ["plain", "unmasked", "rule"],
   "tile": "{t.tile}", "block": ["{t.threads}", 1, 1], "stages": "{t.stages}",
   "dynamic_shared": "{t.shared}", "accepted_spill": {"sm_90a": "{t.spill}"},
   "cost": {"k_tile": "{t.k_tile}", "fixed": "{t.fixed}", "teams": "{t.teams}"},
   "transposes_values": "{t.transposes}",
   "defines": {"TC_Q_SLOTS": "{t.q_slots}", "TC_TRANSPOSES": "{t.transposes}"},
   "for": {
    "t": [
     ["name", "tile", "q_slots", "stages", "transposes", "threads", "shared", "spill", "k_tile",
      "fixed", "teams"],
     ["",      [192, 128, 64],  2, 2, 1, 512, 102240,  84, 2200, 5400, null],
     ["",      [128, 128, 64],  2, 2, 1, 384,  84800,  32, 2020, 3400, null],
     ["",      [128, 64, 64],   2, 3, 1, 640, 137056,   0, 2200, 4600,    2],
     ["",      [192, 128, 128], 1, 2, 0, 512,  90928, 324, 2780, 6300, null],
     ["rows_", [192, 128, 128], 1, 2, 1, 512, 123696, 424, 2870, 7000, null],
     ["",      [128, 128, 128], 2, 2, 1, 384, 150336,  52, 2330, 3400, null],
     ["",      [128, 128, 256], 2, 2, 0, 384, 197440,   0, 3170, 4950, null],
     ["rows_", [128, 128, 256], 2, 2, 1, 384, 230208, 108, 3325, 6300, null]]}}]}
*/
