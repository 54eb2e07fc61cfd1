// The backend of the kernels that run on every arch: mma.cu, simt.cu, dot.cu and axpy.cu of
// csrc/kernels/matmul, with reduce.cu, which adds the partial sums of a K that was split; and of
// sliced.cu, for Hopper.
#include <algorithm>

#include "kernels/matmul/chains_params.h"
#include "ops/common/cluster_capacity.h"
#include "ops/common/launch.h"
#include "ops/matmul/backend.h"
#include "ops/matmul/params.h"
#include "ops/matmul/portable_configs.h"

namespace torch_cubin {
namespace {

constexpr int kReduceBlocks = 16;  // a multiprocessor: full, and no more rounds than needed

MatmulParams params_of(const MatmulProblem& p, const PortablePlan& plan,
                       const MatmulOperands& operands, void* partial) {
  MatmulParams out = matmul_params(p, operands, plan.swapped);
  out.partial = partial;
  out.tiles_m = plan.tiles_m;
  out.tiles_n = plan.tiles_n;
  out.k_tiles_per_split = plan.k_tiles_per_split;
  out.splits = plan.splits;
  if (plan.in_order && p.math == kMathFloat64) out.flags |= kFlagInChains;
  return out;
}

class PortableMatmul : public MatmulKernels {
 public:
  PortableMatmul(const Device& device, const std::vector<PackageKernel*>& kernels)
      : device_(device), table_(device, kernels) {}

  static void check(PackageKernel& kernel) { PortableRow(kernel, Device()); }

  void configs(const MatmulCase& problem, MatmulConfigs& out) const override {
    if (!takes(problem)) return;
    const auto price = [&](const Work& work) { return out.price(work); };
    portable_configs(table_, problem, price, [&](const PortablePlan& chosen, const Work& work) {
      if (in_cluster(chosen) > clusters_.largest()) return;
      if (chosen.tiles_m * chosen.tiles_n > kMaxGrid[0] / problem.batch) return out.too_large();
      MatmulPlan plan;
      plan.sum_order = problem.k_parts > 1 ? 1 : 0;
      plan.set(chosen);
      out.offer(plan, work);
    });
  }

  bool has_capacity(const MatmulPlan& plan) const override {
    const auto chosen = plan.get<PortablePlan>();
    // Asked with as much shared memory as any plan's, that of one block a multiprocessor.
    const int64_t shared = table_.shared_each / 2;
    const int64_t cluster = in_cluster(chosen);
    return cluster == 0 || cluster <= clusters_.ask(*chosen.kernel, device_, shared);
  }

  std::string name(const MatmulPlan& plan) const override {
    const auto chosen = plan.get<PortablePlan>();
    return portable_name(*chosen.kernel) + (chosen.swapped ? " swapped" : "");
  }

  void launch(const MatmulPlan& plan, const MatmulProblem& p,
              const MatmulOperands& operands) const override {
    const auto chosen = plan.get<PortablePlan>();
    if (!chosen.reduces) {
      // Sums of 16-bit types, as they are: what a split would leave.
      void* sums = p.output == p.input ? nullptr : operands.c;
      const MatmulParams params = params_of(p, chosen, operands, sums);
      // Blocks of several tiles run long: an early start of the next gains nothing and, where they
      // do not fill the device, costs locality in L2 (0.4% of 4096^3 on the H200; 2048^3 gains 1%).
      const bool one_tile = chosen.blocks == chosen.tiles_m * chosen.tiles_n * p.batch();
      const int64_t cluster = in_cluster(chosen);
      torch_cubin::launch(*chosen.kernel, {chosen.blocks, 1, 1, cluster, chosen.dynamic_shared},
                          device_, params, one_tile || chosen.clusters);
      return;
    }
    const int64_t outputs = p.batch() * p.m * p.n;
    const Workspace partials(device_, outputs * chosen.splits * (p.math == kMathFloat64 ? 8 : 4));
    MatmulParams params = params_of(p, chosen, operands, partials.data());
    torch_cubin::launch(*chosen.kernel, {chosen.blocks, chosen.splits, 1, 0, chosen.dynamic_shared},
                        device_, params);
    if (chosen.in_order) params.splits = -params.splits;
    // Any number of blocks is right: they share the outputs out among themselves.
    const Math math = p.output == p.input ? p.math : kMathFloat32;
    const int64_t per_block = table_.reduce_outputs[math];
    const int64_t blocks = std::min((outputs + per_block - 1) / per_block,
                                    int64_t{kReduceBlocks} * device_.multiprocessors);
    torch_cubin::launch(*table_.reduce[math], {blocks}, device_, params);
  }

 private:
  static bool takes(const MatmulCase& problem) {
    const bool sums = problem.output == ScalarType::Float && !problem.has_bias;
    return (problem.input == problem.output || sums) && problem.only_bias() &&
           !problem.split_sums && !problem.sums_rows();
  }

  // Blocks of a cluster; 0: none are launched.
  static int64_t in_cluster(const PortablePlan& plan) {
    return plan.clusters && plan.splits > 1 ? plan.splits : 0;
  }

  const Device& device_;
  PortableTable table_;
  ClusterCapacity clusters_{kMostInCluster};
};

const MatmulBackendOf<PortableMatmul, MatmulParams> g_portable_matmul("matmul",
                                                                      {"mma", "persistent", "simt",
                                                                       "sliced", "dot", "reduce"});

}  // namespace
}  // namespace torch_cubin
