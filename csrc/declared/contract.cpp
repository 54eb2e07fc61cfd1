// Reads and checks a contract's definition. Calls are in declared/call.cpp.
#include "declared/contract.h"

#include <algorithm>
#include <mutex>

#include "cubin/error.h"
#include "declared/launch_limits.h"
#include "declared/tuning.h"
#include "package/fields.h"

namespace torch_cubin {

using nlohmann::json;

namespace {

constexpr size_t kMaxKernels = 4096;

// Whether the definition contains a tree [operation, one of the names...].
bool mentions(const json& tree, const char* operation, const std::vector<std::string>& names) {
  if (tree.is_array() && tree.size() > 1 && tree[0] == operation && tree[1].is_string()) {
    const auto& name = tree[1].get_ref<const std::string&>();
    if (std::find(names.begin(), names.end(), name) != names.end()) return true;
  }
  if (!tree.is_structured()) return false;
  return std::any_of(tree.begin(), tree.end(),
                     [&](const json& item) { return mentions(item, operation, names); });
}

// Accepts "ns::name", with or without an overload.
void check_backward(const std::string& name, const std::string& label) {
  const size_t colons = std::min(name.find("::"), name.size());
  const size_t dot = std::min(name.find('.', colons), name.size());
  const bool right = colons < name.size() && is_identifier(name.substr(0, colons)) &&
                     is_identifier(name.substr(colons + 2, dot - colons - 2)) &&
                     (dot == name.size() || is_identifier(name.substr(dot + 1)));
  if (!right) refuse_json(label, "the name of an op, as 'ns::name'", name);
}

std::vector<Expression> read_three(const json& trees, const Scope& scope,
                                   const std::string& label) {
  if (!trees.is_array() || trees.size() != 3) {
    refuse_json(label, "three expressions: x, y and z", trees);
  }
  std::vector<Expression> three;
  for (size_t i = 0; i < 3; ++i) {
    const std::string at = label + "[" + std::to_string(i) + "]";
    three.push_back(Expression::integer(trees[i], scope, at));
  }
  return three;
}

}  // namespace

Contract::Contract(const json& definition, ContractImages& images, std::string package)
    : definition_(definition), package_(std::move(package)), files_(images.files()) {
  Fields first(definition, "a contract");
  const std::string text = first.text("schema");
  schema_ = parse_schema(text);
  op_ = "op '" + schema_.qualified_name() + "'";
  check_schema(schema_);
  Fields fields(definition, op_);
  fields.find("schema");
  Names names(schema_, fields.find("dtypes"), op_);
  variables_ = names.variables().size();
  const json& tensors = fields.object("tensors");
  const json& outputs = fields.list("outputs");
  const json* scratch = fields.find("scratch");
  const json& kernels = fields.list("kernels");
  const json* tuned = fields.find("tuned");
  if (fields.find("backward") != nullptr) {
    check_backward(fields.text("backward"), fields.at("backward"));
    check_differentiable(schema_);
    check_gradient_names(schema_);
  }
  const bool jit = fields.truth("jit", false);
  fields.finish();

  names.add_items(definition);
  items_ = names.items();
  first_output_place_ = names.scope().tensors.size();
  read_tensors(tensors, outputs, scratch, names);
  for (size_t i = 0; i < schema_.arguments.size(); ++i) {
    const SchemaArgument& argument = schema_.arguments[i];
    extras_.push_back(names.extra(i));
    if (argument.is_mutated()) mutated_.push_back(i);
    if (argument.is_tensor()) continue;
    (argument.is_text() ? texts_ : numbers_).push_back(i);
  }

  std::vector<std::string> own;  // tensors that the op allocates
  for (const auto* made : {&outputs_, &scratch_}) {
    for (const Pattern& pattern : *made) own.push_back(pattern.name());
  }
  read_kernels(kernels, own, names, images, jit);
  check_outputs_are_written();

  read_tuned(tuned, names);
  argument_scope_ = names.scope();
  if (launches_.size() > 1) make_call_key();
  if (tuned == nullptr && launches_.size() >= KernelLookup::kLeast) make_lookup();

  for (const char* operation : {"size", "stride", "numel", "dim", "itemsize", "defined",
                                "contiguous", "is_dtype", "address"}) {
    reads_outputs_ |= mentions(kernels, operation, own);
  }
  reads_outputs_ |=
      kernels.dump(-1, ' ', false, json::error_handler_t::replace).find("\"tensor_map\"") !=
      std::string::npos;

  remembers_ = launches_.size() > 1 && lists_.empty();
  for (const Launch& launch : launches_) {
    for (const Requirement& requirement : launch.requirements) {
      address_mask_ |= requirement.address_mask();
    }
  }

  // The op's behaviour, without the origin of its images.
  json same = definition;
  same["schema"] = schema_.text();
  for (json& kernel : same["kernels"]) {
    kernel.erase("producer");
    for (json& index : kernel["images"]) index = images.sha256(index.get<size_t>());
  }
  identity_ = same.dump(-1, ' ', false, json::error_handler_t::replace);
}

void Contract::read_kernels(const json& kernels, const std::vector<std::string>& own,
                            const Names& names, ContractImages& images, bool jit) {
  Scope all = names.scope();
  all.tensors.insert(all.tensors.end(), own.begin(), own.end());
  if (all.tensors.size() > kMaxOpTensors) {
    fail({"input", op_, "has too many tensors", "at most " + std::to_string(kMaxOpTensors),
          std::to_string(all.tensors.size()), ""});
  }
  if (kernels.empty() || kernels.size() > kMaxKernels) {
    refuse_json(op_ + ": kernels", "1 to " + std::to_string(kMaxKernels) + " kernels",
                kernels.size());
  }
  for (size_t i = 0; i < kernels.size(); ++i) {
    launches_.emplace_back(
        kernels[i], op_ + ": kernels[" + std::to_string(i) + "]", schema_, names.scope(), all,
        [this](size_t place) { return dtypes_of(place); }, images, jit);
    launches_.back().number = i;
  }
}

void Contract::make_lookup() {
  std::vector<const json*> conditions;
  for (const json& kernel : definition_["kernels"]) {
    const auto when = kernel.find("when");
    const bool given = when != kernel.end() && !when->is_null();
    conditions.push_back(given ? &*when : nullptr);
  }
  lookup_.emplace(conditions, argument_scope_, op_ + ": kernels");
}

// Refuses an output that no kernel can write: outputs are not filled, so it would be returned with
// uninitialised memory. One of several kernels may leave an output unwritten on purpose: a gradient
// that its condition excludes, or an output without elements.
void Contract::check_outputs_are_written() const {
  for (size_t i = 0; i < outputs_.size(); ++i) {
    const bool reached = std::any_of(launches_.begin(), launches_.end(), [&](const auto& launch) {
      return launch.packing->reaches(first_output_place_ + i);
    });
    if (reached) continue;
    const std::string name = "'" + outputs_[i].name() + "'";
    fail({"input", op_ + ": kernels[0].args",
          "never give a kernel the output " + name + ", which would stay unwritten",
          name + ", a part of it or a TensorMap of it among them",
          shown_json(definition_["kernels"][0]["args"]), ""});
  }
}

std::vector<ScalarType> Contract::dtypes_of(size_t place) const {
  if (place >= first_output_place_ + outputs_.size()) {
    return scratch_[place - first_output_place_ - outputs_.size()].dtypes();
  }
  if (place >= first_output_place_) return outputs_[place - first_output_place_].dtypes();
  size_t argument = place;
  for (const Names::Item& item : items_) {
    if (item.place == place) argument = item.argument;
  }
  return patterns_[static_cast<size_t>(pattern_of_[argument])].dtypes();
}

void Contract::read_tuned(const json* tuned, const Names& names) {
  for (size_t i = 0; i < launches_.size(); ++i) {
    const auto group = static_cast<size_t>(launches_[i].group);
    if (group >= launches_.size() || (tuned == nullptr && group != 0)) {
      refuse_json(op_ + ": kernels[" + std::to_string(i) + "].group",
                  tuned == nullptr ? "none without 'tuned'" : "fewer groups than kernels", group);
    }
    if (groups_.size() <= group) groups_.resize(group + 1);
    groups_[group].push_back(i);
  }
  if (tuned == nullptr) return;
  tuned_.emplace(*tuned, names.scope(), static_cast<int64_t>(groups_.size()), op_ + ": tuned");
}

void Contract::make_call_key() {
  json conditions = json::array();
  for (const json& kernel : definition_["kernels"]) {
    if (kernel.contains("when")) conditions.push_back(kernel["when"]);
  }
  const Scope& scope = argument_scope_;
  for (const auto* places : {&required_, &optional_}) {
    for (const size_t i : *places) call_key_.add_tensor(i, schema_.arguments[i].name);
  }
  for (const Names::Item& item : items_) {
    call_key_.add_tensor(item.place, scope.tensors[item.place]);
  }
  for (const size_t i : lists_) {
    const auto place = static_cast<size_t>(extras_[i]);
    call_key_.add_number(place, "len(" + schema_.arguments[i].name + ")");
  }
  for (const size_t i : numbers_) {
    const SchemaArgument& argument = schema_.arguments[i];
    if (argument.is_float() &&
        !mentions(conditions, "number", {argument.name, argument.name + "?"})) {
      continue;
    }
    call_key_.add_number(i, argument.name);
  }
  for (const size_t i : texts_) call_key_.add_text(i, schema_.arguments[i].name);
  for (const char* operation : {"stride", "contiguous"}) {
    if (mentions(conditions, operation, scope.tensors)) call_key_.add_strides();
  }
}

namespace {

std::mutex g_tuned_calls_mutex;  // guards the creation of tables, not their use

}  // namespace

TunedCalls Contract::tuned_table(const json& calls, TunedCalls::OnBadLine on_bad_line) const {
  return {calls, call_key_, launches_.size(), op_ + ": tuned calls", on_bad_line};
}

const TunedCalls& Contract::first_tuned_calls(int32_t device) const {
  std::lock_guard<std::mutex> lock(g_tuned_calls_mutex);
  auto& place = tuned_calls_[device % kMaxDevices];
  if (place.load() == nullptr) {
    place.store(new TunedCalls(read_tuned_file(*this, device)), std::memory_order_release);
    tables_version_.fetch_add(1, std::memory_order_release);
  }
  return *place.load();
}

void Contract::add_tuned(int32_t device, const json& calls) const {
  tuned_calls(device);  // loads the table of its file first
  std::lock_guard<std::mutex> lock(g_tuned_calls_mutex);
  auto& place = tuned_calls_[device % kMaxDevices];
  json all = place.load()->calls();
  all.insert(all.end(), calls.begin(), calls.end());
  place.store(new TunedCalls(tuned_table(all)), std::memory_order_release);
  tables_version_.fetch_add(1, std::memory_order_release);
}

void Contract::read_tensors(const json& tensors, const json& outputs, const json* scratch,
                            Names& names) {
  read_arguments(tensors, names);
  read_outputs(tensors, outputs, names);
  if (scratch != nullptr) read_scratch(*scratch, names);
  const auto has_name = [](const std::vector<Pattern>& patterns, const std::string& name) {
    return std::any_of(patterns.begin(), patterns.end(),
                       [&](const Pattern& pattern) { return pattern.name() == name; });
  };
  for (const auto& item : tensors.items()) {
    if (has_name(patterns_, item.key()) || has_name(outputs_, item.key())) continue;
    fail({"input", op_ + ": tensors", "has an entry that is no tensor of the op",
          "Tensor arguments of the schema and 'outputs'", "'" + printable(item.key()) + "'", ""});
  }
}

const json& Contract::tensor_entry(const json& tensors, const std::string& name) const {
  const auto found = tensors.find(name);
  if (found != tensors.end()) return *found;
  fail({"input", op_ + ": tensors", "lacks an entry", "'" + name + "'", "", ""});
}

void Contract::read_arguments(const json& tensors, Names& names) {
  const auto& arguments = schema_.arguments;
  pattern_of_.assign(arguments.size(), -1);
  const auto read = [&](size_t i) -> Pattern& {
    pattern_of_[i] = static_cast<int>(patterns_.size());
    patterns_.emplace_back(arguments[i].name, Pattern::Role::kArgument,
                           tensor_entry(tensors, arguments[i].name), names);
    return patterns_.back();
  };
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].type == ArgumentType::kTensor) required_.push_back(i);
    if (arguments[i].type == ArgumentType::kOptionalTensor) optional_.push_back(i);
    if (arguments[i].type == ArgumentType::kTensorList) lists_.push_back(i);
  }
  for (const size_t i : required_) read(i);
  for (Pattern& pattern : patterns_) pattern.read_expressions(names);
  // A name bound by an optional tensor or a list is known only in that pattern, because a call may
  // omit the tensor.
  for (const auto* some : {&optional_, &lists_}) {
    for (const size_t i : *some) {
      const Names::Mark mark = names.mark();
      read(i).read_expressions(names);
      names.forget(mark);
    }
  }
}

