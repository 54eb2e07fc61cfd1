// Attention's gradients for float32 on tensor cores, each product as three of TF32
// (tf32x3_product.cuh). backward.cu defines the computation.
//
// Two kernels with one structure. A block owns kOwn rows of one side and loops over the other side
// in tiles of kOther rows; both sides have two tensors, the first for the scores, the second for
// dP:
//
//   "of"     own side (1, 2)    other side (1, 2)    writes
//   keys     k, v               q, grad_out          dk, dv   for all query heads of the group
//   queries  q, grad_out        k, v                 dq
//
//   S = own1 other1^T, dP = own2 other2^T (transposed if keys are owned), P and dS from them,
//   first += dS other1 (dk or dq), second += P other2 (dv)
//
// These are 7 products, where a kernel that adds to dq needs 5. But P and dS stay in the registers
// that compute them: the accumulators of S are A fragments of the next products if row 8 n + 2 t of
// a tile is column t of the fragment and row 8 n + 2 t + 1 column t + 4. For 16-bit types they go
// through shared memory; here they do not fit, and sums of three mma hide the cost of having only
// 16 rows a warp. Nothing is added between blocks, so every run gives the same bits. (An H200, 8 x
// 2,048 rows, 2,048 columns of all heads of 64: dk and dv 10.0 ms, dq 7.5; PyTorch's efficient
// kernel takes 19.2 for all.)
//
// The columns of the results are permuted: n8 tile 4 q + j holds columns 32 q + 4 g + j, so that a
// lane reads the other side and writes results in vectors of 16 bytes.
//
// With kSharers > 1, several warps share their own rows, and each has a part of the columns: it
// computes its part of the depth of S and dP, adds the others' (through shared memory), and has its
// columns of the results. Wide heads need it, or the results take too many registers.
//
// The spill that the table accepts is a scalar of a tile.
#include "gradient_scores.cuh"
#include "tf32x3_product.cuh"

namespace torch_cubin::TC_KERNEL {

struct Config {
  static constexpr DType kDType = DType::float32;
  static constexpr bool kOwnsKeys = TC_OWNS_KEYS;
  static constexpr int kTileM = TC_TILE_M, kTileN = TC_TILE_N, kTileK = TC_TILE_K;
  static constexpr int kSharers = TC_SHARERS, kStages = TC_STAGES;
  static constexpr int kThreads = TC_THREADS, kMinBlocks = TC_MIN_BLOCKS;
  static constexpr int kDynamicShared = TC_DYNAMIC_SHARED;
};
using Shape = GradientShape<Config>;

constexpr bool kOwnsKeys = Config::kOwnsKeys;
constexpr int kSharers = Config::kSharers;
constexpr int kOwn = Shape::kOwn, kPart = Shape::kPart, kOutTiles = Shape::kOutTiles;
using RowLayout = Swizzle<Shape::kRowBytes, true>;
using Results = float[kOutTiles][4];

// A block's own rows and head. `head`: of queries, the first of the group if keys are owned. Under
// a band the longest tiles come first, for as many heads as leave their operands in L2.
TC_DEVICE Work find_own(const AttentionParams& p) {
  if constexpr (!kOwnsKeys) return find_work<kOwn>(p);
  u32 tiles = (p.seqlen_k + kOwn - 1u) / kOwn, heads = static_cast<u32>(p.heads / p.group);
  u32 bundle = 1;
  if (p.last != kNoBound || p.first != -kNoBound) {
    float bytes = 4.0f * (p.head_dim + p.head_dim_v) * max(p.seqlen_q, 1) * p.group;
    bundle = bundle_in_l2(bytes, 1, heads * p.batch);
  }
  Work work = uniform(schedule_work(tiles, heads, p.batch, bundle));
  work.head *= p.group;
  return work;
}

struct Gradient : ScoreGradient<Shape> {
  u32 shared;
  int part;  // this warp's first column
  Results first;
  float second[kOwnsKeys ? kOutTiles : 1][4];

  TC_DEVICE Gradient(const AttentionParams& p_, const Sequence& s_, u32 shared_, int own_,
                     int part_)
      : ScoreGradient<Shape>{{}, p_, s_, own_}, shared(shared_), part(part_) {
#pragma unroll
    for (auto& tile : first)
#pragma unroll
      for (float& x : tile) x = 0.0f;
#pragma unroll
    for (auto& tile : second)
#pragma unroll
      for (float& x : tile) x = 0.0f;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      int row = own + warp_row() + g() + 8 * h;
      bool exists = !kOwnsKeys && row < s.rows;
      lse[h] = exists ? reference(p.logsumexp[s.row_index(p, row)]) : kInfinity;
      delta[h] = exists ? p.delta[s.row_index(p, row)] : 0.0f;
    }
  }

