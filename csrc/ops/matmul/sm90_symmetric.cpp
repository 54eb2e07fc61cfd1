// The backend of csrc/kernels/matmul/sm90_symmetric.cu: products on Hopper of which the lower
// triangle is computed, and stored twice. A file of over 500 lines: offers of tiles, their prices
// and their launches depend on the same few kinds of plans.
#include <algorithm>
#include <cmath>

#include "kernels/matmul/sm90_params.h"
#include "ops/common/cluster_capacity.h"
#include "ops/common/launch.h"
#include "ops/matmul/backend.h"
#include "ops/matmul/sm90_configs.h"
#include "ops/matmul/sm90_map.h"
#include "ops/matmul/sm90_stream.h"

namespace torch_cubin {
namespace {

constexpr int64_t kOperandRow = 128;  // bytes of an operand's tile in shared memory: the swizzle's
constexpr int64_t kStoreRows = 16;    // of an output's box
constexpr int64_t kRowsOfGroup = 2048;            // of the output, whose tiles follow one another
constexpr int64_t kMostSymmetricTiles = 1 << 30;  // counted in 32 bits, as are their rows
constexpr int64_t kMostSymmetricSize = 1 << 30;
constexpr int64_t kWarpgroups = 2;          // that multiply
constexpr int64_t kLeastPartBlocks = 4;     // k blocks of a part of a streamed tile
constexpr int64_t kMostEqualParts = 8;      // of such a tile
constexpr int64_t kMostClusterBlocks = 8;   // blocks; more are not portable
constexpr int64_t kLeastClusterBlocks = 2;  // k blocks of each of them
constexpr int64_t kSquare = 64;             // rows of a warpgroup; columns that they are stored by
constexpr int64_t kColumns = 8;             // that a block of a large cluster finishes together
constexpr int64_t kPrefetchBytes = 128;     // multiples of which blocks prefetch
// Bytes of the largest operand that blocks prefetch: 768 x 4096 took 0.95 of the time so on an
// H200, 1024 x 4096 0.97, but 1920 x 4096 and 1536 x 8192, whose first tiles came late, took 1.1.
constexpr int64_t kMostPrefetched = 8 << 20;
constexpr int64_t kThinRows = 16;  // as in sm90_thin_rows.cuh
// Waits of a block whose warpgroups take tiles in turns: of one for the other's first products, and
// for its last stores (H200, K of 120 to 1024, 1.03 to 4 waves: 1 to 2 us longer than predicted).
constexpr int64_t kPingPongWaits = 2;
// Of the time that a cluster takes to exchange sums: stored and read, without waiting for each.
constexpr double kThroughMemory = 1.0 / 2;
constexpr int64_t kStreamedHandshakes = 4;
// Results are stored twice; those of 4 bytes in twice as many squares, and staged one by one for
// their transpose, which takes longer where a thread has 128 sums (H200, 8 of 1268 x 32 by
// ping-pong: 30 us, 18 predicted without; 512 x 64 by 128x128 5.4 us, 7.9 predicted so).
constexpr int64_t kStoredTwice = 2, kStoredTwice32 = 4, kStoredTwice32Many = 6;
// Waits of a block of a cluster for the others: it starts with them, meets them after its products,
// and waits for their sums; where it finishes squares, it also copies its own.
constexpr int64_t kWaitsForColumns = 3, kWaitsForSquares = 4;
// Where all of a tile's K is loaded while the one before is stored, a wait less (H200, K of 256:
// 1.2 us less than predicted, K of 512: as predicted).
constexpr int64_t kLoadedAhead = 4;  // k blocks

// A kernel, by its entry in the manifest.
struct SymmetricRow {
  explicit SymmetricRow(PackageKernel& entry) : kernel(&entry) {
    constexpr const char* kMaths[] = {"float16", "bfloat16", "tf32"};
    constexpr const char* kLayouts[] = {"nt", "tn", "nn"};
    const KernelFields fields(entry);
    math = static_cast<Math>(fields.index("math", kMaths));
    const int layout = fields.index("layout", kLayouts);
    a_mn_major = layout == 1;
    b_mn_major = layout != 0;
    int64_t tile[3];
    fields.triple("tile", 1, tile);
    tile_m = tile[0];
    tile_n = tile[1];
    tile_k = tile[2];
    ping_pong = fields.integer("ping_pong", 0, 1) != 0;
    sending = fields.object("cost").number("sending", 0);
    receiving = fields.object("cost").number("receiving", 0);
    thin_rows = fields.object("cost").number("thin_rows", 0);
    if (tile_m % 64 != 0 || tile_n % 64 != 0 || kRowsOfGroup % tile_m != 0) {
      fields.refuse("tile", "multiples of 64, and rows that divide 2048");
    }
  }

