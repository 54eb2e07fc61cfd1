// What a product will cost with the kernels of sm90.cu, and the quickest way to run it: a model of
// what bounds a block, fitted to timings on an H200.
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "ops/matmul/seam.h"

namespace torch_cubin {

// One entry of the catalog.
struct Sm90Row {
  Sm90Row(PackageKernel& entry);  // throws [file] for a field that is wrong

  PackageKernel* kernel;
  Math math;
  bool a_mn_major, b_mn_major;
  int64_t tile_m, tile_n, tile_k;
  bool one_warpgroup;  // computes; else two
  bool streams;        // can deal the last tiles' K out over all clusters
  bool pairs;          // can split K between the two blocks of a cluster
};

// What the two blocks of a cluster have in common.
enum class Sm90Cluster : uint8_t { kNone, kShareA, kShareB, kSplitK };

struct Sm90Plan {
  const Sm90Row* row = nullptr;  // null: none takes the problem
  Sm90Cluster cluster = Sm90Cluster::kNone;
  int32_t tiles_m = 0, tiles_n = 0;  // of a cluster
  int32_t clusters = 0;
  int32_t whole_tiles = 0, stream_tiles = 0, stream_clusters = 0;
};

struct Sm90Way {
  Sm90Plan plan;
  double microseconds = std::numeric_limits<double>::infinity();
};

// All ways that the rows offer.
std::vector<Sm90Way> sm90_ways(const std::vector<Sm90Row>& rows, const MatmulCase& problem,
                               int64_t multiprocessors);

// The quickest of them.
Sm90Way plan_sm90(const std::vector<Sm90Row>& rows, const MatmulCase& problem,
                  int64_t multiprocessors);

// "256x192 share_a streamed"
std::string sm90_name(const Sm90Plan& plan);

}  // namespace torch_cubin
