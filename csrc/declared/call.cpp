// A call of a declared op: match, choose, allocate, pack, launch.
//
// Allocates no host memory except for outputs, unless a kernel has more than kStackBytes of
// parameters. Real tensors, described ones and tune's forced calls take the same steps, so that
// checks and measurements match real calls.
#include <cstring>
#include <tuple>
#include <type_traits>
#include <vector>

#include "cubin/error.h"
#include "declared/boxed_arguments.h"
#include "declared/choice.h"
#include "declared/described_arguments.h"
#include "declared/remembered_call.h"
#include "package/load_error.h"
#include "pytorch/autograd_state.h"
#include "pytorch/contiguous.h"
#include "pytorch/overlap.h"
#include "pytorch/stream.h"
#include "runtime/device.h"

namespace torch_cubin {

using nlohmann::json;

namespace {

constexpr size_t kStackBytes = 4096;  // the limit of kernel parameters before CUDA 12.1
constexpr size_t kStackParams = 256;
constexpr int64_t kAllocatorAlign = 256;  // minimal alignment of PyTorch's allocator

// The tensors that a call allocates. Owns them until give().
class CallAllocations {
 public:
  ~CallAllocations() {
    for (size_t i = 0; i < count_; ++i) {
      std::ignore = aoti_torch_delete_tensor_object(handles_[i]);  // nothing can be done about it
    }
  }
  void add(AtenTensorHandle handle) { handles_[count_++] = handle; }
  // Transfers all of them to the stack.
  void give(StableIValue* stack) {
    for (size_t i = 0; i < count_; ++i) stack[i] = torch::stable::detail::from(handles_[i]);
    count_ = 0;
  }

 private:
  Unset<AtenTensorHandle, kMaxOpTensors> handles_;
  size_t count_ = 0;
};

}  // namespace

// `Arguments`: BoxedArguments or DescribedArguments.
template <class Arguments>
class Contract::Call {
 public:
  // `device_type`: required of the tensors; -1 for any.
  Call(const Contract& contract, Arguments& arguments, int32_t device_type, bool grad_mode)
      : contract_(contract), arguments_(arguments), grad_mode_(grad_mode) {
    state_.device_type = device_type;
  }

  // Compares all arguments with their patterns.
  void bind() {
    for (size_t i = 0; i < contract_.variables_; ++i) state_.dtypes[i] = kUnboundDtype;
    // Expressions may read an item before its list is matched, or one that does not exist.
    for (const Names::Item& item : contract_.items_) {
      state_.facts[item.place] = TensorFacts{};
      state_.addresses[item.place] = nullptr;
    }
    read_numbers();
    for (const size_t i : contract_.required_) match(i, arguments_.view(i));
    for (const size_t i : contract_.optional_) match_optional(i);
    set_device();
    for (const size_t i : contract_.required_) check_expressions(i, -1);
    for (const size_t i : contract_.optional_) {
      if (state_.facts[i].defined) check_expressions(i, -1);
    }
    for (const size_t i : contract_.lists_) match_list(i);
    if (state_.device == kNoDevice) {
      fail({"input", contract_.op_, "was given no tensor", "at least one, which says the device",
            "none", ""});
    }
  }

  // Refuses arguments that share memory with one that the op changes.
  void check_memory() {
    for (const size_t i : contract_.mutated_) {
      if (state_.addresses[i] != nullptr && !pattern(i).may_overlap()) check_overlaps(i);
    }
  }

