// Symmetric products on Hopper: the tiles of the lower triangle, each stored twice, the second time
// transposed. A persistent, warp-specialized kernel with TMA and wgmma. For n <= m:
//
//   out[b, m, n] = out[b, n, m] = round(alpha * sum_k A[b, m, k] * B[b, k, n] + beta * addend[b, m, n])
//
// It is sm90.cu with a triangle of tiles and an epilogue of its own. Clusters do not share tiles:
// two blocks that shared one of B were no faster on an H200 (benchmarks/NOTES.md). As there, the
// tiles of the last wave may be streamed: several blocks have parts of their K. Or each tile has a
// cluster, whose blocks divide K and exchange their sums through shared memory.
//
// The right half of a tile of 128 x 256 at the diagonal is above it, and is not computed. Two such
// narrow tiles make a pair, which one block computes in the time of one tile: so 4096 x 4096 has
// two whole waves on 132 multiprocessors.
//
// The two warpgroups that multiply share a tile. Or (ping-pong, for more tiles than blocks) each
// has tiles of its own, in turns: while one stores a tile, the other one multiplies the next.
//
// It is over 500 lines because warpgroups that share a tile and those that take turns have a loop
// each.
//
// Sm90MatmulParams is sm90.cu's; these kernels read it so:
//   m, n                 rows and columns of out
//   tiles_m, tiles_n     tiles of one matrix's lower triangle, pairs first, each counted as one; 1
//   row_parts            narrow tiles of one matrix that are in pairs: all or none
//   split_blocks         1: A and B are one matrix, so that a narrow tile needs B alone; 2: and the
//                        rows beyond whole tiles are thin (sm90_thin_rows.cuh): b describes tiles
//                        of both operands, and a boxes of thin rows; 3: and tiles at the diagonal
//                        are four by three (sm90_extra_squares.cuh): b describes tiles, a squares
//   group                rows of tiles per group of the triangle's order
//   b                    where tiles can be narrow, boxes of K-major operands have half of their rows
//   out_map              of 128 bytes of columns and 16 rows, whose rows are multiples of 16 bytes
//   a_rows               what blocks prefetch: from, and in bytes the share of each (low) and all
//                        (high; 0: nothing)
//   addend               null: none; of it, too, only the lower triangle is used
//   kSm90RowsInside      lone tiles are in rows of tiles whose last one ends at the last square: the
//                        first one begins within the second. Of odd numbers of squares of 64 rows
//                        so fewer tiles reach below the diagonal
//   kSm90AddVector       the addend has aligned rows of whole 16-byte vectors
//   kSm90Batched, kSm90Lone, kSm90Serpentine, the fields of streamed tiles: as in sm90.cu
//
// sm90_squares.cuh stores the tiles, and adds what other blocks of a cluster send; of larger
// clusters, sm90_columns.cuh does.
//
//   shared memory: kStages x (A tile, B tile) | staging buffers | full, empty barriers | a word per
//     warpgroup | the barrier of a cluster's parts | ping-pong: turns | work items | ping-pong: work
//     items that nobody loads yet, found, taken barriers
//   full[s]: the producer's arrival and all bytes of the stage
//   empty[s]: one arrival per consumer warpgroup; ping-pong: of the one that has the tile
//   found[i], taken[i]: one arrival, of the thread that finds or loads work items
//   parts: one arrival per consumer warpgroup, and all bytes that other blocks of the cluster send
#include "sm90_block.cuh"
#include "sm90_columns.cuh"
#include "sm90_extra_squares.cuh"
#include "sm90_split.cuh"
#include "sm90_squares.cuh"
#include "sm90_thin_rows.cuh"
#include "sm90_tiles.cuh"

namespace torch_cubin::TC_KERNEL {

using namespace sm90;

// Ping-pong: + warpgroup that waits for its turn; both, at the end of a block.
constexpr int kTurnBarrier = kGroupBarrier + 2, kEndBarrier = kTurnBarrier + 2;

// The left half of a tile.
template <class C>
struct Narrow : C {
  static constexpr int kTileN = C::kTileN / 2;
};

template <class C>
TC_DEVICE bool is_narrow(const Work& w) {
  return Layout<C>::kNarrows && w.m0 == w.n0;
}

// Whether B's half of a narrow tile is A's tile, too.
template <class C>
TC_DEVICE bool needs_b_alone(const Sm90MatmulParams& p, const Work& w) {
  return C::kAMnMajor == C::kBMnMajor && is_narrow<C>(w) && p.split_blocks != 0;
}

// Whether B's tile is among the rows of A's, as far as it is inside of the matrix. The last columns
// of a tile that begins sooner (n0 > m0) multiply what was in B's stage before; they are outside of
// the matrix, and not stored. Ping-pong kernels have few tiles at the diagonal, for what they
// multiply.
template <class C>
TC_DEVICE bool needs_a_alone(const Sm90MatmulParams& p, const Work& w) {
  return C::kAMnMajor == C::kBMnMajor && C::kTileN <= C::kTileM && !Layout<C>::kPingPong &&
         p.split_blocks == 1 && w.n0 >= w.m0;
}

// ---- producer -----------------------------------------------------------------------------------

// The tile scheduler of a block. Schedule numbers a matrix's tiles, and this places them: rows of
// tiles are in groups, and the tiles of a group are ordered column by column, so that blocks that
// run at the same time share rows and columns in the L2 cache.
template <class C>
struct Triangle {
  const Sm90MatmulParams& p;
  Schedule<C> schedule;
  int rows;
  int k_begin = 0;  // of the work item
  int second = 0;   // the column of a pair's second tile, which comes next; 0: none
  // Ping-pong kernels have no clusters.
  const Team team = Layout<C>::kPingPong ? Team{0, 1} : Team();
  bool part_is_next = team.size > 1;  // of the cluster's only tile
  int group = 0, first = 0;           // of the last tile; the number of the group's first one

