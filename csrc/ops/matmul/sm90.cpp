// The backend of csrc/kernels/matmul/sm90.cu and sm90_ping_pong.cu: products on Hopper whose
// operands the TMA can read.
#include <algorithm>
#include <utility>

#include "cubin/error.h"
#include "ops/common/cluster_capacity.h"
#include "ops/common/launch.h"
#include "ops/matmul/backend.h"
#include "ops/matmul/sm90_configs.h"
#include "ops/matmul/sm90_map.h"
#include "ops/matmul/sm90_stream.h"

namespace torch_cubin {
namespace {

constexpr int64_t kRowBytes = 128;  // of an operand's tile in shared memory: the swizzle's
constexpr int32_t kGroup = 8;       // tile rows that follow one another; 4 and 16 are no different

constexpr int64_t kLargestCluster = 8;  // blocks; more are not portable
constexpr int64_t kMostRowParts = 8;    // sums of a row of A, each of some k blocks
constexpr int64_t kMostReadK = 128;     // where K is longer a copy is quicker

// Of 1, 2, 4 or 8.
int log2_of(int64_t size) { return size == 8 ? 3 : static_cast<int>(size / 2); }

// What the kernel calls A or B. Strides in elements.
struct Operand {
  const char* data;
  int64_t size, own_stride, k_stride;  // of M or N, which is the operand's own dim; of K
  const int64_t* batch_stride;
  bool whole_lines;  // MatmulOperands::a_whole_lines
};

class Sm90Matmul : public MatmulKernels {
 public:
  Sm90Matmul(const Device& device, const std::vector<PackageKernel*>& kernels)
      : device_(device), table_(device, kernels) {}

  static void check(PackageKernel& kernel) { Sm90Row{kernel}; }

  void configs(const MatmulCase& c, MatmulConfigs& out) const override {
    if (!takes(c)) return;
    const bool must_swap = c.math == kMathTF32 && is_along_k(c.a) && !is_along_k(c.b);
    if (!must_swap) configs(c, false, out);
    if (must_swap || may_swap(c)) configs(swapped(c), true, out);
  }

  bool has_capacity(const MatmulPlan& plan) const override {
    const auto chosen = plan.get<Sm90Plan>();
    const int64_t size = chosen.cluster.size();
    // Blocks of all these kernels take a multiprocessor each.
    return size == 1 || size <= clusters_.ask(*table_.rows.front().kernel, device_);
  }

  std::string name(const MatmulPlan& plan) const override {
    return "sm90 " + sm90_name(plan.get<Sm90Plan>());
  }

  void launch(const MatmulPlan& plan, const MatmulProblem& p,
              const MatmulOperands& operands) const override {
    const auto chosen = plan.get<Sm90Plan>();
    Sm90MatmulParams params{};
    fill(params, chosen, p, operands);
    const int64_t size = chosen.cluster.size();
    const Sm90Row& row = *chosen.row;
    launch_sm90(*row.kernel, {chosen.clusters * size, 1, 1, size},
                {row.tile_m, row.tile_n, row.threads / 128 - 1}, device_, params);
  }

 private:
  static bool takes(const MatmulCase& c) {
    const bool maths = c.math == kMathFloat16 || c.math == kMathBFloat16 || c.math == kMathTF32;
    // A bias has the output's type, and is read as the operands' type. A float32 addend of 16-bit
    // operands is not read: C is added to.
    const bool widens = c.output == ScalarType::Float && !c.has_bias && !c.scaled &&
                        c.activation == kActivationNone && (!c.has_addend || c.accumulates);
    const bool types = c.output == c.input || widens;
    const bool mappable = c.a_mappable && c.b_mappable && c.batch_dims <= kSm90BatchDims;
    return maths && types && (mappable || is_readable(c)) && !c.row_sums && !c.aux &&
           (!(c.split_sums || c.row_parts) || (c.batch_dims == 0 && c.math != kMathTF32));
  }

  // Whether what no tensor map describes can be read by threads: rows of neighbours, of 16 bits.
  // Not weight gradients of so few rows or columns that axpy.cu takes them (H200, 1654 x 3 x 64:
  // 2.3 us, not 3.4).
  static bool is_readable(const MatmulCase& c) {
    constexpr int64_t kFewest = 4;
    const bool is_tn = !is_along_k(c.a) && !is_along_k(c.b);
    if (is_tn && std::min(c.m, c.n) <= kFewest) return false;
    return c.math != kMathTF32 && c.batch_dims == 0 && c.k <= kMostReadK &&
           (c.a_mappable || (!is_vectors(c.a) && c.a_unit)) &&
           (c.b_mappable || (!is_vectors(c.b) && c.b_unit));
  }