  void run(CallAllocations& outputs) {
    bind();
    check_no_derivative();
    check_memory();

    RememberedCall* const slot = contract_.remembers_ ? remembered() : nullptr;
    const bool known = slot != nullptr && slot->contract == &contract_ &&
                       slot->tables == tables_version_ && slot->facts == facts_;
    torch_cubin_launch_call call;
    uint64_t times = 0;
    if (known) {
      call = slot->shape;
      times = slot->times;
    }
    const Choice choice(contract_, state_);
    const Launch& launch = known ? *static_cast<const Launch*>(slot->launch)
                           : contract_.launches_.size() == 1 ? choice.only()
                                                             : choice.choose();
    const size_t first = contract_.first_output_place_;
    bool empty = true;
    for (size_t i = 0; i < contract_.outputs_.size(); ++i) {
      empty &= make(contract_.outputs_[i], first + i, outputs);
    }
    // Scratch is allocated before the grid is evaluated, because the grid may use the scratch
    // tensor's sizes.
    CallAllocations scratch;
    for (size_t i = 0; i < contract_.scratch_.size(); ++i) {
      make(contract_.scratch_[i], first + contract_.outputs_.size() + i, scratch);
    }
    if (!known) {
      call.size = sizeof(call);
      call.flags = launch.flags;
      call.device = state_.device;
      call.priority = launch.priority;
      call.stream = nullptr;
      evaluate(launch.grid, call.grid);
      if (call.grid[0] == 0 || call.grid[1] == 0 || call.grid[2] == 0) {
        for (const size_t i : contract_.mutated_) {
          empty &= !state_.facts[i].defined || state_.addresses[i] == nullptr;
        }
        if (!empty) refuse_empty_grid(call);
        return;
      }
      evaluate(launch.block, call.block);
      if (!launch.cluster.empty()) evaluate(launch.cluster, call.cluster);
      call.shared_memory = launch.shared_memory->evaluate(state_.arguments()).integer;
    }
    // Before the launch, because PyTorch throws here for an inference tensor.
    for (const size_t i : contract_.mutated_) {
      if (state_.facts[i].defined) bump_version(arguments_.tensor(i));
    }
    // Allocating may have run another call on this thread (through an allocator hook).
    pack_and_launch(launch, call, slot, known && slot->times == times);
  }

  json outputs() const {
    json outputs = json::array();
    for (const Pattern& pattern : contract_.outputs_) {
      int64_t sizes[kMaxDims];
      int64_t strides[kMaxDims];
      const int64_t dim = pattern.shape(state_, sizes, strides);
      outputs.push_back({{"dtype", dtype_name(pattern.dtype(state_))},
                         {"sizes", std::vector<int64_t>(sizes, sizes + dim)},
                         {"strides", std::vector<int64_t>(strides, strides + dim)}});
    }
    return outputs;
  }

 private:
  void read_numbers() {
    for (const size_t i : contract_.numbers_) {
      const Value value = arguments_.number(i);
      state_.numbers[i] = value;
      const int flag = contract_.extras_[i];
      if (flag >= 0) {
        state_.numbers[static_cast<size_t>(flag)] = Value::of(value.type != ValueType::kNone);
      }
    }
    for (const size_t i : contract_.texts_) state_.texts[i] = arguments_.text(i);
    for (const size_t i : contract_.lists_) {
      state_.numbers[static_cast<size_t>(contract_.extras_[i])] =
          Value::of(static_cast<int64_t>(arguments_.length(i)));
    }
  }

  const Pattern& pattern(size_t i) const {
    return contract_.patterns_[static_cast<size_t>(contract_.pattern_of_[i])];
  }

  void match(size_t i, const TensorView& view, int item = -1) {
    const Pattern& wanted = pattern(i);
    state_.addresses[i] = nullptr;
    if (wanted.match(view, i, item, state_)) {
      const void* address = arguments_.data(view);
      wanted.check_address(address, view, item);
      state_.addresses[i] = const_cast<void*>(address);
    }
    if (grad_mode_ && requires_grad(view.handle)) argument_requiring_grad_ = static_cast<int>(i);
  }

  void match_optional(size_t i) {
    state_.facts[i] = TensorFacts{};
    state_.addresses[i] = nullptr;
    if (arguments_.has_tensor(i)) match(i, arguments_.view(i));
  }

