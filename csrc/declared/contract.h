// Contract: how the arguments of a declared op become a launch. Read from JSON (docs/manifest.md)
// and checked once; a call (call.cpp) only evaluates it.
#pragma once

#include <torch/csrc/stable/library.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "declared/contract_images.h"
#include "declared/kernel_lookup.h"
#include "declared/packing.h"
#include "declared/pattern.h"
#include "declared/requirement.h"
#include "declared/schema.h"
#include "declared/tuned_calls.h"
#include "declared/tuned_table.h"
#include "runtime/device.h"
#include "runtime/launch.h"
#include "runtime/module.h"

namespace torch_cubin {

class Contract {
 public:
  // `package`: the folder or file that it was read from, or "". Throws [input], [params],
  // [no_kernel].
  Contract(const nlohmann::json& definition, ContractImages& images, std::string package = "");
  Contract(const Contract&) = delete;
  Contract& operator=(const Contract&) = delete;

  const Schema& schema() const { return schema_; }
  const nlohmann::json& definition() const { return definition_; }
  const std::string& package() const { return package_; }
  const nlohmann::json& files() const { return *files_; }  // ContractImages::files()

  // Equal for contracts with the same behaviour and images, wherever the images came from.
  const std::string& identity() const { return identity_; }

  // One call: consumes the arguments on the stack and leaves the outputs in their place. Throws.
  void call(StableIValue* stack) const;

  // The outputs [{"dtype", "sizes", "strides"}] of a call, checked as a real one, for arguments in
  // the form of DescribedArguments. Throws [input].
  nlohmann::json check_call(const nlohmann::json& arguments) const;

  // Consumes the arguments and throws: an op that changes arguments was called with a view that
  // PyTorch negates or conjugates lazily.
  [[noreturn]] void refuse_lazy_view(StableIValue* stack) const;

  // Loads the kernels that run on that device. Throws [arch] if none does.
  void preload(const Device& device) const;

  // For torch_cubin.tune (tuning.h). `calls` is in the form of TunedCalls; throws [input].
  TunedCalls tuned_table(const nlohmann::json& calls,
                         TunedCalls::OnBadLine on_bad_line = TunedCalls::kThrow) const;
  void add_tuned(int32_t device, const nlohmann::json& calls) const;
  // While the sum of changes is above 0, calls consult call_watch().
  void watch(int change) const { watched_ += change; }
  size_t kernels() const { return launches_.size(); }

 private:
  struct Launch {
    Launch(const nlohmann::json& definition, const std::string& label, const Schema& schema,
           const Scope& arguments, const Scope& all,
           std::function<std::vector<ScalarType>(size_t)> dtypes_of, ContractImages& images,
           bool jit);

    // Whether one of its images runs on that device.
    bool runs_on(int32_t device_index) const;
    // Whether `when` and all requirements hold.
    bool takes(const CallState& state) const;
    // Whether it runs on the call's device and takes its arguments.
    bool fits(const CallState& state) const { return runs_on(state.device) && takes(state); }

    std::optional<Expression> when;
    std::vector<Requirement> requirements;
    int32_t group = 0;  // in the tuned table
    size_t number = 0;  // index in launches_
    std::shared_ptr<Module> module;
    Kernel* kernel = nullptr;
    std::vector<Expression> grid, block, cluster;  // three each; cluster may be empty
    std::optional<Expression> shared_memory;
    std::optional<Packing> packing;
    uint32_t flags = 0;  // TORCH_CUBIN_* of runtime/launch_call.h
    int32_t priority = 0;

   private:
    // A bit for each device: whether runs_on() has the answer cached, and the answer.
    mutable std::atomic<uint64_t> asked_{0}, runs_{0};
  };
  template <class Arguments>
  class Call;
  class Choice;

  void check_outputs_are_written() const;
  // The dtypes that a tensor may have, by its index.
  std::vector<ScalarType> dtypes_of(size_t place) const;
  void read_tuned(const nlohmann::json* tuned, const Names& names);
  void make_call_key();
  // The tuned table of a device, read from its file on the first call there.
  const TunedCalls& tuned_calls(int32_t device) const {
    const TunedCalls* const known =
        tuned_calls_[device % kMaxDevices].load(std::memory_order_acquire);
    return known != nullptr ? *known : first_tuned_calls(device);
  }
  const TunedCalls& first_tuned_calls(int32_t device) const;
  void read_tensors(const nlohmann::json& tensors, const nlohmann::json& outputs,
                    const nlohmann::json* scratch, Names& names);
  const nlohmann::json& tensor_entry(const nlohmann::json& tensors, const std::string& name) const;
  void read_arguments(const nlohmann::json& tensors, Names& names);
  std::string new_name(const nlohmann::json& name, const std::string& label,
                       const Names& names) const;
  void read_outputs(const nlohmann::json& tensors, const nlohmann::json& outputs, Names& names);
  void check_like(const Pattern& output, const nlohmann::json& fields,
                  const nlohmann::json& tensors) const;
  void read_scratch(const nlohmann::json& scratch, Names& names);
  // `own`: the names of the tensors that the op allocates.
  void read_kernels(const nlohmann::json& kernels, const std::vector<std::string>& own,
                    const Names& names, ContractImages& images, bool jit);
  void make_lookup();

  nlohmann::json definition_;
  std::string package_;
  std::shared_ptr<const nlohmann::json> files_;
  std::string identity_;
  Schema schema_;
  std::string op_;  // "op 'mylib::vec_add'"
  std::vector<Pattern> patterns_;
  // By argument: its index in patterns_; -1 for arguments that are not tensors.
  std::vector<int> pattern_of_;
  std::vector<size_t> required_, optional_, lists_, mutated_, numbers_,
      texts_;  // by argument index
  std::vector<Names::Item> items_;
  size_t first_output_place_ = 0;  // the index of the first output
  std::vector<Pattern> outputs_, scratch_;
  std::vector<int> extras_;  // by argument: the index of "x?" or "len(xs)", or -1
  std::deque<Launch> launches_;
  std::optional<TunedTable> tuned_;
  std::optional<KernelLookup> lookup_;  // only without a tuned table
  CallKey call_key_;                    // key into the tuned tables
  // By device. A replaced table is leaked, because a thread may still be reading it.
  mutable std::atomic<const TunedCalls*> tuned_calls_[kMaxDevices]{};
  mutable std::atomic<int> watched_{0};  // number of watching threads
  // Incremented with each new table: an earlier choice may be outdated.
  mutable std::atomic<uint64_t> tables_version_{0};
  bool remembers_ = false;    // whether calls can be cached (remembered_call.h), and it pays off
  int64_t address_mask_ = 0;  // the address bits that choose between kernels
  Scope argument_scope_;      // of `when`, for errors
  std::vector<std::vector<size_t>> groups_;  // indices in launches_, by group of the tuned table
  size_t variables_ = 0;                     // number of dtype variables
  bool reads_outputs_ = false;               // whether expressions may read outputs or scratch
};

}  // namespace torch_cubin