// The name of an output or scratch tensor, which nothing before it has.
std::string Contract::new_name(const json& name, const std::string& label,
                               const Names& names) const {
  const std::string text = name.is_string() ? name.get<std::string>() : "";
  bool taken = !is_identifier(text) || names.is_argument(text) || names.find_size(text) >= 0;
  for (const auto* made : {&outputs_, &scratch_}) {
    for (const Pattern& pattern : *made) taken |= pattern.name() == text;
  }
  if (taken) refuse_json(label, "a name, as \"out\", that nothing else has", name);
  return text;
}

void Contract::read_outputs(const json& tensors, const json& outputs, Names& names) {
  if (outputs.size() != schema_.returns.size()) {
    refuse_json(op_ + ": outputs",
                counted(schema_.returns.size(), "name") + ", as many as the schema returns",
                outputs);
  }
  for (size_t i = 0; i < outputs.size(); ++i) {
    const std::string label = op_ + ": outputs[" + std::to_string(i) + "]";
    const std::string name = new_name(outputs[i], label, names);
    const std::string& wanted = schema_.returns[i].empty() ? "out" : schema_.returns[i];
    if (name != wanted) refuse_json(label, "'" + wanted + "', as the schema calls it", outputs[i]);
    const json& fields = tensor_entry(tensors, name);
    outputs_.emplace_back(name, Pattern::Role::kOutput, fields, names);
    outputs_.back().read_expressions(names);
    if (outputs_.back().like() >= 0) check_like(outputs_.back(), fields, tensors);
  }
}