  // Each item of the list binds its pattern's names separately.
  void match_list(size_t i) {
    const size_t length = arguments_.length(i);
    for (size_t item = 0; item < length; ++item) {
      match(i, arguments_.item(i, item), static_cast<int>(item));
      set_device();
      check_expressions(i, static_cast<int>(item));
      for (const Names::Item& named : contract_.items_) {
        if (named.argument != i || named.index != item) continue;
        state_.facts[named.place] = state_.facts[i];
        state_.addresses[named.place] = state_.addresses[i];
      }
    }
  }

  void check_expressions(size_t i, int item) const {
    if (pattern(i).has_expressions()) pattern(i).check_expressions(i, item, state_);
  }

  void set_device() {
    if constexpr (std::is_same_v<Arguments, const BoxedArguments>) {
      if (state_.sm >= 0 || state_.device < 0) return;
      const Device& found = device(state_.device);
      state_.sm = found.sm;
      state_.multiprocessors = found.multiprocessors;
    }
  }

  // Throws if a mutated tensor overlaps another: one block could write what another still reads.
  void check_overlaps(size_t mutated) const {
    const auto memory = [](const void* address, const TensorFacts& facts) {
      return MemoryFacts{address, facts.sizes, facts.strides, facts.dim, facts.itemsize};
    };
    const MemoryFacts own = memory(state_.addresses[mutated], state_.facts[mutated]);
    const auto check = [&](size_t other, const MemoryFacts& facts) {
      if (!share_memory(own, facts)) return;
      pattern(mutated).refuse_overlap(contract_.schema_.arguments[other].name);
    };
    for (const std::vector<size_t>* places : {&contract_.required_, &contract_.optional_}) {
      for (const size_t i : *places) {
        if (i != mutated) check(i, memory(state_.addresses[i], state_.facts[i]));
      }
    }
    for (const size_t i : contract_.lists_) {
      for (size_t item = 0; item < arguments_.length(i); ++item) {
        const TensorView& view = arguments_.item(i, item);
        if (!has_elements(view.sizes, view.dim)) continue;
        check(i, {arguments_.data(view), view.sizes, view.strides, view.dim,
                  element_size(view.dtype)});
      }
    }
  }

  // Throws for a call that would need a derivative. With a registered formula PyTorch calls the op
  // below autograd, with grad mode off.
  void check_no_derivative() const {
    if (argument_requiring_grad_ >= 0) {
      fail({"input",
            contract_.op_ + " argument '" +
                contract_.schema_.arguments[static_cast<size_t>(argument_requiring_grad_)].name +
                "'",
            "requires grad, and the op has no derivative", "", "",
            "Define the op with a backward, or call it under torch.no_grad()."});
    }
    // Tangents propagate under no_grad too, and this level cannot tell which tensors have one.
    if (dual_level_is_open()) {
      fail({"input", contract_.op_, "has no derivative, and a forward-mode level is open", "", "",
            "Call it outside of torch.func.jvp and forward_ad.dual_level."});
    }
  }