  void configs(const MatmulCase& seen, bool transposed, MatmulConfigs& out) const {
    const auto offer = [&](Sm90Plan chosen, const Work& work, const Work* last) {
      MatmulPlan plan;
      chosen.transposed = transposed;
      plan.splits = chosen.splits;
      if (seen.row_parts) plan.row_parts = plan.splits * row_parts(chosen, seen.n);
      plan.set(chosen);
      out.offer(plan, work, last);
    };
    sm90_configs(table_, seen, clusters_.largest(), transposed, offer);
  }

  // Whether kernels that store their tiles transposed can compute C^T = B^T A^T instead. Kernels
  // take TF32 that is not contiguous along K as A alone, and store it from registers: where B is,
  // and A is not, they must.
  static bool may_swap(const MatmulCase& c) {
    return c.math != kMathTF32 && c.output == c.input && c.out_vectors && c.only_bias() &&
           c.a_mappable && c.b_mappable && !c.split_sums && !c.row_parts;
  }

  static MatmulCase swapped(const MatmulCase& c) {
    MatmulCase seen = c;
    std::swap(seen.m, seen.n);
    std::swap(seen.a, seen.b);
    std::swap(seen.a_mappable, seen.b_mappable);
    std::swap(seen.a_lines, seen.b_lines);
    std::swap(seen.a_unit, seen.b_unit);
    std::swap(seen.a_apart, seen.b_apart);
    std::swap(seen.a_broadcast, seen.b_broadcast);
    return seen;
  }

  // How many tiles of a row add up its elements of A, in turns.
  static int row_parts(const Sm90Plan& plan, int64_t n) {
    const int64_t most = std::max<int64_t>(kMostRowParts / plan.splits, 1);
    return static_cast<int>(std::min(ceil_div(n, plan.row->tile_n), most));
  }

