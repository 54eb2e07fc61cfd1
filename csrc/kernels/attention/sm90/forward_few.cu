// Attention forward on Hopper for few queries under batch_invariant(): tiles of 8 queries, with the
// same bits as sm90/forward.cu, whose roles, shared memory and barriers it has
// (sm90/forward_block.cuh).
//
// There one chain of blocks of keys decides how long a decode takes: a block's scores, its weights,
// its product with V. A warpgroup's first warp has all 8 queries here, in the first of each
// thread's two rows, so that it computes half as many weights. And the scores of the next block
// have registers of their own, so that tensor cores compute them, and the product with V, while
// weights are computed.
#include "common/dtype.cuh"
#include "forward_block.cuh"
#include "softmax.cuh"
#include "wgmma_registers.cuh"

namespace torch_cubin::TC_KERNEL {

using namespace sm90;

template <DType kDType_, int kD_, int kN_, int kQSlots_, int kStages_>
struct FewRowsConfig : ForwardBlock<1, kQSlots_, kStages_, (kD_ + 63) / 64 * 64 * 128,
                                    (kD_ + 63) / 64 * kN_ * 128, AttentionTile> {
  using Block = typename FewRowsConfig::ForwardBlock;
  using Params = Sm90AttentionParams;
  static constexpr DType kDType = kDType_;
  static constexpr int kD = kD_, kN = kN_, kRows = 8;
  static constexpr bool kPingPong = false, kMasked = false, kTakesNext = false;
  static constexpr bool kKeepsKeys = true, kSendsNextBlock = false;
  // Panels in shared memory, of 64 columns.
  static constexpr int kPanels = (kD + 63) / 64, kPanelColumns = 64, kPanelBytes = 128;
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = kD > 64 ? 256 : 240;
  static constexpr WgmmaType kType = kDType == DType::bfloat16 ? WgmmaType::bf16 : WgmmaType::f16;
  static constexpr int kNextBlock = 0, kSharedBytes = Block::kBlockBytes;
  static_assert(kN % 16 == 0 && kD % 16 == 0 && kN <= 128);
  static_assert(kStages_ > 1, "two blocks of keys at a time");

  static TC_DEVICE void describe_tile(AttentionTile& tile, const Params& p,
                                      const TilePlace& place) {
    describe<kRows, kN, false>(tile, p, place);
  }
  static TC_DEVICE void load_values(const Params& p, const AttentionTile& tile, int block, u32 to,
                                    u32 arrived) {
    load_rows<FewRowsConfig>(p.v, tile, block, to, arrived);
  }
};

template <class C>
struct FewRowsConsumer : ForwardConsumer<C> {
  using Base = ForwardConsumer<C>;
  using Base::p, Base::shared, Base::tiles, Base::warp, Base::lane, Base::number, Base::step;
  using Base::slot, Base::phase, Base::q_slot, Base::release;
  u32 q_base, k_base, v_base;  // descriptors of slot 0, their low words
  float ahead[C::kN / 2];      // the scores of the next block
  float s[C::kN / 2];          // those of this one, then its weights; the first row's alone
  float o[C::kD / 2];
  u32 w[C::kN / 16][4];
  RunningSoftmax<false, 1> softmax;
  KeyBlocks<C::kRows, false> keys;

  TC_DEVICE FewRowsConsumer(const Sm90AttentionParams& params, u32 memory,
                            const AttentionTile* ring, int own_group)
      : Base(params, memory, ring, own_group) {
    q_base = static_cast<u32>(wgmma_descriptor(shared, 0, 1024));
    k_base = static_cast<u32>(wgmma_descriptor(shared + C::kK, 0, 1024));
    v_base = static_cast<u32>(wgmma_descriptor(shared + C::kV, C::kN * 128, 1024));
  }

  TC_DEVICE const AttentionTile& tile() const { return tiles[number % C::kRing]; }
  TC_DEVICE int row() const { return tile().row + lane / 4; }

  // The high word is the same for all.
  static TC_DEVICE u64 descriptor(u32 low, u32 bytes) {
    return wgmma_descriptor(0, 0, 1024) | (low + (bytes >> 4));
  }

  TC_DEVICE void score(u32 of_step) {
    u32 q = q_base + number % C::kQSlots * (C::kQBytes >> 4);
    u32 k = k_base + slot(of_step) * (C::kKvBytes >> 4);
    barrier_wait(shared + C::kKFull + 8 * slot(of_step), phase(of_step));
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < C::kD / 16; ++i) {
      Wgmma<C::kN>::template run<C::kType, 0, 0>(ahead, descriptor(q, k_major_offset(i, 64)),
                                                 descriptor(k, k_major_offset(i, C::kN)), i > 0);
    }
    wgmma_commit();
  }

