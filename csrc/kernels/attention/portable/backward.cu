// Attention's gradients dq, dk, dv for 16-bit types, by FlashAttention-2 (Dao, 2023), with sm_80's
// instructions. From q, k, v, grad_out, logsumexp and delta = rowsum(grad_out * out):
//
//   S = scale q k^T      P = exp(S - logsumexp)      dP = grad_out v^T     dS = P (dP - delta)
//   dv = P^T grad_out    dk = scale dS^T q           dq = scale dS k
//
// A block owns kTileN keys of one key head and loops over the query heads of its group and their
// tiles of kTileM rows, last rows first; dk and dv stay in registers, dq is added to dq_sum
// (backward_dq.cuh), which the convert kernel scales and rounds.
//
// A step of the loop: `scores` writes P and dS, rounded, to shared memory; `products` reads them as
// operands of the three products. Both read a tile of q and one of grad_out. With 1 or 2 stages of
// these, a step has two barriers. With 3 stages and two buffers of P and dS, one barrier separates
// the products of step i from those of i + 1, and half of the warps compute the next scores before
// the products, the other half after them, so that exponentials and products overlap.
//
// Shared memory is the limit: 128 bytes a clock, while mma.sync at full rate needs 160 if every
// fragment of B serves one mma. For a step of 64 x 128 at depth 128, in KiB: q k^T and grad_out
// v^T, 32 x 32 elements a warp, 128 each; P^T grad_out and dS^T q, 32 x 64 a warp, 96 each; dS k
// 128; P, dS and the copies 64. That is 640 for 10.5 MFLOP, 5,120 clocks (an H200 takes 7,100, with
// shared memory busy for 72% of them, the tensor cores for 50%). With transposed scores, so that P
// and dS stay in registers as A, a warp can hold 16 keys, uses a fragment of B once, and reads 690.
#include "backward_dq.cuh"
#include "backward_scores.cuh"

namespace torch_cubin::TC_KERNEL {

struct Config {
  static constexpr DType kDType = DType::TC_DTYPE;
  static constexpr bool kGeneral = TC_GENERAL;
  static constexpr int kTileM = TC_TILE_M, kTileN = TC_TILE_N, kTileK = TC_TILE_K;
  static constexpr int kStages = TC_STAGES;
  static constexpr int kThreads = TC_THREADS, kMinBlocks = TC_MIN_BLOCKS;
  static constexpr int kDynamicShared = TC_DYNAMIC_SHARED;
  // Numbers of warps that share the rows of the scores, of dk and dv, and of dq.
  static constexpr int kScoreWarps = TC_SCORE_WARPS, kKeyWarps = TC_KEY_WARPS;
  static constexpr int kQueryWarps = TC_QUERY_WARPS;
  static constexpr bool kSplit = TC_SPLIT;  // see dots_split
  // Fragments are loaded this many steps before they are used.
  static constexpr int kScoreAhead = TC_SCORE_AHEAD, kProductAhead = TC_PRODUCT_AHEAD;
};
using Shape = BackwardShape<Config>;

struct Backward : Scores<Shape> {
  Tiles<KeyShare::kI, KeyShare::kJ> dk, dv;

  TC_DEVICE Backward(const AttentionParams& p, const Sequence& s, u32 shared, int column)
      : Scores<Shape>{{{}, p, s, shared, column}} {
    clear(dk);
    clear(dv);
  }

  TC_DEVICE DqTurn turn_of(const Sequence& of_head, int tile) const {
    int first = max(tile * kRows + s.first, 0) / kColumns;
    return DqTurn(p, of_head, tile * kRows, column / kColumns, first);
  }

