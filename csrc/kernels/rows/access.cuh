// Access to the elements of rows of any length and dtype: by vectors, or one by one.
#pragma once

#include "common/dtype.cuh"
#include "rows_params.h"

namespace torch_cubin {

static_assert(kRowFloat16 == static_cast<int>(DType::float16) &&
              kRowBFloat16 == static_cast<int>(DType::bfloat16) &&
              kRowFloat32 == static_cast<int>(DType::float32));

struct alignas(16) FourWords {
  u32 words[4];
};

TC_DEVICE void load_vector(FourWords& out, const void* from) {
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(out.words[0]), "=r"(out.words[1]), "=r"(out.words[2]), "=r"(out.words[3])
               : "l"(from));
}

// Reads 16 bytes past the L1 cache: 1 to 3% quicker in kernels that write little (H200: column sums
// of 8192 x 4096 17.3 -> 16.7 us), but slower in others (gradient of softmax of 16384 x 4096, in
// registers, 94 -> 105 us, of 65536 x 512 47.7 -> 50.0).
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
    for (int i = 0; i < kParts; ++i) load_vector(raw.parts[i], from + i * 16);
  }
  static TC_DEVICE void load_raw_once(Raw& raw, const RowOf& row, int column) {
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

// The same, past the L1 cache.
template <int kDtype>
struct ReadVectors : Vectors<kDtype> {
  static TC_DEVICE void load_raw(typename Vectors<kDtype>::Raw& raw, const RowOf& row, int column) {
    Vectors<kDtype>::load_raw_once(raw, row, column);
  }
};

// For rows of any such length, which Lane::stream reads; RewrittenVectors for kernels that write as
// many.
template <int kDtype>
struct StreamedVectors : ReadVectors<kDtype> {
  static constexpr bool kIsHeld = false;
};
template <int kDtype>
struct RewrittenVectors : Vectors<kDtype> {
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

}  // namespace torch_cubin