  PackageKernel* kernel;
  Math math;
  bool a_mn_major, b_mn_major;
  int64_t tile_m, tile_n, tile_k;
  bool ping_pong;    // each warpgroup multiplies whole tiles, and stores one beside the other's
  double sending;    // a sum to another block where all multiprocessors do, to receiving one
  double receiving;  // one of a few columns of a tile, to receiving one of whole squares
  double thin_rows;  // logarithm of what all tiles take longer where some take thin rows
  double correction = 0;  // that of sm90.cu's tile

  std::string tile() const { return std::to_string(tile_m) + "x" + std::to_string(tile_n); }
  // Of 128 bytes of columns, which the TMA stores.
  int64_t squares() const {
    return tile_m / kSquare * (tile_n * (math == kMathTF32 ? 4 : 2) / kOperandRow);
  }
  // Whether the blocks of a cluster finish columns of a tile, as in sm90_columns.cuh.
  bool has_columns(int64_t size) const {
    return !ping_pong && tile_n <= tile_m && size > squares();
  }
  // Whether lone tiles of clusters of that size take rows of tiles that end at the last square. The
  // squares of two tiles are added in the same order only where few blocks, or columns, are.
  bool has_rows_inside(int64_t n, int64_t size) const {
    const bool odd = ceil_div(n, kSquare) % 2 != 0;
    return tile_m == 2 * kSquare && tile_n == kSquare && odd && (size <= 2 || has_columns(size));
  }
  // Whether a thread has 128 sums of a tile.
  bool has_many_sums() const { return ping_pong || tile_n == 2 * tile_m; }
  // Whether half of a tile at the diagonal is skipped.
  bool narrows() const { return tile_n == 2 * tile_m; }
  // Whether tiles at the diagonal can take thin last rows.
  bool takes_thin_rows() const { return ping_pong && !a_mn_major && !b_mn_major; }
  // Whether they can take squares of other tiles, as in sm90_extra_squares.cuh.
  bool takes_extra_squares() const {
    return !ping_pong && tile_m == 2 * kSquare && tile_n == 2 * kSquare && !a_mn_major &&
           !b_mn_major;
  }
};

struct SymmetricPlan {
  const SymmetricRow* row;
  int64_t narrow;   // tiles of one matrix that are in pairs
  bool thin;        // the rows beyond whole tiles are computed with the tiles at the diagonal
  bool extra;       // every fourth tile at the diagonal is computed with the three before it
  bool inside;      // rows of tiles end at the last square
  int64_t tiles;    // of one matrix; a pair counts as one
  int64_t all;      // of all matrices
  int64_t rest;     // of those, what fills no wave of all multiprocessors
  int64_t shares;   // blocks that divide the k blocks of the rest; 0: each tile has a block
  int64_t cluster;  // blocks that divide the k blocks of each tile

