// Rows of any length and dtype, for kernels bound by memory: access to their elements, which
// threads hold them, and sums over the threads of a row.
//
// A row belongs to `threads` adjacent threads of a block, a power of two, or to all threads of the
// blocks of a cluster. The host chooses both by the row's length alone, and with them the elements
// of a thread and the order of every sum: a row's bits do not depend on other rows.
#pragma once

#include "cluster.cuh"
#include "common/dtype.cuh"
#include "rows_params.h"

namespace torch_cubin {

static_assert(kRowFloat16 == static_cast<int>(DType::float16) &&
              kRowBFloat16 == static_cast<int>(DType::bfloat16) &&
              kRowFloat32 == static_cast<int>(DType::float32));

struct alignas(16) FourWords {
  u32 words[4];
};

// Reads 16 bytes past the L1 cache.
TC_DEVICE void load_once(FourWords& out, const void* from) {
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(out.words[0]), "=r"(out.words[1]), "=r"(out.words[2]), "=r"(out.words[3])
               : "l"(from));
}

// Writes 16 bytes that the L2 cache may give up first.
TC_DEVICE void store_once(FourWords* to, const FourWords& x) {
  asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(x.words[0]),
               "r"(x.words[1]), "r"(x.words[2]), "r"(x.words[3])
               : "memory");
}

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

// A row of a tensor.
struct RowOf {
  char* data;
  int dtype;

  TC_DEVICE RowOf(const void* tensor, tc_int64 first, int dtype)
      : data(static_cast<char*>(const_cast<void*>(tensor)) +
             (first << (dtype == kRowFloat32 ? 2 : 1))),
        dtype(dtype) {}
};

// Access to rows of a dtype whose lengths are multiples of eight, that begin at multiples of 16
// bytes, and that their threads hold, by vectors of eight elements. A result may have another
// dtype, and parameters of 16-bit rows may be float32.
template <int kDtype>
struct Vectors {
  static constexpr int kElements = kRowVector;
  static constexpr bool kIsFloat = kDtype == kRowFloat32;
  static constexpr bool kExact = kIsFloat;         // whether results need all of float32's digits
  static constexpr int kParts = kIsFloat ? 2 : 1;  // of 16 bytes
  // A vector as it is in memory.
  struct Raw {
    FourWords parts[kParts];
  };
  static constexpr int kHeld = kThreadBytes / (16 * kParts);  // vectors of a thread at a time
  static constexpr bool kIsHeld = true;                       // whether threads hold the whole row

  static TC_DEVICE void load_raw(Raw& raw, const RowOf& row, int column) {
    const char* from = row.data + column * tc_int64(2 * kParts);
#pragma unroll
    for (int i = 0; i < kParts; ++i) load_once(raw.parts[i], from + i * 16);
  }

  static TC_DEVICE void unpack(float (&x)[8], const Raw& raw) {
#pragma unroll
    for (int i = 0; i < 4 * kParts; ++i) {
      u32 word = raw.parts[i / 4].words[i % 4];
      if constexpr (kIsFloat) {
        x[i] = __uint_as_float(word);
      } else {
        // Hides what the word is: the compiler would keep the floats for the next pass over them,
        // in twice the registers.
        asm volatile("" : "+r"(word));
        if constexpr (kDtype == kRowFloat16) {
          x[2 * i] = f16_to_float(static_cast<u16>(word));
          x[2 * i + 1] = f16_to_float(static_cast<u16>(word >> 16));
        } else {
          x[2 * i] = __uint_as_float(word << 16);
          x[2 * i + 1] = __uint_as_float(word & 0xFFFF0000u);
        }
      }
    }
  }

  // The highest element, NaN aside; NaN if all are.
  static TC_DEVICE float max_of(const Raw& raw) {
    u32 highest = raw.parts[0].words[0];
#pragma unroll
    for (int i = 1; i < 4 * kParts; ++i) {
      const u32 word = raw.parts[i / 4].words[i % 4];
      if constexpr (kIsFloat) {
        highest = __float_as_uint(fmaxf(__uint_as_float(highest), __uint_as_float(word)));
      } else if constexpr (kDtype == kRowFloat16) {
        asm("max.f16x2 %0, %1, %2;" : "=r"(highest) : "r"(highest), "r"(word));
      } else {
        asm("max.bf16x2 %0, %1, %2;" : "=r"(highest) : "r"(highest), "r"(word));
      }
    }
    if constexpr (kIsFloat) return __uint_as_float(highest);
    if constexpr (kDtype == kRowFloat16) {
      return fmaxf(f16_to_float(static_cast<u16>(highest)),
                   f16_to_float(static_cast<u16>(highest >> 16)));
    }
    return fmaxf(__uint_as_float(highest << 16), __uint_as_float(highest & 0xFFFF0000u));
  }

  static TC_DEVICE void pack(Raw& raw, const float (&x)[8]) {
#pragma unroll
    for (int i = 0; i < 4 * kParts; ++i) {
      u32& word = raw.parts[i / 4].words[i % 4];
      if constexpr (kIsFloat) {
        word = __float_as_uint(x[i]);
      } else {
        word = kDtype == kRowFloat16 ? pack_f16(x[2 * i], x[2 * i + 1])
                                     : pack_bf16(x[2 * i], x[2 * i + 1]);
      }
    }
  }

  static TC_DEVICE void load(float (&x)[8], const RowOf& row, int column) {
    if (!kIsFloat && row.dtype == kRowFloat32) return Vectors<kRowFloat32>::load(x, row, column);
    load_own(x, row, column);
  }