  TC_DEVICE void multiply_v(u32 of_step, int add) {
    u32 v = v_base + slot(of_step) * (C::kKvBytes >> 4);
    barrier_wait(shared + C::kVFull + 8 * slot(of_step), phase(of_step));
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < C::kN / 16; ++i) {
      WgmmaRegisters<C::kD>::template run<C::kType, 1>(o, w[i], descriptor(v, i * kMnMajorStep),
                                                       i > 0 ? 1 : add);
    }
    wgmma_commit();
  }

  // Computes the scores of this block in one warp, for the rare case that the softmax needs them
  // again after overwriting them with weights. The sums are those of sm90/forward.cu, 16 keys at a
  // time, since the accumulators of both pending products take most registers.
  TC_DEVICE void score_again() {
    u32 lane = this->lane;
    asm volatile("" : "+r"(lane));  // or addresses are computed, and spilled, before each block
    u32 q = shared + q_slot() * C::kQBytes + lane % 16 * 128;
    u32 k = shared + C::kK + slot(step) * C::kKvBytes + (lane / 16 * 8 + lane % 8) * 128;
    u32 swizzle = lane % 8 * 16;
#pragma unroll
    for (int j = 0; j < C::kN / 16; ++j) {
      float d[2][4] = {};
#pragma unroll 1
      for (int i = 0; i < C::kD / 16; ++i) {
        u32 a[4], b[4];
        ldmatrix<false>(a, q + i / 4 * 8192 + ((i % 4 * 32 + lane / 16 * 16) ^ swizzle));
        ldmatrix<false>(
            b, k + i / 4 * (C::kN * 128) + j * 2048 + ((i % 4 * 32 + lane / 8 % 2 * 16) ^ swizzle));
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if constexpr (C::kDType == DType::bfloat16) {
            mma_bf16(d[half], a, b[2 * half], b[2 * half + 1]);
          } else {
            mma_f16(d[half], a, b[2 * half], b[2 * half + 1]);
          }
        }
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) s[8 * j + i] = d[i / 4][i % 4];
    }
  }

  // Sets scores outside of the band to -inf. Blocks that are entirely visible pay one comparison.
  TC_DEVICE void hide() {
    const Sm90Sequence& q = tile().sequence;
    int first_row = tile().row, last_row = first_row + C::kRows - 1;
    int begin = keys.block * C::kN, end = begin + C::kN - 1;
    bool open = end <= min(first_row + q.last, q.columns - 1) && begin >= last_row + q.first;
    if (__builtin_expect(open, 1)) return;
    int column = begin + lane % 4 * 2;
    u32 seen[2] = {bits_up_to(min(row() + q.last, q.columns - 1) - column) &
                       ~bits_up_to(row() + q.first - 1 - column),
                   ~0u};
    replace_where_clear(s, seen, -kInfinity);
  }

  // This block's scores to weights. Returns whether previous outputs must be multiplied by
  // `factor`.
  TC_DEVICE bool weigh(float (&factor)[2]) {
    bool moves;
#pragma unroll 1
    for (;;) {
      hide();
      if (__builtin_expect(softmax.weigh(s, p.unit, factor, moves), 1)) return moves;
      score_again();
    }
  }

  // The second row's weights are 0.
  TC_DEVICE void pack() {
#pragma unroll
    for (int i = 0; i < C::kN / 16; ++i)
#pragma unroll
      for (int j = 0; j < 4; j += 2) {
        w[i][j] = DTypeTraits<C::kDType>::pack(s[8 * i + 2 * j], s[8 * i + 2 * j + 1]);
        w[i][j + 1] = 0;
      }
  }

  // Writes logsumexp and the outputs, as sm90/forward.cu does.
  TC_DEVICE void store() {
    const AttentionTile& tile = this->tile();
    int i = row();
    float total = quad_sum(softmax.sum[0]);
    float inverse = total == 0.0f ? 0.0f : reciprocal_approx(total);
    if (p.logsumexp != nullptr && lane % 4 == 0 && i < tile.sequence.rows) {
      p.logsumexp[tile.batch * p.logsumexp_stride[0] + tile.head * p.logsumexp_stride[1] +
                  tile.sequence.q_row + i] = (softmax.reference[0] + log2_approx(total)) * kLn2;
    }
    bool odd = lane % 2 != 0;
    int column = lane % 2 * 8 + lane % 4 / 2 * 4;  // of each 16
    u16* to = static_cast<u16*>(p.out) + tile.batch * p.out_stride[0] +
              tile.head * p.out_stride[1] + (tile.sequence.q_row + i) * p.out_stride[2] + column;
#pragma unroll
    for (int a = 0; a < C::kD / 16; ++a) {
      u32 left = pack_out(8 * a, inverse), right = pack_out(8 * a + 4, inverse);
      u32 got = __shfl_xor_sync(~0u, odd ? left : right, 1);
      if (i < tile.sequence.rows && 16 * a + column < p.head_dim_v) {
        *reinterpret_cast<uint2*>(to + 16 * a) = make_uint2(odd ? got : left, odd ? right : got);
      }
    }
  }
  TC_DEVICE u32 pack_out(int at, float inverse) const {
    return DTypeTraits<C::kDType>::pack(o[at] * inverse, o[at + 1] * inverse);
  }

  // The scores in `ahead` to packed weights, while the next block's are computed, and the products
  // with V that were issued before. After the last block its scores are computed once more, and not
  // used: the compiler has to know which products are pending. Returns whether previous outputs
  // must be multiplied by `factor`.
  TC_DEVICE bool next_weights(float (&factor)[2]) {
#pragma unroll
    for (int i = 0; i < C::kN / 2; ++i) s[i] = ahead[i];
    score(step + (keys.is_last() ? 0 : 1));
    factor[0] = factor[1] = 1.0f;
    bool moves = false;
    // By a vote, so that ptxas knows that the warp stays together.
    if (__any_sync(~0u, warp == 0)) moves = weigh(factor);
    wgmma_wait<0>();
    keep_in_place(ahead);
    release(shared + C::kKEmpty + 8 * slot(step));
    ++step;
    return moves;
  }

  TC_DEVICE void run() {
#pragma unroll 1
    for (;; ++number) {
      barrier_wait(Base::q_full(), Base::q_phase());
      if (tile().blocks == 0) return;
      keys = KeyBlocks<C::kRows, false>(p, tile());
      softmax.reset();
      score(step);
      wgmma_wait<0>();
      keep_in_place(ahead);
      float factor[2];
      next_weights(factor);
      pack();
      int add = 0;
#pragma unroll 1
      while (!keys.is_last()) {
        keys.next();
        multiply_v(step - 1, add);
        add = 1;
        bool moves = next_weights(factor);
        keep_in_place(o);
        release(shared + C::kVEmpty + 8 * slot(step - 2));
        if (__builtin_expect(moves, 0)) {
#pragma unroll
          for (int i = 0; i < C::kD / 2; ++i) o[i] *= factor[0];
        }
        pack();
      }
      multiply_v(step - 1, add);
      wgmma_wait<0>();
      keep_in_place(o);
      release(shared + C::kVEmpty + 8 * slot(step - 1));
      release(shared + C::kQEmpty + 8 * q_slot());
      if (warp == 0) store();
      __syncwarp();
    }
  }
};

