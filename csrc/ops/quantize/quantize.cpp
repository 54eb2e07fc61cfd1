// quantize on CUDA: the backend of csrc/kernels/quantize.
#include "ops/quantize/quantize.h"

#include <algorithm>
#include <memory>

#include "cubin/error.h"
#include "kernels/quantize/quantize_params.h"
#include "ops/common/aten.h"
#include "ops/common/backend.h"
#include "ops/common/device_tables.h"
#include "ops/common/launch.h"
#include "ops/common/stable_ops.h"
#include "runtime/device.h"

namespace torch_cubin {
namespace {

constexpr int64_t kReadBytes = 16;  // at a time
constexpr int64_t kWriteBytes = 8;
constexpr int kEight = 8;                 // elements that a thread handles together
constexpr int64_t kMostBlocks = 1 << 30;  // counted in 32 bits

// log2 of the threads that have a row, of rows with one scale.
int row_threads_log2(int64_t columns) {
  int log2 = kQuantizeLeastLog2;
  while (kQuantizeKept << log2 < columns && 1 << log2 < kQuantizeThreads) ++log2;
  return log2;
}

constexpr const char* kDtypes[] = {"float16", "bfloat16", "float32"};
constexpr ScalarType kTypes[] = {ScalarType::Half, ScalarType::BFloat16, ScalarType::Float};
constexpr const char* kKinds[] = {"rows", "tiles"};

enum Mode { kBlockMode, kGatedMode, kRowMode, kTileMode, kModes };
constexpr const char* kModeNames[] = {"block", "gated", "row"};

struct QuantizeKernel {
  explicit QuantizeKernel(PackageKernel& entry) : kernel(&entry) {
    const KernelFields fields(entry);
    dtype = fields.index("dtype", kDtypes);
    mode = fields.index("kind", kKinds) == 1 ? kTileMode : fields.index("mode", kModeNames);
    int64_t tile[3];
    fields.triple("tile", 1, tile);
    blocks = tile[0];
  }

  PackageKernel* kernel;
  int dtype, mode;
  int64_t blocks;  // of 128 columns, that a block of threads quantises
};

const RowBackend<QuantizeKernel, QuantizeParams> g_quantize("quantize", "quantize");

struct QuantizeTable {
  explicit QuantizeTable(const Device& device) : family("quantize", device) {
    for (const QuantizeKernel& own : g_quantize.rows(family)) {
      rows[own.mode][own.dtype] = std::make_unique<QuantizeKernel>(own);
    }
  }

  const QuantizeKernel& find(int mode, ScalarType dtype) const {
    const auto at = std::find(kTypes, kTypes + std::size(kTypes), dtype) - kTypes;
    const auto& row = rows[mode][at];
    if (row == nullptr) family.fail_no_kernel("quantize of " + dtype_name(dtype));
    return *row;
  }