  TC_DEVICE explicit Triangle(const Sm90MatmulParams& params) : p(params), schedule(params) {
    rows = has_thin_rows<C>(p) ? p.n / C::kTileM : (p.n + C::kTileM - 1) / C::kTileM;
  }

  // The block's next tile, or part of one; false without one.
  TC_DEVICE bool get(Work& w) {
    if (second != 0) {
      w.m0 = w.n0 = second * C::kTileN;
      second = 0;
      return true;
    }
    if (!(team.size > 1 ? get_part(w) : get_tile(w))) return false;
    k_begin = schedule.k_begin;
    const int number = w.m0 / C::kTileM, pairs = (p.row_parts + 1) / 2;
    const int first_ones = has_thin_rows<C>(p)       ? rows
                           : has_extra_squares<C>(p) ? count_diagonal<C>(rows)
                                                     : pairs;
    if constexpr (kTakesExtraSquares<C>) extra_m0(w) = 0;
    if (number < pairs) {
      w.m0 = w.n0 = 2 * number * C::kTileN;
      if (2 * number + 1 < p.row_parts) second = 2 * number + 1;
      return true;
    }
    if (number < first_ones) {
      if (has_extra_squares<C>(p)) {
        place_diagonal<C>(number, rows, w);
      } else {
        w.m0 = w.n0 = number * C::kTileM;
      }
    } else {
      find(number - first_ones, w);
    }
    return true;
  }

  // Whether get() would find another one.
  TC_DEVICE bool has_more() const {
    return second != 0 || schedule.next < p.whole_tiles || schedule.unit < schedule.units;
  }

 private:
  // As Schedule's, without its divisions where there are no batches.
  TC_DEVICE void place(int tile, Work& w) const {
    if (p.flags & kSm90Batched) {
      schedule.place(tile, w);
    } else {
      w.b0 = w.b1 = w.b2 = 0;
      w.m0 = tile * C::kTileM;
    }
  }

  // Ping-pong, parts of streamed tiles come before the block's last whole tile: while that is
  // multiplied, the other warpgroup adds the parts up, and stores their tile.
  TC_DEVICE bool get_tile(Work& w) {
    const int next = schedule.next;
    const bool streams_first = Layout<C>::kPingPong && schedule.unit < schedule.units &&
                               next < p.whole_tiles && next + schedule.clusters >= p.whole_tiles;
    if (next < p.whole_tiles && !streams_first) {
      schedule.next = next + schedule.clusters;
      schedule.k_begin = 0;
      w.streamed = 0;
      w.k_count = p.k_blocks;
      place(next, w);
      return true;
    }
    if (streams_first) schedule.next = p.whole_tiles;
    const bool any = schedule.get(w, false);
    if (streams_first) schedule.next = next;
    return any;
  }

  // The block's part of its cluster's only tile.
  TC_DEVICE bool get_part(Work& w) {
    if (!part_is_next) return false;
    part_is_next = false;
    place(team.number(), w);
    schedule.k_begin = team.k_begin(p.k_blocks, team.rank);
    w.k_count = team.k_begin(p.k_blocks, team.rank + 1) - schedule.k_begin;
    w.streamed = 0;
    return true;
  }

  // Whether the tiles at the diagonal come before all others: those in pairs, those with extra
  // squares, or those with thin rows, which are spread evenly over the blocks so.
  TC_DEVICE bool diagonal_is_first() const {
    return p.row_parts > 0 || has_thin_rows<C>(p) || has_extra_squares<C>(p);
  }