  bool has_equal_parts() const { return shares % rest == 0; }
};

// The tiles of the lower triangle, whole or in part.
int64_t count_tiles(const SymmetricRow& row, int64_t n) {
  const int64_t rows = ceil_div(n, row.tile_m), columns = ceil_div(n, row.tile_n);
  int64_t tiles = 0;
  for (int64_t column = 0; column < columns; ++column) {
    tiles += rows - column * row.tile_n / row.tile_m;
  }
  return tiles;
}

// The same, where all tiles run at a time, and clusters of that size compute one each.
int64_t count_lone_tiles(const SymmetricRow& row, int64_t n, int64_t size) {
  if (!row.has_rows_inside(n, size)) return count_tiles(row, n);
  const int64_t rows = ceil_div(n, row.tile_m);
  return rows * rows;
}

class SymmetricKernels : public MatmulKernels {
  // What blocks work on: whole tiles, such with thin rows, or parts of their K in clusters.
  enum class Of { kTiles, kThinRows, kCluster };

 public:
  SymmetricKernels(const Device& device, const std::vector<PackageKernel*>& kernels)
      : device_(device) {
    const Corrections corrections(device);
    for (PackageKernel* kernel : kernels) {
      rows_.emplace_back(*kernel);
      rows_.back().correction = corrections.of(rows_.back().tile());
    }
    of_streamed_ = corrections.of(" streamed");
    of_streamed_evenly_ = corrections.of(" streamed evenly");
  }

  static void check(PackageKernel& kernel) { SymmetricRow{kernel}; }

  void configs(const MatmulCase& c, MatmulConfigs& out) const override {
    if (!takes(c)) return;
    for (const SymmetricRow& row : rows_) {
      if (row.math != c.math || row.a_mn_major != !is_along_k(c.a) ||
          row.b_mn_major != !is_along_k(c.b)) {
        continue;
      }
      const int64_t tiles = count_tiles(row, c.m), all = tiles * c.batch;
      if (tiles * row.tile_m > kMostSymmetricTiles || all > kMostSymmetricTiles) continue;
      if (row.ping_pong && all <= device_.multiprocessors) continue;
      offer_tiles(row, c, tiles, 0, out);
      offer_thin_rows(row, c, out);
      offer_extra_squares(row, c, tiles, out);
      if (row.ping_pong) continue;
      if (!c.batch_invariant) offer_clusters(row, c, out);
      // The tiles at the diagonal in pairs, one of them alone if their number is odd.
      const int64_t narrow = ceil_div(c.m, row.tile_n);
      if (row.narrows() && narrow > 1 && all > device_.multiprocessors) {
        offer_tiles(row, c, tiles - narrow / 2, narrow, out);
      }
    }
  }

  bool has_capacity(const MatmulPlan& plan) const override {
    const int64_t size = plan.get<SymmetricPlan>().cluster;
    // Blocks of all these kernels take a multiprocessor each.
    return size == 1 || size <= clusters_.ask(*rows_.front().kernel, device_);
  }

  std::string name(const MatmulPlan& plan) const override {
    const auto chosen = plan.get<SymmetricPlan>();
    std::string name = "sm90_symmetric " + chosen.row->tile();
    if (chosen.row->ping_pong) name += " ping_pong";
    if (chosen.narrow > 0) name += " in pairs";
    if (chosen.thin) name += " with thin rows";
    if (chosen.extra) name += " with extra squares";
    if (chosen.cluster > 1) return name + " split in " + std::to_string(chosen.cluster);
    if (chosen.shares == 0) return name;
    if (!chosen.has_equal_parts()) return name + " streamed";
    return name + " streamed in " + std::to_string(chosen.shares / chosen.rest);
  }

