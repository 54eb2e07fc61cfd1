// What a matmul kernel's host file gives: csrc/ops/matmul/<name>.cpp for
// csrc/kernels/matmul/<name>.cu.
//
//   class Sm90Kernels : public MatmulKernels {     // on one device
//     static void check(PackageKernel&);             // throws for fields that are wrong
//     void configs(const MatmulCase& c, MatmulConfigs& out) const override;  // what could run it
//     std::string name(const MatmulPlan&) const override;      // for tuned tables
//     void launch(const MatmulPlan&, const MatmulProblem&, const MatmulOperands&) const override;
//   };
//   // Once a process: registers itself for entries of that kind and parameter.
//   const MatmulBackendOf<Sm90Kernels, Sm90MatmulParams> g_sm90("matmul/sm90", {"sm90"});
//
// plan.cpp asks all backends alike, prices what they offer (cost.h) and keeps the quickest, unless
// a tuned table (tuned.h) names another. A launch may run several kernels (launch() and Workspace
// of ops/common/launch.h; tensor maps: runtime/tensor_map.h).
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "ops/common/backend.h"
#include "ops/matmul/cost.h"
#include "ops/matmul/problem.h"

namespace torch_cubin {

constexpr int64_t kVectorBytes = 16;  // what the aligned kernels load at a time
constexpr int64_t kLineBytes = 128;   // of the caches

// More batch dims than this, and matmul.cpp runs the product in parts.
constexpr int kMaxPlannedBatchDims = 4;

// How a kernel can read an operand. "Own" is the operand's dim that is not K: M of A, N of B.
// Vectors begin at 16-byte addresses, in every row and every batch.
enum Access : uint8_t {
  kKVectors,     // K is contiguous, in 16-byte vectors
  kOwnVectors,   // the own dim is contiguous, in 16-byte vectors
  kOwnElements,  // by elements, and neighbours along the own dim are nearer
  kKElements,    // by elements, and neighbours along K are nearer
  kAccessCount
};

inline bool is_vectors(Access access) { return access == kKVectors || access == kOwnVectors; }
inline bool is_along_k(Access access) { return access == kKVectors || access == kKElements; }

// All that a plan may depend on; equal cases have equal plans, which are remembered. What a backend
// must know of an operand's address and strides to take a problem stands here, and nowhere else.
struct MatmulCase {
  int64_t m, n, k, batch;
  int32_t batch_dims;  // of those that remain after merging; 4 at most
  ScalarType input, output;
  Math math;
  Access a, b;
  // A and B: whether a tensor map (TMA) with a dim for each batch dim can describe the operand:
  // read by vectors, no row begins within another, strides below 2^40 bytes. Rank and box are the
  // backend's.
  bool a_mappable, b_mappable;
  bool a_lines, b_lines;  // read by vectors, and every row begins at a line of the cache
  bool a_unit, b_unit;    // neighbours along the operand's nearer dim lie side by side
  // The operand's rows, along the nearer dim, whether read by vectors or not: none begins within
  // another, eight of them are less than 2^31 bytes, and those of the next batch follow.
  bool a_apart, b_apart;
  bool a_broadcast, b_broadcast;  // some batch stride is 0
  bool has_bias;
  Activation activation;
  bool scaled, has_addend;  // alpha is not 1; something is added, times beta
  bool accumulates;  // has_addend: it is C itself, beta is 1, and C's rows are 16-byte vectors
  bool out_vectors;  // C's rows are 16-byte vectors
  // Each row of C must have the same bits whatever M and the batch are. So K is added up from its
  // beginning to its end, in one chain of the tensor cores' instructions: not backwards, nor split
  // but into k_parts.
  bool batch_invariant;
  // 1, 2 or 4 (k_parts_of()): equal parts of K, of whole k blocks of all kernels, each added up in
  // one chain from zero, and then the parts in their order. So few rows take more multiprocessors.
  int k_parts;
  // K is to be split: a plan says into how many parts, and each part's sums go to a matrix of their
  // own, one after the other. (finish.cpp asks, and adds them up.)
  bool split_sums;
  // The sums of A's rows over K are wanted, too (MatmulOperands::row_sums), or parts of them, which
  // finish.cpp asks for and adds up: a plan says how many. Backends that cannot give them refuse;
  // without a kernel there is no plan, which is no error.
  bool row_sums, row_parts;
  // The sums before the activation are wanted, too (MatmulOperands::aux). finish.cpp alone gives
  // them; without a plan of its own the caller computes them by a second product.
  bool aux;
  // Only the lower triangle of the output has to be computed, if its mirror image is stored above
  // the diagonal (MatmulPlan::mirrors). C begins at a vector, and is M x M. If the mirror image is
  // needed, another kernel (mirror.h) follows plans that do not store it.
  bool symmetric, needs_mirror;
  bool own_transpose;  // symmetric: B is A's transpose, in the same memory

