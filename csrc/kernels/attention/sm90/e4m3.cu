// Attention forward on Hopper for queries, keys and values of e4m3: sm90/forward.cu in bytes.
//
// The roles of the warps and the barriers are those of sm90/forward_block.cuh. The differences to
// sm90/forward.cu:
//   - wgmma needs both 8-bit operands K-major, so values come as (column, key):
//     sm90/e4m3_values.cu transposes them before, in the order of keys in which weights lie in
//     registers. In kernels for fewer keys (TC_TRANSPOSES) two warps of the producers do so in
//     shared memory (sm90/e4m3_values.cuh), for each tile of queries anew: that saves 20 us for 32
//     MB, and takes 5% longer for each block of keys.
//   - Weights become e4m3, whose range is small: sm90/e4m3_softmax.cuh.
//   - The factors q_descale, k_descale and v_descale are read by the warp that schedules the tiles:
//     the scores' go into the softmax's unit, the values' into the division by the row's sum.
//   - wgmma's sums of e4m3 have some 14 bits (common/wgmma_e4m3.cuh), so a block's product with V
//     is added to the outputs in float32, in the registers of the scores: a consumer multiplies by
//     V, then scores the next block, and computes weights from the scores while the others
//     multiply. They take turns.
//
// The sums of weights, and so the logsumexp, are float32. The file is longer than files should be:
// two loops share the steps of one warpgroup, and their registers.
#include "common/dtype.cuh"
#include "common/wgmma_e4m3.cuh"
#include "e4m3_layout.cuh"
#include "e4m3_params.h"
#include "e4m3_softmax.cuh"
#include "e4m3_values.cuh"
#include "forward_block.cuh"

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

template <int kD_, int kN_, int kGroups_, int kQSlots_, int kStages_, bool kTransposes_>
struct E4m3Config
    : ForwardBlock<kGroups_, kQSlots_, kStages_, 64 * kD_, kN_ * kD_, E4m3Tile<kTransposes_>, 0,
                   (kTransposes_ ? 2 : 0), kN_*(kD_ < 128 ? 64 : 128)> {
  using Tile = typename E4m3Config::ForwardBlock::Tile;
  using Block = typename E4m3Config::ForwardBlock;
  using Params = Sm90E4m3Params;
  using Block::kGroups, Block::kKvBytes;
  static constexpr int kD = kD_, kN = kN_;
  static constexpr bool kPingPong = true;
  static constexpr bool kMasked = false, kSendsNextBlock = false, kKeepsKeys = false;
  static constexpr bool kTransposes = kTransposes_;
  static constexpr bool kTakesNext = !kTransposes;
  // A consumer skips tiles of which it has no rows: the other two are quicker then. Full attention
  // of 1,024 rows of 128 columns took 0.93 of the time of tiles of 128 queries; longer rows, which
  // the kernels without kTransposes have, nothing less (H200).
  static constexpr bool kSkipsTiles = kGroups == 3 && kTransposes, kRotates = kSkipsTiles;
  static constexpr int kFewestSkipped = 4;  // blocks of keys
  // Bytes of a row of Q and K, and of a row of the values, in one panel.
  static constexpr int kPanelBytes = kD < 128 ? 64 : 128, kPanels = kD / kPanelBytes;
  static constexpr int kPanelColumns = kPanelBytes;
  static constexpr int kKeyPanel = kN % 128 == 0 ? 128 : 64, kKeyPanels = kN / kKeyPanel;
  static constexpr bool kMovesDescriptors = kGroups == 2 && kD == 64;  // as in forward.cu
  // Where values of 256 columns are transposed here, a consumer ends its turn before it adds a
  // block's product with V, so that the other one's products run meanwhile: 0.94 to 0.98 of the
  // time, with fewer columns 1.0 to 1.08 (H200).
  static constexpr bool kEndsTurnEarly = kTransposes && kD > 128;
  // With fewer than 40 the warp that schedules tiles spills, which delays no other; with 160, a few
  // outputs are spilled, and three consumers are still quicker than two.
  static constexpr int kProducerRegisters = kGroups == 3 ? 32 : 40;
  static constexpr int kConsumerRegisters = kGroups == 3 ? 160 : 232;

  // As in forward.cu, for 64 columns: 0.93 to 1.01 of the time. With more, ptxas spills more: 0.95
  // to 1.05 of 128, 1.1 to 1.5 of 256 (H200).
  static constexpr bool kLoops = kD == 64;
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
};