  void launch(const MatmulPlan& plan, const MatmulProblem& p,
              const MatmulOperands& operands) const override {
    const auto chosen = plan.get<SymmetricPlan>();
    const SymmetricRow& row = *chosen.row;
    Sm90MatmulParams params{};
    const bool batched = p.batch_dims > 0;
    const int64_t rows_of_a = chosen.thin ? kThinRows : chosen.extra ? kSquare : row.tile_m;
    describe(operands.a, row.a_mn_major, rows_of_a, p.a_stride_m, p.a_stride_k,
             batched ? p.a_batch_stride : nullptr, row, p, params.a);
    describe(operands.b, row.b_mn_major, row.narrows() ? row.tile_n / 2 : row.tile_n, p.b_stride_n,
             p.b_stride_k, batched ? p.b_batch_stride : nullptr, row, p, params.b);
    describe_out(p, operands.c, params);
    params.addend = operands.addend;
    params.alpha = static_cast<float>(p.alpha);
    params.beta = static_cast<float>(p.beta);
    params.addend_stride_m = p.addend_stride_m;
    params.addend_stride_n = p.addend_stride_n;
    if (operands.addend != nullptr) {
      std::copy_n(p.addend_batch_stride, p.batch_dims, params.addend_batch_stride);
    }
    params.m = params.n = static_cast<int>(p.m);
    params.k_blocks = static_cast<int>(ceil_div(p.k, row.tile_k));
    params.group = static_cast<int>(kRowsOfGroup / row.tile_m);
    params.tiles_m = static_cast<int>(chosen.tiles);
    params.tiles_n = 1;
    params.row_parts = static_cast<int>(chosen.narrow);
    params.split_blocks = chosen.extra                    ? 3
                          : chosen.thin                   ? 2
                          : is_own_transpose(p, operands) ? 1
                                                          : 0;
    params.out = operands.c;
    if (batched) params.flags |= kSm90Batched;
    if (!p.batch_invariant) params.flags |= kSm90Serpentine;
    if (addend_in_vectors(p, operands.addend)) params.flags |= kSm90AddVector;
    params.stream_tiles = static_cast<int>(chosen.shares > 0 ? chosen.rest : 0);
    params.stream_clusters = static_cast<int>(chosen.shares);
    params.whole_tiles = static_cast<int>(chosen.all - params.stream_tiles);
    // Without a whole wave only blocks with a share have work.
    const int64_t most = params.whole_tiles > 0 ? chosen.all : std::max(chosen.all, chosen.shares);
    const int64_t blocks = chosen.cluster > 1 ? chosen.all * chosen.cluster
                                              : std::min<int64_t>(most, device_.multiprocessors);
    // A lone tile has no next one that its end could overlap with.
    const bool lone = chosen.cluster > 1 || (chosen.shares == 0 && chosen.all <= blocks);
    if (lone && chosen.narrow == 0) params.flags |= kSm90Lone;
    if (chosen.inside) params.flags |= kSm90RowsInside;
    const int64_t bytes = p.batch() * p.m * p.k * element_size(p.input);
    if (lone && is_one_stretch(p) && bytes <= kMostPrefetched) {
      const int64_t share = ceil_div(bytes, blocks * kPrefetchBytes) * kPrefetchBytes;
      params.a_rows = {operands.a, 0, share, bytes};
    }
    launch_sm90(*row.kernel, {blocks, 1, 1, chosen.cluster}, {row.tile_m, row.tile_n, kWarpgroups},
                device_, params);
  }

 private:
  static bool takes(const MatmulCase& c) {
    const bool maths = c.math == kMathFloat16 || c.math == kMathBFloat16 || c.math == kMathTF32;
    const bool plain = !c.has_bias && c.activation == kActivationNone && !c.split_sums &&
                       !c.sums_rows() && c.output == c.input;
    return c.symmetric && c.k_parts == 1 && maths && plain && c.a_mappable && c.b_mappable &&
           c.batch_dims <= kSm90BatchDims && c.m <= kMostSymmetricSize &&
           c.k <= kMostSymmetricSize && c.m * element_size(c.output) % kVectorBytes == 0;
  }

  // Tiles that a block computes alone, and with the last of them streamed. `narrow` tiles of each
  // matrix are in pairs.
  void offer_tiles(const SymmetricRow& row, const MatmulCase& c, int64_t tiles, int64_t narrow,
                   MatmulConfigs& out) const {
    const int64_t all = tiles * c.batch, blocks = device_.multiprocessors, rest = all % blocks;
    const auto offer = [&](int64_t shares) {
      const SymmetricPlan chosen = {&row, narrow, false, false, false, tiles, all, rest, shares, 1};
      offer_phases(plan_of(chosen), chosen, c, out);
    };
    const int64_t lone = count_lone_tiles(row, c.m, 1), all_lone = lone * c.batch;
    if (lone < tiles && all_lone <= blocks) {
      const int64_t left = all_lone % blocks;
      const SymmetricPlan chosen = {&row, 0, false, false, true, lone, all_lone, left, 0, 1};
      offer_phases(plan_of(chosen), chosen, c, out);
    } else {
      offer(0);
    }
    // Of a matrix, the pairs come first; they are not streamed.
    if (!c.batch_invariant && (narrow == 0 || rest <= tiles - ceil_div(narrow, int64_t{2}))) {
      stream(all, ceil_div(c.k, row.tile_k), offer);
    }
  }

