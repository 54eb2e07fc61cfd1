// Rows of any length and dtype, for kernels bound by memory: access to their elements, sums over
// the threads of a row, and the order in which a block takes rows.
//
// A row belongs to `threads` adjacent threads of a block, a power of two that the host chooses by
// the row's length alone. So do the elements of a thread, and with them the order of every sum: a
// row's bits depend neither on other rows nor on the device.
#pragma once

#include "common/dtype.cuh"

namespace torch_cubin {

// Values of the dtype fields of parameters.
constexpr int kRowFloat16 = 0;
constexpr int kRowBFloat16 = 1;
constexpr int kRowFloat32 = 2;

struct alignas(16) FourWords {
  u32 words[4];
};

// A row of a tensor.
struct RowOf {
  char* data;
  int dtype;

  TC_DEVICE RowOf(const void* tensor, tc_int64 first, int dtype)
      : data(static_cast<char*>(const_cast<void*>(tensor)) +
             (first << (dtype == kRowFloat32 ? 2 : 1))),
        dtype(dtype) {}
};

// Access to rows whose lengths are multiples of eight and that begin at multiples of 16 bytes, by
// vectors of eight elements. Most rows are float32 if kIsFloat, else of 16 bits; a result may have
// the other kind, and parameters of 16-bit rows may be float32.
template <bool kIsFloat>
struct Vectors {
  static constexpr int kElements = 8;
  static constexpr bool kExact = kIsFloat;         // whether results need all of float32's digits
  static constexpr int kParts = kIsFloat ? 2 : 1;  // of 16 bytes, of a vector of most rows

  static TC_DEVICE void unpack(float (&x)[8], const FourWords (&raw)[kParts], int dtype) {
    if (!kIsFloat && dtype == kRowFloat16) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        x[i] = f16_to_float(static_cast<u16>(raw[0].words[i / 2] >> (i % 2 * 16)));
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if constexpr (kIsFloat) {
        x[i] = __uint_as_float(raw[i / 4].words[i % 4]);
      } else {
        const u32 pair = raw[0].words[i / 2];
        x[i] = __uint_as_float(i % 2 == 0 ? pair << 16 : pair & 0xFFFF0000u);
      }
    }
  }

  static TC_DEVICE void pack(FourWords (&raw)[kParts], const float (&x)[8], int dtype) {
    if (!kIsFloat && dtype == kRowFloat16) {
#pragma unroll
      for (int i = 0; i < 4; ++i) raw[0].words[i] = pack_f16(x[2 * i], x[2 * i + 1]);
      return;
    }
#pragma unroll
    for (int i = 0; i < 4 * kParts; ++i) {
      raw[i / 4].words[i % 4] =
          kIsFloat ? __float_as_uint(x[i]) : pack_bf16(x[2 * i % 8], x[(2 * i + 1) % 8]);
    }
  }

  static TC_DEVICE void load(float (&x)[8], const RowOf& row, int column) {
    if (!kIsFloat && row.dtype == kRowFloat32) return Vectors<true>::load(x, row, column);
    auto from = reinterpret_cast<const FourWords*>(row.data) + column / 8 * tc_int64(kParts);
    FourWords raw[kParts];
#pragma unroll
    for (int i = 0; i < kParts; ++i) raw[i] = from[i];
    unpack(x, raw, row.dtype);
  }

  static TC_DEVICE void store(const RowOf& row, const float (&x)[8], int column) {
    if ((row.dtype == kRowFloat32) != kIsFloat) {
      Vectors<!kIsFloat>::store_own(row, x, column);
    } else {
      store_own(row, x, column);
    }
  }

  static TC_DEVICE void round(float (&x)[8], int dtype) {
    FourWords raw[kParts];
    pack(raw, x, dtype);
    unpack(x, raw, dtype);
  }

  // To a row of the kind of most rows.
  static TC_DEVICE void store_own(const RowOf& row, const float (&x)[8], int column) {
    auto to = reinterpret_cast<FourWords*>(row.data) + column / 8 * tc_int64(kParts);
    FourWords raw[kParts];
    pack(raw, x, row.dtype);
#pragma unroll
    for (int i = 0; i < kParts; ++i) to[i] = raw[i];
  }
};

// Access to all other rows, by single elements.
struct Singles {
  static constexpr int kElements = 1;
  static constexpr bool kExact = true;

  static TC_DEVICE void load(float (&x)[1], const RowOf& row, int column) {
    if (row.dtype == kRowFloat32) {
      x[0] = reinterpret_cast<const float*>(row.data)[column];
    } else {
      const u16 bits = reinterpret_cast<const u16*>(row.data)[column];
      x[0] = row.dtype == kRowFloat16 ? f16_to_float(bits) : bf16_to_float(bits);
    }
  }

  static TC_DEVICE void store(const RowOf& row, const float (&x)[1], int column) {
    if (row.dtype == kRowFloat32) {
      reinterpret_cast<float*>(row.data)[column] = x[0];
    } else {
      const u32 bits = row.dtype == kRowFloat16 ? pack_f16(x[0], 0) : pack_bf16(x[0], 0);
      reinterpret_cast<u16*>(row.data)[column] = static_cast<u16>(bits);
    }
  }
};

// Calls run(access) with the access for rows of that length and dtype.
template <class Run>
TC_DEVICE void with_access(int columns, int dtype, Run&& run) {
  if (columns % 8 != 0) {
    run(Singles{});
  } else if (dtype == kRowFloat32) {
    run(Vectors<true>{});
  } else {
    run(Vectors<false>{});
  }
}

struct Add {
  TC_DEVICE float operator()(float a, float b) const { return a + b; }
};
struct Max {
  TC_DEVICE float operator()(float a, float b) const { return fmaxf(a, b); }
};