  // dv += P^T grad_out, dk += dS^T q, dq_sum += dS k, for the P and dS at `scores`. Calls between()
  // in the middle.
  template <class Between>
  TC_DEVICE void products(u32 stage, u32 scores, int head, int tile, Between&& between) {
    using WeightFragment = FragmentAddress<Fragment::a_transposed, kColumnBytes>;
    using RowFragment = FragmentAddress<Fragment::b_transposed, kDepthBytes>;
    Sequence of_head = s;
    of_head.head += head;
    DqTurn turn = turn_of(of_head, tile);
    turn.look();
    {
      WeightFragment weight(0, KeyShare::row());
      RowFragment rows(0, KeyShare::column());
      multiply<kDType, kRows / 16, kProductAhead>(dv, weight, scores, rows, stage + kQueryTile);
      between();
      multiply<kDType, kRows / 16, kProductAhead>(dk, weight, scores + kScoreTile, rows, stage);
    }
    Tiles<QueryShare::kI, QueryShare::kJ> dq;
    clear(dq);
    FragmentAddress<Fragment::a, kColumnBytes> weight(QueryShare::row());
    RowFragment rows(0, QueryShare::column());
    multiply<kDType, kColumns / 16, kProductAhead>(dq, weight, scores + kScoreTile, rows, shared);

    int row = tile * kRows + QueryShare::row();
    float* at = p.dq_sum + dq_sum_offset(p, of_head, row / 16) + QueryShare::column() * 16 +
                threadIdx.x % 32 * kDqLaneStep;
    auto put = [&](auto&& put_tile) {
#pragma unroll
      for (int i = 0; i < QueryShare::kI; ++i) {
        if (row + 16 * i < s.rows) {
#pragma unroll
          for (int j = 0; j < QueryShare::kJ; ++j) {
            if (QueryShare::column() + 8 * j < p.head_dim) put_tile(at + j * 128, dq[i][j]);
          }
        }
        at += p.head_dim * 16;
      }
    };
    if (turn.rank == 0) {
      put([](float* to, const float (&v)[4]) { store_dq(to, v); });
    } else {
      turn.wait();
      put([](float* to, const float (&v)[4]) { add_dq(to, v); });
    }
  }

  // Lets the next block add to the rows of an earlier `products`, after a barrier. One warp does
  // it, a different one each time: while it waits for the additions, the others go on.
  TC_DEVICE void pass_turn(int head, int tile) const {
    if (threadIdx.x / 32 != tile % kWarps) return;
    Sequence of_head = s;
    of_head.head += head;
    turn_of(of_head, tile).pass();
  }

