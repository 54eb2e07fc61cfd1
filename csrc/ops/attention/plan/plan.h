// The kernels of attention and the choice among them: what a call needs, and the interface of a
// backend, the host file csrc/ops/attention/<folder>/<name>.cpp of kernels in
// csrc/kernels/attention/<folder>. A backend may serve the forward, the backward, caches, or
// several. It sees the manifest's entries as rows of tables, from which it chooses.
//
// All backends are asked, and the quickest answer is kept. FusedOperands::params() and fill() give
// every operand and setting in plain numbers, an AttentionParams for each part of the batch; a
// kernel with its own struct copies from there, and declares it in a header of its own.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ops/attention/problem/kv_cache.h"
#include "ops/attention/problem/operands.h"
#include "ops/common/backend.h"
#include "ops/common/launch.h"

namespace torch_cubin {

// What a call needs of a kernel besides its dtype and head dims, and what a kernel supports, by
// `takes` in the manifest: a kernel serves a call if it takes all of the call's features.
//
// Every call has exactly one of the first six. Sinks and masks are no rule: scores do not depend on
// them.
enum AttentionFeature : unsigned {
  kPlainCall = 1 << 0,   // lengths and the band only, and a positive scale
  kUnmasked = 1 << 1,    // no mask, but another feature
  kBoolMask = 1 << 2,    // a boolean mask
  kAddedAlone = 1 << 3,  // an additive mask of the tensors' dtype, and no rule
  kAddedMask = 1 << 4,   // the same with a rule
  kFloatMask = 1 << 5,   // an additive float32 mask with 16-bit tensors
  kSinks = 1 << 6,
  kScoreRule = 1 << 7,     // softcap, ALiBi, dropout or another scale
  kLargeSoftcap = 1 << 8,  // has_large_softcap()
};
constexpr const char* kAttentionFeatures[] = {"plain",       "unmasked",   "bool_mask",
                                              "added_alone", "added_mask", "float_mask",
                                              "sinks",       "rule",       "large_softcap"};
constexpr unsigned kAnyAdded = kAddedAlone | kAddedMask | kFloatMask;
constexpr unsigned kAnyMask = kBoolMask | kAnyAdded;

constexpr double kLog2e = 1.4426950408889634;  // kernels compute powers of two

// All that a plan may depend on.
struct AttentionCase {
  ScalarType dtype;
  unsigned needs;  // AttentionFeatures
  // Bytes of an additive mask's numbers, for its own batches, heads and rows; and of the copy that
  // the forward's kernels for Hopper would make.
  int64_t mask_bytes = 0, mask_copy = 0;
  bool packed;  // sequence lengths are known on the device only; the lengths are upper bounds
  int64_t heads, kv_heads;
  int64_t seqlen_q, seqlen_k;
  int64_t head_dim, head_dim_v;  // padded to whole vectors
  // Of one launch; 1 if it is not known yet, and for a batch-invariant plan: launch() then gets
  // another batch than plan() did.
  int64_t batch;
  // Nothing may depend on the other sequences, nor on the other rows of the same one: a kernel that
  // serves every number of rows has precedence.
  bool batch_invariant = false;

  int64_t group() const { return kv_heads > 0 ? heads / kv_heads : 1; }
  bool has(unsigned any_of) const { return (needs & any_of) != 0; }
  // Whether a row can attend to a key: Hopper's kernels serve no other calls.
  bool has_scores() const { return seqlen_q > 0 && seqlen_k > 0 && head_dim > 0 && head_dim_v > 0; }
};

AttentionCase attention_case(const AttentionCall& call);

enum AttentionDtype { kAttendFloat16, kAttendBFloat16, kAttendFloat32, kAttendDtypes };

// kAttendDtypes if no fused kernel supports the dtype.
AttentionDtype attention_dtype(ScalarType dtype);

struct AttentionRow {
  // Throws [file] for an entry with a field that these kernels do not have.
  AttentionRow(PackageKernel& kernel, const Device& device);