  // Whole tiles, where few rows lie beyond them.
  void offer_thin_rows(const SymmetricRow& row, const MatmulCase& c, MatmulConfigs& out) const {
    const int64_t rows = c.m / row.tile_m, thin = c.m % row.tile_m;
    if (!row.takes_thin_rows() || !c.own_transpose || c.batch_invariant) return;
    if (thin == 0 || thin > kThinRows) return;
    const int64_t tiles = rows * (rows + 1) / 2, all = tiles * c.batch;
    const int64_t blocks = device_.multiprocessors;
    if (all <= blocks) return;
    const SymmetricPlan chosen = {&row, 0, true, false, false, tiles, all, all % blocks, 0, 1};
    offer_phases(plan_of(chosen), chosen, c, out);
  }

  // Tiles without every fourth one at the diagonal, where all of them then run at a time. Else they
  // would take longer than others (1792, H200: 13.46 us, 13.34), and of more waves ping-pong hides
  // the stores.
  void offer_extra_squares(const SymmetricRow& row, const MatmulCase& c, int64_t tiles,
                           MatmulConfigs& out) const {
    const int64_t fours = ceil_div(c.m, row.tile_m) / 4, blocks = device_.multiprocessors;
    if (!row.takes_extra_squares() || !c.own_transpose || fours == 0) return;
    const int64_t all = (tiles - fours) * c.batch;
    if (all > blocks || tiles * c.batch <= blocks) return;
    const int64_t rest = all % blocks;
    const SymmetricPlan chosen = {&row, 0, false, true, false, tiles - fours, all, rest, 0, 1};
    offer_phases(plan_of(chosen), chosen, c, out);
  }

  // Offers the numbers of blocks that may divide the k blocks of the last tiles, which fill no
  // wave: those that divide each tile into equal parts, and all blocks.
  void stream(int64_t tiles, int64_t k_blocks, const std::function<void(int64_t)>& offer) const {
    const int64_t blocks = device_.multiprocessors, rest = tiles % blocks;
    // Kernels count the parts' k blocks in 31 bits.
    if (rest == 0 || blocks * rest * k_blocks >= (int64_t{1} << 31)) return;
    for (int64_t parts = 2; parts <= kMostEqualParts; ++parts) {
      if (rest * parts > blocks || k_blocks < parts * kLeastPartBlocks) break;
      offer(rest * parts);
    }
    if (blocks % rest != 0 && rest * k_blocks >= blocks * kLeastPartBlocks) offer(blocks);
  }