  bool sums_rows() const { return row_sums || row_parts; }

  // No epilogue but a bias. A backend whose kernels can do no other must refuse the rest.
  bool only_bias() const { return activation == kActivationNone && !scaled && !has_addend && !aux; }

  friend bool operator==(const MatmulCase& x, const MatmulCase& y) {
    return x.m == y.m && x.n == y.n && x.k == y.k && x.batch == y.batch && x.facts() == y.facts();
  }
  // Everything but the sizes, packed into one number.
  uint64_t facts() const {
    uint64_t packed = static_cast<uint64_t>(static_cast<uint8_t>(input));
    packed = packed << 8 | static_cast<uint64_t>(static_cast<uint8_t>(output));
    packed = packed << 4 | static_cast<uint64_t>(math);
    packed = packed << 2 | a;
    packed = packed << 2 | b;
    packed = packed << 3 | static_cast<uint64_t>(batch_dims);
    packed = packed << 3 | static_cast<uint64_t>(activation);
    for (const bool fact :
         {a_mappable, b_mappable,  a_lines,      b_lines,         a_unit,     b_unit,
          a_apart,    b_apart,     a_broadcast,  b_broadcast,     has_bias,   scaled,
          has_addend, accumulates, out_vectors,  batch_invariant, split_sums, row_sums,
          row_parts,  symmetric,   needs_mirror, own_transpose,   aux}) {
      packed = packed << 1 | static_cast<uint64_t>(fact);
    }
    packed = packed << 3 | static_cast<uint64_t>(k_parts);
    return packed;
  }
};

// What a launch reads and writes, besides the problem's integers.
struct MatmulOperands {
  const char* a = nullptr;
  const char* b = nullptr;
  const char* bias = nullptr;    // null: none
  int64_t bias_stride = 0;       // elements; 0 where it is one number
  const char* addend = nullptr;  // of the output's type; null: none
  char* c = nullptr;
  // Whether the operand, where its own dim is contiguous, is a copy whose rows go on to the end of
  // a line (pad.cpp): what lies there may be read, and is any number.
  bool a_whole_lines = false, b_whole_lines = false;
  // Sums of A's rows over K, M of the operands' type; or float32, M of each of a plan's parts.
  // Null: not wanted.
  char* row_sums = nullptr;
  // alpha * the sums + bias, rounded, beside an activation of them; as C. Null: not wanted.
  char* aux = nullptr;
};

MatmulCase matmul_case(const MatmulProblem& problem, const MatmulOperands& operands);

// Whether B is A's transpose, in the same memory. Operands of equal values elsewhere are not:
// whether they are equal could only be known by reading them.
bool is_own_transpose(const MatmulProblem& problem, const MatmulOperands& operands);

class MatmulKernels;

struct MatmulPlan : PlanDetails<96> {
  const MatmulKernels* kernels = nullptr;  // who made it; null: nobody takes the problem
  double microseconds = std::numeric_limits<double>::infinity();  // predicted
  bool too_large = false;  // a kernel would take a smaller batch of it, or a smaller product
  // For a batch-invariant case: plans of the same number give the same bits, and the lowest number
  // is taken before time is compared. So a backend's number may not depend on M or on the batch.
  // 0 is the order that the case asks for.
  int sum_order = 0;
  int splits = 1;        // of K, for a case of split sums
  int row_parts = 0;     // of all splits together, for a case of them
  bool mirrors = false;  // stores the mirror image, too; of a rewrite: its product's plan does
};

// What a kernel that only moves data takes, by its entry's "cost": the share of the memory's peak
// that it reaches, and the cycles of its launch.
struct CopyCost {
  static constexpr int kLeastShare = 10;  // a tenth; an entry with less is an error

  CopyCost() = default;
  explicit CopyCost(const KernelFields& fields)
      : share(fields.object("cost").number("share", 1 / double{kLeastShare})),
        fixed(fields.object("cost").number("fixed", 0)) {}

  Work work(double bytes) const {
    Work work;
    work.beside_cycles = fixed;
    work.beside_bytes = bytes / share;
    return work;
  }