  PackageKernel* kernel;
  AttentionDtype dtype;             // in which it multiplies; kAttendDtypes: any
  bool e4m3;                        // of tensors, or caches, of float8_e4m3fn
  std::string of;                   // "queries", "keys" or "values" if a step has kernels for each
  unsigned takes;                   // AttentionFeatures
  int64_t rows, columns, head_dim;  // of a tile; head_dim: the largest supported
  int64_t slots;                    // blocks that run on the device at a time
  int64_t stages;                   // of the ring of keys and values
  int64_t teams;                    // of a block, each with tiles of its own
  bool transposes;                  // e4m3: blocks transpose values, which others find transposed
  bool widens;                      // e4m3 backward: blocks make q in bfloat16 themselves
  bool rounds;                      // Hopper's backward: blocks round dq themselves
  int64_t dynamic_shared;           // bytes of a block
  int64_t saturating;               // decode: blocks of a multiprocessor that keep the memory busy
  double cost_tile, cost_fixed;     // cycles of a block: for a tile of columns, and for the rest
};

// The rows of kernels that compete, in the order of the manifest.
class AttentionTable {
 public:
  void add(const AttentionRow& row) { rows_.push_back(row); }
  bool empty() const { return rows_.empty(); }

  // visit(row) for those of the dtype that take all of `needs`, of the narrowest head_dim that
  // suffices.
  template <class Visit>
  void for_each(AttentionDtype dtype, unsigned needs, int64_t head_dim, Visit&& visit) const {
    const AttentionRow* narrowest = first(dtype, needs, head_dim);
    for (const AttentionRow& row : rows_) {
      if (narrowest != nullptr && row.head_dim == narrowest->head_dim && fits(row, dtype, needs)) {
        visit(row);
      }
    }
  }

  // The first of these; null: none.
  const AttentionRow* first(AttentionDtype dtype, unsigned needs = 0, int64_t head_dim = 0) const;

 private:
  static bool fits(const AttentionRow& row, AttentionDtype dtype, unsigned needs) {
    return row.dtype == dtype && (needs & ~row.takes) == 0;
  }

  std::vector<AttentionRow> rows_;
};

// A step of attention, as kernels of the manifest compute it.
struct AttentionStep {
  const char* kind;             // in the manifest
  const char* header;           // of their parameters, see check_params()
  size_t bytes;                 // of these
  bool needs_features = false;  // whether they must list the features that they take

  bool is_of(const KernelEntry& entry) const {
    return entry.kind == kind && entry.params_header == header;
  }
};

// A backend's kernels on one device, for the arch that serves it best.
class AttentionEntries {
 public:
  AttentionEntries(const Device& device, const std::vector<PackageKernel*>& kernels)
      : device_(device), kernels_(kernels) {}

  // visit(row) for each kernel of a step, in the order of the manifest.
  template <class Visit>
  void each(const AttentionStep& step, Visit&& visit) const {
    for (PackageKernel* kernel : kernels_) {
      if (step.is_of(kernel->entry())) visit(AttentionRow(*kernel, device_));
    }
  }

  // The one of a step that has a kernel for each `of`; null: none.
  PackageKernel* kernel(const AttentionStep& step, const char* of = "") const {
    PackageKernel* found = nullptr;
    each(step, [&](const AttentionRow& row) {
      if (row.of == of) found = row.kernel;
    });
    return found;
  }

  AttentionTable table(const AttentionStep& step) const {
    AttentionTable rows;
    each(step, [&](const AttentionRow& row) { rows.add(row); });
    return rows;
  }

 private:
  const Device& device_;
  const std::vector<PackageKernel*>& kernels_;
};

template <class Kernels>
struct AttentionPlan : PlanDetails<64> {
  const Kernels* kernels = nullptr;  // the creator; null: no fused kernel supports the problem
  double microseconds = std::numeric_limits<double>::infinity();  // predicted
};

class AttentionForwardKernels;
class AttentionBackwardKernels;
using ForwardPlan = AttentionPlan<AttentionForwardKernels>;
using BackwardPlan = AttentionPlan<AttentionBackwardKernels>;

// A backend's kernels on one device. Thread-safe. The time of plan() is infinite if the case is not
// supported, which does not depend on the batch: that is known only after operands have been copied
// where necessary.
class AttentionForwardKernels {
 public:
  virtual ~AttentionForwardKernels() = default;
  virtual ForwardPlan plan(const AttentionCase& problem) const = 0;

  // `operands` includes kOut, with rows of whole vectors. `logsumexp`: null, or [batch, head, row].
  virtual void launch(const ForwardPlan& plan, const AttentionCase& problem,
                      const FusedOperands& operands, float* logsumexp) const = 0;

