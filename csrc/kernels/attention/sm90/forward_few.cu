// Attention forward on Hopper for few queries under batch_invariant(): tiles of 8 queries, with the
// same bits as sm90/forward.cu, whose shared memory, barriers and loads it has
// (sm90/forward_block.cuh).
//
// There one chain of blocks of keys decides how long a decode takes: a block's scores, its weights,
// its product with V. Only the sums with V have to be one chain. So here four warps compute
// weights, each of every fourth block, and four others multiply them by V, each for a quarter of
// its columns. All products are mma.sync's, whose sums have the bits of wgmma's.
//
// Weights need the reference of their rows, which rarely moves after the first block
// (sm90/softmax.cuh). A warp computes them with the reference that it knows, and then takes its
// turn: if an earlier block has moved a reference since, it computes them again from its scores.
//
//   shared memory, behind that of forward_block.cuh:
//     weights: a slot for each scoring warp | the references, and how often they moved | barriers
//   full barriers:  the arrival of the scoring warp
//   empty barriers: one arrival of each multiplying warp
//   turn barriers:  the arrival of the warp that has the block before
//   start barriers: the arrival of the warp that has a tile's first block
#include "common/dtype.cuh"
#include "common/mma.cuh"
#include "forward_block.cuh"
#include "softmax.cuh"

namespace torch_cubin::TC_KERNEL {

using namespace sm90;

constexpr int kMultipliers = 4;  // warps
// Scoring warps, of a warpgroup: one for each slot of K, so that no other warp waits for a slot's
// next phase while it waits for this one.
constexpr int kScorers = TC_STAGES;
static_assert(kScorers <= 4);

template <DType kDType_, int kD_, int kN_, int kQSlots_, int kStages_>
struct FewRowsConfig : ForwardBlock<1, kQSlots_, kStages_, (kD_ + 63) / 64 * 64 * 128,
                                    (kD_ + 63) / 64 * kN_ * 128, AttentionTile> {
  using Block = typename FewRowsConfig::ForwardBlock;
  using Params = Sm90AttentionParams;
  static constexpr DType kDType = kDType_;
  static constexpr int kD = kD_, kN = kN_, kRows = 8, kThreads = 3 * kWarpgroup;
  static constexpr bool kPingPong = false, kMasked = false, kTakesNext = false;
  // Multipliers lag behind scorers, so that the entry of the tile before may be overwritten.
  static constexpr bool kKeepsKeys = false, kSendsNextBlock = false;
  // Panels in shared memory, of 64 columns.
  static constexpr int kPanels = (kD + 63) / 64, kPanelColumns = 64, kPanelBytes = 128;
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
  static constexpr int kNextBlock = 0;
  // A slot: the weights of 32 keys after the other, 16 bytes a lane; then for each lane their sum,
  // the factor of all earlier sums, and the weights' reference.
  static constexpr int kWeights = (Block::kBlockBytes + 15) / 16 * 16, kWeightsBytes = kN * 16;
  static constexpr int kSlotBytes = kWeightsBytes + 32 * 16;
  static constexpr int kReferences = kWeights + kScorers * kSlotBytes;  // 16 bytes a lane
  static constexpr int kMoves = kReferences + 32 * 16;
  static constexpr int kFull = kMoves + 16, kEmpty = kFull + 8 * kScorers;
  static constexpr int kTurn = kEmpty + 8 * kScorers, kStart = kTurn + 8 * kScorers;
  static constexpr int kSharedBytes = kStart + 8 * kScorers;
  static_assert(kN % 32 == 0 && kD % 64 == 0);

  static TC_DEVICE void describe_tile(AttentionTile& tile, const Params& p,
                                      const TilePlace& place) {
    describe<kRows, kN, false>(tile, p, place);
  }
  static TC_DEVICE void load_values(const Params& p, const AttentionTile& tile, int block, u32 to,
                                    u32 arrived) {
    load_rows<FewRowsConfig>(p.v, tile, block, to, arrived);
  }
};

// Each lane has row lane / 4 of the tile, and of 8 keys or columns those of lane % 4.
template <class C>
struct FewRowsConsumer : ForwardConsumer<C> {
  using Base = ForwardConsumer<C>;
  using Base::p, Base::shared, Base::tiles, Base::warp, Base::lane, Base::number, Base::step;
  using Base::slot, Base::phase;
  static constexpr int kColumns = C::kD / kMultipliers;  // of V, of a multiplying warp
  const bool scores;
  const u32 swizzle;

  TC_DEVICE FewRowsConsumer(const Sm90AttentionParams& params, u32 memory,
                            const AttentionTile* ring, int own_group)
      : Base(params, memory, ring, 0), scores(own_group == 0), swizzle(lane % 8 * 16) {}

  TC_DEVICE const AttentionTile& tile() const { return tiles[number % C::kRing]; }
  TC_DEVICE int row() const { return tile().row + lane / 4; }