  double share = 1, fixed = 0;
};

// What a rewrite moves beside the product that it leaves, in bytes: always, for each split of K,
// and for each part of the sums of rows (MatmulPlan::splits, row_parts of that product's plan).
struct RewriteBytes {
  double always = 0, of_split = 0, of_part = 0;
};

// What backends offer for one case: kernels that run it, and rewrites, which make another case of
// it (operands copied before the product, sums finished after it). The planner prices the former by
// cost.h, and the latter with the quickest plan of the case that they leave.
class MatmulConfigs {
 public:
  using Planner = std::function<MatmulPlan(const MatmulCase&)>;  // of the cases that rewrites leave

  MatmulConfigs(const Terms& terms, bool batch_invariant, const Planner& planner,
                std::vector<MatmulPlan>* all = nullptr)
      : terms_(terms), batch_invariant_(batch_invariant), planner_(planner), all_(all) {}

  // Who offers from now on.
  void from(const MatmulKernels* kernels) { kernels_ = kernels; }
  // `last`: what follows `work` in the same kernel, if anything does.
  void offer(MatmulPlan plan, const Work& work, const Work* last = nullptr);
  void rewrite(MatmulPlan plan, const MatmulCase& product, const RewriteBytes& bytes,
               const CopyCost& cost);
  double price(const Work& work) const { return microseconds(work, terms_); }
  // Plans that do not mirror are followed by a kernel with this work.
  void follow_by_mirror(const Work& work) { mirror_ = price(work); }
  // A smaller batch of the case, or a smaller product, would be taken.
  void too_large() { too_large_ = true; }

  // The quickest; of a batch-invariant case, of those with the lowest sum_order.
  MatmulPlan best();

 private:
  struct Rewrite {
    MatmulPlan plan;
    MatmulCase product;
    RewriteBytes bytes;
    CopyCost cost;
  };
  void search(const Rewrite& rewrite);
  void keep(MatmulPlan plan);

  const Terms& terms_;
  const bool batch_invariant_;
  const Planner& planner_;
  std::vector<MatmulPlan>* all_;
  const MatmulKernels* kernels_ = nullptr;
  std::vector<Rewrite> rewrites_;
  double mirror_ = 0;  // us
  MatmulPlan best_;
  bool too_large_ = false;
};

// A backend's kernels on one device. Used by many threads at once.
class MatmulKernels {
 public:
  virtual ~MatmulKernels() = default;

  // Offers every config that could run the case: none where these kernels do not take it.
  // Deterministic: depends on the case alone, and on what has_capacity() says of the device.
  virtual void configs(const MatmulCase& problem, MatmulConfigs& out) const = 0;

  // Whether the device can run a plan of these kernels at all: asked before it is launched or
  // offered. Where it cannot (clusters, under MPS), no later plan is of that kind. A fact of the
  // device: it must not depend on which plan asked first.
  virtual bool has_capacity(const MatmulPlan& plan) const {
    static_cast<void>(plan);
    return true;
  }

  // A plan's name, by which tuned tables know it: the same in every process, no two configs of a
  // case have the same one, and where it can be, the same for all types of operands.
  virtual std::string name(const MatmulPlan& plan) const = 0;

  // Runs a plan of its own on the device's current stream. The problem has the plan's case.
  virtual void launch(const MatmulPlan& plan, const MatmulProblem& problem,
                      const MatmulOperands& operands) const = 0;
};

class MatmulBackend : public KernelBackend {
 public:
  template <size_t kKinds>
  explicit MatmulBackend(const char* const (&kinds)[kKinds]) : KernelBackend("matmul", kinds) {}

  // `kernels` are its entries, for the arch that serves the device best, that check() let pass.
  virtual std::unique_ptr<MatmulKernels> on(const Device& device,
                                            const std::vector<PackageKernel*>& kernels) const = 0;
};

// `Kernels`: the backend's MatmulKernels, constructed with the arguments of on(). Its entries have
// one parameter, the struct `Params` of a header (check_params()).
template <class Kernels, class Params>
class MatmulBackendOf : public MatmulBackend {
 public:
  template <size_t kKinds>
  MatmulBackendOf(const char* header, const char* const (&kinds)[kKinds])
      : MatmulBackend(kinds), header_(header) {}
  void check(PackageKernel& kernel) const override {
    check_params(kernel.entry(), header_, sizeof(Params));
    Kernels::check(kernel);
  }
  std::unique_ptr<MatmulKernels> on(const Device& device,
                                    const std::vector<PackageKernel*>& kernels) const override {
    return std::make_unique<Kernels>(device, kernels);
  }

 private:
  const char* const header_;
};

}  // namespace torch_cubin