// ---- consumers ----------------------------------------------------------------------------------

template <class C>
struct Consumer : ForwardConsumer<C> {
  using Base = ForwardConsumer<C>;
  using Base::p, Base::shared, Base::tiles, Base::group, Base::warp, Base::lane, Base::number,
      Base::step;
  using Base::slot, Base::phase, Base::q_slot, Base::first_row, Base::thread_row, Base::release,
      Base::moved;
  using Tile = typename C::Tile;
  u32 q_base, k_base, v_base;  // descriptors of slot 0, their low words
  float s[C::kN / 2], o[C::kD / 2];
  float even[32], odd[32];  // a block's product with V: 64 columns, and the next ones
  u32 w[C::kN / 32][4];
  E4m3Softmax softmax;
  float unit;        // of this tile, a positive normal number
  float multiplier;  // factor of the scores if the tile's unit cannot be used
  bool multiplies;
  KeyBlocks<C::kRows, false> keys;  // of this tile; its block is scored next
  int open_first, open_last;        // blocks that this warpgroup sees entirely

  TC_DEVICE Consumer(const Sm90E4m3Params& params, u32 memory, const Tile* ring, int own_group)
      : Base(params, memory, ring, own_group) {
    q_base = static_cast<u32>(k_major_descriptor<C::kPanelBytes>(shared + group * C::kQBytes));
    k_base = static_cast<u32>(k_major_descriptor<C::kPanelBytes>(shared + C::kK));
    v_base = static_cast<u32>(k_major_descriptor<C::kKeyPanel>(shared + C::kV));
  }

  // False after the last tile.
  TC_DEVICE bool begin() {
    barrier_wait(Base::q_full(), Base::q_phase());
    const Tile& tile = tiles[number % C::kRing];
    int row = first_row(tile);
    if (tile.blocks == 0) return false;
    if (C::kSkipsTiles && row >= tile.sequence.rows && tile.blocks >= C::kFewestSkipped) {
      return false;
    }
    keys = KeyBlocks<C::kRows, false>(p, tile);
    const Sm90Sequence& q = tile.sequence;
    open_last = (min(row + q.last, q.columns - 1) + 1) / C::kN - 1;
    open_first = (max(row + 63 + q.first, 0) + C::kN - 1) / C::kN;
    multiplier = tile.unit;
    multiplies = !(multiplier >= 1.1754944e-38f && multiplier < kInfinity);
    unit = multiplies ? 1.0f : multiplier;
    return true;
  }

  // Takes part in the barriers and turns of tiles without rows for this warpgroup. False after the
  // last tile.
  TC_DEVICE bool skip_tiles() {
#pragma unroll 1
    while (!begin()) {
      const Tile& tile = tiles[number % C::kRing];
      if (!C::kSkipsTiles || tile.blocks == 0) return false;
      __syncwarp();
      release(shared + C::kQEmpty + 8 * q_slot());
#pragma unroll 1
      for (int left = tile.blocks; left > 0; --left, ++step) {
        barrier_wait(shared + C::kKFull + 8 * slot(step), phase(step));
        barrier_wait(shared + C::kVFull + 8 * slot(step), phase(step));
        __syncwarp();
        release(shared + C::kKEmpty + 8 * slot(step));
        release(shared + C::kVEmpty + 8 * slot(step));
        Base::begin_turn();
        Base::end_turn();
      }
      ++number;
    }
    return true;
  }

  template <int kRowBytes>
  static TC_DEVICE u64 descriptor(u32 low, int bytes) {
    return k_major_descriptor<kRowBytes>(0) | (low + (bytes >> 4));
  }