  // Places tile `number` of the others. A group has columns of all its rows, which form a
  // rectangle, and then columns that begin at the diagonal. No walk over all columns: while the
  // thread looks for a tile it loads none (4096 x 1024, H200: the tensor cores waited 6% of the
  // time for that).
  TC_DEVICE void find(int number, Work& w) {
    // So many neighbouring columns begin at the same row.
    constexpr int kSame = C::kTileN < C::kTileM ? C::kTileM / C::kTileN : 1;
    constexpr int kWidth = kSame * C::kTileN;
    const int skipped = diagonal_is_first() ? 1 : 0;
    if (number < first) group = first = 0;
    for (;; ++group) {
      const int top = group * p.group, height = min(p.group, rows - top), end = top + height;
      int same = ((top - skipped + 1) * C::kTileM + kWidth - 1) / kWidth;  // of all rows
      int inside = number - first;
      if (inside < same * kSame * height) {
        const int column = static_cast<u32>(inside) / static_cast<u32>(height);
        w.m0 = (top + inside - column * height) * C::kTileM;
        w.n0 = column * C::kTileN;
        return;
      }
      inside -= same * kSame * height;
      for (;; ++same) {
        const int row = same * kWidth / C::kTileM + skipped, left = end - row;
        if (left <= 0) break;
        if (inside < kSame * left) {
          const int column = kSame == 1 ? 0 : static_cast<u32>(inside) / static_cast<u32>(left);
          w.m0 = (row + inside - column * left) * C::kTileM;
          w.n0 = (same * kSame + column) * C::kTileN;
          return;
        }
        inside -= kSame * left;
      }
      first = number - inside;
    }
  }
};

// Ping-pong: finds the work items one after another, ahead of the thread that loads them. It takes
// 800 to 1,800 cycles an item, most of them for instructions that no cache near has, and the tensor
// cores would wait for that (4096 x 1024, H200). k_step of an item is read as its first k block.
// NOTE: blocks that have one tile start later so (384 x 2048 in clusters 5.7 -> 6.8 us).
template <class C>
TC_DEVICE void find_items(const Sm90MatmulParams& p, u32 found, Work* items) {
  Triangle<C> triangle(p);
  Work w;
  for (int number = 0;; ++number) {
    const int slot = number % kItemsAhead;
    const u32 passed = number / kItemsAhead & 1;
    if (!triangle.get(w)) w.k_count = 0;
    w.k_step = triangle.k_begin;
    w.counter -= number & 1;  // join() adds the warpgroup, which is that of every other item
    w.k_first = triangle.has_more() ? 0 : 1;  // read as: the block's last item
    barrier_wait_bounded(found + 8 * (kItemsAhead + slot), passed ^ 1);
    items[slot] = w;
    barrier_arrive(found + 8 * slot);
    if (w.k_count == 0) return;
  }
}

// Whether a block, or cluster, has one tile, which place_lone() places.
template <class C>
TC_DEVICE bool is_placed_alone(const Sm90MatmulParams& p) {
  return !Layout<C>::kPingPong && p.flags & kSm90Lone && !has_extra_squares<C>(p);
}

// Places the only tile of a block, or of its cluster, and returns the first of its k blocks. Few
// instructions: none of them is in a cache near, and a Triangle takes 1,300 cycles (H200).
template <class C>
TC_DEVICE int place_lone(const Sm90MatmulParams& p, bool batched, Work& w) {
  const Team team;
  u32 number = blockIdx.x;
  int begin = 0, end = p.k_blocks;
  if (team.size > 1) {
    number = team.number();
    begin = team.k_begin(p.k_blocks, team.rank);
    end = team.k_begin(p.k_blocks, team.rank + 1);
  }
  w.b0 = w.b1 = w.b2 = 0;
  if (batched) {
    const u32 one = p.tiles_m, inner = p.batch[0], middle = p.batch[1];
    const u32 matrix = number / one;
    number -= matrix * one;
    w.b0 = matrix;
    if (matrix >= inner) {
      w.b2 = matrix / inner / middle;
      w.b1 = matrix / inner - w.b2 * middle;
      w.b0 = matrix % inner;
    }
  }
  if constexpr (C::kTileN <= C::kTileM) {  // row by row: row r begins at r (r + 1) / 2 squares
    constexpr u32 kInSquare = C::kTileM / C::kTileN;
    // With rows inside, row r has 2 r + 1 tiles, and begins at r r.
    const bool inside = kInSquare == 2 && p.flags & kSm90RowsInside;
    const float of_root = inside ? number + 0.5f : 2.0f * (number / kInSquare) + 0.5f;
    float root;
    asm("sqrt.approx.f32 %0, %1;" : "=f"(root) : "f"(of_root));
    const u32 row = static_cast<u32>(inside ? root : root - 0.5f);
    w.m0 = row * C::kTileM;
    if (inside && row > 0) w.m0 -= Layout<C>::kRows;
    w.n0 = (number - (inside ? row * row : row * (row + 1) / 2 * kInSquare)) * C::kTileN;
    // The last tile's rows begin sooner, so that none is outside: the TMA takes longer for such
    // rows than for others. Two tiles then store the same results: not where the squares of three
    // parts of K and more are added, in an order that their place in the tile decides.
    const int shift = w.m0 + C::kTileM - p.n;
    const int step = C::kAMnMajor || !has_columns<C>(team) ? Layout<C>::kRows : 8;
    const bool moves = (team.size <= 2 || has_columns<C>(team)) && shift % step == 0;
    if (moves && shift > 0 && shift <= static_cast<int>(w.m0)) w.m0 -= shift;
  } else {  // column by column
    const u32 rows = (p.n + C::kTileM - 1) / C::kTileM;
    u32 column = 0, first = 0;
    while (number >= rows - first) {
      number -= rows - first;
      first = ++column * C::kTileN / C::kTileM;
    }
    w.m0 = (first + number) * C::kTileM;
    w.n0 = column * C::kTileN;
  }
  w.k_count = end - begin;
  w.streamed = 0;
  if constexpr (kTakesExtraSquares<C>) extra_m0(w) = 0;
  return begin;
}

// Requests the block's share of the operand's memory, in one stretch, for the L2 cache: memory is
// read faster so than by the boxes of the tiles, each of 128 bytes of many rows.
TC_DEVICE void prefetch_share(const Sm90Rows& operand) {
  const tc_int64 begin = blockIdx.x * operand.low, left = operand.high - begin;
  if (left <= 0) return;
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(
                   static_cast<const char*>(operand.from) + begin),
               "r"(static_cast<u32>(left < operand.low ? left : operand.low))
               : "memory");
}