  // A cluster for each tile, where all of them run at a time.
  void offer_clusters(const SymmetricRow& row, const MatmulCase& c, MatmulConfigs& out) const {
    const int64_t k_blocks = ceil_div(c.k, row.tile_k);
    const auto results = static_cast<double>(row.tile_m * row.tile_n);
    for (int64_t size = 2; size <= clusters_.largest(); ++size) {
      const int64_t slots = clusters_at_once(device_.multiprocessors, size);
      const int64_t tiles = count_lone_tiles(row, c.m, size), all = tiles * c.batch;
      if (k_blocks < size * kLeastClusterBlocks) break;
      if (all > slots) continue;
      const auto own_blocks = static_cast<double>(ceil_div(k_blocks, size));
      Work work = work_of(row, c, 1, own_blocks, 1, Of::kCluster);
      const bool columns = row.has_columns(size);
      const int64_t parts = columns ? row.tile_n / kColumns : row.squares();
      const auto of_parts = static_cast<double>(parts);
      const auto own = static_cast<double>(ceil_div(parts, size));
      work.values *= own / of_parts;
      fill(row, own_blocks, all * size, work);
      // What a block receives, which passes while it waits, and what it sends, the slower, the more
      // multiprocessors do (95 sizes up to 3072 with 256 to 8192 columns on an H200).
      const auto others = static_cast<double>(size - 1);
      const double sent = others / static_cast<double>(size);
      // Of odd numbers of blocks, each has squares of both warpgroups, which add them side by side;
      // so it has columns of any number of blocks.
      const double in_turn = size % 2 == 0 ? own : std::ceil(own / 2);
      const double received = columns ? own * row.receiving : in_turn / 2;
      work.sums_bytes = (received / of_parts * others + row.sending * sent * work.filled) *
                        results * sizeof(float);
      work.handshakes = static_cast<double>(columns ? kWaitsForColumns : kWaitsForSquares);
      work.early = true;
      work.correction = 0;  // a tile whose K is in parts has none of its factor in sm90.cu
      const bool inside = row.has_rows_inside(c.m, size);
      const int64_t rest = all % device_.multiprocessors;
      const SymmetricPlan chosen = {&row, 0, false, false, inside, tiles, all, rest, 0, size};
      out.offer(plan_of(chosen), work);
    }
  }

  // For a launch of so many blocks, at most one for each multiprocessor. What the TMA writes to
  // shared memory delays what wgmma reads, and the less, the fewer multiprocessors load: a k block
  // of 128x64, for which wgmma reads during 256 cycles and the TMA writes during 192, took 290
  // cycles where 15% of the multiprocessors had a block (H100), and 410 where 55% had.
  void fill(const SymmetricRow& row, double k_blocks, int64_t blocks, Work& work) const {
    work.filled = static_cast<double>(blocks) / static_cast<double>(device_.multiprocessors);
    work.shared -= (1 - work.filled) * k_blocks * static_cast<double>(row.tile_m + row.tile_n);
  }

  static bool is_one_stretch(const MatmulProblem& p) {
    const bool matrix =
        (p.a_stride_k == 1 && p.a_stride_m == p.k) || (p.a_stride_m == 1 && p.a_stride_k == p.m);
    return matrix && (p.batch_dims == 0 || (p.batch_dims == 1 && p.a_batch_stride[0] == p.m * p.k));
  }

  static MatmulPlan plan_of(const SymmetricPlan& chosen) {
    MatmulPlan plan;
    plan.set(chosen);
    plan.mirrors = true;
    return plan;
  }