  // Loads a tile of kRows rows; missing rows and columns become zeros.
  template <int kRows>
  static TC_DEVICE void copy(u32 to, const void* tensor, tc_int64 offset, tc_int64 stride,
                             int columns, int rows_left) {
    constexpr int kChunk = kRows < kThreads / 8 ? kRows : kThreads / 8;
    RowCopy<kChunk, kRowBytes, kThreads> rows(static_cast<const float*>(tensor) + offset,
                                              stride * 4, columns * 4);
#pragma unroll 1
    for (int chunk = 0; chunk < kRows; chunk += kChunk) {
      rows.copy_filling(to + chunk * kRowBytes, rows_left - chunk);
      rows.tile += kChunk * rows.row_bytes;
    }
  }

  template <int kRows>
  TC_DEVICE void copy_keys(u32 to, int row) const {
    int left = s.columns - row;
    copy<kRows>(to, p.k, s.k_offset(p, p.k_stride, row), p.k_stride[2], p.head_dim, left);
    copy<kRows>(to + kRows * kRowBytes, p.v, s.k_offset(p, p.v_stride, row), p.v_stride[2],
                p.head_dim_v, left);
  }

  template <int kRows>
  TC_DEVICE void copy_queries(u32 to, const Sequence& of_head, int row) const {
    int left = s.rows - row;
    copy<kRows>(to, p.q, of_head.q_offset(p, p.q_stride, row), p.q_stride[2], p.head_dim, left);
    copy<kRows>(to + kRows * kRowBytes, p.grad_out, of_head.q_offset(p, p.grad_out_stride, row),
                p.grad_out_stride[2], p.head_dim_v, left);
  }

  // `head`: of the group.
  TC_DEVICE void copy_other(u32 stage, int head, int row) const {
    if constexpr (!kOwnsKeys) {
      copy_keys<kOther>(stage, row);
    } else {
      Sequence of_head = s;
      of_head.head += head;
      copy_queries<kOther>(stage, of_head, row);
      static_assert(kThreads >= 2 * kOther, "a thread has one row");
      int thread = threadIdx.x, down = thread % kOther;
      if (thread < 2 * kOther) {
        const float* from = thread < kOther ? p.logsumexp : p.delta;
        cp_async<4>(stage + 2 * kOtherTile + thread * 4, from + of_head.row_index(p, row) + down,
                    row + down < s.rows);
      }
    }
  }