template <class C>
TC_DEVICE void produce(const Sm90MatmulParams& p, u32 shared, u32 full, u32 empty, u32 found,
                       const Work* items, Work* ring) {
  prefetch_share(p.a_rows);
  const Share alone = {0, 0, 1};
  int stage = 0, number = 0;
  u32 phase = 0;
  bool backwards = false;
  const Sm90TensorMap& map_of_tiles = has_thin_rows<C>(p) || has_extra_squares<C>(p) ? p.b : p.a;
  // `is_plain`: the block's only item, a tile without thin rows or an extra square.
  const auto load_item = [&](const Work& w, int k_begin, bool batched, auto is_plain) {
    constexpr bool kPlain = decltype(is_plain)::value;
    int k = (backwards ? k_begin + w.k_count - 1 : k_begin) * C::kTileK;
    const int step = backwards ? -C::kTileK : C::kTileK;
    const bool narrow = is_narrow<C>(w), b_alone = needs_b_alone<C>(p, w);
    const bool a_alone = needs_a_alone<C>(p, w);
    const bool thin = !kPlain && takes_thin_rows<C>(p, w);
    const bool extra = !kPlain && has_extra_square<C>(w);
    u32 a_bytes = b_alone ? 0 : thin ? kThinRows * 128 : C::kABytes;
    if (extra && !has_two_operands(w)) a_bytes = Layout<C>::kHalfBytes;
    const u32 bytes = a_bytes + (a_alone ? 0 : narrow ? C::kBBytes / 2 : C::kBBytes);
    if (!kPlain) barrier_wait_bounded(empty + 8 * stage, phase ^ 1);
    ring[number++ % C::kRing] = w;
#pragma unroll 1
    for (int i = 0; i < w.k_count; ++i, k += step) {
      if (!kPlain || i >= C::kStages) barrier_wait_bounded(empty + 8 * stage, phase ^ 1);
      const u32 arrived = full + 8 * stage, to = shared + stage * C::kStageBytes;
      barrier_expect(arrived, bytes);
      if (kHasThinRows<C> && thin) {
        load_operand<false, kThinRows, C::kTileK>(p.a, to, arrived, alone, batched,
                                                  thin_begin<C>(p), k, w);
      } else if (kTakesExtraSquares<C> && extra) {
        load_extra_square<C>(p.a, to, arrived, batched, k, w);
      } else if (!b_alone) {
        load_operand<C::kAMnMajor, C::kTileM, C::kTileK>(kPlain ? p.a : map_of_tiles, to, arrived,
                                                         alone, batched, w.m0, k, w);
      }
      if constexpr (Layout<C>::kNarrows) {
        load_operand<C::kBMnMajor, C::kTileN / 2, C::kTileK>(p.b, to + C::kABytes, arrived, alone,
                                                             batched, w.n0, k, w);
        if (!narrow) {
          load_operand<C::kBMnMajor, C::kTileN / 2, C::kTileK>(
              p.b, to + C::kABytes + C::kBBytes / 2, arrived, alone, batched, w.n0 + C::kTileN / 2,
              k, w);
        }
      } else if (!a_alone) {
        load_operand<C::kBMnMajor, C::kTileN, C::kTileK>(p.b, to + C::kABytes, arrived, alone,
                                                         batched, w.n0, k, w);
      }
      if (++stage == C::kStages) {
        stage = 0;
        phase ^= 1;
      }
    }
    if (p.flags & kSm90Serpentine) backwards = !backwards;
  };
#if TC_PING_PONG
  wait_for_previous_grid();
  for (;;) {
    const int slot = number % kItemsAhead;
    barrier_wait_bounded(found + 8 * slot, number / kItemsAhead & 1);
    const Work w = items[slot];
    barrier_arrive(found + 8 * (kItemsAhead + slot));
    if (w.k_count == 0) break;
    load_item(w, w.k_step, p.flags & kSm90Batched, Constant<0>());
  }
#else  // this thread finds the work items itself
  Work w;
  if (is_placed_alone<C>(p)) {
    const bool batched = p.flags & kSm90Batched;
    const int k_begin = place_lone<C>(p, batched, w);
    wait_for_previous_grid();
    // NOTE: two loops, since one of both took longer without batches.
    if (batched) {
      load_item(w, k_begin, true, Constant<1>());
    } else {
      load_item(w, k_begin, false, Constant<1>());
    }
  } else {
    Triangle<C> triangle(p);
    bool any = triangle.get(w);
    wait_for_previous_grid();
    for (; any; any = triangle.get(w)) {
      load_item(w, triangle.k_begin, p.flags & kSm90Batched, Constant<0>());
    }
  }
#endif
  barrier_wait_bounded(empty + 8 * stage, phase ^ 1);
  ring[number % C::kRing].k_count = 0;
  barrier_arrive(full + 8 * stage);
}