  // Of a block of keys: the warp that scores it, and the parity of its slot's phases.
  static TC_DEVICE u32 scorer(u32 of_step) { return of_step % kScorers; }
  static TC_DEVICE u32 parity(u32 of_step) { return of_step / kScorers % 2; }
  TC_DEVICE u32 weights(u32 of_step) const {
    return shared + C::kWeights + scorer(of_step) * C::kSlotBytes + lane * 16;
  }

  // For all reads of the warp.
  TC_DEVICE void release_all(u32 barrier, int arrivals) {
    __syncwarp();
    if (lane < arrivals) barrier_arrive(barrier);
  }

  static TC_DEVICE void multiply(float (&sum)[4], u32 low, u32 high, u32 b0, u32 b1) {
    const u32 a[4] = {low, 0, high, 0};  // without rows 8 to 15
    mma<C::kDType>(sum, a, b0, b1);
  }

  // ---- scorers ----------------------------------------------------------------------------------

  using Scores = float[C::kN / 2];  // in wgmma's layout, of the first row alone
  using Queries = u32[C::kD / 16][2];

  TC_DEVICE void load_queries(Queries& q) const {
    const u32 from = shared + this->q_slot() * C::kQBytes + lane % 16 * 128;
#pragma unroll
    for (int i = 0; i < C::kD / 16; ++i) {
      u32 a[4];
      ldmatrix<false>(a, from + i / 4 * 8192 + ((i % 4 * 32 + lane / 16 * 16) ^ swizzle));
      q[i][0] = a[0];
      q[i][1] = a[2];
    }
  }

  TC_DEVICE void score(Scores& s, const Queries& q, u32 of_step) {
    const u32 k = shared + C::kK + slot(of_step) * C::kKvBytes + (lane / 16 * 8 + lane % 8) * 128;
    barrier_wait(shared + C::kKFull + 8 * slot(of_step), phase(of_step));
#pragma unroll
    for (int j = 0; j < C::kN / 16; ++j) {
      float d[2][4] = {};
#pragma unroll
      for (int i = 0; i < C::kD / 16; ++i) {
        u32 b[4];
        ldmatrix<false>(
            b, k + i / 4 * (C::kN * 128) + j * 2048 + ((i % 4 * 32 + lane / 8 % 2 * 16) ^ swizzle));
        multiply(d[0], q[i][0], q[i][1], b[0], b[1]);
        multiply(d[1], q[i][0], q[i][1], b[2], b[3]);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) s[8 * j + i / 2 * 4 + i % 2] = d[i / 2][i % 2];
    }
    release_all(shared + C::kKEmpty + 8 * slot(of_step), 4);
  }

  // Sets scores outside of the band to -inf. Blocks that are entirely visible pay one comparison.
  TC_DEVICE void hide(Scores& s, int block) const {
    const Sm90Sequence& q = tile().sequence;
    int first_row = tile().row, last_row = first_row + C::kRows - 1;
    int begin = block * C::kN, end = begin + C::kN - 1;
    bool open = end <= min(first_row + q.last, q.columns - 1) && begin >= last_row + q.first;
    if (__builtin_expect(open, 1)) return;
    int column = begin + lane % 4 * 2;
    u32 seen[2] = {bits_up_to(min(row() + q.last, q.columns - 1) - column) &
                       ~bits_up_to(row() + q.first - 1 - column),
                   ~0u};
    replace_where_clear(s, seen, -kInfinity);
  }

  // Scores to weights, as sm90/forward.cu. Returns whether a reference moved.
  TC_DEVICE bool weigh(RunningSoftmax<false, 1>& softmax, Scores& w, float& factor,
                       const Scores& s) const {
    float factors[2] = {1.0f, 1.0f};
    bool moves;
    softmax.sum[0] = softmax.sum[1] = 0.0f;
#pragma unroll 1
    for (;;) {
#pragma unroll
      for (int i = 0; i < C::kN / 2; ++i) w[i] = s[i];
      if (__builtin_expect(softmax.weigh(w, p.unit, factors, moves), 1)) break;
    }
    factor = factors[0];
    return moves;
  }

  TC_DEVICE u32 count_moves() const {
    u32 moves;
    load_shared(moves, shared + C::kMoves);
    return moves;
  }
  TC_DEVICE void read_references(RunningSoftmax<false, 1>& softmax) const {
    u32 words[4];
    load_shared(words, shared + C::kReferences + lane * 16);
    softmax.reference[0] = __uint_as_float(words[0]);
    softmax.state = words[1];
    softmax.looks = words[2] != 0;
  }
  TC_DEVICE void write_references(const RunningSoftmax<false, 1>& softmax, u32 moves) const {
    const u32 words[4] = {__float_as_uint(softmax.reference[0]), softmax.state, softmax.looks, 0};
    store_shared(shared + C::kReferences + lane * 16, words);
    __threadfence_block();
    __syncwarp();
    if (lane == 0) store_shared(shared + C::kMoves, moves);
  }

