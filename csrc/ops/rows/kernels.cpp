#include "ops/rows/kernels.h"

#include <algorithm>
#include <memory>

#include "cubin/error.h"
#include "kernels/rows/norm_params.h"
#include "kernels/rows/softmax_params.h"
#include "kernels/rows/sum_params.h"
#include "ops/common/aten.h"
#include "ops/common/backend.h"
#include "ops/common/device_tables.h"
#include "ops/common/stable_ops.h"
#include "runtime/device.h"

namespace torch_cubin {
namespace {

constexpr int64_t kVectorsOfThread = 2;    // of rows that do not need all threads of a block
constexpr int64_t kSinglesOfThread = 8;    // the same for rows without vectors
constexpr int64_t kReservedShared = 1024;  // of each block: the system's, and for sums
constexpr int64_t kMostColumns = INT32_MAX - 4096 * kRowVector;
constexpr int64_t kAlignment = 16;  // bytes

constexpr const char* kKindNames[] = {"norm",    "norm_backward",    "norm_columns",
                                      "softmax", "softmax_backward", "sum"};

// The parameter struct of a kind, and the header that has it.
struct KindParams {
  const char* header;
  size_t bytes;
};

KindParams params_of(int kind) {
  if (kind == kRowsSum) return {"rows/sum", sizeof(RowSumParams)};
  if (kind >= kRowsSoftmax) return {"rows/softmax", sizeof(RowsSoftmaxParams)};
  return {"rows/norm", sizeof(NormParams)};
}

class RowsBackend : public KernelBackend {
 public:
  RowsBackend() : KernelBackend("rows") {}
  void check(PackageKernel& kernel) const override {
    const KernelFields fields(kernel);
    const KindParams params = params_of(fields.index("kind", kKindNames));
    check_params(kernel.entry(), params.header, params.bytes);
    fields.integer("stages", 1);
    fields.integer("blocks", 1);
  }
};

const RowsBackend g_rows;

struct RowsTable {
  explicit RowsTable(const Device& device) : family("rows", device) {
    family.for_each_backend<KernelBackend>([&](const KernelBackend&, const auto& own) {
      for (PackageKernel* kernel : own) {
        kernels[KernelFields(*kernel).index("kind", kKindNames)] = kernel;
      }
    });
  }
  FamilyKernels family;
  PackageKernel* kernels[kRowsKinds] = {};
};

DeviceTables<RowsTable> g_rows_tables;

// The stride of rows of the last `dims` dims; false if they have none, or are not contiguous.
bool find_stride(const TensorView& x, int64_t dims, int64_t* stride) {
  int64_t next = 1;
  for (int64_t i = x.dim - 1; i >= x.dim - dims; --i) {
    if (x.sizes[i] == 1) continue;
    if (x.strides[i] != next) return false;
    next *= x.sizes[i];
  }
  *stride = next;
  bool found = false;
  for (int64_t i = x.dim - dims - 1; i >= 0; --i) {
    if (x.sizes[i] == 1) continue;
    if (found && x.strides[i] != next) return false;
    if (!found) *stride = x.strides[i];
    found = true;
    next = x.strides[i] * x.sizes[i];
  }
  return true;
}

}  // namespace

PackageKernel& rows_kernel(RowsKind kind, const Device& device) {
  const RowsTable& table = g_rows_tables.get(
      device, [](const Device& device) { return std::make_unique<RowsTable>(device).release(); });
  if (table.kernels[kind] == nullptr) {
    table.family.fail_no_kernel(std::string("rows, kind ") + kKindNames[kind]);
  }
  return *table.kernels[kind];
}

RowsLayout::RowsLayout(PackageKernel& kernel, const Device& device, const RowSizes& sizes,
                       int64_t tensors, ScalarType row_dtype, int64_t sums) {
  const KernelFields fields(kernel);
  const int64_t block = kernel.entry().block[0], stages = fields.integer("stages", 1);
  multiprocessor_blocks = fields.integer("blocks", 1);
  const int64_t of_thread = has_vectors(sizes) ? kVectorsOfThread * kRowVector : kSinglesOfThread;
  threads = 1;
  while (threads < block && threads * of_thread < sizes.columns) threads *= 2;
  at_once = block / threads;
  tiles = ceil_div(sizes.rows, at_once);
  if (!has_vectors(sizes)) return;
  vectors = ceil_div(sizes.columns, threads * kRowVector);
  const int64_t of_vector =
      block * kRowVector * (stages * tensors * element_size(row_dtype) + sums * 4);
  if (of_vector == 0) return;  // the kernel stages nothing
  resident = std::min(vectors, (device.shared_optin - kReservedShared) / of_vector);
  shared = resident * of_vector;
}

Grid RowsLayout::grid(const Device& device) const {
  // As many blocks as are resident: each prefetches the rows that it takes later.
  const int64_t of_one =
      std::clamp<int64_t>((device.shared_optin + kReservedShared) / (shared + kReservedShared), 1,
                          multiprocessor_blocks);
  Grid grid;
  grid.x = std::min(tiles, of_one * device.multiprocessors);
  grid.dynamic_shared = shared;
  return grid;
}

RowsOperand::RowsOperand(const Tensor& tensor, int64_t dims, const RowSizes& sizes) {
  TensorView x(tensor);
  const auto fits = [&] {
    if (!find_stride(x, dims, &stride)) return false;
    const bool aligned = reinterpret_cast<uintptr_t>(x.data()) % kAlignment == 0 &&
                         (sizes.rows == 1 || stride * element_size(x.dtype) % kAlignment == 0);
    return aligned || !has_vectors(sizes);
  };
  if (!fits()) {
    copy_ = empty_cuda(x.sizes, x.dim, x.dtype, x.device_index);
    torch::stable::copy_(*copy_, detach(tensor));
    x = TensorView(*copy_);
    fits();
  }
  data = x.data();
}

int row_dtype(const char* op, ScalarType dtype) {
  if (dtype == ScalarType::Half) return 0;
  if (dtype == ScalarType::BFloat16) return 1;
  if (dtype == ScalarType::Float) return 2;
  fail({"no_kernel", op, "has no kernel for this dtype on CUDA", "float16, bfloat16 or float32",
        dtype_name(dtype), "Convert the input, or use PyTorch's function."});
}

void check_length(const char* op, const RowSizes& sizes) {
  if (sizes.columns <= kMostColumns) return;
  fail({"no_kernel", op, "has longer rows than kernels take",
        "at most " + std::to_string(kMostColumns) + " elements", std::to_string(sizes.columns),
        ""});
}

}  // namespace torch_cubin