// ---- consumers ----------------------------------------------------------------------------------

template <class C>
TC_DEVICE void consume(const Sm90MatmulParams& p, u32 shared, u32 full, u32 empty, u32 word,
                       const Work* ring, int warp) {
  int stage = 0, number = 0, turn = 0;
  u32 phase = 0;
  const int group = warp / 4;
  const bool frees = threadIdx.x % kWarpgroup == 0;
  bool leads = group == 0 && !(p.flags & kSm90Lone);
  const u32 staging =
      shared + Layout<C>::kStaging + group * (Layout<C>::kBuffers * Layout<C>::kBufferBytes);
  const u64 first_stage = wgmma_descriptor(shared, 8192, 1024);

  if (group == 1 && !(p.flags & kSm90Lone)) named_sync(kSkewBarrier, 2 * kWarpgroup);
  for (;; ++number) {
    barrier_wait(full + 8 * stage, phase);
    const Work& w = ring[number % C::kRing];
    const int k_count = w.k_count;
    if (k_count == 0) break;
    float sum[1][C::kTileN / 2];
    const auto next_stage = [&] {
      if (++stage == C::kStages) {
        stage = 0;
        phase ^= 1;
      }
    };
    const auto finish_skew = [&] {
      if (leads) {
        named_arrive(kSkewBarrier, 2 * kWarpgroup);
        leads = false;
      }
    };
    const bool extra = has_extra_square<C>(w), in_b = needs_b_alone<C>(p, w) || extra;
    const u32 rows = (in_b ? C::kABytes : 0) + group * 8192;  // the warpgroup's, in a stage
    const u32 other = needs_a_alone<C>(p, w) ? (w.n0 - w.m0) * 128 : C::kABytes;
    // For tiles of D's width.
    const auto multiply_tile = [&](auto width, auto& columns) {
      using D = decltype(width);
      int previous = stage;
      auto step = [&](int add) {
        barrier_wait(full + 8 * stage, phase);
        const u64 tiles = advance(first_stage, stage * C::kStageBytes);
        if constexpr (kIsWithExtra<D>) {
          multiply_with_extra_square<C>(columns, advance(tiles, C::kABytes), tiles,
                                        advance(tiles, has_two_operands(w) ? 8192 : 0), add);
        } else {
          multiply<D>(columns, advance(tiles, rows), advance(tiles, other), add);
        }
        if (add) {
          wgmma_wait<1>();
          if (frees) barrier_arrive(empty + 8 * previous);
          finish_skew();
        }
        previous = stage;
        next_stage();
      };
      step(0);
      // Another block may finish a streamed tile, so nothing is requested for it before join().
      if (p.flags & kSm90AddVector && !w.streamed) {
        request_first_squares<C>(p, w, staging, turn, group);
      }
#pragma unroll 1
      for (int i = 1; i < k_count; ++i) step(1);
      wgmma_wait<0>();
      if constexpr (kIsWithExtra<D>) {
        keep_in_place(columns.own);
        keep_in_place(columns.extra);
      } else {
        keep_in_place(columns[0]);
      }
      if (frees) barrier_arrive(empty + 8 * previous);
    };
    if (w.m0 + group * Layout<C>::kRows >= p.n) {  // the warpgroup has no rows of the tile
      // One warp frees the stages, when all have seen the tile. A warp that waited by itself could
      // be late by two phases, which a barrier does not distinguish: it would wait for ever.
      named_sync(kGroupBarrier + group, kWarpgroup);
#pragma unroll 1
      for (int i = 0; i < k_count; ++i) {
        if (warp % 4 == 0) {
          barrier_wait(full + 8 * stage, phase);
          if (frees) barrier_arrive(empty + 8 * stage);
        }
        next_stage();
      }
      named_sync(kGroupBarrier + group, kWarpgroup);
      if (cluster_size() > 1) {  // as send_squares
        cluster_meet();
        if (frees) barrier_arrive(shared + Layout<C>::kParts);
      }
      continue;
    }
    if (is_narrow<C>(w)) {
      multiply_tile(Narrow<C>(), reinterpret_cast<float (&)[1][C::kTileN / 4]>(sum));
    } else if (extra && group == 0) {
      // NOTE: it ends with an epilogue of its own: with one for both, ptxas serialises the products
      // (C7511).
      if constexpr (kTakesExtraSquares<C>) {
        SquareSums<C> squares;
        multiply_tile(WithExtra<C>(), squares);
        finish_skew();
        float both[1][C::kTileN / 2];
#pragma unroll
        for (int i = 0; i < C::kTileN / 4; ++i) {
          both[0][i] = squares.own[i];
          both[0][C::kTileN / 4 + i] = squares.extra[i];
        }
        const Team alone = {0, 1};
        store_squares<C>(p, w, alone, shared, staging, turn, group, 0, C::kTileN / C::kPanel, both);
        continue;
      }
    } else {
      multiply_tile(C(), sum);
    }
    finish_skew();
    float no_rows[C::kBlocksM];
    if (w.streamed && !join<C>(p, w, group, word + 4 * group, sum, false, no_rows)) continue;
    const Team team;  // here, so that it takes no registers from the products
    if constexpr (kTakesColumns<C>) {
      if (has_columns<C>(team)) {
        const Columns<C> columns(w, team, shared, group);
        send_columns<C>(columns, shared + Layout<C>::kParts, sum);
        finish_columns<C>(p, w, columns, shared + Layout<C>::kParts, group);
        // NOTE: this was the cluster's only tile. Ended so, ptxas serialises TF32's products
        // (C7511); those of 16 bits, where both `break`.
        if (C::kElement == 4) break;
        continue;
      }
    }
    if (team.size > 1) send_squares<C>(p, w, team, group, shared, sum);
    store_squares<C>(p, w, team, shared, staging, turn, group, 0, C::kTileN / C::kPanel, sum);
  }
  if (leads) named_arrive(kSkewBarrier, 2 * kWarpgroup);  // there was no tile
  if (threadIdx.x % 32 == 0) tma_store_wait_read<0>();
}