  void fill(Sm90MatmulParams& out, const Sm90Plan& plan, const MatmulProblem& p,
            const MatmulOperands& operands) const {
    const Sm90Row& row = *plan.row;
    const int64_t of_a = plan.cluster.of_a, of_b = plan.cluster.of_b;
    const bool batched = p.batch_dims > 0;
    const int64_t bytes = element_size(p.input);
    const MapType type = sm90_map_type(p.math);
    Operand a = {
        operands.a, p.m, p.a_stride_m, p.a_stride_k, p.a_batch_stride, operands.a_whole_lines};
    Operand b = {
        operands.b, p.n, p.b_stride_n, p.b_stride_k, p.b_batch_stride, operands.b_whole_lines};
    if (plan.transposed) std::swap(a, b);
    const auto describe = [&](const Operand& of, bool mn_major, int64_t tile, int64_t sharers,
                              Sm90TensorMap& map) {
      Sm90Matrix x{of.data,
                   type,
                   bytes,
                   {},
                   0,
                   batched ? of.batch_stride : nullptr,
                   p.batch_size,
                   p.batch_dims,
                   {},
                   MapSwizzle::k128Bytes};
      const int64_t rows = mn_major ? row.tile_k : tile;
      // The TMA takes longer to fill a part of a box with zeros than to load it (sm90_edge.cuh).
      const int64_t in_line = kRowBytes / bytes;
      const int64_t own = of.whole_lines ? ceil_div(of.size, in_line) * in_line : of.size;
      x.dims[0] = mn_major ? own : p.k;
      x.dims[1] = mn_major ? p.k : of.size;
      x.stride = mn_major ? of.k_stride : of.own_stride;
      x.box[0] = kRowBytes / bytes;
      x.box[1] = rows / sharers;
      encode_sm90_map(x, device_, map);
    };
    const auto to_read = [&](const Operand& of, bool mn_major, Sm90Rows& rows) {
      rows.from = of.data;
      rows.stride = mn_major ? of.k_stride : of.own_stride;
      const int64_t last = ((mn_major ? p.k : of.size) - 1) * rows.stride * bytes;
      rows.low = reinterpret_cast<tc_int64>(of.data) + std::min<int64_t>(last, 0);
      rows.high = reinterpret_cast<tc_int64>(of.data) + std::max<int64_t>(last, 0) +
                  (mn_major ? of.size : p.k) * bytes;
    };
    if (plan.reads_a) {
      to_read(a, row.a_mn_major, out.a_rows);
      out.flags |= kSm90ReadA;
    } else {
      describe(a, row.a_mn_major, row.tile_m, of_a, out.a);
    }
    if (plan.reads_b) {
      to_read(b, row.b_mn_major, out.b_rows);
      out.flags |= kSm90ReadB;
    } else {
      describe(b, row.b_mn_major, row.tile_n, of_b, out.b);
    }
    out.k = static_cast<int>(p.k);

    int64_t c_batch_stride[kSm90BatchDims] = {};
    int64_t inner = p.m * p.n;
    for (int i = 0; i < kSm90BatchDims; ++i) {
      out.batch[i] = 1;
      if (i >= p.batch_dims) continue;
      out.batch[i] = static_cast<int>(p.batch_size[i]);
      c_batch_stride[i] = inner;
      inner *= p.batch_size[i];
    }
    out.curve = kActivationCurves[p.activation];
    out.alpha = static_cast<float>(p.alpha);
    out.flags |= p.activation << kSm90Activation;
    if (operands.addend != nullptr) fill_addend(out, p, operands.addend);
    if (row.from_registers()) {
      fill_out_from_registers(out, plan, c_batch_stride, p, operands);
    } else if (plan.transposed) {
      out.flags |= kSm90Transposed;
      out.bias_stride = operands.bias_stride;
      describe_out(out, plan, c_batch_stride, p, operands.c);
    } else {
      fill_out(out, plan, c_batch_stride, p, operands);
    }
    out.bias = operands.bias;
    out.row_sums = reinterpret_cast<float*>(operands.row_sums);
    out.row_parts = row_parts(plan, p.n);
    if (batched) out.flags |= kSm90Batched;
    out.flags |= log2_of(of_a) << kSm90AlongN | log2_of(of_b) << kSm90AlongM;
    if (plan.splits > 1) {
      out.flags |= kSm90SplitK;
      out.split_blocks = plan.split_blocks;
      out.batch[0] = static_cast<int>(plan.splits);
      out.out_batch_stride[0] = p.m * p.n;
    }
    if (row.parts) out.split_blocks = plan.split_blocks;
    if (plan.cluster.splits_k())
      out.flags |= kSm90OverK | log2_of(plan.cluster.of_k) << kSm90AlongK;
    // Clusters that follow one another have the operand in common that their blocks do not share.
    if (of_b > of_a && plan.splits <= 1 && !plan.cluster.splits_k()) out.flags |= kSm90GroupN;
    // An element of x @ x.mT is the sum of its products in one order, and so is the one mirrored.
    const bool one_order = p.batch_invariant || p.symmetry == Symmetry::kProduct;
    if (!one_order) out.flags |= kSm90Serpentine;
    // Where C is larger than the cache, the operands have more use of it.
    const int64_t out_bytes = p.batch() * p.m * p.n * element_size(p.output);
    if (out_bytes <= device_.l2_bytes) out.flags |= kSm90KeepOut;
    out.m = static_cast<int>(a.size);
    out.n = static_cast<int>(b.size);
    out.k_blocks = static_cast<int>(ceil_div(p.k, row.tile_k));
    out.tiles_m = plan.tiles_m;
    out.tiles_n = plan.tiles_n;
    out.group = kGroup;
    out.whole_tiles = plan.whole_tiles;
    out.stream_tiles = plan.stream_tiles;
    out.stream_clusters = plan.stream_clusters;
    const bool one_wave = plan.stream_tiles == 0 && plan.whole_tiles <= plan.clusters;
    if (one_wave && plan.splits == 1 && of_a * of_b == 1 && starts_early(row, p, out.m, out.n)) {
      out.flags |= kSm90Lone;
    }
    if (one_wave && operands.addend == nullptr && out.row_sums == nullptr) {
      out.flags |= tiles_inside(out, plan);
    }
  }