  TC_DEVICE void score() {
    u32 q = moved(q_base + number % C::kQSlots * (C::kGroups * C::kQBytes >> 4));
    u32 k = moved(k_base + slot(step) * (C::kKvBytes >> 4));
    barrier_wait(shared + C::kKFull + 8 * slot(step), phase(step));
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < C::kD / 32; ++i) {
      WgmmaE4m3<C::kN>::run(s, descriptor<C::kPanelBytes>(q, k_major_bytes<C::kPanelBytes, 64>(i)),
                            descriptor<C::kPanelBytes>(k, k_major_bytes<C::kPanelBytes, C::kN>(i)),
                            i > 0);
    }
    wgmma_commit();
  }

  // Columns 64 * chunk and on of the product of the weights, for the step before the one that is
  // scored next.
  TC_DEVICE void multiply_v(float (&sums)[32], int chunk) {
    u32 v = moved(v_base + slot(step - 1) * (C::kKvBytes >> 4)) + chunk * (64 * C::kKeyPanel >> 4);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < C::kN / 32; ++i) {
      WgmmaE4m3Registers<64>::run(
          sums, w[i], descriptor<C::kKeyPanel>(v, k_major_bytes<C::kKeyPanel, C::kD>(i)), i > 0);
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

  // A block's product with V, in a turn that has begun: chunk after chunk in registers that the
  // scores do not need meanwhile. Accumulated by wgmma over 16,384 keys, sums of equal weights and
  // values of one sign lost 27%; over one block nothing is lost.
  TC_DEVICE void accumulate_v(const float (&factor)[2]) {
    constexpr int kChunks = C::kD / 64;
    barrier_wait(shared + C::kVFull + 8 * slot(step - 1), phase(step - 1));
    multiply_v(even, 0);
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      if (chunk + 1 == kChunks) {
        wgmma_wait<0>();
      } else {
        multiply_v(chunk % 2 == 0 ? odd : even, chunk + 1);
        if (C::kEndsTurnEarly && chunk + 2 == kChunks) Base::end_turn();
        wgmma_wait<1>();
      }
      add_to_out(chunk % 2 == 0 ? even : odd, chunk, factor);
    }
    release(shared + C::kVEmpty + 8 * slot(step - 1));
  }

  // The next scores are computed while a block's product with V is added, if there are registers
  // for both.
  static constexpr bool kScoresMeanwhile = C::kGroups == 2 && C::kD <= 128;

  // accumulate_v() and score(), all products issued before the first sums are added. Ends the turn.
  TC_DEVICE void accumulate_v_and_score(const float (&factor)[2]) {
    constexpr int kChunks = C::kD / 64;
    static_assert(kChunks <= 2);
    barrier_wait(shared + C::kVFull + 8 * slot(step - 1), phase(step - 1));
    multiply_v(even, 0);
    if constexpr (kChunks == 2) multiply_v(odd, 1);
    score();
    Base::end_turn();
    wgmma_wait<kChunks>();
    add_to_out(even, 0, factor);
    if constexpr (kChunks == 2) {
      wgmma_wait<1>();
      add_to_out(odd, 1, factor);
    }
    release(shared + C::kVEmpty + 8 * slot(step - 1));
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
    for (int i = 0; i < C::kD / 32; ++i) {
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
          mma_e4m3(d, a, b[2 * half], b[2 * half + 1]);
        }
      }
    }
  }

  // A unit that is not a positive normal number does not keep the order of the scores, and -inf
  // times 0 is not -inf.
  TC_DEVICE void change() {
    if (__builtin_expect(!multiplies, 1)) return;
#pragma unroll
    for (int i = 0; i < C::kN / 2; ++i) s[i] *= multiplier;
  }

  // Whether this warpgroup sees all of the block.
  TC_DEVICE bool is_open() const { return keys.block >= open_first && keys.block <= open_last; }

  // Sets scores outside of the band to -inf. Blocks that are entirely visible pay one comparison.
  TC_DEVICE void hide() {
    if (__builtin_expect(is_open(), 1)) return;
    const AttentionTile& tile = tiles[number % C::kRing];
    const Sm90Sequence& q = tile.sequence;
#pragma unroll
    for (int part = 0; part < C::kN / 64; ++part) {
      int column = keys.block * C::kN + 64 * part + lane % 4 * 2;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        int row = thread_row(tile) + 8 * h;
        u32 seen = bits_up_to(min(row + q.last, q.columns - 1) - column) &
                   ~bits_up_to(row + q.first - 1 - column);
#pragma unroll
        for (int i = 0; i < 16; ++i) {
          if (!(seen >> i & 1)) s[32 * part + i / 2 * 4 + 2 * h + i % 2] = -kInfinity;
        }
      }
    }
  }

  // This block's scores to weights.
  TC_DEVICE void weigh(float (&factor)[2]) {
#pragma unroll 1
    for (;;) {
      change();
      hide();
      if (__builtin_expect(softmax.weigh(s, unit, factor, is_open()), 1)) break;
      score_again();
    }
    if (__builtin_expect(!is_open(), 0)) softmax.look_again();
  }

  TC_DEVICE void pack() {
#pragma unroll
    for (int i = 0; i < C::kN / 32; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        int at = 16 * i + j / 2 * 8 + j % 2 * 2;
        w[i][j] = pack_e4m3(s[at], s[at + 1], s[at + 4], s[at + 5]);
      }
  }

  // Ends a tile's sums: writes logsumexp, and returns the factor of the outputs.
  TC_DEVICE void finish_sums(const Tile& tile, float (&inverse)[2]) {
    auto out = p.logsumexp + tile.batch * p.logsumexp_stride[0] +
               tile.head * p.logsumexp_stride[1] + tile.sequence.q_row;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      int i = thread_row(tile) + 8 * h;
      float total = quad_sum(softmax.sum[h]);
      inverse[h] = total == 0.0f ? 0.0f : tile.v_descale / total;
      if (p.logsumexp != nullptr && lane % 4 == 0 && i < tile.sequence.rows) {
        out[i] = total == 0.0f ? -kInfinity : (softmax.reference[h] + log2_approx(total)) * kLn2;
      }
    }
  }

  TC_DEVICE void store(const AttentionTile& tile, const float (&inverse)[2]) {
    if constexpr (C::kStoresRows) {
      return Base::store_rows(tile, [&](int at) {
        float factor = inverse[at / 2 % 2];
        return pack_bf16(o[at] * factor, o[at + 1] * factor);
      });
    }
    int t = lane % 4;
    auto out = static_cast<u16*>(p.out) + tile.batch * p.out_stride[0] +
               tile.head * p.out_stride[1] + tile.sequence.q_row * p.out_stride[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      int i = thread_row(tile) + 8 * h;
      u16* to = out + i * p.out_stride[2] + 8 * t;
#pragma unroll
      for (int a = 0; a < C::kD / 32; ++a) {
        u32 word[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          int at = 16 * a + 4 * j + 2 * h;
          word[j] = pack_bf16(o[at] * inverse[h], o[at + 1] * inverse[h]);
        }
        quad_transpose(word);
        if (i < tile.sequence.rows && 32 * a + 8 * t < p.head_dim_v) {
          *reinterpret_cast<uint4*>(to + 32 * a) = make_uint4(word[0], word[1], word[2], word[3]);
        }
      }
    }
  }

  TC_DEVICE void clear_out() {
#pragma unroll
    for (int i = 0; i < C::kD / 2; ++i) o[i] = 0.0f;
  }

  // Turns a step's scores, once complete, into weights in registers. `factor`: what previous
  // outputs must be multiplied by, or 1.
  TC_DEVICE void finish_step(float (&factor)[2]) {
    wgmma_wait<0>();
    keep_in_place(s);
    weigh(factor);
    end_step();
  }

  TC_DEVICE void end_step() {
    release(shared + C::kKEmpty + 8 * slot(step));
    if (keys.is_last()) release(shared + C::kQEmpty + 8 * q_slot());
    ++step;
    pack();
  }

  // The previous step's product with V, and the next scores, in a turn.
  TC_DEVICE void begin_step(const float (&factor)[2]) {
    Base::begin_turn();
    if constexpr (kScoresMeanwhile) {
      accumulate_v_and_score(factor);
    } else {
      accumulate_v(factor);
      score();
      if (!C::kEndsTurnEarly) Base::end_turn();
    }
  }

  // kLoops: steps of the next blocks that hide nothing, in a loop that jumps over no code, as
  // run_loops() of forward.cu; not after a block with hidden keys, which wants a maximum.
  TC_DEVICE void run_loops(float (&factor)[2]) {
    float part[2][2];
#pragma unroll 1
    for (;;) {
      if (multiplies || !is_open()) return;
      int left = __shfl_sync(~0u, keys.block - max(open_first, keys.last()), 0);
      if (left <= 0 || run_loop(left, part, factor)) return;
      bool looked = softmax.looks();
      if (looked || !softmax.weigh_large(s, part, factor)) {
        if (!looked) score_again();
        weigh(factor);
      }
      end_step();
    }
  }

  // Returns false in the middle of a step for which a maximum is wanted, or whose weights are not
  // small.
  TC_DEVICE bool run_loop(int left, float (&part)[2][2], float (&factor)[2]) {
#pragma unroll 1
    for (;;) {
      keys.next();
      begin_step(factor);
      factor[0] = factor[1] = 1.0f;
      wgmma_wait<0>();
      keep_in_place(s);
      if (softmax.looks() || !softmax.weigh_small(s, unit, part)) return false;
      end_step();
      if (--left == 0) return true;
    }
  }

  TC_DEVICE void run() {
    Base::open_turns();
#pragma unroll 1
    while (skip_tiles()) {
      float factor[2] = {1.0f, 1.0f}, inverse[2];
      clear_out();
      softmax.reset();
      score();
      finish_step(factor);
#pragma unroll 1
      for (;;) {
        bool fresh = keys.is_last();
        if (fresh) {
          finish_sums(tiles[number % C::kRing], inverse);
          ++number;
          if (!begin()) break;
          softmax.reset();
        } else {
          keys.next();
        }
        begin_step(factor);
        if (__builtin_expect(fresh, 0)) {
          store(tiles[(number - 1) % C::kRing], inverse);
          clear_out();
        }
        factor[0] = factor[1] = 1.0f;
        finish_step(factor);
        if constexpr (C::kLoops) run_loops(factor);
      }
      if (C::kEndsTurnEarly || C::kSkipsTiles) Base::begin_turn();
      accumulate_v(factor);
      if (C::kSkipsTiles && !C::kEndsTurnEarly) Base::end_turn();
      store(tiles[(number - 1) % C::kRing], inverse);
      if (!C::kSkipsTiles) break;
      __syncwarp();
    }
    Base::close_turns();
  }
};