// For join(): so many warpgroups that none has an offset in a part of a tile. Here each has the
// whole part, and join() would take them for two that share it.
template <class C>
struct WithoutOffset : C {
  static constexpr int kConsumers = 1 << 20;
};

// NOTE: with TF32's eight squares ptxas would serialise the products (C7511).
template <class C>
constexpr bool kStoresFromStages = C::kElement == 2;

// Whether the block's last tile is stored through the stages, which nobody uses any more, without
// waiting for buffers. Otherwise both warpgroups store half of it: with an addend, and where the
// other warpgroup's products may still read a stage, since the tile has not passed through them
// all.
template <class C>
TC_DEVICE bool stores_from_stages(const Sm90MatmulParams& p, const Work& w) {
  return kStoresFromStages<C> && !(p.flags & kSm90AddVector) && !w.streamed &&
         w.k_count >= C::kStages;
}

// Each warpgroup multiplies every other tile, and stores it while the other one multiplies. When a
// block has no more tiles, the warpgroup without one stores half of the last one.
template <class C>
TC_DEVICE void consume_ping_pong(const Sm90MatmulParams& p, u32 shared, u32 full, u32 empty,
                                 u32 word, const Work* ring, int warp) {
  constexpr int kSteps = C::kTileN / C::kPanel;  // of each block of rows
  const int group = warp / 4;
  const bool frees = threadIdx.x % kWarpgroup == 0;
  const u32 staging =
      shared + Layout<C>::kStaging + group * (Layout<C>::kBuffers * Layout<C>::kBufferBytes);
  const u64 first_stage = wgmma_descriptor(shared, 8192, 1024);
  int stage = 0, number = 0, turn = 0;
  u32 phase = 0;
  // A turn is the stage, its phase and the number of the next work item, in 16 bytes of each
  // warpgroup. The other one has read its last turn: it has passed one on since.
  const auto pass_turn = [&] {
    if (frees) {
      asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(shared + Layout<C>::kTurns +
                                                                    16 * (1 - group)),
                   "r"(stage), "r"(phase), "r"(number + 1), "r"(0)
                   : "memory");
    }
    named_arrive(kTurnBarrier + 1 - group, 2 * kWarpgroup);
  };

  for (bool waits = group == 1;; waits = true) {
    if (waits) {
      named_sync(kTurnBarrier + group, 2 * kWarpgroup);
      int unused;
      asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(stage), "=r"(phase), "=r"(number), "=r"(unused)
                   : "r"(shared + Layout<C>::kTurns + 16 * group)
                   : "memory");
    }
    barrier_wait(full + 8 * stage, phase);
    const int k_count = ring[number % C::kRing].k_count;
    const bool helps = k_count == 0;
    const Work& w = ring[(helps ? number - 1 : number) % C::kRing];
    if (helps && w.streamed) break;  // its parts may be added up by another block
    if (helps && stores_from_stages<C>(p, w)) break;
    float sum[C::kBlocksM][C::kTileN / 2];
    if (!helps) {
      int previous = stage;
      // issue(stage, add) issues the products of a stage.
      const auto step = [&](auto issue, int add) {
        const u64 tiles = advance(first_stage, stage * C::kStageBytes);
        barrier_wait(full + 8 * stage, phase);
        issue(tiles, add);
        if (add) {
          wgmma_wait<1>();
          if (frees) barrier_arrive(empty + 8 * previous);
        }
        previous = stage;
        if (++stage == C::kStages) {
          stage = 0;
          phase ^= 1;
        }
      };
      const auto add_other_stages = [&](auto issue) {
#pragma unroll 1
        for (int i = 1; i < k_count; ++i) step(issue, 1);
        pass_turn();
        wgmma_wait<0>();
#pragma unroll
        for (int i = 0; i < C::kBlocksM; ++i) keep_in_place(sum[i]);
        if (frees) barrier_arrive(empty + 8 * previous);
      };
      if (!takes_thin_rows<C>(p, w)) {
        const auto issue = [&](u64 tiles, int add) {
          multiply<C>(sum, tiles, advance(tiles, C::kABytes), add);
        };
        step(issue, 0);
        // Another block may finish a streamed tile, so nothing is requested for it before join().
        if (p.flags & kSm90AddVector && !w.streamed) {
          request_first_squares<C>(p, w, staging, turn, group);
        }
        add_other_stages(issue);
      } else if constexpr (kHasThinRows<C>) {
        const auto multiply_with = [&](auto corner) {
          ThinSums thin;
          const auto issue = [&](u64 tiles, int add) {
            multiply_with_thin_rows<C, decltype(corner)::value>(
                sum, thin, advance(tiles, C::kABytes), tiles, add);
          };
          if (p.flags & kSm90AddVector) request_first_squares<C>(p, w, staging, turn, group);
          step(issue, 0);
          add_other_stages(issue);
          store_thin_rows<C, decltype(corner)::value>(p, w, thin);
        };
        if (has_corner<C>(p, w)) {
          multiply_with(Corner<true>());
        } else {
          multiply_with(Corner<false>());
        }
      }
      float no_rows[C::kBlocksM];
      if (w.streamed &&
          !join<WithoutOffset<C>>(p, w, group, word + 4 * group, sum, false, no_rows)) {
        if (w.k_first != 0) break;
        continue;
      }
    }
    int first = 0, last = C::kBlocksM * kSteps;
    const bool is_last = w.k_first != 0;
    const bool has_buffers = is_last && stores_from_stages<C>(p, w);
    if (is_last && !w.streamed && !has_buffers) {
      // The second block of rows goes to the other warpgroup through the stages, which nobody uses.
      named_sync(kEndBarrier, 2 * kWarpgroup);
      const u32 through = shared + threadIdx.x % kWarpgroup * 16;
      if (helps) {
        named_sync(kEndBarrier, 2 * kWarpgroup);
        first = kSteps;
#pragma unroll
        for (int j = 0; j < C::kTileN / 8; ++j) {
          float x[4];
          load_shared(x, through + j * (16 * kWarpgroup));
#pragma unroll
          for (int c = 0; c < 4; ++c) sum[C::kBlocksM - 1][4 * j + c] = x[c];
        }
      } else {
        last = kSteps;
#pragma unroll
        for (int j = 0; j < C::kTileN / 8; ++j) {
          const float* x = sum[C::kBlocksM - 1] + 4 * j;
          asm volatile(
              "st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(through + j * (16 * kWarpgroup)),
              "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3])
              : "memory");
        }
        named_arrive(kEndBarrier, 2 * kWarpgroup);
      }
    }
    const Team alone = {0, 1};
    if constexpr (kStoresFromStages<C>) {
      if (has_buffers) {
        int own = 0;
        store_squares<C, true>(p, w, alone, shared, shared, own, group, 0, last, sum);
        break;
      }
    }
    store_squares<C>(p, w, alone, shared, staging, turn, group, first, last, sum);
    if (is_last) break;
  }
  if (threadIdx.x % 32 == 0) tma_store_wait_read<0>();
}

