// Sums over rows on CUDA, by csrc/kernels/rows/column_sums.cu.
#include <algorithm>

#include "kernels/rows/column_sums_params.h"
#include "ops/rows/kernels.h"
#include "runtime/device.h"

namespace torch_cubin {
namespace {

constexpr const char* kSumsOp = "aten::sum.dim_IntList";
// Each part has some loads of each thread, few rows are one part, which no second kernel needs to
// sum, and blocks are one fewer a multiprocessor of an H100 than fit there, so that those of the
// second kernel start beside them (12608 x 768, H200: 7.8 -> 7.2 us). The order of the additions
// follows from these, so that it depends on no device, but for rows that clusters add up where
// there are any.
constexpr int64_t kSumsRows = 128, kRowsOfOnePart = 512, kSumsBlocks = 3 * 132;
// Up to so many rows, a cluster's blocks add their parts up themselves (2048 x 768, H200: 3.9 ->
// 2.7 us); more rows fill the GPU only in more parts.
constexpr int64_t kRowsOfCluster = 4096;

void launch_sums(const void* x, int64_t stride, ScalarType dtype, const RowSizes& sizes,
                 int64_t parts, bool joins, void* out, ScalarType out_dtype, const Device& gpu) {
  ColumnSumsParams p{};
  p.x = x;
  p.out = out;
  p.rows = sizes.rows;
  p.x_stride = stride;
  p.columns = static_cast<int>(sizes.columns);
  p.parts = static_cast<int>(parts);
  p.out_dtype = row_dtype(kSumsOp, out_dtype);
  p.joins = joins;
  Grid grid;
  grid.x = blocks_of_columns(sizes) * parts;
  if (joins) grid.cluster_x = parts;
  launch(rows_kernel(kColumnSums, dtype, gpu), grid, gpu, p);
}

}  // namespace

void column_sums_cuda(const Tensor& input, int64_t dims, const Tensor& out) {
  const TensorView x(input), result(out);
  const RowSizes sizes = row_sizes(x, dims);
  check_length(kSumsOp, sizes);
  const RowsOperand rows(input, dims, sizes);
  const Device& gpu = device(x.device_index);
  if (sizes.rows > kRowsOfOnePart && sizes.rows <= kRowsOfCluster && has_vectors(sizes) &&
      largest_cluster(kColumnSums, x.dtype, gpu) == kMostCluster) {
    launch_sums(rows.data, rows.stride, x.dtype, sizes, kMostCluster, true, out.mutable_data_ptr(),
                result.dtype, gpu);
    return;
  }
  const int64_t most = sizes.rows <= kRowsOfOnePart ? 1 : ceil_div(sizes.rows, kSumsRows);
  const int64_t parts = std::clamp<int64_t>(kSumsBlocks / blocks_of_columns(sizes), 1, most);
  void* const to = out.mutable_data_ptr();
  if (parts == 1) {
    launch_sums(rows.data, rows.stride, x.dtype, sizes, 1, false, to, result.dtype, gpu);
    return;
  }
  const Workspace sums(gpu, parts * sizes.columns * 4);
  launch_sums(rows.data, rows.stride, x.dtype, sizes, parts, false, sums.data(), ScalarType::Float,
              gpu);
  launch_sums(sums.data(), sizes.columns, ScalarType::Float, {parts, sizes.columns}, 1, false, to,
              result.dtype, gpu);
}

}  // namespace torch_cubin