  // Whether launch() writes zeros, and a logsumexp of -inf, for rows of packed tensors that belong
  // to no sequence; otherwise they are written before.
  virtual bool clears_empty_rows() const { return false; }
};

class AttentionBackwardKernels {
 public:
  virtual ~AttentionBackwardKernels() = default;
  virtual BackwardPlan plan(const AttentionCase& problem) const = 0;

  // `operands` includes kOut, kGradOut and the gradients.
  virtual void launch(const BackwardPlan& plan, const AttentionCase& problem,
                      const FusedOperands& operands, const float* logsumexp) const = 0;

  virtual bool clears_empty_rows() const { return false; }  // of all gradients

  // Runs the kernel for the terms of the sinks' gradient (portable/delta.cu); false if it has none.
  virtual bool launch_sink_terms(ScalarType dtype, const AttentionParams& params) const {
    return false;
  }
};

// The queries of a call, and the sequences of its cache, as packed sequences.
struct PackedKvCache {
  Tensor q, k, v;  // (rows, heads, head_dim)
  Tensor cu_seqlens_q, cu_seqlens_k;
};

// A backend's kernels for flash_attention_with_kvcache on one device.
class KvCacheKernels {
 public:
  virtual ~KvCacheKernels() = default;
  // Returns false, having done nothing, if it has no kernel for the dtype and head dims. With
  // `packed` it attends to nothing, and copies the sequences there instead.
  virtual bool run(const KvCacheCall& call, PackedKvCache* packed) const = 0;
};

// The kernels of all backends on one device.
struct AttentionKernels {
  std::vector<std::unique_ptr<AttentionForwardKernels>> forward;
  std::vector<std::unique_ptr<AttentionBackwardKernels>> backward;
  std::vector<std::unique_ptr<KvCacheKernels>> kv_cache;

  void add(std::unique_ptr<AttentionForwardKernels> one) { forward.push_back(std::move(one)); }
  void add(std::unique_ptr<AttentionBackwardKernels> one) { backward.push_back(std::move(one)); }
  void add(std::unique_ptr<KvCacheKernels> one) { kv_cache.push_back(std::move(one)); }
};

class AttentionBackend : public KernelBackend {
 public:
  // Adds its kernels on a device, of entries that check() accepted.
  using Make = void (*)(const Device&, const AttentionEntries&, AttentionKernels&);
  // Throws [file] for a row that the backend cannot launch.
  using CheckRow = void (*)(const AttentionStep&, const AttentionRow&);

  // `steps`: static, of the kernels that it launches.
  template <size_t kSteps>
  AttentionBackend(const AttentionStep* const (&steps)[kSteps], Make make,
                   CheckRow check_row = nullptr)
      : KernelBackend("attention"), make_(make), check_row_(check_row) {
    static_assert(kSteps <= kMostSteps, "raise kMostSteps");
    std::copy(steps, steps + kSteps, steps_);
  }

  bool owns(const KernelEntry& entry) const override { return step_of(entry) != nullptr; }
  void check(PackageKernel& kernel) const override;
  void make(const Device& device, const AttentionEntries& entries, AttentionKernels& made) const {
    make_(device, entries, made);
  }

 private:
  const AttentionStep* step_of(const KernelEntry& entry) const;  // null: none

  static constexpr size_t kMostSteps = 8;
  const AttentionStep* steps_[kMostSteps + 1] = {};  // terminated by null
  Make make_;
  CheckRow check_row_;
};

// The Make of a backend whose kernels are one class.
template <class Kernels>
void make_kernels(const Device& device, const AttentionEntries& entries, AttentionKernels& made) {
  made.add(std::make_unique<Kernels>(device, entries));
}

// False for no blocks: cu_seqlens of no sequence. Throws [input] for more than a launch can have;
// `unit` names the counted things.
bool check_blocks(int64_t blocks, int64_t most = kMaxGrid[0], const char* unit = "blocks");

// Made on first use of the device. Throws [arch] if the catalog has nothing for it.
const AttentionKernels& attention_kernels(const Device& device);

// What the plan of one launch may depend on: under batch_invariant() not on the number of
// sequences, and, where a kernel for Hopper serves the call, not on their lengths.
AttentionCase planned_case(AttentionCase problem);

// Plans without kernels if no fused kernel supports the problem: then it is composed.
ForwardPlan plan_forward(const AttentionKernels& kernels, const AttentionCase& problem);
BackwardPlan plan_backward(const AttentionKernels& kernels, const AttentionCase& problem);

}  // namespace torch_cubin
