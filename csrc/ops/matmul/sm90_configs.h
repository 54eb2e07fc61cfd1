// The configs that the kernels of sm90.cu have for a product (tile, cluster, split of K), and what
// each asks of the device.
#pragma once

#include <cstdint>
#include <functional>
#include <iterator>
#include <string>
#include <vector>

#include "ops/matmul/backend.h"

namespace torch_cubin {

// One entry of the catalog.
struct Sm90Row {
  explicit Sm90Row(PackageKernel& entry);  // throws [file] for a field that is wrong

  PackageKernel* kernel;
  Math math;
  bool a_mn_major, b_mn_major;
  int64_t tile_m, tile_n, tile_k;
  int64_t threads;
  bool one_warpgroup;  // computes; else two
  bool streams;        // can split the last tiles' K over all clusters
  bool splits_k;       // can split K over the blocks of a cluster
  bool reads;          // for operands whose rows begin anywhere, and no others
  bool swaps;          // can store a tile transposed: takes products with swapped operands
  bool ping_pong;      // a warpgroup computes a tile while the other one stores (sm90_ping_pong.cu)
  bool parts;          // adds K up in equal parts (sm90_parts.cu): for MatmulCase::k_parts
  double correction = 0;     // of its tile (Corrections)
  double of_one_matrix = 0;  // the same, of a matrix by its own transpose

  // Beside the product (Config::kRowSums of sm90_schedule.cuh).
  bool adds_rows() const {
    return a_mn_major && math != kMathTF32 && threads <= 384 && !ping_pong && !reads &&
           tile_m * tile_n <= 128 * (threads - 128);
  }

  // Weight gradients: both operands' own dims are contiguous.
  bool is_tn() const { return a_mn_major && b_mn_major; }

  // Those whose tiles one warpgroup computes, of at most a panel of columns.
  bool is_narrow_tn() const { return is_tn() && one_warpgroup && !reads && tile_n <= tile_k; }

  // TF32 that wgmma cannot read from shared memory: A passes through registers.
  bool from_registers() const { return math == kMathTF32 && a_mn_major; }

  // A block with one tile is priced as one that begins sooner (kStartsEarly of sm90_lone.cuh; wide
  // tiles of weight gradients, which do, too, have factors for it).
  bool is_priced_early() const {
    return !reads && !ping_pong && !from_registers() && (!is_tn() || is_narrow_tn());
  }

  bool stores_transposed() const { return swaps || from_registers(); }
};

// What the blocks of a cluster have in common: so many along N share a tile of A, so many along M
// one of B; or as many as `of_k` split K.
struct Sm90Cluster {
  const char* name;  // in a config's
  int64_t of_a, of_b, of_k;

  int64_t size() const { return of_a * of_b * of_k; }
  bool splits_k() const { return of_k > 1; }
};
constexpr Sm90Cluster kSm90Clusters[] = {
    {"", 1, 1, 1},         {" share_a", 2, 1, 1},    {" share_b", 1, 2, 1},
    {" split_k", 1, 1, 2}, {" share_both", 2, 2, 1}, {" four_a", 4, 1, 1},
    {" four_b", 1, 4, 1},  {" 2x4", 4, 2, 1},        {" 4x2", 2, 4, 1},
    {" eight_a", 8, 1, 1}, {" eight_b", 1, 8, 1},    {" four_k", 1, 1, 4},
    {" eight_k", 1, 1, 8}};

// From so many waves of whole tiles on, the parts of the last one's need not be equal.
constexpr int64_t kSm90ManyWaves = 2;

struct Sm90Plan {
  const Sm90Row* row = nullptr;  // null: none takes the problem
  Sm90Cluster cluster = kSm90Clusters[0];
  int32_t tiles_m = 0, tiles_n = 0;  // of a cluster
  int32_t clusters = 0;
  int32_t whole_tiles = 0, stream_tiles = 0, stream_clusters = 0;
  // Of K, and k blocks of each: of a case of split sums, or of a row with `parts`.
  int32_t splits = 1, split_blocks = 0;
  bool reads_a = false, reads_b = false;  // without a tensor map
  // The kernel computes C^T = B^T A^T: what it calls A, M and tiles_m are B, N and tiles of N.
  bool transposed = false;

  // Whether the parts of streamed tiles are equal.
  bool streams_evenly() const {
    return whole_tiles < kSm90ManyWaves * clusters && stream_clusters % stream_tiles == 0;
  }
};

// Where the rows of an operand begin in the cache: at its lines, or at sectors of 32 bytes.
enum class RowsBegin { kAtLines, kAtSectors, kWithinSectors };

// Of a case's operands, whose rows are taken to have no gaps where they do not begin at lines.
// `mn_major`: in the kernel's eyes.
RowsBegin rows_of_a(const MatmulCase& c, bool mn_major);
RowsBegin rows_of_b(const MatmulCase& c, bool mn_major);

// A tile as a block of these kernels, or of others that are built like them, computes it: what it
// loads is shared by so many blocks of a cluster. `of_gradient`: of a weight, by sm90.cu.
struct Sm90Tile {
  int64_t m, n;
  bool a_mn_major = false, b_mn_major = false;
  int64_t of_a = 1, of_b = 1;
  RowsBegin a_rows = RowsBegin::kAtLines, b_rows = RowsBegin::kAtLines;
  bool of_gradient = false;
};

// What `tiles` tiles of `k_blocks` blocks of K (128 bytes each) in all ask of one multiprocessor.
Work sm90_work(const Sm90Tile& tile, double tiles, double k_blocks);

// A device's kernels of sm90.cu.
struct Sm90Table {
  Sm90Table(const Device& device, const std::vector<PackageKernel*>& kernels);

  int64_t multiprocessors;
  std::vector<Sm90Row> rows;
  double of_cluster[std::size(kSm90Clusters)];       // corrections
  double of_clusters_tn, of_pairs_tn, of_splits_tn;  // of weight gradients, beside the others
  double of_splits, of_read, of_streamed, of_streamed_evenly, of_swapped, of_one_matrix;
};

// A config, its work, and the last phase of that, which may be null.
using Sm90Offer = std::function<void(const Sm90Plan&, const Work&, const Work*)>;

// Offers each config that the rows have. `largest_cluster`: blocks of the largest one that the
// device runs. `swapped`: the problem's operands are, so that only rows that can store their tiles
// transposed take it.
void sm90_configs(const Sm90Table& table, const MatmulCase& problem, int64_t largest_cluster,
                  bool swapped, const Sm90Offer& offer);

// "128x256 share_a streamed", "64x64 read 4 splits", "128x192 swapped share_b", "128x192 ping_pong"
std::string sm90_name(const Sm90Plan& plan);

}  // namespace torch_cubin