// Checks an output that has the shape and strides of an argument, which may have no gaps.
void Contract::check_like(const Pattern& output, const json& fields, const json& tensors) const {
  const auto like = static_cast<size_t>(output.like());
  const std::string& argument = schema_.arguments[like].name;
  const Pattern& other = patterns_[static_cast<size_t>(pattern_of_[like])];
  if (other.layout() != Pattern::Layout::kContiguous && other.layout() != Pattern::Layout::kDense) {
    fail({"input", op_ + ": tensors." + output.name() + ".like",
          "names a tensor that may have gaps", "one whose layout is contiguous or dense",
          "'" + argument + "'", ""});
  }
  const auto shape = fields.find("shape");
  const auto others = tensors[argument].find("shape");
  if (shape != fields.end() && !shape->is_null() && *shape != *others) {
    refuse_json(op_ + ": tensors." + output.name() + ".shape",
                "none beside 'like', or " + shown_json(*others), *shape);
  }
}

void Contract::read_scratch(const json& scratch, Names& names) {
  if (!scratch.is_array()) refuse_json(op_ + ": scratch", "a list", scratch);
  for (size_t i = 0; i < scratch.size(); ++i) {
    const json& fields = scratch[i];
    const std::string label = op_ + ": scratch[" + std::to_string(i) + "].name";
    const bool named = fields.is_object() && fields.contains("name");
    const std::string name = new_name(named ? fields["name"] : json(), label, names);
    scratch_.emplace_back(name, Pattern::Role::kScratch, fields, names);
    scratch_.back().read_expressions(names);
  }
}