// Joins values over the threads of each row; all of them get the same bits, because `join` commutes
// exactly. Every thread of the block calls it.
template <int kBlock, int kValues, class Join>
TC_DEVICE void join_row(float (&values)[kValues], int threads, Join join) {
  for (int lane = min(threads, 32) / 2; lane > 0; lane /= 2) {
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      values[i] = join(values[i], __shfl_xor_sync(~0u, values[i], lane));
    }
  }
  if (threads <= 32) return;
  __shared__ float parts[kValues][kBlock / 32];
  const int warp = threadIdx.x / 32, warps = threads / 32, first = warp & ~(warps - 1);
  __syncthreads();  // the values of the last call have been read
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    if (threadIdx.x % 32 == 0) parts[i][warp] = values[i];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    float value = parts[i][first];
#pragma unroll 1
    for (int other = 1; other < warps; ++other) value = join(value, parts[i][first + other]);
    values[i] = value;
  }
}

template <int kBlock, class Join>
TC_DEVICE float join_row(float value, int threads, Join join) {
  float values[1] = {value};
  join_row<kBlock>(values, threads, join);
  return values[0];
}

// A thread's part of a row: kElements at columns (lane + i * threads) * kElements, i = 0, 1, ...
template <class Access>
struct Lane {
  static constexpr int kElements = Access::kElements;
  int lane, threads, columns;

  TC_DEVICE Lane(int threads, int columns)
      : lane(static_cast<int>(threadIdx.x) & (threads - 1)), threads(threads), columns(columns) {}

  // Calls body(i, column).
  template <class Body>
  TC_DEVICE void for_each(Body&& body) const {
    constexpr int kUnrolled = kElements == 1 ? 2 : 1;
    int i = 0;
#pragma unroll kUnrolled
    for (int column = lane * kElements; column < columns; column += threads * kElements) {
      body(i++, column);
    }
  }
};

// Shared memory for the first `resident` vectors of each thread, of `tensors` of one dtype and of
// several rows: the next ones arrive while the kernel works on the current one. A thread reads only
// what it copied itself, so that nothing needs a barrier. Single elements are not staged.
template <class Access, int kBlock>
struct Stages {
  static constexpr int kElements = Access::kElements;
  u32 base;
  int tensors, resident, dtype;

  TC_DEVICE Stages(int tensors, int resident, int dtype)
      : tensors(tensors), resident(resident), dtype(dtype) {
    extern __shared__ FourWords staged[];
    base = shared_address(staged) + threadIdx.x * 16;
  }

  TC_DEVICE u32 address(int stage, int tensor, int i) const {
    if constexpr (kElements == 1)
      return 0;
    else
      return base + ((stage * tensors + tensor) * resident + i) * (Access::kParts * kBlock * 16);
  }

  // Begins to copy a row of a tensor.
  TC_DEVICE void copy(int stage, int tensor, const RowOf& row, const Lane<Access>& at) const {
    if constexpr (kElements > 1) {
      at.for_each([&](int i, int column) {
        if (i >= resident) return;
        const u32 to = address(stage, tensor, i);
        const char* from = row.data + column * tc_int64(2 * Access::kParts);
#pragma unroll
        for (int part = 0; part < Access::kParts; ++part) {
          cp_async<16>(to + part * kBlock * 16, from + part * 16, true);
        }
      });
    }
  }

  TC_DEVICE void put(const float (&x)[kElements], int stage, int tensor, int i) const {
    if constexpr (kElements > 1) {
      if (i >= resident) return;
      FourWords raw[Access::kParts];
      Access::pack(raw, x, dtype);
#pragma unroll
      for (int part = 0; part < Access::kParts; ++part) {
        store_shared(address(stage, tensor, i) + part * kBlock * 16, raw[part].words);
      }
    }
  }

  // The elements of a row that copy() copied; from memory if they are not resident.
  TC_DEVICE void get(float (&x)[kElements], int stage, int tensor, const RowOf& row, int i,
                     int column) const {
    if constexpr (kElements > 1) {
      if (i < resident) return get_resident(x, stage, tensor, i);
    }
    Access::load(x, row, column);
  }

  TC_DEVICE void get_resident(float (&x)[kElements], int stage, int tensor, int i) const {
    FourWords raw[Access::kParts];
#pragma unroll
    for (int part = 0; part < Access::kParts; ++part) {
      load_shared(raw[part].words, address(stage, tensor, i) + part * kBlock * 16);
    }
    Access::unpack(x, raw, dtype);
  }
};

// Calls body(row, stage, valid) for this thread's rows, where `valid` is whether the row exists,
// after copy(row, stage) has begun the copies of it. All threads of the block take part in each
// call.
template <int kBlock, int kStages, class Copy, class Body>
TC_DEVICE void for_each_row(tc_int64 rows, int threads, Copy&& copy, Body&& body) {
  const int at_once = kBlock / threads;
  const tc_int64 step = static_cast<tc_int64>(gridDim.x) * at_once;
  constexpr int kAhead = kStages - 1;  // rows; before the first one, copies only
  tc_int64 base = static_cast<tc_int64>(blockIdx.x) * at_once - kAhead * step;
  tc_int64 row = base + threadIdx.x / threads;
  for (int stage = 1; base < rows; base += step, row += step) {
    const int last = stage == 0 ? kAhead : stage - 1;
    if (row + kAhead * step < rows) copy(row + kAhead * step, last);
    cp_async_commit();
    cp_async_wait<kAhead>();
    if (base >= 0) body(row, stage, row < rows);
    stage = stage == kAhead ? 0 : stage + 1;
  }
}

}  // namespace torch_cubin