  // This thread's cache slot for calls with these facts. Null for calls that are not cached: while
  // tune records, or with long strings or many dims.
  RememberedCall* remembered() {
    static thread_local RememberedCall calls[kRememberedCalls];
    if (contract_.watched_.load(std::memory_order_relaxed) != 0) return nullptr;
    tables_version_ = contract_.tables_version_.load(std::memory_order_acquire);
    facts_.add(state_.device);
    for (const std::vector<size_t>* places : {&contract_.required_, &contract_.optional_}) {
      for (const size_t i : *places) {
        const TensorFacts& tensor = state_.facts[i];
        const size_t dim = tensor.defined ? static_cast<size_t>(tensor.dim) : 0;
        if (!facts_.has_capacity(3 + 2 * dim)) return nullptr;
        facts_.add(tensor.defined ? tensor.dim : -1);
        if (!tensor.defined) continue;
        facts_.add(static_cast<int64_t>(reinterpret_cast<intptr_t>(tensor.dtype)));
        facts_.add(reinterpret_cast<intptr_t>(state_.addresses[i]) & contract_.address_mask_);
        for (size_t j = 0; j < dim; ++j) facts_.add(tensor.sizes[j]);
        for (size_t j = 0; j < dim; ++j) facts_.add(tensor.strides[j]);
      }
    }
    for (const size_t i : contract_.numbers_) {
      const Value& number = state_.numbers[i];
      if (!facts_.has_capacity(2)) return nullptr;
      int64_t bits = number.integer;  // for a float all bits, so that -0.0 stays distinct
      if (number.type == ValueType::kFloat) std::memcpy(&bits, &number.number, sizeof(bits));
      facts_.add(static_cast<int64_t>(number.type));
      facts_.add(number.type == ValueType::kNone ? 0 : bits);
    }
    for (const size_t i : contract_.texts_) {
      const std::string_view text = state_.texts[i];
      int64_t bytes[2]{};
      if (!facts_.has_capacity(3) || text.size() > sizeof(bytes)) return nullptr;
      if (!text.empty()) std::memcpy(bytes, text.data(), text.size());
      for (const int64_t word : {static_cast<int64_t>(text.size()), bytes[0], bytes[1]}) {
        facts_.add(word);
      }
    }
    const auto own = reinterpret_cast<uintptr_t>(&contract_) / alignof(Contract);
    return &calls[(facts_.hash() + own) % kRememberedCalls];
  }

  // Allocates an output or scratch; true if it has no elements.
  bool make(const Pattern& pattern, size_t place, CallAllocations& made) {
    int64_t sizes[kMaxDims];
    int64_t strides[kMaxDims];
    const int64_t dim = pattern.shape(state_, sizes, strides);
    const ScalarType dtype = pattern.dtype(state_);
    const AtenTensorHandle tensor = allocate_cuda(sizes, strides, dim, dtype, state_.device);
    made.add(tensor);
    if (pattern.zeroed()) fill_with_zeros(tensor);
    const bool empty = !has_elements(sizes, dim);
    state_.addresses[place] = nullptr;
    if (contract_.reads_outputs_) {
      const TensorView view(tensor);
      state_.facts[place] = {
          view.sizes, view.strides, view.dim, element_size(view.dtype), dtype_text(view.dtype),
          true};
    }
    if (!empty && aoti_torch_get_data_ptr(tensor, &state_.addresses[place]) != 0) {
      fail({"internal", contract_.op_, "could not read an output's address", "", "", ""});
    }
    return empty;
  }

  void evaluate(const std::vector<Expression>& three, int64_t* out) const {
    for (size_t i = 0; i < 3; ++i) out[i] = three[i].evaluate(state_.arguments()).integer;
  }

  [[noreturn]] void refuse_empty_grid(const torch_cubin_launch_call& call) const {
    fail({"input", contract_.op_, "has an empty grid and results that are not empty",
          "at least one block", "grid " + tuple_text(call.grid, 3),
          "The definition does not allow for these arguments."});
  }