extern "C" __global__ void __launch_bounds__(TC_THREADS, 1)
    TC_KERNEL(const __grid_constant__ Sm90AttentionParams p) {
  using C = FewRowsConfig<DType::TC_DTYPE, TC_TILE_K, TC_TILE_N, TC_Q_SLOTS, TC_STAGES>;
  static_assert(C::kRows == TC_TILE_M);
  static_assert(C::kThreads == TC_THREADS && C::kSharedBytes == TC_DYNAMIC_SHARED);
  run_block<C, FewRowsConsumer>(p);
}

}  // namespace torch_cubin::TC_KERNEL
/* torch_cubin kernels
{"virtual_arch": ["90a"],
 "defaults": {"archs": ["sm_90a"], "alignment": 16, "takes": ["plain"]},
 "kernels": [
  {"name": "sm90_attention_{d.short}_{t.name}", "kind": "sm90",
   "dtype": "{d.dtype}", "math": "{d.dtype}", "layout": "any",
   "tile": "{t.tile}", "block": [256, 1, 1], "dynamic_shared": "{t.shared}",
   "stages": "{t.stages}", "cost": "{t.cost}",
   "defines": {"TC_DTYPE": "{d.dtype}", "TC_Q_SLOTS": 2},
   "for": {
    "d": [{"short": "bf16", "dtype": "bfloat16"}, {"short": "f16", "dtype": "float16"}],
    "t": [
     {"name": "8x128x64", "tile": [8, 128, 64], "stages": 4, "shared": 148224,
      "cost": {"k_tile": 1300, "fixed": 1930}},
     {"name": "8x128x128", "tile": [8, 128, 128], "stages": 3, "shared": 230112,
      "cost": {"k_tile": 1700, "fixed": 3960}}]}}]}
*/