  // Whether a block finds its only tile by few instructions (produce_lone() of sm90.cu): not in
  // batches of more than one dim, nor, of one warpgroup, in any, and not where boxes of a weight
  // gradient's last tiles are not loaded (sm90_edge.cuh).
  static bool starts_early(const Sm90Row& row, const MatmulProblem& p, int64_t m, int64_t n) {
    const auto skips = [&](int64_t size, int64_t tile) {
      const int64_t rest = size % tile;
      return rest != 0 && ceil_div(rest, row.tile_k) < ceil_div(tile, row.tile_k);
    };
    if (row.from_registers() || p.batch_dims > (row.one_warpgroup ? 0 : 1)) return false;
    return !row.is_tn() || row.tile_n <= row.tile_k ||
           !(skips(m, row.tile_m) || skips(n, row.tile_n));
  }

  // Which of the last tiles may begin sooner, where each block has one tile. What they store is
  // stored twice, so that nothing may be added to it, and both must have the same bits: of several
  // tiles, a block may add up every second one's K from its end.
  static int tiles_inside(const Sm90MatmulParams& params, const Sm90Plan& plan) {
    const Sm90Row& row = *plan.row;
    // NOTE: the TMA traps where a box begins within 16 bytes of the contiguous dim.
    const bool contiguous = row.a_mn_major || plan.transposed;
    // The sums of four parts of K and more are added in an order that a row's place in its tile
    // decides (exchange() in sm90_split.cuh).
    const bool rows =
        params.m >= row.tile_m && (!contiguous || params.m % 8 == 0) && plan.cluster.of_k < 4;
    const bool columns = params.n >= row.tile_n && params.n % 8 == 0;
    return (rows ? kSm90RowsInside : 0) | (columns ? kSm90ColumnsInside : 0);
  }

  // How the tiles get to C, whose batch strides these are.
  void fill_out(Sm90MatmulParams& out, const Sm90Plan& plan, const int64_t* batch_stride,
                const MatmulProblem& p, const MatmulOperands& operands) const {
    const int64_t out_bytes = element_size(p.output);
    const bool aligned = reinterpret_cast<uintptr_t>(operands.c) % kVectorBytes == 0 &&
                         p.n * out_bytes % kVectorBytes == 0;
    const bool paired = operands.bias_stride == 1 &&
                        reinterpret_cast<uintptr_t>(operands.bias) % (2 * out_bytes) == 0;
    const bool sum_and_bias = is_sum_and_bias(p, operands);
    const bool widens = p.output != p.input;
    // What the kernel does to the accumulators themselves.
    const bool in_registers =
        widens ? aligned
               : (sum_and_bias || (out_bytes == 2 && addend_in_pairs(p, operands.addend))) &&
                     (operands.bias == nullptr || paired);
    if (widens && in_registers) {
      out.flags |= kSm90Sums;
      if (operands.addend != nullptr) out.flags |= kSm90Accumulate;
    } else {
      const bool to_activate = p.activation != kActivationNone && p.activation != kActivationRelu;
      if (to_activate || p.alpha != 1 || operands.addend != nullptr) out.flags |= kSm90Activate;
      const bool to_finish = operands.bias != nullptr || !sum_and_bias;
      if (to_finish && in_registers) out.flags |= kSm90Finish;
    }
    if (in_registers && aligned) {
      describe_out(out, plan, batch_stride, p, operands.c);
      return;
    }
    out.out = operands.c;
    out.out_stride_m = p.n;
    std::copy_n(batch_stride, kSm90BatchDims, out.out_batch_stride);
    if (in_registers && !widens) {
      out.flags |= kSm90OutUnaligned;
      return;
    }
    if (widens && operands.addend != nullptr) {
      // The kernel would read it as the operands' type.
      fail({"internal", "the addend of a product into float32", "is not C, in vectors",
            "as MatmulCase::accumulates says", "", ""});
    }
    out.flags |= kSm90General;
    if (p.output == ScalarType::Float) out.flags |= kSm90OutFloat;
    if (aligned) out.flags |= kSm90OutVector;
    out.bias_stride = operands.bias_stride;
  }