Contract::Launch::Launch(const json& definition, const std::string& label, const Schema& schema,
                         const Scope& arguments, const Scope& all,
                         std::function<std::vector<ScalarType>(size_t)> dtypes_of,
                         ContractImages& images, bool jit) {
  Fields fields(definition, label);
  if (const json* tree = fields.find("when")) {
    when.emplace(*tree, arguments, fields.at("when"));
    if (when->type() != ValueType::kBool) {
      refuse_json(fields.at("when"), "a condition, or null", *tree);
    }
  }
  if (const json* list = fields.find("requires")) {
    if (!list->is_array()) refuse_json(fields.at("requires"), "a list", *list);
    for (size_t i = 0; i < list->size(); ++i) {
      const std::string at = fields.at("requires") + "[" + std::to_string(i) + "]";
      requirements.emplace_back((*list)[i], arguments, at);
    }
  }
  if (fields.find("producer") != nullptr) fields.object("producer");
  if (fields.find("group") != nullptr) {
    group = static_cast<int32_t>(fields.integer("group", 0, kMaxKernels - 1));
  }
  const std::string name = fields.text("kernel");
  std::vector<size_t> indices;
  for (const json& index : fields.list("images")) {
    const bool right = index.is_number_integer() && index >= 0 && index < images.count() &&
                       std::find(indices.begin(), indices.end(), index) == indices.end();
    if (!right) {
      refuse_json(fields.at("images"),
                  "places in the list of " + counted(images.count(), "image") + ", each once",
                  index);
    }
    indices.push_back(index.get<size_t>());
  }
  if (indices.empty()) refuse_json(fields.at("images"), "at least one image", json::array());
  module = images.module(indices, jit, name);
  kernel = &module->kernel_called(name);
  grid = read_three(fields.get("grid"), all, fields.at("grid"));
  block = read_three(fields.get("block"), all, fields.at("block"));
  if (const json* trees = fields.find("cluster")) {
    cluster = read_three(*trees, all, fields.at("cluster"));
    flags |= TORCH_CUBIN_CLUSTER;
  }
  const json* bytes = fields.find("shared_memory");
  shared_memory = Expression::integer(bytes == nullptr ? json(0) : *bytes, all,
                                      fields.at("shared_memory"), "an integer, bytes");
  if (fields.truth("cooperative", false)) flags |= TORCH_CUBIN_COOPERATIVE;
  if (fields.truth("programmatic_dependent_launch", false)) flags |= TORCH_CUBIN_DEPENDENT;
  if (fields.find("priority") != nullptr) {
    priority = static_cast<int32_t>(fields.integer("priority", INT32_MIN, INT32_MAX));
    flags |= TORCH_CUBIN_PRIORITY;
  }
  packing.emplace(fields.get("args"), kernel->info(),
                  ArgumentPlaces{schema, all, fields.at("args"), std::move(dtypes_of)});
  fields.finish();
  check_constants(label, {grid, block, cluster, *shared_memory}, *module, kernel->name());
}

bool Contract::Launch::runs_on(int32_t device_index) const {
  const uint64_t bit = uint64_t{1} << (device_index % kMaxDevices);
  if ((asked_.load(std::memory_order_acquire) & bit) == 0) {
    if (module->runs_on(device(device_index), kernel->name())) runs_.fetch_or(bit);
    asked_.fetch_or(bit, std::memory_order_release);
  }
  return (runs_.load(std::memory_order_relaxed) & bit) != 0;
}

bool Contract::Launch::takes(const CallState& state) const {
  if (when && when->evaluate(state.arguments()).integer == 0) return false;
  return std::all_of(requirements.begin(), requirements.end(),
                     [&](const Requirement& requirement) { return requirement.holds(state); });
}

void Contract::preload(const Device& device) const {
  bool any = false;
  std::string tag, message;
  for (const Launch& launch : launches_) {
    try {
      launch.kernel->preload(device);
      any = true;
    } catch (const Error& error) {
      // Some of several kernels may be for other GPUs.
      if (error.tag() != "arch") throw;
      tag = error.tag();
      message = error.what();
    }
  }
  if (!any) fail_with_text(tag, message);
}

}  // namespace torch_cubin
