// What the kernels over rows and the host agree on, besides each kernel's own parameter.
#pragma once

namespace torch_cubin {

typedef long long tc_int64;  // device code includes no <cstdint>

// Values of the dtype fields of parameters, in the order of common/dtype.cuh.
enum RowDtype { kRowFloat16, kRowBFloat16, kRowFloat32 };

// Elements that are read at a time, in rows whose length is a multiple of it.
constexpr int kRowVector = 8;

// What a thread holds of a row, of each tensor: bytes by vectors, or elements of other rows. 64
// bytes a thread are loads enough at a time to use all of the memory's rate.
constexpr int kThreadBytes = 64, kThreadSingles = 8;

// Of the kernels that have their rows in shared memory (staged.cuh): vectors of a thread, and the
// threads of a block at most.
constexpr int kStagedVectors = 4, kStagedThreads = 512;

constexpr int kMostCluster = 8;  // blocks that share a row

// Threads that share a row in blocks that sum over rows (columns.cuh).
constexpr int kThreadsAcross = 8;

// Elements that a thread of norm_parts.cu adds, where rows are multiples of it; otherwise one.
constexpr int kPartsVector = 4;

}  // namespace torch_cubin
