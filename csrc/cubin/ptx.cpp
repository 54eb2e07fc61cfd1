// parse_ptx: the grammar outside of function bodies (PTX ISA, "Kernel Function Parameters" and
// "Performance-Tuning Directives"), on the words of ptx_scanner.h.
#include "cubin/ptx.h"

#include <algorithm>
#include <deque>
#include <iterator>
#include <map>
#include <set>
#include <string_view>
#include <utility>
#include <vector>

#include "cubin/elf.h"
#include "cubin/error.h"
#include "cubin/ptx_scanner.h"

namespace torch_cubin {
namespace {

constexpr uint64_t kMaxParamBytes = uint64_t{1} << 31;

struct TypeSize {
  std::string_view name;
  uint32_t bytes;
};

constexpr TypeSize kTypes[] = {
    {".b8", 1},    {".u8", 1},     {".s8", 1},      {".b16", 2},        {".u16", 2},  {".s16", 2},
    {".f16", 2},   {".bf16", 2},   {".b32", 4},     {".u32", 4},        {".s32", 4},  {".f32", 4},
    {".f16x2", 4}, {".bf16x2", 4}, {".b64", 8},     {".u64", 8},        {".s64", 8},  {".f64", 8},
    {".b128", 16}, {".texref", 0}, {".surfref", 0}, {".samplerref", 0}, {".pred", 1},
};

const TypeSize* find_type(std::string_view word) {
  for (const TypeSize& type : kTypes) {
    if (type.name == word) return &type;
  }
  return nullptr;
}

class PtxReader : private PtxScanner {
 public:
  PtxReader(std::string_view text, const std::string& origin) : PtxScanner(text, origin) {
    ptx_.size = text.size();
  }

  Ptx read() {
    bool external = false;  // linkage directives before the current word
    bool weak = false, visible = false;
    for (next(); !word_.empty(); next()) {
      if (word_ == ".version") {
        next();
        ptx_.version = std::string(word_.substr(0, 16));
      } else if (word_ == ".target") {
        next();
        read_target();
      } else if (word_ == ".address_size") {
        next();
        ptx_.address_size = static_cast<int>(number());
      } else if (word_ == ".entry") {
        const size_t begin = at_ - word_.size();
        read_entry();
        if (word_ == "{") {
          ptx_.kernels.back().begin = begin;
          ptx_.kernels.back().is_weak = weak;
          ptx_.kernels.back().is_local = !weak && !visible;
          ++depth_;
          body_ = &entries_.emplace_back();
        }
      } else if (word_ == ".func" && depth_ == 0) {
        read_function(external);
      } else if (word_ == ".shared") {
        read_shared(external);
      } else if ((word_ == ".global" || word_ == ".const") && depth_ == 0) {
        read_variable(word_ == ".const", external);
      } else if (word_ == "{") {
        ++depth_;
      } else if (word_ == "}") {
        if (depth_-- == 0) damaged("a '}' has no '{'");
        if (depth_ == 0) {
          if (body_ != nullptr && !entries_.empty() && body_ == &entries_.back()) {
            ptx_.kernels.back().end = at_;
          }
          body_ = nullptr;
        }
      } else if (body_ != nullptr) {
        body_->dynamic |= dynamic_shared_.count(word_) != 0;
        body_->has_size |= sized_shared_.count(word_) != 0;
        const auto called = functions_.find(word_);
        if (called != functions_.end()) body_->calls.insert(&called->second);
        const auto imported = imports_.find(word_);
        if (imported != imports_.end()) imported->second = true;
      }
      // A linkage directive precedes its declaration, possibly with other linkage words between.
      const bool is_linkage = word_ == ".extern" || word_ == ".weak" || word_ == ".visible";
      external = word_ == ".extern" || (external && is_linkage);
      weak = word_ == ".weak" || (weak && is_linkage);
      visible = word_ == ".visible" || (visible && is_linkage);
    }
    if (ptx_.version.empty()) damaged("it names no version");
    if (ptx_.arch.sm == 0) damaged("it names no target");
    if (depth_ != 0) damaged("it ends within a function");
    mark_dynamic_shared();
    list_imports();
    return std::move(ptx_);
  }