  // scores = own other^T, over this warp's part of `width` columns.
  TC_DEVICE void dots(Scores& scores, u32 own_tile, u32 other_tile, int width) const {
    FragmentAddress<Fragment::a, kRowBytes> own_at(warp_row());
    FragmentAddress<Fragment::b, kRowBytes> other_at(0);
#pragma unroll
    for (auto& tile : scores)
#pragma unroll
      for (float& x : tile) x = 0.0f;
    own_tile += part * 4;
    other_tile += part * 4;
    int columns = min(width - part, kPart);
#pragma unroll 1  // unrolled, it needs too many registers
    for (int column = 0; column < columns; column += 32, own_tile += 128, other_tile += 128)
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        Split<2> b[kTiles];
        u32 words[4];
#pragma unroll
        for (int n = 0; n < kTiles; n += 2) {
          other_at.load(words, other_tile, 8 * n, 16 * step);
#pragma unroll
          for (int i = 0; i < 4; ++i) b[n + i / 2].set(i % 2, words[i]);
        }
        Split<4> a;
        own_at.load(words, own_tile, 0, 16 * step);
#pragma unroll
        for (int i = 0; i < 4; ++i) a.set(i, words[i]);
        multiply_add(scores, 0, a, b);
      }
  }

  // Waits for the other warps of these rows.
  static TC_DEVICE void meet() {
    int warp = threadIdx.x / 32;
    asm volatile("bar.sync %0, %1;" ::"r"(1 + warp / kSharers), "n"(32 * kSharers) : "memory");
  }

  // Adds the parts of S and dP from the other warps of these rows, in order.
  TC_DEVICE void exchange(Scores& scores, Scores& grads) const {
    int warp = threadIdx.x / 32;
    u32 at = shared + kExchangeAt + threadIdx.x % 32 * 16;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      store_shared(at + warp * kExchange + n * 512, scores[n]);
      store_shared(at + warp * kExchange + (kTiles + n) * 512, grads[n]);
    }
    meet();
    at += warp / kSharers * (kSharers * kExchange);
    auto add = [&](float (&sum)[4], u32 from) {
#pragma unroll
      for (int other = 0; other < kSharers; ++other) {
        u32 words[4];
        load_shared(words, from + other * kExchange);
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          float x = __uint_as_float(words[r]);
          sum[r] = other == 0 ? x : sum[r] + x;
        }
      }
    };
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      add(scores[n], at + n * 512);
      add(grads[n], at + (kTiles + n) * 512);
    }
  }

  // results += weights other, for this warp's columns of `width`.
  template <bool kInfinite = false, int kAll>
  TC_DEVICE void multiply(float (&results)[kAll][4], const Scores& weights, u32 other_tile,
                          int width) const {
    u32 even = other_tile + part * 4 + RowLayout::offset(2 * t(), g());
    u32 odd = other_tile + part * 4 + RowLayout::offset(2 * t() + 1, g());
    int columns = width - part;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      Split<4> a;
#pragma unroll
      for (int i = 0; i < 4; ++i) a.set(i, __float_as_uint(weights[n][i % 2 * 2 + i / 2]));
#pragma unroll
      for (int q = 0; q < kOutTiles / 4; ++q) {
        // Without branches ptxas loads so far ahead that it has to spill.
        if (32 * q >= columns) break;
        Split<2> b[4];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          u32 words[4];
          load_shared(words, (i == 0 ? even : odd) + 8 * n * kRowBytes + q * 128);
#pragma unroll
          for (int j = 0; j < 4; ++j) b[j].set(i, words[j]);
        }
        multiply_add<kInfinite>(results, 4 * q, a, b);
      }
    }
  }

  // Adds the contribution of the other side's tile at `other`, which is in `stage`.
  TC_DEVICE void step(u32 stage, int head, int other) {
    int mine = own + warp_row();
    int i = kOwnsKeys ? other : mine, i_last = i + (kOwnsKeys ? kOther : 16) - 1;
    int j = kOwnsKeys ? mine : other, j_last = j + (kOwnsKeys ? 16 : kOther) - 1;
    bool some = j_last - i >= s.first && j - i_last <= s.last && j < s.columns;
    if (!__any_sync(~0u, some)) {
      if constexpr (kSharers > 1) meet();  // racecheck reports false races if only some warps wait
      return;
    }
    bool edge =
        j - i_last < s.first || j_last - i > s.last || i_last >= s.rows || j_last >= s.columns;
    Scores scores, grads = {};
#pragma unroll 1  // one copy of the code for both: it is a tenth of the kernel's
    for (int which = 0; which < 2; ++which) {
#pragma unroll
      for (int n = 0; n < kTiles; ++n)
#pragma unroll
        for (int r = 0; r < 4; ++r) scores[n][r] = grads[n][r];
      dots(grads, shared + which * kOwnTile, stage + which * kOtherTile,
           which == 0 ? p.head_dim : p.head_dim_v);
    }
    if constexpr (kSharers > 1) exchange(scores, grads);
    differentiate(scores, grads, stage, head, other, edge);
    // An infinite gradient makes dq and dk NaN, as in PyTorch, but only an infinite column of dv.
    if constexpr (kOwnsKeys) multiply<true>(second, scores, stage + kOtherTile, p.head_dim_v);
    multiply(first, grads, stage, p.head_dim);
  }

  TC_DEVICE void loop() {
    // The tiles of the other side that these rows interact with.
    int end = min(own + kOwn, kOwnsKeys ? s.columns : s.rows);
    int seen = max(kOwnsKeys ? own - s.last : own + s.first, 0);
    int seen_end = kOwnsKeys ? min(s.rows, end - s.first) : min(s.columns, end + s.last);
    if (seen_end <= seen) return;
    int begin = seen / kOther * kOther;
    int heads = kOwnsKeys ? p.group : 1;
    if constexpr (kOwnsKeys) {
      copy_keys<kOwn>(shared, own);
    } else {
      copy_queries<kOwn>(shared, s, own);
    }
    int head = 0, other = begin;
    auto advance = [&] {
      other += kOther;
      if (other >= seen_end) {
        other = begin;
        ++head;
      }
    };
    u32 stage = shared + 2 * kOwnTile;
    // With two stages one copy is in flight while the previous tile is used: head and other are
    // those of the copy, and `used` lags behind.
    int used_head = -1, used = 0;
#pragma unroll 1
    for (;;) {
      bool more = head < heads;
      if (more) copy_other(stage, head, other);
      cp_async_commit();
      if (kStages == 2) {
        stage = 2 * shared + (4 * kOwnTile + kStage) - stage;
        if (used_head >= 0) step(stage, used_head, used);
        if (!more) break;
      }
      // The tile has arrived, and all threads have read the one that is overwritten next.
      cp_async_wait<0>();
      __syncthreads();
      if (kStages == 1) {
        step(stage, head, other);
        __syncthreads();
      }
      used_head = head;
      used = other;
      advance();
      if (kStages == 1 && head == heads) break;
    }
  }
};

// Where a block's results are written: offsets from the tensors' bases, and the number of its rows.
struct Target {
  tc_int64 first, second;
  int rows;
};