  TC_DEVICE void write_weights(u32 of_step, const Scores& w, float sum, float factor,
                               float reference) {
    const u32 to = weights(of_step);
    barrier_wait(shared + C::kEmpty + 8 * warp, parity(of_step) ^ 1);
#pragma unroll
    for (int i = 0; i < C::kN / 32; ++i) {
      u32 packed[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        packed[j] = DTypeTraits<C::kDType>::pack(w[16 * i + 4 * j], w[16 * i + 4 * j + 1]);
      }
      store_shared(to + i * 512, packed);
    }
    const float note[4] = {sum, factor, reference, 0.0f};
    store_shared(to + C::kWeightsBytes, note);
  }

  // Lets other scorers weigh the blocks behind a tile's first one, which has found the references.
  TC_DEVICE void start_others(int blocks) const {
    const int others = min(blocks, kScorers) - 1;
    if (lane < others) barrier_arrive(shared + C::kStart + 8 * scorer(warp + 1 + lane));
  }

  TC_DEVICE void score_keys() {
    RunningSoftmax<false, 1> softmax;
    u32 known = 0;   // how often references had moved when `softmax` was read
    u32 starts = 0;  // waits for a tile's first block
#pragma unroll 1
    for (;; ++number) {
      barrier_wait(Base::q_full(), Base::q_phase());
      const int blocks = tile().blocks, last_block = tile().last_block;
      if (blocks == 0) return;
      Queries q;
      load_queries(q);
      bool is_of_tile = false;  // whether `softmax` is
#pragma unroll 1
      for (u32 i = (warp + kScorers - scorer(step)) % kScorers; static_cast<int>(i) < blocks;
           i += kScorers) {
        const u32 own = step + i;
        Scores s, w;
        float factor;
        score(s, q, own);
        hide(s, last_block - static_cast<int>(i));
        if (i == 0) {
          softmax.reset();
        } else if (!is_of_tile) {
          barrier_wait(shared + C::kStart + 8 * warp, starts++ % 2);
          known = count_moves();
          __threadfence_block();
          read_references(softmax);
        }
        is_of_tile = true;
        bool moves = weigh(softmax, w, factor, s);
        barrier_wait(shared + C::kTurn + 8 * warp, parity(own));
        const u32 now = count_moves();
        if (i > 0 && __any_sync(~0u, now != known)) {
          read_references(softmax);
          moves = weigh(softmax, w, factor, s);
        }
        known = now + (moves ? 1 : 0);
        if (moves) write_references(softmax, known);
        write_weights(own, w, softmax.sum[0], factor, softmax.reference[0]);
        __syncwarp();
        if (i == 0) start_others(blocks);
        if (lane == 0) {
          barrier_arrive(shared + C::kFull + 8 * warp);
          barrier_arrive(shared + C::kTurn + 8 * scorer(own + 1));
        }
      }
      step += blocks;
      // The barrier also counts warps of the warpgroup that score nothing.
      release_all(shared + C::kQEmpty + 8 * this->q_slot(), warp == 0 ? 5 - kScorers : 1);
    }
  }

  // ---- multipliers ------------------------------------------------------------------------------

  using Outputs = float[kColumns / 8][4];            // the first two of each four are the row's
  using Values = u32[C::kN / 16][kColumns / 16][4];  // of a block, for mma.sync

  TC_DEVICE void load_values(Values& v, u32 of_step) const {
    const int first = warp * kColumns;
    const u32 from =
        shared + C::kV + slot(of_step) * C::kKvBytes + first / 64 * (C::kN * 128) + lane % 16 * 128;
    barrier_wait(shared + C::kVFull + 8 * slot(of_step), phase(of_step));
#pragma unroll
    for (int i = 0; i < C::kN / 16; ++i) {
#pragma unroll
      for (int j = 0; j < kColumns / 16; ++j) {
        ldmatrix<true>(v[i][j],
                       from + i * 2048 + ((first % 64 * 2 + j * 32 + lane / 16 * 16) ^ swizzle));
      }
    }
  }

  TC_DEVICE void multiply_values(Outputs& o, const u32 (&w)[C::kN / 32][4], const Values& v) {
#pragma unroll
    for (int i = 0; i < C::kN / 16; ++i) {
      const u32 low = w[i / 2][i % 2 * 2], high = w[i / 2][i % 2 * 2 + 1];
#pragma unroll
      for (int j = 0; j < kColumns / 16; ++j) {
        multiply(o[2 * j], low, high, v[i][j][0], v[i][j][1]);
        multiply(o[2 * j + 1], low, high, v[i][j][2], v[i][j][3]);
      }
    }
  }