  // Whole waves, and then the rest.
  void offer_phases(const MatmulPlan& plan, const SymmetricPlan& chosen, const MatmulCase& c,
                    MatmulConfigs& out) const {
    const SymmetricRow& row = *chosen.row;
    const int64_t blocks = device_.multiprocessors, waves = chosen.all / blocks;
    const auto k_blocks = static_cast<double>(ceil_div(c.k, row.tile_k));
    const Of of = chosen.thin ? Of::kThinRows : Of::kTiles;
    const auto rest = static_cast<double>(chosen.rest), shares = static_cast<double>(chosen.shares);
    const double of_rest = rest / static_cast<double>(chosen.all);
    const double parts = chosen.shares > 0 ? shares / rest : 1;  // of a tile of the rest
    Work last = work_of(row, c, 1, k_blocks / parts, of_rest, of);
    last.filled = rest * parts / static_cast<double>(blocks);
    last.follows = waves > 0;
    if (chosen.shares > 0) {
      // Few blocks exchange sums at a higher rate.
      last.sums_bytes = static_cast<double>(row.tile_m * row.tile_n) * sizeof(float) * parts *
                        last.filled * kThroughMemory;
      last.handshakes = kStreamedHandshakes;
      last.correction += chosen.has_equal_parts() ? of_streamed_evenly_ : of_streamed_;
      // What blocks load that stand at different places of K stays in no cache.
      if (!chosen.has_equal_parts()) {
        last.bytes_again += rest * static_cast<double>(row.tile_m + row.tile_n) * k_blocks * 128;
      }
    }
    const bool lone = waves == 0 && chosen.shares == 0;
    if (lone) fill(row, k_blocks, chosen.all, last);
    // Each result is stored twice, by all multiprocessors at a time: a wait of each wave.
    last.waits = last.filled;
    last.early = lone;
    if (waves == 0) return out.offer(plan, last);
    const auto turns = static_cast<double>(waves);
    Work whole = work_of(row, c, turns, turns * k_blocks, 1 - of_rest, of);
    whole.waits = turns;
    if (chosen.narrow > 0) add_pair(row, k_blocks, whole);
    // A block loads its next tile while it stores one, and stores take as long in two waves as in
    // one. Streamed tiles begin with another block's sums.
    if (!row.ping_pong) {
      whole.tiles -= turns - 1;
      const bool ahead = k_blocks <= kLoadedAhead && row.tile_n > kSquare && !row.b_mn_major;
      whole.waits = ahead && turns + of_rest > 1 ? 0 : 1;
      if (chosen.shares == 0) last.tiles = last.waits = 0;
    }
    // Ping-pong, a tile is stored beside the products of the next one; so are streamed tiles, which
    // come before the last whole one.
    if (row.ping_pong) {
      const bool ends_whole = chosen.rest == 0 || chosen.shares > 0;
      whole.hidden = turns - (ends_whole ? 1 : 0);
      whole.waits += kPingPongWaits;
      if (chosen.shares > 0) last.values = 0;
    }
    out.offer(plan, whole, chosen.rest > 0 ? &last : nullptr);
  }

  // What a pair of narrow tiles takes longer than another tile. If A and B are one matrix, as with
  // operands of one layout, B alone is loaded.
  static void add_pair(const SymmetricRow& row, double k_blocks, Work& work) {
    const bool loads_a = row.a_mn_major != row.b_mn_major;
    const auto m = static_cast<double>(row.tile_m), n = static_cast<double>(row.tile_n);
    const double loaded = 2 * (loads_a ? m : 0) + n;
    work.tiles += 1;
    work.shared += k_blocks * (loaded + m / 64 * (128 + n) - (m + n) - m / 64 * (64 + n));
  }

  // What the busiest block does: `tiles` of them with `k_blocks` in all. `part` is the share of all
  // tiles that the launch computes meanwhile.
  Work work_of(const SymmetricRow& row, const MatmulCase& c, double tiles, double k_blocks,
               double part, Of of) const {
    // Of one square, a warpgroup multiplies nothing; a block with all of K waits for the TMA to
    // fill its tile all the same (H200, 13 of 64 x 1024 by 128x64: 4.9 us, 3.5 as a square's).
    const bool square = of == Of::kCluster && c.m <= kSquare;
    const int64_t rows = square ? kSquare : row.tile_m, columns = square ? kSquare : row.tile_n;
    Work work = sm90_work({rows, columns, row.a_mn_major, row.b_mn_major, 1, 1,
                           rows_of_a(c, row.a_mn_major), rows_of_b(c, row.b_mn_major)},
                          tiles, k_blocks);
    const auto covered = [&](int64_t tile) {
      return static_cast<double>(c.m) / static_cast<double>(ceil_div(c.m, tile) * tile);
    };
    // Clusters that divide K have been fitted without.
    const bool whole = of == Of::kTiles;
    work.outside = whole ? 1 - covered(row.tile_m) * covered(row.tile_n) : 0;
    // A row takes as many lines of the L2 cache as in sm90.cu, but not where few blocks read at the
    // same k, as clusters that divide it do (8 of 96 x 3424, 320 x 464 in TF32).
    const double k_bytes = k_blocks * 128, rows_of_both = static_cast<double>(rows + columns);
    const double lines = of == Of::kCluster ? 1 : work.l2_bytes / (k_bytes * rows_of_both);
    work.l2_bytes = k_bytes * loaded_rows(row, c, lines);
    const int64_t in_4_bytes = row.has_many_sums() ? kStoredTwice32Many : kStoredTwice32;
    work.values *= static_cast<double>(c.math == kMathTF32 ? in_4_bytes : kStoredTwice);
    work.correction = row.correction + (of == Of::kThinRows ? row.thin_rows : 0);
    const auto bytes = part * static_cast<double>(c.batch * c.m * element_size(c.input));
    work.bytes = bytes * static_cast<double>(c.k + c.m);
    work.bytes_again = c.m > row.tile_m ? bytes * static_cast<double>(c.k) : 0;
    return work;
  }