template <class C>
TC_DEVICE void run(const Sm90MatmulParams& p) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const u32 shared = shared_address(memory);
  const u32 full = shared + Layout<C>::kBarriers, empty = full + 8 * C::kStages;
  const u32 word = shared + Layout<C>::kWords, found = shared + Layout<C>::kFound;
  const auto ring = reinterpret_cast<Work*>(memory + Layout<C>::kRing);
  const auto items = reinterpret_cast<Work*>(memory + Layout<C>::kItems);
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);

  const auto initialize = [&] {
    if (shared % 1024 != 0) asm volatile("trap;");
    prefetch_tensor_map(&p.a);
    prefetch_tensor_map(&p.b);
    prefetch_tensor_map(&p.out_map);
    for (int s = 0; s < C::kStages; ++s) {
      barrier_init(full + 8 * s, 1);
      barrier_init(empty + 8 * s, C::kConsumers);
    }
    barrier_init(shared + Layout<C>::kParts, C::kConsumers);
    if (Layout<C>::kPingPong) {
      for (int i = 0; i < 2 * kItemsAhead; ++i) barrier_init(found + 8 * i, 1);
    }
    fence_barrier_init();
  };
#if TC_PING_PONG
  if (threadIdx.x == 0) initialize();
  __syncthreads();