extern "C" __global__ void __launch_bounds__(TC_THREADS, 1)
    TC_KERNEL(const __grid_constant__ Sm90E4m3Params p) {
  using C = E4m3Config<TC_TILE_K, TC_TILE_N, TC_TILE_M / 64, TC_Q_SLOTS, TC_STAGES, TC_TRANSPOSES>;
  static_assert(C::kThreads == TC_THREADS && C::kSharedBytes == TC_DYNAMIC_SHARED);
  run_block<C, Consumer>(p);
}

}  // namespace torch_cubin::TC_KERNEL
/* torch_cubin kernels
{"virtual_arch": ["90a"],
 "kernels": [
  {"name": "sm90_e4m3_attention_{t.name}{t.tile.0}x{t.tile.1}x{t.tile.2}", "kind": "forward",
   "dtype": "float8_e4m3fn", "math": "bfloat16", "takes": ["plain", "unmasked", "rule"],
   "tile": "{t.tile}", "block": ["{t.threads}", 1, 1], "stages": 2, "dynamic_shared": "{t.shared}",
   "accepted_spill": {"sm_90a": "{t.spill}"},
   "cost": {"k_tile": "{t.k_tile}", "fixed": "{t.fixed}"}, "transposes_values": "{t.transposes}",
   "defines": {"TC_Q_SLOTS": "{t.q_slots}", "TC_TRANSPOSES": "{t.transposes}"},
   "for": {
    "t": [
     ["name", "tile", "q_slots", "transposes", "threads", "shared", "spill", "k_tile", "fixed"],
     ["",      [192, 128, 64],  2, 0, 512,  85856, 144, 2300, 2800],
     ["",      [128, 128, 64],  2, 1, 384,  84800,  40, 2050, 2300],
     ["",      [192, 128, 128], 1, 0, 512,  90928, 360, 2780, 6300],
     ["rows_", [192, 128, 128], 1, 1, 512, 123696, 464, 2870, 7000],
     ["",      [128, 128, 128], 2, 1, 384, 150336,  52, 2330, 3400],
     ["",      [128, 128, 256], 2, 0, 384, 197440,  24, 3170, 4950],
     ["rows_", [128, 128, 256], 2, 1, 384, 230208, 132, 3325, 6300]]}}]}
*/