  // What a tile loads of both operands, in rows, each of which takes `lines` of the L2 cache. Where
  // a matrix is smaller than the tile, the TMA writes zeros, which take as long as one line.
  static double loaded_rows(const SymmetricRow& row, const MatmulCase& c, double lines) {
    const int64_t size = row.a_mn_major ? ceil_div(c.m, kSquare) * kSquare : c.m;
    const int64_t loaded = std::min(size, row.tile_m) + std::min(size, row.tile_n);
    return static_cast<double>(loaded) * lines +
           static_cast<double>(row.tile_m + row.tile_n - loaded);
  }

  void describe(const char* data, bool mn_major, int64_t tile, int64_t own_stride, int64_t k_stride,
                const int64_t* batch_stride, const SymmetricRow& row, const MatmulProblem& p,
                Sm90TensorMap& map) const {
    const int64_t bytes = element_size(p.input);
    Sm90Matrix x{data,
                 sm90_map_type(p.math),
                 bytes,
                 {p.k, p.m},
                 own_stride,
                 batch_stride,
                 p.batch_size,
                 p.batch_dims,
                 {kOperandRow / bytes, tile},
                 MapSwizzle::k128Bytes};
    if (mn_major) {
      std::swap(x.dims[0], x.dims[1]);
      x.stride = k_stride;
      x.box[1] = row.tile_k;
    }
    encode_sm90_map(x, device_, map);
  }

  void describe_out(const MatmulProblem& p, const char* data, Sm90MatmulParams& params) const {
    int64_t batch_stride[kSm90BatchDims] = {};
    int64_t inner = p.m * p.m;
    for (int i = 0; i < kSm90BatchDims; ++i) {
      params.batch[i] = 1;
      if (i >= p.batch_dims) continue;
      params.batch[i] = static_cast<int>(p.batch_size[i]);
      batch_stride[i] = inner;
      inner *= p.batch_size[i];
    }
    const int64_t bytes = element_size(p.output);
    const MapType type = p.math == kMathTF32 ? MapType::kFloat32 : sm90_map_type(p.math);
    const Sm90Matrix x{data,
                       type,
                       bytes,
                       {p.m, p.m},
                       p.m,
                       p.batch_dims > 0 ? batch_stride : nullptr,
                       p.batch_size,
                       p.batch_dims,
                       {kOperandRow / bytes, kStoreRows},
                       MapSwizzle::k128Bytes};
    encode_sm90_map(x, device_, params.out_map);
  }

  // Whether the addend's rows are vectors of 16 bytes, everywhere.
  static bool addend_in_vectors(const MatmulProblem& p, const char* addend) {
    const int64_t vector = kVectorBytes / element_size(p.output);
    bool vectors = addend != nullptr && p.addend_stride_n == 1 && p.addend_stride_m % vector == 0 &&
                   reinterpret_cast<uintptr_t>(addend) % kVectorBytes == 0;
    for (int i = 0; i < p.batch_dims; ++i) {
      vectors = vectors && p.addend_batch_stride[i] % vector == 0;
    }
    return vectors;
  }

  const Device& device_;
  std::vector<SymmetricRow> rows_;
  ClusterCapacity clusters_{kMostClusterBlocks};
  double of_streamed_, of_streamed_evenly_;  // corrections
};

const MatmulBackendOf<SymmetricKernels, Sm90MatmulParams> g_symmetric("matmul/sm90",
                                                                      {"sm90_symmetric"});

}  // namespace
}  // namespace torch_cubin