  // From a row of this dtype.
  static TC_DEVICE void load_own(float (&x)[8], const RowOf& row, int column) {
    auto from = reinterpret_cast<const FourWords*>(row.data) + column / 8 * tc_int64(kParts);
    Raw raw;
#pragma unroll
    for (int i = 0; i < kParts; ++i) raw.parts[i] = from[i];
    unpack(x, raw);
  }

  static TC_DEVICE void store(const RowOf& row, const float (&x)[8], int column) {
    if (row.dtype == kDtype) return store_own(row, x, column);
    if (!kIsFloat) return Vectors<kRowFloat32>::store_own(row, x, column);
    if (row.dtype == kRowFloat16) return Vectors<kRowFloat16>::store_own(row, x, column);
    Vectors<kRowBFloat16>::store_own(row, x, column);
  }

  // To a row of this dtype.
  static TC_DEVICE void store_own(const RowOf& row, const float (&x)[8], int column) {
    auto to = reinterpret_cast<FourWords*>(row.data) + column / 8 * tc_int64(kParts);
    Raw raw;
    pack(raw, x);
#pragma unroll
    for (int i = 0; i < kParts; ++i) to[i] = raw.parts[i];
  }

  // The same for results that are larger than the L2 cache.
  static TC_DEVICE void store_own_once(const RowOf& row, const float (&x)[8], int column) {
    auto to = reinterpret_cast<FourWords*>(row.data) + column / 8 * tc_int64(kParts);
    Raw raw;
    pack(raw, x);
#pragma unroll
    for (int i = 0; i < kParts; ++i) store_once(to + i, raw.parts[i]);
  }
};

// The same for rows of any such length, which Lane::stream reads.
template <int kDtype>
struct StreamedVectors : Vectors<kDtype> {
  static constexpr bool kIsHeld = false;
};

// Access to all other rows, by single elements. Tensors of another dtype may be read and written as
// with vectors.
template <int kDtype>
struct Singles {
  static constexpr int kElements = 1;
  static constexpr bool kExact = true;
  using Raw = u32;  // an element's bits, which are converted later than all loads are issued
  static constexpr int kHeld = kThreadSingles;
  static constexpr bool kIsHeld = false;

  static TC_DEVICE u32 bits_at(const RowOf& row, int dtype, int column) {
    return dtype == kRowFloat32 ? reinterpret_cast<const u32*>(row.data)[column]
                                : reinterpret_cast<const u16*>(row.data)[column];
  }
  static TC_DEVICE float value_of(u32 bits, int dtype) {
    return dtype == kRowFloat32   ? __uint_as_float(bits)
           : dtype == kRowFloat16 ? f16_to_float(static_cast<u16>(bits))
                                  : bf16_to_float(static_cast<u16>(bits));
  }
  static TC_DEVICE u32 bits_of(float x, int dtype) {
    return dtype == kRowFloat32   ? __float_as_uint(x)
           : dtype == kRowFloat16 ? pack_f16(x, 0)
                                  : pack_bf16(x, 0);
  }

  static TC_DEVICE void load_raw(Raw& raw, const RowOf& row, int column) {
    raw = bits_at(row, kDtype, column);
  }
  static TC_DEVICE void unpack(float (&x)[1], const Raw& raw) { x[0] = value_of(raw, kDtype); }
  static TC_DEVICE void pack(Raw& raw, const float (&x)[1]) { raw = bits_of(x[0], kDtype); }

  static TC_DEVICE void load(float (&x)[1], const RowOf& row, int column) {
    x[0] = value_of(bits_at(row, row.dtype, column), row.dtype);
  }
  static TC_DEVICE void store(const RowOf& row, const float (&x)[1], int column) {
    const u32 bits = bits_of(x[0], row.dtype);
    if (row.dtype == kRowFloat32) {
      reinterpret_cast<u32*>(row.data)[column] = bits;
    } else {
      reinterpret_cast<u16*>(row.data)[column] = static_cast<u16>(bits);
    }
  }
  static TC_DEVICE void store_own(const RowOf& row, const float (&x)[1], int column) {
    store(RowOf(row.data, 0, kDtype), x, column);
  }
  static TC_DEVICE void store_own_once(const RowOf& row, const float (&x)[1], int column) {
    store_own(row, x, column);
  }
};

// The element of a tensor of any dtype.
TC_DEVICE float element_of(const void* tensor, int dtype, tc_int64 index) {
  float x[1];
  Singles<kRowFloat32>::load(x, RowOf(tensor, index, dtype), 0);
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
// hold them.
template <DType kDtype, class Run>
TC_DEVICE void with_held_access(int threads, int cluster, int columns, Run&& run) {
  using OwnVectors = Vectors<static_cast<int>(kDtype)>;
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

// Joins values over the threads of rows. `Values` is a struct of floats; join(a, b) commutes
// exactly, so that all threads of a row get the same bits. Every thread of the block, and of the
// cluster, calls it.
//
// A block has at most kBlock threads.
//
// Threads that still read the values of one call may not meet those of the next one, which
// alternate in memory: a thread reaches the call after that only when all have read.
//
// kUnrolls: for a kernel that is bound by instructions, and has registers to spare.
template <class Values, int kBlock, bool kClusters = true, bool kUnrolls = false>
struct RowJoin {
  static constexpr int kWarps = kBlock / 32;
  int threads, cluster, call = 0;
  u32 parity = 0;  // of the mbarriers' phases

  struct Shared {
    Values of_warps[2][kWarps], of_blocks[2][kMostCluster];
    u64 arrived[2];  // mbarriers of of_blocks
  };
  static TC_DEVICE Shared& shared() {
    __shared__ Shared own;
    return own;
  }

  TC_DEVICE RowJoin(int threads, int cluster) : threads(threads), cluster(cluster) {
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

  template <class Join>
  TC_DEVICE void operator()(Values& values, Join&& join) {
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
    __syncthreads();
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
