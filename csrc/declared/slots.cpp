#include "declared/slots.h"

#include <atomic>
#include <map>
#include <mutex>
#include <tuple>
#include <utility>

#include "cubin/error.h"
#include "pytorch/torch_error.h"

namespace torch_cubin {
namespace {

using nlohmann::json;

// Contracts are leaked on purpose, replaced ones too: another thread may be inside a call, and a
// CUDA graph may replay the kernels.
std::atomic<const Contract*> g_slots[kMaxDeclaredOps];
std::mutex g_define_mutex;  // guards the following members

std::map<std::string, size_t>& slots_by_name() {
  static auto* const slots = new std::map<std::string, size_t>;
  return *slots;
}

template <size_t N>
void trampoline(StableIValue* stack, uint64_t, uint64_t) {
  g_slots[N].load(std::memory_order_acquire)->call(stack);
}

template <size_t N>
void refuse_lazy_view(StableIValue* stack, uint64_t, uint64_t) {
  g_slots[N].load(std::memory_order_acquire)->refuse_lazy_view(stack);
}

using Boxed = void (*)(StableIValue*, uint64_t, uint64_t);
struct Functions {
  Boxed call, refuse_lazy_view;
};

template <size_t... N>
Functions pick(size_t slot, std::index_sequence<N...>) {
  static constexpr Functions kPool[] = {{&trampoline<N>, &refuse_lazy_view<N>}...};
  return kPool[slot];
}

Functions functions_of(size_t slot) {
  return pick(slot, std::make_index_sequence<kMaxDeclaredOps>());
}

// A registration with PyTorch, undone by the destructor unless kept.
class Registration {
 public:
  ~Registration() {
    for (TorchLibraryHandle library : libraries_) {
      std::ignore = aoti_torch_delete_library_object(library);  // nothing can be done about it here
    }
  }
  Registration() = default;
  Registration(Registration&& other) noexcept : libraries_(std::move(other.libraries_)) {
    other.libraries_.clear();
  }
  Registration(const Registration&) = delete;
  Registration& operator=(const Registration&) = delete;

  void define(const Schema& schema, size_t slot) {
    const std::string& space = schema.name_space;
    libraries_.reserve(4);
    TorchLibraryHandle library = nullptr;
    check(aoti_torch_library_init_fragment(space.c_str(), "torch_cubin", 0, &library), schema);
    libraries_.push_back(library);
    check(aoti_torch_library_def(library, schema.schema_for_pytorch().c_str()), schema);
    const Functions functions = functions_of(slot);
    implement("CUDA", schema, functions.call);
    if (!schema.mutates()) return;
    // PyTorch's fallback for lazy views assumes that a mutating op returns its mutated argument.
    implement("Negative", schema, functions.refuse_lazy_view);
    implement("Conjugate", schema, functions.refuse_lazy_view);
  }

  void keep() { libraries_.clear(); }

 private:
  void implement(const char* key, const Schema& schema, Boxed function) {
    TorchLibraryHandle library = nullptr;
    check(aoti_torch_library_init_impl(schema.name_space.c_str(), key, "torch_cubin", 0, &library),
          schema);
    libraries_.push_back(library);
    check(
        torch_library_impl(library, schema.unqualified_name().c_str(), function, TORCH_ABI_VERSION),
        schema);
  }

  static void check(AOTITorchError error, const Schema& schema) {
    if (error == 0) return;
    const std::string said = torch_error();
    fail({"input", "op '" + schema.qualified_name() + "'", "could not be registered with PyTorch",
          "a schema that PyTorch takes, and a name that no other library defines",
          said.empty() ? "an error that PyTorch wrote to stderr" : printable(said, 600), ""});
  }