 private:
  void read_target();
  void read_entry();
  void read_function(bool external);
  void read_variable(bool is_constant, bool external);
  void list_imports();
  void read_shared(bool external);
  void mark_dynamic_shared();
  void read_params(PtxKernel& kernel);
  PtxParam read_param();
  void read_directives(PtxKernel& kernel);
  std::array<uint32_t, 3> read_triple();
  void read_dimension(PtxParam& param);

  uint64_t depth_ = 0;
  Ptx ptx_;
  // Names of shared variables outside of functions. PTX declares names before use.
  std::set<std::string_view> dynamic_shared_, sized_shared_;
  // The shared memory and functions that a body refers to.
  struct Body {
    bool dynamic = false, has_size = false;
    std::set<Body*> calls;
  };
  std::map<std::string_view, bool> imports_;    // declared `.extern`; whether a body refers to it
  std::map<std::string_view, Body> functions_;  // declared before use
  std::deque<Body> entries_;                    // parallel to ptx_.kernels
  Body* body_ = nullptr;                        // the one that is being read
};

void PtxReader::read_target() {
  if (ptx_.arch.sm != 0) return;  // a linked file may repeat it
  std::string_view name = word_;
  if (name.substr(0, 3) != "sm_") damaged("its target is no sm_XY");
  name.remove_prefix(3);
  for (; !name.empty() && is_ptx_digit(name[0]) && ptx_.arch.sm < 1000; name.remove_prefix(1)) {
    ptx_.arch.sm = ptx_.arch.sm * 10 + (name[0] - '0');
  }
  if (name == "a" || name == "f") {
    ptx_.arch.suffix = name[0];
  } else if (!name.empty()) {
    damaged("its target is no sm_XY");
  }
}

void PtxReader::read_entry() {
  next();
  if (word_.empty() || !is_ptx_word(word_[0])) damaged("an entry has no name");
  PtxKernel kernel;
  kernel.name = std::string(word_);
  if (kernel.name.size() > kMaxNameBytes) damaged("an entry's name is too long");
  next();
  if (word_ == "(") read_params(kernel);
  read_directives(kernel);
  if (word_ == "{") ptx_.kernels.push_back(std::move(kernel));  // otherwise only a declaration
}

// `.shared .align 16 .b8 name[1024];`. A declaration in a body counts as a use: nvcc writes a
// kernel's static arrays like this.
void PtxReader::read_shared(bool external) {
  ptx_.uses_dynamic_shared |= external;
  if (depth_ != 0) {
    if (body_ != nullptr) body_->has_size = true;
    return;
  }
  std::string_view name;
  while (at_ < text_.size() && word_ != "[" && word_ != "=" && word_ != ";" && word_ != "{") {
    name = word_;
    next();
  }
  (external ? dynamic_shared_ : sized_shared_).insert(name);
  if (word_ == "{") ++depth_;
}

// `.func (.param .b32 result) name (.param .b64 x) { ... }`, or `;` instead of the body. Stops
// before the body.
void PtxReader::read_function(bool external) {
  next();
  for (uint64_t open = 0; open != 0 || word_ == "(" || (!word_.empty() && word_[0] == '.');
       next()) {
    if (word_.empty()) damaged("it ends within a declaration");
    open += word_ == "(";
    open -= word_ == ")";
  }
  const std::string_view name = word_;
  if (name.empty() || !is_ptx_word(name[0])) damaged("a function has no name");
  while (word_ != "{" && word_ != ";") {
    if (word_.empty()) damaged("it ends within a declaration");
    next();
  }
  Body& body = functions_[name];
  if (external) imports_.emplace(name, false);
  if (word_ != "{") return;
  imports_.erase(name);
  ++depth_;
  body_ = &body;
}

// `.global .align 4 .b8 name[16] = {...};`, with attributes before the type. Names of
// compiler-generated variables, such as printf's strings, begin with '$'.
void PtxReader::read_variable(bool is_constant, bool external) {
  VariableInfo variable;
  variable.is_constant = is_constant;
  uint64_t lanes = 1;
  std::string_view name;
  for (next(); !word_.empty() && word_ != ";" && word_ != "=" && word_ != "[" && word_ != ",";
       next()) {
    if (word_ == "(") {
      while (!word_.empty() && word_ != ")") next();
    } else if (const TypeSize* type = find_type(word_)) {
      variable.size = type->bytes;
    } else if (word_ == ".v2" || word_ == ".v4") {
      lanes = word_ == ".v2" ? 2 : 4;
    } else if (is_ptx_word(word_[0]) && word_[0] != '.' && !is_ptx_digit(word_[0])) {
      name = word_;
    }
  }
  uint64_t bytes = variable.size * lanes;
  while (word_ == "[") {  // without a number: sized by its initial values, or an expression
    next();
    uint64_t count = 0;
    for (const char c : word_) {
      count = is_ptx_digit(c) && count < kMaxParamBytes
                  ? count * 10 + static_cast<uint64_t>(c - '0')
                  : 0;
    }
    bytes = bytes > (uint64_t{1} << 40) ? 0 : bytes * count;
    while (!word_.empty() && word_ != "]") next();
    next();
  }
  variable.size = bytes;
  if (external) {
    imports_.emplace(name, false);
  } else if (!name.empty() && name[0] != '$') {
    imports_.erase(name);
    variable.name = std::string(name);
    if (variable.name.size() > kMaxNameBytes) damaged("a variable's name is too long");
    ptx_.variables.push_back(std::move(variable));
  }
  while (!word_.empty() && word_ != ";") next();
}

void PtxReader::list_imports() {
  // The device functions that drivers provide.
  constexpr std::string_view kOfDriver[] = {"vprintf", "malloc", "free", "__assertfail"};
  for (const auto& [name, used] : imports_) {
    const bool known =
        std::find(std::begin(kOfDriver), std::end(kOfDriver), name) != std::end(kOfDriver) ||
        name.substr(0, 14) == "__cuda_syscall";
    if (used && !known) ptx_.imports.emplace_back(name);
  }
}

// A kernel also uses the shared memory of the functions that it calls. Propagates from each
// function that uses shared memory to its callers, visiting each once.
void PtxReader::mark_dynamic_shared() {
  std::map<Body*, std::vector<Body*>> callers;
  const auto note = [&](Body& body) {
    for (Body* called : body.calls) callers[called].push_back(&body);
  };
  for (auto& [name, body] : functions_) note(body);
  for (Body& body : entries_) note(body);
  for (bool Body::* use : {&Body::dynamic, &Body::has_size}) {
    std::vector<Body*> found;
    for (auto& [name, body] : functions_) {
      if (body.*use) found.push_back(&body);
    }
    while (!found.empty()) {
      Body* const body = found.back();
      found.pop_back();
      for (Body* caller : callers[body]) {
        if (!(caller->*use)) found.push_back(caller);
        caller->*use = true;
      }
    }
  }
  for (size_t i = 0; i < entries_.size(); ++i) {
    ptx_.kernels[i].uses_dynamic_shared = entries_[i].dynamic && !entries_[i].has_size;
  }
}

void PtxReader::read_params(PtxKernel& kernel) {
  next();
  while (word_ != ")") {
    PtxParam param = read_param();
    param.index = static_cast<uint32_t>(kernel.params.size());
    kernel.params.push_back(std::move(param));
    if (word_ == ",") {
      next();
    } else {
      require(")");
    }
  }
  next();
}

PtxParam PtxReader::read_param() {
  PtxParam param;
  require(".param");
  bool pointer = false;
  const TypeSize* type = nullptr;
  for (next(); !word_.empty() && word_[0] == '.'; next()) {
    if (word_ == ".align") {
      next();
      const uint64_t alignment = number();
      if (!pointer) param.alignment = alignment;  // after .ptr: the pointee's
    } else if (word_ == ".ptr") {
      pointer = true;
    } else if (const TypeSize* found = find_type(word_)) {
      type = found;
    } else if (!pointer) {  // after .ptr: the state space
      damaged("a parameter has the unknown type '" + printable(word_, 40) + "'");
    }
  }
  if (type == nullptr) damaged("a parameter has no type");
  if (word_.empty() || !is_ptx_word(word_[0])) damaged("a parameter has no name");
  param.name = std::string(word_);
  if (param.name.size() > kMaxNameBytes) damaged("a parameter's name is too long");
  param.type = std::string(type->name.substr(1));
  param.size = type->bytes;
  if (param.alignment == 0) param.alignment = type->bytes;
  for (next(); word_ == "[";) read_dimension(param);
  const bool may_point =
      param.size == 8 && param.type.find('[') == std::string::npos && param.type[0] != 'f';
  param.kind = pointer ? ParamKind::kPointer : may_point ? ParamKind::kUnknown : ParamKind::kValue;
  return param;
}

void PtxReader::read_dimension(PtxParam& param) {
  next();
  const uint64_t count = number();
  if (count != 0 && param.size > kMaxParamBytes / count) damaged("a parameter is too large");
  param.size *= count;
  param.type += "[" + std::to_string(count) + "]";
  if (param.type.size() > 80) damaged("a parameter has too many dimensions");
  next();
  require("]");
  next();
}

std::array<uint32_t, 3> PtxReader::read_triple() {
  std::array<uint32_t, 3> value = {0, 1, 1};
  for (size_t i = 0;; ++i) {
    next();
    const uint64_t n = number();
    if (n > UINT32_MAX) damaged("a directive's number is too large");
    value[i] = static_cast<uint32_t>(n);
    next();
    if (word_ != ",") return value;
    if (i == 2) damaged("a directive has more than three numbers");
  }
}

// Stops at the word that ends them, '{' or ';'.
void PtxReader::read_directives(PtxKernel& kernel) {
  while (word_ != "{" && word_ != ";") {
    if (word_.empty()) damaged("it ends within a declaration");
    if (word_ == ".maxntid") {
      kernel.max_block = read_triple();
    } else if (word_ == ".reqntid") {
      kernel.required_block = read_triple();
    } else if (word_ == ".reqnctapercluster") {
      kernel.cluster = read_triple();
    } else if (word_ == ".blocksareclusters") {
      kernel.grid_in_clusters = true;
      next();
    } else if (word_ == ".maxnreg") {
      kernel.max_registers = read_triple()[0];
    } else if (word_ == ".pragma") {
      while (word_ != ";" && !word_.empty()) next();
      next();
    } else {
      next();
    }
  }
}

}  // namespace

Ptx parse_ptx(const uint8_t* data, size_t size, const std::string& origin) {
  std::string_view text(reinterpret_cast<const char*>(data), size);
  const size_t end = text.find_last_not_of('\0');
  text = text.substr(0, end == std::string_view::npos ? 0 : end + 1);
  const size_t nul = text.find('\0');
  if (nul != std::string_view::npos) {
    fail({"image", origin, "is damaged PTX: it has a NUL byte at offset " + std::to_string(nul), "",
          "", "Build or copy it again."});
  }
  return PtxReader(text, origin).read();
}

KernelInfo kernel_info_of(const PtxKernel& entry) {
  KernelInfo kernel;
  kernel.name = entry.name;
  kernel.required_block = entry.required_block;
  kernel.max_block = entry.max_block;
  kernel.cluster = entry.cluster;
  kernel.uses_dynamic_shared = entry.uses_dynamic_shared;
  kernel.grid_in_clusters = entry.grid_in_clusters;
  kernel.is_local = entry.is_local;
  kernel.is_weak = entry.is_weak;
  for (const PtxParam& param : entry.params) {
    const auto size = static_cast<uint32_t>(param.size);
    kernel.params.push_back(
        {param.index, kernel.param_bytes, size, param.kind, stated_type_of_ptx(param.type)});
    kernel.param_bytes += size;
  }
  return kernel;
}

bool have_same_entry(const Ptx& a, std::string_view a_text, const Ptx& b, std::string_view b_text,
                     const std::string& name) {
  const auto split = [&](const Ptx& ptx, std::string_view text) {
    std::pair<std::string, std::string> parts;  // the entry, and all text outside of entries
    size_t at = 0;
    for (const PtxKernel& kernel : ptx.kernels) {
      if (kernel.name == name) parts.first = text.substr(kernel.begin, kernel.end - kernel.begin);
      parts.second += text.substr(at, kernel.begin - at);
      at = kernel.end;
    }
    parts.second += text.substr(at);
    return parts;
  };
  return split(a, a_text) == split(b, b_text);
}

bool has_ptx_word(const uint8_t* data, size_t size, const std::string& word) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  for (size_t at = text.find(word); at != std::string_view::npos; at = text.find(word, at + 1)) {
    const size_t end = at + word.size();
    if ((at == 0 || !is_ptx_word(text[at - 1])) && (end == size || !is_ptx_word(text[end]))) {
      return true;
    }
  }
  return false;
}

}  // namespace torch_cubin