#else
  start_alone<1, C::kConsumers>(warp, initialize);
#endif
  launch_next_grid();
  if (warp < 4) {
    fewer_registers<C::kProducerRegisters>();
    if (warp == 0 && elect_one()) {
      produce<C>(p, shared, full, empty, found, items, ring);
    } else {
      if constexpr (Layout<C>::kPingPong) {
        if (warp == 1 && elect_one()) find_items<C>(p, found, items);
      }
      wait_for_previous_grid();
    }
    __syncwarp();
    if (!Layout<C>::kPingPong && Team().size > 1) cluster_meet();  // matches that of send_squares
  } else {
    more_registers<C::kConsumerRegisters>();
    wait_for_previous_grid();
    if constexpr (Layout<C>::kPingPong) {
      consume_ping_pong<C>(p, shared, full, empty, word, ring, warp - 4);
    } else {
      consume<C>(p, shared, full, empty, word, ring, warp - 4);
    }
  }
}

extern "C" __global__ void __launch_bounds__(TC_THREADS, 1)
    TC_KERNEL(const __grid_constant__ Sm90MatmulParams p) {
  using C = Config<DType::TC_DTYPE, TC_A_MN, TC_B_MN, TC_TILE_M, TC_TILE_N, TC_STAGES,
                   TC_PING_PONG ? 1 : 2, true, false, false>;
  static_assert((1 + Layout<C>::kWarpgroups) * kWarpgroup == TC_THREADS);
  static_assert(Layout<C>::kSharedBytes == TC_DYNAMIC_SHARED);
  static_assert(C::kTileK == TC_TILE_K, "128 bytes of K");
  run<C>(p);
}

}  // namespace torch_cubin::TC_KERNEL

/* torch_cubin kernels
{"virtual_arch": ["90a"],
 "defaults": {
  "kind": "sm90_symmetric", "layout": "{l.layout}", "tile": "{t.tile}", "block": [384, 1, 1],
  "stages": "{t.stages}", "dynamic_shared": "{t.shared}",
  "cost": {"sending": 1.5, "receiving": 0.75, "thin_rows": 0.0}, "ping_pong": "{t.ping_pong}",
  "defines": {"TC_DTYPE": "{d.dtype}", "TC_A_MN": "{l.a_mn}", "TC_B_MN": "{l.b_mn}",
              "TC_PING_PONG": "{t.ping_pong}"}},
 "kernels": [
  {"name": "sm90_symmetric_matmul_{d.short}_{l.layout}_{t.tile.0}x{t.tile.1}{t.name}",
   "for": {
    "d": "bf16 f16",
    "l": [
     ["layout", "a_mn", "b_mn"],
     ["nt", 0, 0],
     ["tn", 1, 1],
     ["nn", 0, 1]],
    "t": [
     ["name", "tile", "stages", "shared", "ping_pong"],
     ["",           [128, 256, 64], 4, 229968, 0],
     ["",           [128, 192, 64], 4, 229968, 0],
     ["",           [128, 128, 64], 5, 229984, 0],
     ["_ping_pong", [128, 128, 64], 5, 230176, 1],
     ["",           [128, 64, 64],  6, 213616, 0]]}},
  {"name": "sm90_symmetric_matmul_tf32_{l.layout}_{t.tile.0}x{t.tile.1}{t.name}",
   "for": {
    "d": "tf32", "l": [{"layout": "nt", "a_mn": 0, "b_mn": 0}],
    "t": [
     ["name", "tile", "stages", "shared", "ping_pong"],
     ["",           [128, 256, 32], 4, 229968, 0],
     ["",           [128, 128, 32], 5, 229984, 0],
     ["_ping_pong", [128, 128, 32], 5, 230176, 1],
     ["",           [128, 64, 32],  6, 213616, 0]]}}]}
*/