// `to`: the address of the block's first row. `part`: the warp's first column.
template <int kAll>
TC_DEVICE void store(float* to, tc_int64 stride, int rows, const float (&results)[kAll][4],
                     float factor, int part, int width) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    int row = Gradient::warp_row() + Gradient::g() + 8 * h;
#pragma unroll
    for (int q = 0; q < kOutTiles / 4; ++q)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        int column = part + 32 * q + 8 * Gradient::t() + 4 * e, r = 2 * h + e;
        const auto* tiles = &results[4 * q];
        if (row < rows && column < width) {
          *reinterpret_cast<float4*>(to + row * stride + column) =
              make_float4(tiles[0][r] * factor, tiles[1][r] * factor, tiles[2][r] * factor,
                          tiles[3][r] * factor);
        }
      }
  }
}

extern "C" __global__ void __launch_bounds__(Config::kThreads, Config::kMinBlocks)
    TC_KERNEL(const __grid_constant__ AttentionParams p) {
  wait_for_previous_kernel();
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  __shared__ Target target;  // keeping it in registers through the loop costs more
  Work work = find_own(p);
  Sequence s(p, work.batch, work.head);
  int part = kSharers > 1 ? uniform(threadIdx.x / 32 % kSharers) * kPart : 0;
  int own = work.tile * kOwn, rows = (kOwnsKeys ? s.columns : s.rows) - own;
  if (rows <= 0) return;  // shorter than the longest sequence
  if (threadIdx.x == 0) {
    target.first = kOwnsKeys ? s.k_offset(p, p.dk_stride, own) : s.q_offset(p, p.dq_stride, own);
    target.second = s.k_offset(p, p.dv_stride, own);
    target.rows = rows;
  }
  Gradient gradient(p, s, shared_address(shared_memory), own, part);
  gradient.loop();

  __syncthreads();
  if constexpr (kOwnsKeys) {
    store(static_cast<float*>(p.dk) + target.first, p.dk_stride[2], target.rows, gradient.first,
          p.scale, part, p.head_dim);
    store(static_cast<float*>(p.dv) + target.second, p.dv_stride[2], target.rows, gradient.second,
          1.0f, part, p.head_dim_v);
  } else {
    store(static_cast<float*>(p.dq) + target.first, p.dq_stride[2], target.rows, gradient.first,
          p.scale, part, p.head_dim);
  }
}

}  // namespace torch_cubin::TC_KERNEL
/* torch_cubin kernels
{"kernels": [
  {"name": "gradient_attention_f32_{d.side}_{t.{d.m}}x{t.{d.n}}x{t.depth}", "kind": "gradient",
   "of": "{d.of}", "dtype": "float32", "math": "float32",
   "takes": ["plain", "unmasked", "bool_mask", "added_alone", "added_mask", "float_mask", "sinks",
             "rule", "large_softcap"], "tile": ["{t.{d.m}}", "{t.{d.n}}", "{t.depth}"],
   "block": ["{t.threads}", 1, 1], "stages": "{t.stages}", "dynamic_shared": "{t.shared_{d.side}}",
   "archs": "{t.archs}", "accepted_spill": "{d.spill}", "cost": {"k_tile": 0, "fixed": 0},
   "defines": {"TC_OWNS_KEYS": "{d.owns_keys}", "TC_SHARERS": "{t.sharers}",
               "TC_MIN_BLOCKS": "{t.blocks}"},
   "for": {
    "d": [
     ["side", "of", "m", "n", "owns_keys", "spill"],
     ["k", "keys",    "rows", "own",  1, {"sm_100a": 32}],
     ["q", "queries", "own",  "rows", 0, {}]],
    "t": [
     ["own", "rows", "depth", "threads", "blocks", "sharers", "stages", "shared_k", "shared_q",
      "archs"],
     [ 64, 32,  64, 128, 2, 1, 2,  66048,  65536, ["sm_80", "sm_90a", "sm_100a"]],
     [128, 32,  64, 256, 1, 1, 2,  98816,  98304, ["sm_86", "sm_89", "sm_120a"]],
     [128, 32, 128, 256, 1, 1, 2, 197120, 196608, ["sm_90a", "sm_100a"]],
     [128, 16, 128, 256, 1, 1, 2, 164096, 163840, ["sm_80"]],
     [ 64, 16, 128, 128, 1, 1, 2,  98560,  98304, ["sm_86", "sm_89", "sm_120a"]],
     [ 64, 16, 256, 256, 1, 2, 2, 213248, 212992, ["sm_90a", "sm_100a"]],
     [ 32, 16, 256, 128, 1, 2, 2, 139520, 139264, ["sm_80"]],
     [ 16, 16, 256, 128, 1, 4, 1,  73856,  73728, ["sm_86", "sm_89", "sm_120a"]]]}}]}
*/
