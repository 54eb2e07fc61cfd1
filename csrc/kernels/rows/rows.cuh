// Rows of any length and dtype, for kernels bound by memory: which threads hold them, and sums over
// the threads of a row.
//
// A row belongs to `threads` adjacent threads of a block, a power of two, or to all threads of the
// blocks of a cluster. The host chooses both by the row's length alone, and with them the elements
// of a thread and the order of every sum: a row's bits do not depend on other rows.
#pragma once

#include "access.cuh"
#include "cluster.cuh"

namespace torch_cubin {

// For all threads of a warp.
TC_DEVICE float sum_of_warp(float x) {
#pragma unroll
  for (int lane = 16; lane > 0; lane /= 2) x += __shfl_xor_sync(~0u, x, lane);
  return x;
}

// The sum of a thread's elements, in pairs, which replaces them.
template <int kElements>
TC_DEVICE float sum_of(float (&x)[kElements]) {
#pragma unroll
  for (int step = kElements / 2; step > 0; step /= 2) {
#pragma unroll
    for (int i = 0; i < step; ++i) x[i] += x[i + step];
  }
  return x[0];
}

// A thread's part of a row: vectors at columns (lane + i * threads) * kElements, i = 0, 1, ..., of
// which kHeld at a time are in registers. With vectors that is the whole row; by single elements it
// is read in chunks, and again by each for_each().
template <class Access>
struct Lane {
  static constexpr int kElements = Access::kElements;
  static constexpr int kHeld = Access::kHeld;
  using Raw = typename Access::Raw;
  int lane, threads, columns;

  // `threads` of each of the `cluster` adjacent blocks of a row.
  TC_DEVICE Lane(int threads, int cluster, int columns)
      : lane(static_cast<int>(threadIdx.x) & (threads - 1)),
        threads(threads * cluster),
        columns(columns) {
    lane += static_cast<int>(blockIdx.x & (cluster - 1)) * threads;
  }

  // Whether threads hold such rows, and have more than the first half of their vectors: then
  // nothing needs to test those.
  static TC_DEVICE bool takes(int threads, int cluster, int columns) {
    const int capacity = threads * cluster * (kElements * kHeld);
    return columns % kElements == 0 && columns > capacity / 2 && columns <= capacity;
  }

  TC_DEVICE int column(int first, int i) const { return first + (lane + i * threads) * kElements; }
  TC_DEVICE bool has(int first, int i) const {
    return (Access::kIsHeld && i < kHeld / 2) || column(first, i) < columns;
  }

  TC_DEVICE void load(Raw (&raw)[kHeld], const RowOf& row, int first) const {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      if (has(first, i)) Access::load_raw(raw[i], row, column(first, i));
    }
  }

  // The row's first element, which its threads exchange if they are of one warp; `read` reads it
  // from memory. `raw`: what load(0) has read.
  template <class Read>
  TC_DEVICE float first_element(const Raw (&raw)[kHeld], Read&& read) const {
    if (threads > 32) return read();
    float x[kElements];
    Access::unpack(x, raw[0]);
    return __shfl_sync(~0u, x[0], 0, threads);
  }