  TC_DEVICE void loop() {
    RowTiles<Shape> tiles(s, column, min(column + kColumns, s.columns));
    int steps = (tiles.end - tiles.begin) * p.group;
    if (steps <= 0) return;
    struct Step {
      int head, tile;
    };
    auto following = [&](Step step) {
      bool wrap = step.tile == tiles.begin;
      return Step{step.head + wrap, wrap ? tiles.end - 1 : step.tile - 1};
    };
    auto preceding = [&](Step step) {
      bool wrap = step.tile == tiles.end - 1;
      return Step{step.head - wrap, wrap ? tiles.begin : step.tile + 1};
    };
    Step now{0, tiles.end - 1};
    u32 queries = shared + kQueriesAt, weights = shared + kScoresAt;
    constexpr u32 kStage = 2 * kQueryTile, kBuffer = 2 * kScoreTile;

    copy_keys();
    copy_queries(queries, now.head, now.tile);
    cp_async_commit();
    put_sum(fetch_sum(now.head, now.tile), 0);
    float sum = 0.0f;  // of the next step, until it is in shared memory
    if (steps > 1) {
      Step next = following(now);
      if constexpr (kStages > 1) copy_queries(queries + kStage, next.head, next.tile);
      sum = fetch_sum(next.head, next.tile);
    }
    cp_async_commit();
    cp_async_wait<1>();
    __syncthreads();
    scores(queries, weights, 0, now.head, now.tile);

    int step = 0;
    auto between = [&] {
      if (step == 0) return;
      Step before = preceding(now);
      pass_turn(before.head, before.tile);
    };
    if constexpr (kOneBarrier) {
      u32 read = 0, buffer = 0;  // stage and buffer of this step
      bool late = threadIdx.x / 32 >= kWarps / 2;
#pragma unroll 1
      for (; step < steps; ++step) {
        u32 read_next = read == 2 ? 0 : read + 1, write = read == 0 ? 2 : read - 1;
        put_sum(sum, buffer ^ 1);
        cp_async_wait<0>();
        __syncthreads();
        Step next = following(now);
        if (step + 2 < steps) {
          Step coming = following(next);
          copy_queries(queries + write * kStage, coming.head, coming.tile);
          sum = fetch_sum(coming.head, coming.tile);
        }
        cp_async_commit();
        u32 here = weights + buffer * kBuffer, there = weights + (buffer ^ 1) * kBuffer;
        if (!late) products(queries + read * kStage, here, now.head, now.tile, between);
        if (step + 1 < steps) {
          scores(queries + read_next * kStage, there, buffer ^ 1, next.head, next.tile);
        }
        if (late) products(queries + read * kStage, here, now.head, now.tile, between);
        now = next;
        read = read_next;
        buffer ^= 1;
      }
      now = preceding(now);
    } else {
      u32 read = 0;
#pragma unroll 1
      for (;; ++step) {
        __syncthreads();
        products(queries + read * kStage, weights, now.head, now.tile, between);
        if (step + 1 == steps) break;
        put_sum(sum, 0);
        cp_async_wait<0>();
        __syncthreads();
        Step next = following(now), coming = following(next);
        if constexpr (kStages == 1) {
          copy_queries(queries, next.head, next.tile);
          cp_async_commit();
        }
        if (step + 2 < steps) {
          if constexpr (kStages == 2) {
            copy_queries(queries + read * kStage, coming.head, coming.tile);
            cp_async_commit();
          }
          sum = fetch_sum(coming.head, coming.tile);
        }
        if constexpr (kStages == 1) {
          cp_async_wait<0>();
          __syncthreads();
        }
        if constexpr (kStages == 2) read ^= 1;
        scores(queries + read * kStage, weights, 0, next.head, next.tile);
        now = next;
      }
    }
    __syncthreads();
    pass_turn(now.head, now.tile);
  }

