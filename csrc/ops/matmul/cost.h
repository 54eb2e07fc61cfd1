// What a kernel costs, for every backend alike. A backend counts what a config asks of the device
// (Work); Terms say what the device takes for each; microseconds() is the only place where the two
// meet. No time and no rate of the device stands in a backend.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>

#include "runtime/device.h"

namespace torch_cubin {

// A product, counted, or a phase of it, which follows another one of the same kernel. "Of one" is
// the multiprocessor that has the most to do, all its tiles together; the rest is of the whole
// device.
struct Work {
  // Of one, beside one another: the longest of them counts.
  double multiply = 0;    // cycles of the tensor cores
  double shared = 0;      // cycles of shared memory, 128 bytes each
  double l2_bytes = 0;    // loaded; twice where 128 bytes lie across two lines of the cache
  double once_bytes = 0;  // loaded that no other multiprocessor loads: they come from memory
  double port_bytes = 0;  // the same while a neighbour loads, too, by sm90.cu
  // Of one, one after another.
  double narrow = 0;        // cycles of the tensor cores that wait for each load
  double threads = 0;       // cycles of threads, as the kernels' rows say them
  double rows = 0;          // of a k tile that a warp brings one after another, and
  double stretches = 0;     // of 64 elements of K of 64 rows that threads multiply, by
  double blocks = 1;        // blocks each, that share the multiprocessor
  double waits = 0;         // for elements of K that threads read, or for all others' stores
  double tiles = 0;         // tiles of kernels whose rows do not say their cycles
  double values = 0;        // results of those tiles
  double activations = 0;   // cycles of those results' activations
  double hidden = 0;        // of those tiles: stored while other ones are multiplied
  double ahead = 0;         // of those tiles: their first loads start while another one is computed
  double store_bytes = 0;   // of a tile's results, where threads store them
  double store_groups = 1;  // of threads that store at different times: the others go on
  double sums_bytes = 0;    // partial sums that it exchanges with others
  double handshakes = 0;    // waits for another block's sums
  // Of the device.
  bool follows = false;      // without a launch of its own
  bool early = false;        // a block has one tile alone, whose loads start early
  bool clusters = false;     // its blocks are launched in clusters of several
  double filled = 1;         // share of the multiprocessors that have something to do
  double outside = 0;        // share of the tiles that lies outside the matrices
  double bytes = 0;          // the operands and the output, once
  double bytes_again = 0;    // of operands that more than one cluster reads
  double correction = 0;     // logarithm of a factor (Corrections)
  bool inaccurate = false;   // K is added up in chains longer than PyTorch's
  double beside_cycles = 0;  // fixed, of a kernel before or after the product
  double beside_bytes = 0;   // at the rate of the memory's peak, of that kernel
};

// What a device takes for each. Its clock and its memory's rate are read off the device; the others
// are fitted to sweeps on an H200 and an H100 (benchmarks/fit_planner.py) and serve every GPU.
struct Terms {
  double cycles_per_microsecond = 0;        // of the multiprocessors
  double memory_bytes_per_microsecond = 0;  // at its peak
  double read_again = 0.41;                 // of the memory's time, for bytes_again
  double l2_bytes_per_cycle = 58.6;         // of one
  double idle_l2 = 0.391;                   // share of what the idle leave that others can use
  double port_bytes_per_cycle = 40;         // of two, which share a port
  double narrow_cycles = 5.02;              // for each cycle of narrow products
  double launch = 0.972;                    // us
  double cluster_launch = 0.1;              // us, more than without clusters
  double tile_cycles = 1160;                // first loads and last products of a tile, or a wait
  double early_cycles = 580;                // of those, which loads spare that start early
  double value_cycles = 0.13;               // of a result, in the epilogue
  double sums_bytes_per_cycle = 12.7;       // of one
  double handshake = 0.322;                 // us
  double outside = 0.165;                   // more time, by the share that lies outside
  double store_bytes_per_cycle = 7.44;      // of the threads of one
  double row_cycles = 137;                  // of a warp
  double stretch_cycles = 711;              // of a block
  double lone = 0.5;                        // share of its time beside others that a block takes
  double inaccurate = 0.14;                 // logarithm of the time that accuracy is worth
};

// Every number of them, by its name; and terms with some of another value. Throws [input].
nlohmann::json numbers_of(const Terms& terms);
Terms changed_terms(Terms terms, const nlohmann::json& values);

double microseconds(const Work& work, const Terms& terms);

Terms terms_of(const Device& device);

// What the formula does not explain: by how much longer than predicted configs take that have
// something in common (a tile, a cluster, a split of K, a kernel), on a GPU of that name. The table
// is data, written by benchmarks/fit_planner.py; what it does not name is not corrected.
class Corrections {
 public:
  explicit Corrections(const Device& device) : gpu_(device.name) {}
  // The logarithm of the factor.
  double of(const std::string& what) const;

 private:
  const std::string gpu_;
};

}  // namespace torch_cubin