  // The tensor map by which panels are stored: a warp's 16 rows, or, of a transposed tile, a
  // warpgroup's 64 columns.
  void describe_out(Sm90MatmulParams& out, const Sm90Plan& plan, const int64_t* batch_stride,
                    const MatmulProblem& p, const char* c) const {
    const int64_t bytes = element_size(p.output), in_row = plan.row->tile_n * bytes;
    const int64_t panel = plan.transposed || in_row % 128 == 0 ? 128 : in_row % 64 == 0 ? 64 : 32;
    const int64_t rows = plan.transposed && plan.row->tile_n % 32 == 0 ? 32 : 16;
    const MapSwizzle swizzle = panel == 128  ? MapSwizzle::k128Bytes
                               : panel == 64 ? MapSwizzle::k64Bytes
                                             : MapSwizzle::k32Bytes;
    const MapType type = p.output == ScalarType::Float ? MapType::kFloat32 : sm90_map_type(p.math);
    Sm90Matrix x{c,      type, bytes, {p.n, p.m}, p.n, nullptr, nullptr, 0, {panel / bytes, rows},
                 swizzle};
    const int64_t splits = plan.splits, of_split = p.m * p.n;
    if (plan.splits > 1) {
      x.batch_stride = &of_split;
      x.batch_size = &splits;
      x.batch_dims = 1;
    } else if (p.batch_dims > 0) {
      x.batch_stride = batch_stride;
      x.batch_size = p.batch_size;
      x.batch_dims = p.batch_dims;
    }
    encode_sm90_map(x, device_, out.out_map);
  }

  // The same where lanes write what they have: two neighbours at a time, or anything.
  static void fill_out_from_registers(Sm90MatmulParams& out, const Sm90Plan& plan,
                                      const int64_t* batch_stride, const MatmulProblem& p,
                                      const MatmulOperands& operands) {
    out.out = operands.c;
    out.out_stride_m = p.n;
    std::copy_n(batch_stride, kSm90BatchDims, out.out_batch_stride);
    out.bias_stride = operands.bias_stride;
    if (plan.transposed) {
      out.flags |= kSm90Transposed | kSm90BiasRow;
      std::swap(out.addend_stride_m, out.addend_stride_n);
    }
    const bool pairs =
        p.n % 2 == 0 && reinterpret_cast<uintptr_t>(operands.c) % (2 * sizeof(float)) == 0;
    const bool has_bias = operands.bias != nullptr;
    const bool biased_by_rows = plan.transposed && operands.bias_stride == 1;
    if (!pairs || !is_sum_and_bias(p, operands) || (has_bias && !biased_by_rows)) {
      out.flags |= kSm90General;
    } else if (has_bias) {
      out.flags |= kSm90Finish;
    }
  }

  static bool is_sum_and_bias(const MatmulProblem& p, const MatmulOperands& operands) {
    return p.activation == kActivationNone && p.alpha == 1 && operands.addend == nullptr;
  }

  // Whether neighbouring columns of the addend can be read two at a time, everywhere.
  static bool addend_in_pairs(const MatmulProblem& p, const char* addend) {
    if (addend == nullptr) return true;
    bool pairs = p.n % 2 == 0 && p.addend_stride_n == 1 && p.addend_stride_m % 2 == 0 &&
                 reinterpret_cast<uintptr_t>(addend) % (2 * element_size(p.output)) == 0;
    for (int i = 0; i < p.batch_dims; ++i) pairs = pairs && p.addend_batch_stride[i] % 2 == 0;
    return pairs;
  }

  static void fill_addend(Sm90MatmulParams& out, const MatmulProblem& p, const char* addend) {
    constexpr int64_t kVector = 4;  // elements read at a time
    out.addend = addend;
    out.beta = static_cast<float>(p.beta);
    out.addend_stride_m = p.addend_stride_m;
    out.addend_stride_n = p.addend_stride_n;
    bool vectors = p.addend_stride_n == 1 && p.addend_stride_m % kVector == 0 &&
                   reinterpret_cast<uintptr_t>(addend) % (kVector * element_size(p.output)) == 0;
    for (int i = 0; i < p.batch_dims; ++i) {
      out.addend_batch_stride[i] = p.addend_batch_stride[i];
      vectors = vectors && p.addend_batch_stride[i] % kVector == 0;
    }
    if (vectors) out.flags |= kSm90AddVector;
  }

  const Device& device_;
  const Sm90Table table_;
  ClusterCapacity clusters_{kLargestCluster};
};

const MatmulBackendOf<Sm90Matmul, Sm90MatmulParams> g_sm90_matmul("matmul/sm90",
                                                                  {"sm90", "sm90_ping_pong",
                                                                   "sm90_parts"});

}  // namespace
}  // namespace torch_cubin