  FamilyKernels family;
  std::unique_ptr<QuantizeKernel> rows[kModes][std::size(kTypes)];
};

const QuantizeTable& quantize_table(const Device& device) {
  static DeviceTables<QuantizeTable> tables;
  return tables.get(device);
}

int mode_of(const QuantizeCall& call) {
  if (call.gated) return kGatedMode;
  if (call.recipe == kScaleRow) return kRowMode;
  return call.recipe == kScaleBlock1x128 && !call.transpose ? kBlockMode : kTileMode;
}

// What the quantised rows are, where they are not x's.
struct RowsOf {
  const std::optional<Tensor>& numbers;
  const GroupBlocks* blocks;  // null: not apart
  Quantized* also = nullptr;  // not transposed: rows of 1x128, or without `blocks` 128x128
};

Quantized empty_quantized(const QuantizeCall& call, int32_t device_index) {
  const int64_t sizes[] = {call.rows, call.k};
  return {
      empty_cuda(sizes, 2, call.dtype, device_index),
      empty_cuda_strided(call.scale.sizes, call.scale_strides, 2, ScalarType::Float, device_index)};
}

// How gated rows are read, by `grid` blocks of threads: H200, microseconds before and after,
// 512 x 4096 2.72, 2.30; 4096 x 2048 6.38, 5.89; 4096 x 4096 11.24, 10.52; 4096 x 7168 18.50,
// 18.14. `apart`: bytes lie between rows that are not x.
void hide_reads(QuantizeParams& params, const Device& gpu, int64_t grid, int64_t x_bytes,
                bool apart) {
  // Of less the kernel before reads or writes little that it could be hidden behind.
  if (grid < 2 * gpu.multiprocessors) return;
  // So that results stay in the L2 cache. Of more bytes it takes 1.03 of the time.
  if (8 * x_bytes <= 5 * gpu.l2_bytes) params.flags |= kQuantizeReadOnce;
  if (apart) return;
  const int64_t early = std::min<int64_t>(grid, gpu.multiprocessors * kQuantizeGatedResident);
  params.flags |= static_cast<int>(early) << kQuantizeEarly;
}

// Quantises x, or `of`, as `call` says.
Quantized run_quantize(const Tensor& x, const QuantizeCall& call, const RowsOf* of = nullptr) {
  TensorView view(x);
  const int64_t recipe = call.recipe;
  auto [data, scales] = empty_quantized(call, view.device_index);
  if (call.rows == 0 || call.k == 0) {
    if (call.scale.numel() > 0) torch::stable::fill_(scales, 1);
    return {data, scales};
  }
  std::optional<Tensor> copy;
  if (view.sizes[1] > 1 && view.strides[1] != 1) {
    copy = torch::stable::contiguous(detach(x));
    view = TensorView(*copy);
  }
  const Device& gpu = device(view.device_index);
  const int mode = mode_of(call);
  const QuantizeKernel& kernel = quantize_table(gpu).find(mode, view.dtype);
  const int64_t bytes = element_size(view.dtype), stride = view.sizes[0] > 1 ? view.strides[0] : 0;
  QuantizeParams params{};
  params.x = view.data();
  params.data = static_cast<unsigned char*>(data.mutable_data_ptr());
  params.scales = static_cast<float*>(scales.mutable_data_ptr());
  params.x_stride = stride;
  params.up = call.k;
  params.data_stride = call.k;
  params.rows = static_cast<int>(view.sizes[0]);
  if (of != nullptr && of->numbers) {
    const TensorView numbers(*of->numbers);
    params.numbers = static_cast<const int*>(numbers.data());
    params.rows = static_cast<int>(numbers.sizes[0]);
    params.x_rows = static_cast<int>(view.sizes[0]);
  }
  const int64_t columns = call.transpose ? call.rows : call.k;
  params.columns = static_cast<int>(columns);
  const bool reads = reinterpret_cast<uintptr_t>(params.x) % kReadBytes == 0 &&
                     stride * bytes % kReadBytes == 0 && params.columns % kEight == 0 &&
                     (!call.gated || call.k * bytes % kReadBytes == 0);
  if (reads) params.flags |= kQuantizeVectors;
  if (call.k % kWriteBytes == 0) params.flags |= kQuantizeOutVectors;
  if (call.power_of_two) params.flags |= kQuantizePowerOfTwo;
  if (call.dtype == ScalarType::Float8_e5m2) params.flags |= kQuantizeE5m2;
  if (call.transpose) params.flags |= kQuantizeTransposed;
  params.scale_stride = call.scale_strides[0];
  params.scale_stride_k = call.scale_strides[1];
  if (recipe == kScaleBlock128x128 && !call.transpose) {  // the scales' first dim is that of K
    std::swap(params.scale_stride, params.scale_stride_k);
  }
  if (mode == kTileMode && recipe == kScaleBlock1x128) params.flags |= kQuantizeColumns;

  const int64_t across = ceil_div(columns, kScaleBlock);
  params.inverse_blocks = static_cast<unsigned int>(UINT32_MAX / across);
  int64_t blocks = int64_t{params.rows};
  if (mode == kTileMode) blocks = ceil_div(blocks, kScaleBlock) * across;
  if (of != nullptr && of->blocks != nullptr) {
    const GroupBlocks& own = *of->blocks;
    const char* tables = static_cast<const char*>(TensorView(own.tables).data());
    params.blocks = reinterpret_cast<const GroupBlock*>(tables) + 1 + own.groups;
    blocks = own.most * across;
  }
  if (params.blocks != nullptr || (of != nullptr && of->also != nullptr)) {
    params.flags |= kQuantizeApart;
  }
  if (of != nullptr && of->also != nullptr) {
    params.row_data = static_cast<unsigned char*>(std::get<0>(*of->also).mutable_data_ptr());
    params.row_scales = static_cast<float*>(std::get<1>(*of->also).mutable_data_ptr());
  }
  if (mode == kBlockMode || mode == kGatedMode) {
    blocks = ceil_div(blocks, kQuantizeBand) * kQuantizeBand * across;
  }
  if (std::max({blocks, view.sizes[0], view.sizes[1]}) > kMostBlocks) {
    fail({"no_kernel", kQuantizeOp, "has a size that no kernel takes",
          "at most " + std::to_string(kMostBlocks) + " rows, columns and blocks", view.shape_text(),
          ""});
  }
  int64_t together = mode == kTileMode ? 1 : kernel.blocks;  // by a block of threads
  if (mode == kRowMode) {
    params.row_threads_log2 = row_threads_log2(call.k);
    together = kQuantizeThreads >> params.row_threads_log2;
  }
  const int64_t grid = ceil_div(blocks, together);
  if (mode == kGatedMode && reads) {
    hide_reads(params, gpu, grid, params.rows * stride * bytes, stride != 2 * call.k);
  }
  launch(*kernel.kernel, {grid}, gpu, params);
  return {data, scales};
}

}  // namespace

Quantized quantize_cuda(const Tensor& x, int64_t recipe, bool transpose, bool power_of_two,
                        const std::string& gate, std::optional<ScalarType> dtype) {
  return run_quantize(x,
                      check_quantize(TensorView(x), recipe, transpose, power_of_two, gate, dtype));
}

namespace {

QuantizeCall call_of_rows(const Tensor& x, const std::optional<Tensor>& numbers) {
  QuantizeCall call =
      check_quantize(TensorView(x), kScaleBlock1x128, false, false, "none", std::nullopt);
  if (numbers) call.rows = TensorView(*numbers).sizes[0];
  call.lay_out_scales();
  return call;
}

QuantizeCall call_of_groups(const Tensor& x, const GroupBlocks& blocks) {
  QuantizeCall call =
      check_quantize(TensorView(x), kScaleBlock1x128, true, false, "none", std::nullopt);
  call.k = blocks.k;
  call.lay_out_scales(blocks.most);
  return call;
}

}  // namespace

Quantized quantize_rows_cuda(const Tensor& x, const std::optional<Tensor>& numbers) {
  const RowsOf of{numbers, nullptr};
  return run_quantize(x, call_of_rows(x, numbers), &of);
}

Quantized quantize_groups_cuda(const Tensor& x, const std::optional<Tensor>& numbers,
                               const GroupBlocks& blocks) {
  const RowsOf of{numbers, &blocks};
  return run_quantize(x, call_of_groups(x, blocks), &of);
}

QuantizedBoth quantize_both_cuda(const Tensor& x, const std::optional<Tensor>& numbers,
                                 const GroupBlocks& blocks) {
  Quantized rows = empty_quantized(call_of_rows(x, numbers), TensorView(x).device_index);
  const RowsOf of{numbers, &blocks, &rows};
  return {rows, run_quantize(x, call_of_groups(x, blocks), &of)};
}

QuantizedBoth quantize_weight_cuda(const Tensor& x) {
  const auto call = [&](bool transpose) {
    return check_quantize(TensorView(x), kScaleBlock128x128, transpose, false, "none",
                          std::nullopt);
  };
  const std::optional<Tensor> none;
  Quantized rows = empty_quantized(call(false), TensorView(x).device_index);
  const RowsOf of{none, nullptr, &rows};
  return {rows, run_quantize(x, call(true), &of)};
}

}  // namespace torch_cubin