  // Writes logsumexp and the outputs, as sm90/forward.cu does.
  TC_DEVICE void store(const Outputs& o, float sum, float reference) const {
    const AttentionTile& tile = this->tile();
    int i = row();
    float total = quad_sum(sum);
    float inverse = total == 0.0f ? 0.0f : reciprocal_approx(total);
    if (p.logsumexp != nullptr && warp == 0 && lane % 4 == 0 && i < tile.sequence.rows) {
      p.logsumexp[tile.batch * p.logsumexp_stride[0] + tile.head * p.logsumexp_stride[1] +
                  tile.sequence.q_row + i] = (reference + log2_approx(total)) * kLn2;
    }
    bool odd = lane % 2 != 0;
    int column = warp * kColumns + lane % 2 * 8 + lane % 4 / 2 * 4;  // of each 16
    u16* to = static_cast<u16*>(p.out) + tile.batch * p.out_stride[0] +
              tile.head * p.out_stride[1] + (tile.sequence.q_row + i) * p.out_stride[2] + column;
    const auto pack_out = [&](const float (&sums)[4]) {
      return DTypeTraits<C::kDType>::pack(sums[0] * inverse, sums[1] * inverse);
    };
#pragma unroll
    for (int a = 0; a < kColumns / 16; ++a) {
      u32 left = pack_out(o[2 * a]), right = pack_out(o[2 * a + 1]);
      u32 got = __shfl_xor_sync(~0u, odd ? left : right, 1);
      if (i < tile.sequence.rows && 16 * a + column < p.head_dim_v) {
        *reinterpret_cast<uint2*>(to + 16 * a) = make_uint2(odd ? got : left, odd ? right : got);
      }
    }
  }

  TC_DEVICE void multiply_weights() {
#pragma unroll 1
    for (;; ++number) {
      // Queries are the scorers' alone.
      barrier_wait(shared + C::kTileFull + 8 * (number % C::kRing), number / C::kRing % 2);
      const int blocks = tile().blocks;
      if (blocks == 0) return;
      Outputs o = {};
      float sum = 0.0f, reference = 0.0f;
#pragma unroll 1
      for (int i = 0; i < blocks; ++i, ++step) {
        u32 w[C::kN / 32][4];
        float note[4];
        Values v;
        load_values(v, step);
        barrier_wait(shared + C::kFull + 8 * scorer(step), parity(step));
#pragma unroll
        for (int j = 0; j < C::kN / 32; ++j) load_shared(w[j], weights(step) + j * 512);
        load_shared(note, weights(step) + C::kWeightsBytes);
        release_all(shared + C::kEmpty + 8 * scorer(step), 1);
        if (__builtin_expect(i > 0 && __any_sync(~0u, note[1] != 1.0f), 0)) {
          sum *= note[1];
#pragma unroll
          for (int j = 0; j < kColumns / 8; ++j) {
            o[j][0] *= note[1];
            o[j][1] *= note[1];
          }
        }
        sum += note[0];
        reference = note[2];
        multiply_values(o, w, v);
        release_all(shared + C::kVEmpty + 8 * slot(step), 1);
      }
      store(o, sum, reference);
      __syncwarp();
    }
  }

  TC_DEVICE void run() {
    if (scores && threadIdx.x % kWarpgroup == 0) {
      for (int i = 0; i < kScorers; ++i) {
        barrier_init(shared + C::kFull + 8 * i, 1);
        barrier_init(shared + C::kEmpty + 8 * i, kMultipliers);
        barrier_init(shared + C::kTurn + 8 * i, 1);
        barrier_init(shared + C::kStart + 8 * i, 1);
      }
      fence_barrier_init();
      barrier_arrive(shared + C::kTurn);  // the first turn
      store_shared(shared + C::kMoves, 0u);
    }
    named_sync(1, 2 * kWarpgroup);
    if (!scores) {
      multiply_weights();
    } else if (warp < kScorers) {
      score_keys();
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
 "kernels": [
  {"name": "sm90_attention_{d.short}_{t.tile.0}x{t.tile.1}x{t.tile.2}", "kind": "forward",
   "takes": ["plain"], "tile": "{t.tile}", "block": [384, 1, 1], "stages": "{t.stages}",
   "dynamic_shared": "{t.shared}", "cost": {"k_tile": "{t.k_tile}", "fixed": "{t.fixed}"},
   "defines": {"TC_DTYPE": "{d.dtype}", "TC_Q_SLOTS": "{t.q_slots}"},
   "for": {
    "d": "bf16 f16",
    "t": [
     ["tile", "stages", "q_slots", "shared", "k_tile", "fixed"],
     [[8, 128, 64],  4, 2, 159120,  650, 3900],
     [[8, 128, 128], 3, 1, 222016, 1275, 3800]]}}]}
*/