  // Rounds this warp's tiles into shared memory, and stores those of the block.
  TC_DEVICE void store(Tiles<KeyShare::kI, KeyShare::kJ>& sum, float factor, u32 to, void* out,
                       const tc_int64 (&stride)[3], int width) const {
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    u32 at = to + DepthLayout::offset(KeyShare::row() + g, 0) + t * 4;
#pragma unroll
    for (int i = 0; i < KeyShare::kI; ++i) {
#pragma unroll
      for (int j = 0; j < KeyShare::kJ; ++j) {
        int bytes = (KeyShare::column() + 8 * j) * 2;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          store_shared((at ^ (bytes & 127)) + (bytes & ~127) + (16 * i + 8 * h) * kDepthBytes,
                       Traits::pack(sum[i][j][2 * h] * factor, sum[i][j][2 * h + 1] * factor));
        }
      }
    }
    __syncthreads();
    char* base = static_cast<char*>(out) + 2 * s.k_offset(p, stride, column);
    constexpr int kVectors = kDepthBytes / 16;
#pragma unroll 4
    for (int index = threadIdx.x; index < kColumns * kVectors; index += kThreads) {
      int row = index / kVectors, vector = index % kVectors;
      if (column + row >= s.columns || vector * 8 >= width) continue;
      u32 from = to + DepthLayout::offset(row, vector);
      u32 words[4];
      load_shared(words, from);
      *reinterpret_cast<uint4*>(base + 2 * row * stride[2] + vector * 16) =
          make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
  using DepthLayout = Swizzle<kDepthBytes, true>;
};

extern "C" __global__ void __launch_bounds__(Config::kThreads, Config::kMinBlocks)
    TC_KERNEL(const __grid_constant__ AttentionParams p) {
  wait_for_previous_kernel();
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  Work work = find_columns<Shape>(p);
  Sequence s(p, work.batch, work.head * p.group);
  int column = work.tile * Shape::kColumns;
  if (column >= s.columns) return;
  Backward block(p, s, shared_address(shared_memory), column);
  block.loop();
  __syncthreads();  // all have read k and v, whose memory is reused
  block.store(block.dk, p.scale, block.shared, p.dk, p.dk_stride, p.head_dim);
  block.store(block.dv, 1.0f, block.shared + Shape::kKeyTile, p.dv, p.dv_stride, p.head_dim_v);
}

}  // namespace torch_cubin::TC_KERNEL
/* torch_cubin kernels
{"defaults": {
  "name": "backward_attention_{d.short}_{g.name}_{t.tile.0}x{t.tile.1}x{t.tile.2}{t.name}",
  "kind": "backward", "takes": "{g.takes}", "tile": "{t.tile}", "block": ["{t.threads}", 1, 1],
  "stages": "{t.stages}", "dynamic_shared": "{t.shared}", "archs": "{archs.{t.on}}",
  "cost": {"k_tile": 0, "fixed": 0},
  "defines": {"TC_DTYPE": "{d.dtype}", "TC_GENERAL": "{g.general}", "TC_MIN_BLOCKS": "{t.blocks}",
              "TC_SCORE_WARPS": "{t.score}", "TC_KEY_WARPS": "{t.key}",
              "TC_QUERY_WARPS": "{t.query}", "TC_SPLIT": "{t.split}",
              "TC_SCORE_AHEAD": "{t.ahead}", "TC_PRODUCT_AHEAD": 1},
  "for": {
   "d": "f16 bf16",
   "archs": [{
    "all": ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a"],
    "large": ["sm_80", "sm_90a", "sm_100a"], "80": ["sm_80"], "90": ["sm_90a", "sm_100a"],
    "small": ["sm_86", "sm_89", "sm_120a"]}]}},
 "kernels": [
  {"for": {
    "g": [{"name": "full", "general": 0, "takes": ["plain"]}],
    "t": [
     ["name", "tile", "threads", "blocks", "stages", "shared", "ahead", "score", "key", "query",
      "split", "on"],
     ["",   [64, 128, 64],  128, 2, 2,  98816, 1, 2, 4, 2, 0, "all"],
     ["_3", [64, 128, 128], 256, 1, 3, 230400, 1, 2, 4, 2, 0, "90"],
     ["",   [64, 128, 128], 256, 1, 2, 164352, 1, 2, 4, 2, 0, "80"],
     ["",   [64, 64, 128],  256, 1, 1,  82432, 1, 2, 4, 2, 0, "small"],
     ["_2", [64, 64, 256],  256, 1, 2, 229888, 1, 2, 2, 2, 1, "90"],
     ["",   [64, 64, 256],  256, 1, 1, 147968, 1, 4, 2, 2, 0, "80"],
     ["",   [32, 32, 256],  128, 1, 1,  69888, 1, 2, 2, 2, 0, "small"]]}},
  {"for": {
    "g": [{"name": "general", "general": 1,
           "takes": ["unmasked", "bool_mask", "added_alone", "added_mask", "float_mask", "sinks",
                     "rule", "large_softcap"]}],
    "t": [
     ["name", "tile", "threads", "blocks", "stages", "shared", "ahead", "score", "key", "query",
      "split", "on"],
     ["",   [64, 128, 64],  256, 1, 2,  98816, 1, 2, 4, 4, 0, "all"],
     ["",   [64, 128, 128], 256, 1, 2, 164352, 0, 2, 4, 2, 0, "large"],
     ["",   [64, 64, 128],  256, 1, 1,  82432, 1, 2, 4, 2, 0, "small"],
     ["_2", [64, 64, 256],  256, 1, 2, 213504, 1, 4, 2, 2, 0, "90"],
     ["",   [64, 64, 256],  256, 1, 1, 147968, 0, 2, 2, 2, 0, "80"],
     ["",   [32, 32, 256],  128, 1, 1,  69888, 1, 2, 2, 2, 0, "small"]]}}]}
*/