  // The address of a launch's workspace; null for zero bytes.
  void* allocate(const WorkspaceArgument& workspace, const torch_cubin_launch_call& call,
                 CallAllocations& made) const {
    int64_t bytes = workspace.bytes->evaluate(state_.arguments()).integer;
    bool overflow = bytes < 0;
    if (workspace.is_per_block) {
      for (const int64_t blocks : call.grid) {
        overflow |= __builtin_mul_overflow(bytes, blocks, &bytes);
      }
    }
    if (bytes == 0 && !overflow) return nullptr;
    const int64_t more = workspace.align > kAllocatorAlign ? workspace.align : 0;
    overflow |= __builtin_add_overflow(bytes, more, &bytes);
    if (overflow) {
      fail({"input", workspace.label, "has a size out of range", "0 to 2^63 - 1 bytes", "another",
            "The definition does not allow for these arguments."});
    }
    const int64_t stride = 1;
    const AtenTensorHandle tensor =
        allocate_cuda(&bytes, &stride, 1, ScalarType::Byte, state_.device);
    made.add(tensor);
    if (workspace.zeroed) fill_with_zeros(tensor);
    void* address = nullptr;
    if (aoti_torch_get_data_ptr(tensor, &address) != 0) {
      fail({"internal", contract_.op_, "could not read a workspace's address", "", "", ""});
    }
    const auto step = static_cast<uintptr_t>(workspace.align);
    return reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(address) + step - 1) / step * step);
  }

  // `slot`: null, or the call's cache slot, which is filled if `known`.
  void pack_and_launch(const Launch& launch, torch_cubin_launch_call& call, RememberedCall* slot,
                       bool known) const {
    const Packing& packing = *launch.packing;
    alignas(16) uint8_t stack[kStackBytes];
    void* stack_params[kStackParams];
    std::vector<uint8_t> heap;
    std::vector<void*> heap_params;
    uint8_t* bytes = stack;
    call.params = stack_params;
    if (packing.bytes() > kStackBytes) {
      heap.resize(packing.bytes());
      bytes = heap.data();
    }
    if (packing.params() > kStackParams) {
      heap_params.resize(packing.params());
      call.params = heap_params.data();
    }
    if (known) {
      packing.pack_known(state_, slot->bytes, bytes, call.params);
    } else {
      packing.pack(state_, bytes, call.params);
    }
    const bool remember = slot != nullptr && !known && packing.bytes() <= slot->kMostBytes;
    uint64_t times = 0;
    if (remember) {
      slot->contract = nullptr;  // invalid until the launch succeeds
      times = ++slot->times;
      std::memcpy(slot->bytes, bytes, packing.bytes());
    }
    // Freed right after the launch: the allocator reuses memory in stream order.
    CallAllocations workspaces;
    for (const WorkspaceArgument& workspace : packing.workspaces()) {
      void* const address = allocate(workspace, call, workspaces);
      std::memcpy(bytes + workspace.at, &address, sizeof(address));
    }
    torch_cubin::launch(*launch.kernel, call, &current_stream);
    if (!remember || slot->times != times) return;
    slot->tables = tables_version_;
    slot->launch = &launch;
    slot->shape = call;
    slot->facts = facts_;
    slot->contract = &contract_;
  }

  const Contract& contract_;
  Arguments& arguments_;
  const bool grad_mode_;
  CallState state_;
  CallFacts facts_;  // only for cached calls
  uint64_t tables_version_ = 0;
  int argument_requiring_grad_ = -1;  // an argument that requires grad
};

void Contract::call(StableIValue* stack) const {
  CallAllocations outputs;
  {
    static const int32_t cuda = aoti_torch_device_type_cuda();
    const BoxedArguments boxed(schema_, stack);
    raise_load_error();  // the arguments will be released
    Call<const BoxedArguments> call(*this, boxed, cuda, aoti_torch_grad_mode_is_enabled());
    call.run(outputs);
  }
  outputs.give(stack);  // after the arguments are released: the outputs replace them on the stack
}

json Contract::check_call(const json& arguments) const {
  DescribedArguments described(schema_, arguments);
  Call<DescribedArguments> call(*this, described, -1, false);
  call.bind();
  if (described.have_addresses()) call.check_memory();  // those of the CPU; fake ones have none
  return call.outputs();
}

void Contract::refuse_lazy_view(StableIValue* stack) const {
  const BoxedArguments boxed(schema_, stack);
  fail({"input", op_, "is given a lazily negated or conjugated view, and changes its arguments",
        "plain tensors", "", "Call .resolve_neg().resolve_conj() on it first."});
}

}  // namespace torch_cubin