  // Calls body(i, column), with the row's vectors of a chunk in what load(first) has read; the
  // caller has called load(0).
  template <class Load, class Body>
  TC_DEVICE void for_each(Load&& load, Body&& body) const {
    const int chunk = threads * (kElements * kHeld);
#pragma unroll 1
    for (int first = 0; first < (Access::kIsHeld ? 1 : columns); first += chunk) {
      if (!Access::kIsHeld && columns > chunk) load(first);
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
        if (has(first, i)) body(i, column(first, i));
      }
    }
  }

  // The same with the elements of each vector: body(x, column).
  template <class Load, class Body>
  TC_DEVICE void for_each_unpacked(const Raw (&raw)[kHeld], Load&& load, Body&& body) const {
    for_each(load, [&](int i, int column) {
      float x[kElements];
      Access::unpack(x, raw[i]);
      body(x, column);
    });
  }

  // Calls body(x, column) for the row's vectors, read once, each while the next ones are loaded. It
  // begins to load before it asks skip() whether to.
  template <class Skip, class Body>
  TC_DEVICE void stream(const RowOf& row, Skip&& skip, Body&& body) const {
    static_assert(!Access::kIsHeld);
    constexpr int kHalf = kHeld / 2;
    const int half = threads * (kElements * kHalf);
    Raw raw[2][kHalf];
    const auto load_half = [&](Raw(&to)[kHalf], int first) {
#pragma unroll
      for (int i = 0; i < kHalf; ++i) {
        if (has(first, i)) Access::load_raw(to[i], row, column(first, i));
      }
    };
    const auto take_half = [&](const Raw(&from)[kHalf], int first) {
#pragma unroll
      for (int i = 0; i < kHalf; ++i) {
        if (!has(first, i)) continue;
        float x[kElements];
        Access::unpack(x, from[i]);
        body(x, column(first, i));
      }
    };
    load_half(raw[0], 0);
    if (skip()) return;
#pragma unroll 1
    for (int first = 0; first < columns; first += 2 * half) {
      load_half(raw[1], first + half);
      take_half(raw[0], first);
      load_half(raw[0], first + 2 * half);
      take_half(raw[1], first + half);
    }
  }
};

// Calls run(access) with the access for rows of that length and dtype, for kernels whose threads
// hold them. Past the L1 cache: few rows that clusters have are 6% quicker so (gradient of softmax
// of 128 x 32000, H200: 7.5 us, by plain loads 8.0).
template <DType kDtype, class Run>
TC_DEVICE void with_held_access(int threads, int cluster, int columns, Run&& run) {
  using OwnVectors = ReadVectors<static_cast<int>(kDtype)>;
  if (Lane<OwnVectors>::takes(threads, cluster, columns)) {
    run(OwnVectors{});
  } else {
    run(Singles<static_cast<int>(kDtype)>{});
  }
}

// The same for kernels that read rows of any length by vectors.
template <template <int> class OfVectors, DType kDtype, class Run>
TC_DEVICE void with_access(int columns, Run&& run) {
  if (columns % kRowVector != 0) {
    run(Singles<static_cast<int>(kDtype)>{});
  } else {
    run(OfVectors<static_cast<int>(kDtype)>{});
  }
}

// What threads of a block, and of a cluster, write to one another.
template <class Values, int kWarps>
struct JoinedValues {
  Values of_warps[2][kWarps], of_blocks[2][kMostCluster];
  u64 arrived[2];  // mbarriers of of_blocks
  static TC_DEVICE JoinedValues& shared() {
    __shared__ JoinedValues own;
    return own;
  }
};

// Joins values over the threads of rows. `Values` is a struct of floats; join(a, b) commutes
// exactly, so that all threads of a row get the same bits. Every thread of the block, and of the
// cluster, calls it.
//
// A block has at most kBlock threads.
//
// Threads that still read the values of one call may not meet those of the next one, which
// alternate in memory: a thread reaches the call after that only when all have read.
//
// kUnrolls: for a kernel that is bound by instructions, and has registers to spare. kThreads: of a
// row, if it is known; rows of a block then do not wait for one another.
template <class Values, int kBlock, bool kClusters = true, bool kUnrolls = false, int kThreads = 0>
struct RowJoin {
  static constexpr int kWarps = kBlock / 32;
  int threads, cluster, call = 0;
  u32 parity = 0;  // of the mbarriers' phases

  static TC_DEVICE JoinedValues<Values, kWarps>& shared() {
    return JoinedValues<Values, kWarps>::shared();
  }