  std::vector<TorchLibraryHandle> libraries_;
};

json op_json(const Contract& contract) {
  return {{"name", contract.schema().qualified_name()},
          {"schema", contract.schema().text()},
          {"contract", contract.definition()},
          {"package", contract.package().empty() ? json() : json(contract.package())},
          {"images", contract.files()}};
}

struct Step {
  std::unique_ptr<const Contract> contract;
  const char* state;
  size_t slot;
};

size_t free_slot(size_t taken, const std::string& name) {
  const size_t slot = slots_by_name().size() + taken;
  if (slot < kMaxDeclaredOps) return slot;
  fail({"input", "op '" + name + "'", "is one op too many",
        "at most " + std::to_string(kMaxDeclaredOps) + " declared ops a process", "one more", ""});
}

}  // namespace

json define_contracts(std::vector<std::unique_ptr<const Contract>> contracts) {
  std::lock_guard<std::mutex> lock(g_define_mutex);
  auto& slots = slots_by_name();
  std::vector<Step> steps;
  std::map<std::string, size_t> met;  // which of steps
  size_t added = 0;
  for (std::unique_ptr<const Contract>& contract : contracts) {
    const Schema& schema = contract->schema();
    const std::string name = schema.qualified_name();
    const auto [before, is_new] = met.emplace(name, steps.size());
    if (!is_new) {
      const Step& other = steps[before->second];
      if (other.contract->identity() != contract->identity()) {
        fail({"input", "op '" + name + "'", "is defined twice at once", "one definition",
              "two that differ", ""});
      }
      steps.push_back({std::move(contract), "same", other.slot});
      continue;
    }
    const auto found = slots.find(name);
    if (found == slots.end()) {
      const size_t slot = free_slot(added++, name);
      steps.push_back({std::move(contract), "defined", slot});
      continue;
    }
    const Contract& present = *g_slots[found->second].load();
    if (present.schema().text() != schema.text()) {
      fail({"input", "op '" + name + "'", "exists with another schema", present.schema().text(),
            schema.text(), "PyTorch keeps an op's schema for the process: choose another name."});
    }
    const bool same = present.identity() == contract->identity();
    if (!same && !contract->package().empty()) {
      fail({"input", "op '" + name + "'", "exists with other content",
            "the op of package '" + printable(contract->package()) + "'",
            present.package().empty() ? "one that was defined in this process"
                                      : "that of package '" + printable(present.package()) + "'",
            "Load one of them, or name the ops differently."});
    }
    steps.push_back({std::move(contract), same ? "same" : "swapped", found->second});
  }

  json answer = json::array();
  for (const Step& step : steps) {
    answer.push_back(op_json(*step.contract));
    answer.back()["state"] = step.state;
  }
  std::vector<Registration> registrations;
  registrations.reserve(steps.size());
  for (Step& step : steps) {
    if (std::string(step.state) != "defined") continue;
    // Set the contract first: the op is callable as soon as it is registered. The contract stays
    // even if another op's registration fails and this one is undone.
    const Contract& contract = *step.contract.release();
    g_slots[step.slot].store(&contract, std::memory_order_release);
    registrations.emplace_back();
    registrations.back().define(contract.schema(), step.slot);
  }
  // From here on nothing throws except std::bad_alloc.
  for (Step& step : steps) {
    if (std::string(step.state) == "defined") {
      slots[g_slots[step.slot].load()->schema().qualified_name()] = step.slot;
    } else if (std::string(step.state) == "swapped") {
      g_slots[step.slot].store(step.contract.release(), std::memory_order_release);
    }
  }
  for (Registration& registration : registrations) registration.keep();
  return answer;
}

const Contract& find_contract(const std::string& name) {
  std::lock_guard<std::mutex> lock(g_define_mutex);
  const auto found = slots_by_name().find(name);
  if (found == slots_by_name().end()) {
    fail({"input", "op '" + printable(name) + "'", "is not a declared op of this process", "", "",
          "Define it, or load its package, first."});
  }
  return *g_slots[found->second].load();
}

json declared_ops() {
  std::lock_guard<std::mutex> lock(g_define_mutex);
  json ops = json::array();
  for (const auto& [name, slot] : slots_by_name()) {
    ops.push_back(op_json(*g_slots[slot].load()));
  }
  return ops;
}

}  // namespace torch_cubin