  TC_DEVICE RowJoin(int threads, int cluster)
      : threads(kThreads > 0 ? kThreads : threads), cluster(cluster) {
    if (kClusters && cluster > 1) values_begin(shared().arrived);
  }

  // Sets the values of the block's warps from `first` on, which do not run, to 0. For all threads,
  // before the first call.
  static TC_DEVICE void clear_warps(int first) {
    for (int warp = first + threadIdx.x; warp < kWarps; warp += blockDim.x) {
      shared().of_warps[0][warp] = shared().of_warps[1][warp] = {};
    }
  }

  template <class Join>
  static TC_DEVICE void join_lane(Values& values, int lane, Join&& join) {
    Values other;
#pragma unroll
    for (int i = 0; i < Values::kCount; ++i) {
      other.of[i] = __shfl_xor_sync(~0u, values.of[i], lane);
    }
    values = join(values, other);
  }

  template <class Join>
  static TC_DEVICE void join_lanes(Values& values, int lanes, Join&& join) {
    for (int lane = lanes / 2; lane > 0; lane /= 2) join_lane(values, lane, join);
  }

  // Waits for the threads of the row.
  static TC_DEVICE void meet() {
    if constexpr (kThreads == 0 || kThreads == kBlock) {
      __syncthreads();
    } else {
      static_assert(kBlock <= 2 * kThreads);
      if (threadIdx.x < kThreads) {
        asm volatile("bar.sync 1, %0;" ::"n"(kThreads) : "memory");
      } else {
        asm volatile("bar.sync 2, %0;" ::"n"(kThreads) : "memory");
      }
    }
  }

  template <class Join>
  TC_DEVICE void operator()(Values& values, Join&& join) {
    const int threads = kThreads > 0 ? kThreads : this->threads;
    auto& [of_warps, of_blocks, arrived] = shared();
    if constexpr (kUnrolls) {
      if (threads < 32) {
        join_lanes(values, threads, join);
        return;
      }
#pragma unroll
      for (int lane = 16; lane > 0; lane /= 2) join_lane(values, lane, join);
      if (threads == 32) return;
    } else {
      join_lanes(values, min(threads, 32), join);
      if (threads <= 32) return;
    }
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = threads / 32;
    if (lane == 0) of_warps[call][warp] = values;
    if constexpr (kThreads == 0 || kThreads > 32) meet();
    values = of_warps[call][(warp & ~(warps - 1)) + (lane & (warps - 1))];
    join_lanes(values, warps, join);
    if (kClusters && cluster > 1) {
      if (threadIdx.x == 0) values_expect(&arrived[call], cluster * sizeof(Values));
      if (threadIdx.x < cluster) {
        values_write(&of_blocks[call][cluster_rank()], values.of, threadIdx.x, &arrived[call]);
      }
      values_wait(&arrived[call], parity);
      values = of_blocks[call][lane & (cluster - 1)];
      join_lanes(values, cluster, join);
    }
    parity ^= call;
    call ^= 1;
  }
};

template <int kFloats>
struct Sums {
  static constexpr int kCount = kFloats;
  float of[kFloats];

  struct Join {
    TC_DEVICE Sums operator()(const Sums& a, const Sums& b) const {
      Sums sum;
#pragma unroll
      for (int i = 0; i < kFloats; ++i) sum.of[i] = a.of[i] + b.of[i];
      return sum;
    }
  };
};

// The row of this thread; past the last one, that one once more, which is not `valid`.
struct OwnRow {
  tc_int64 row;
  bool valid;

  TC_DEVICE OwnRow(tc_int64 rows, int threads, int cluster) {
    const int log_threads = 31 - __clz(threads), log_cluster = 31 - __clz(cluster);
    row = static_cast<tc_int64>(blockIdx.x >> log_cluster) * (blockDim.x >> log_threads) +
          (threadIdx.x >> log_threads);
    valid = row < rows;
    if (!valid) row = rows - 1;
  }
};

}  // namespace torch_cubin
