#include "runtime/module.h"

#include <time.h>

#include <algorithm>
#include <set>
#include <tuple>
#include <utility>

#include "cubin/arch.h"
#include "cubin/demangle.h"
#include "cubin/error.h"
#include "cubin/near_names.h"
#include "cubin/ptx.h"
#include "runtime/device_memory.h"

namespace torch_cubin {
namespace {

// How well an image suits a device, 0 if it cannot run: first the device's exact arch, then its
// family, then the same major at the nearest lower minor, and last PTX.
int rank(const SourceImage& source, int device_sm) {
  constexpr int kBeforePtx = 1000000;
  if (source.is_ptx) return rank_ptx(source.image.arch, device_sm);
  const int cubin = rank_cubin(source.image.arch, device_sm);
  return cubin == 0 ? 0 : kBeforePtx + cubin;
}

constexpr const char* kLoadApart =
    "Load them apart; from an archive, extract the one that you want and load that file.";

constexpr size_t kMostNamesShown = 8;

constexpr const char* kTakeOut =
    "Give it another name, or take the image that you want out of the file, as `cuobjdump -xelf "
    "all "
    "FILE` does, and load it alone.";

// Whether each source file of a program may have its own kernel of that symbol. Template instances
// and weak symbols are the same in all files. Compilers before CUDA 13 do not mark static kernels.
bool is_own_of_file(const KernelInfo& kernel) {
  if (kernel.is_local || kernel.is_weak) return kernel.is_local;
  return demangled(kernel.name).find('<') == std::string::npos;
}

bool has_same_kernel(const SourceImage& a, const SourceImage& b, const std::string& name) {
  if (!a.is_ptx) {
    return have_same_kernel(a.bytes.data(), a.bytes.size(), b.bytes.data(), b.bytes.size(), name);
  }
  const auto text = [](const SourceImage& source) {
    return std::string_view(reinterpret_cast<const char*>(source.bytes.data()),
                            source.bytes.size());
  };
  const auto parsed = [](const SourceImage& source) {
    return parse_ptx(source.bytes.data(), source.bytes.size(), source.origin);
  };
  return have_same_entry(parsed(a), text(a), parsed(b), text(b), name);
}

std::string sizes_text(const std::vector<ParamInfo>& params) {
  std::string text = counted(params.size(), "parameter");
  for (const ParamInfo& p : params) text += (p.index == 0 ? " of " : ", ") + std::to_string(p.size);
  return text + (params.empty() ? "" : " bytes");
}

void pause_for_launches() {
  const timespec pause = {0, 50000};
  nanosleep(&pause, nullptr);
}

}  // namespace

Module::Module(std::vector<SourceImage> images, std::string origin, Lifetime lifetime)
    : images_(std::move(images)),
      origin_(std::move(origin)),
      loaded_images_(images_.size()),
      lifetime_(lifetime),
      captured_(lifetime == Lifetime::kUntilExit) {
  if (images_.empty()) {
    fail({"image", origin_, "holds no image", "at least one cubin", "none", ""});
  }
  find_different_sources();
  find_different_params();
}

// Different kernels may share a name: Inductor restarts its numbering for each model, and tile
// configurations compiled from one file have the same names. Within one source C++'s one-definition
// rule holds, except for `static` kernels. A conflict is reported only when the kernel is
// requested, since it may never be used.
void Module::find_different_sources() {
  // Caches comparisons: two libraries may share thousands of kernels, all in one image of each.
  std::map<std::pair<const SourceImage*, const SourceImage*>, bool> same;
  std::map<std::tuple<std::string, std::string, bool>,
           std::pair<const SourceImage*, const KernelInfo*>>
      first;
  for (const SourceImage& source : images_) {
    const std::string arch = source.image.arch.name();
    for (const KernelInfo& kernel : source.image.kernels) {
      const auto [at, added] = first.emplace(std::tuple(kernel.name, arch, source.is_ptx),
                                             std::make_pair(&source, &kernel));
      if (added) continue;
      const SourceImage& other = *at->second.first;
      const bool one_file = other.source == source.source;
      if (one_file && !is_own_of_file(kernel) && !is_own_of_file(*at->second.second)) continue;
      const auto [compared, is_new] = same.try_emplace(std::make_pair(&other, &source));
      if (is_new) compared->second = other.bytes == source.bytes;
      if (compared->second || (one_file && has_same_kernel(other, source, kernel.name))) continue;
      refused_.emplace(
          kernel.name,
          Fault{"image", "kernel '" + printable(kernel.name) + "' for " + arch,
                one_file ? "is in two images of one file, and not the same: a static kernel is its "
                           "source file's own"
                         : "is in two of the files that are loaded together, and not the same",
                "one kernel of a name and architecture", other.origin + " and " + source.origin,
                one_file ? kTakeOut : kLoadApart});
    }
  }
}

// Finds kernels whose parameters differ between images. A call packs its arguments in the same
// layout for every device.
void Module::find_different_params() {
  std::map<std::string, std::pair<const KernelInfo*, const SourceImage*>> first;
  for (const SourceImage& source : images_) {
    for (const KernelInfo& kernel : source.image.kernels) {
      const auto [at, added] = first.emplace(kernel.name, std::make_pair(&kernel, &source));
      if (added) continue;
      const KernelInfo& other = *at->second.first;
      bool same = other.params.size() == kernel.params.size();
      for (size_t i = 0; same && i < kernel.params.size(); ++i) {
        same = other.params[i].size == kernel.params[i].size;
      }
      if (same) continue;
      const std::string arch = source.image.arch.name(),
                        before = at->second.second->image.arch.name();
      refused_.emplace(
          kernel.name,
          Fault{
              "params", "kernel '" + printable(kernel.name) + "' of " + origin_,
              arch == before ? "has other parameters in another image for " + arch
                             : "has other parameters for " + arch + " than for " + before,
              sizes_text(other.params), sizes_text(kernel.params),
              "Build all images from one source; where a compiler gives each architecture "
              "parameters of its own, as Triton does for descriptors, each is a kernel of its own "
              "(define_op's kernels=)."});
    }
  }
}

void Module::Use::refuse() {
  module_.users_.fetch_sub(1);
  fail({"closed", module_.origin_, "was unloaded", "", "",
        "Load it again, or unload it after its last use."});
}

Kernel& Module::kernel(const std::string& name) {
  refuse_forked();
  const Use use(*this);
  std::lock_guard<std::mutex> lock(kernels_mutex_);
  auto found = kernels_.find(name);
  if (found != kernels_.end()) return *found->second;
  const auto refused = refused_.find(name);
  if (refused != refused_.end()) fail(refused->second);
  auto kernel = std::make_unique<Kernel>(*this, facts_of(name));
  return *kernels_.emplace(name, std::move(kernel)).first->second;
}

// The facts of the first image with the kernel, plus the parameter types that any image states: for
// an extern "C" kernel, PTX has the types that a cubin lacks.
KernelInfo Module::facts_of(const std::string& name) const {
  KernelInfo facts;
  bool known = false;
  for (const SourceImage& source : images_) {
    const KernelInfo* info = source.image.find(name);
    if (info == nullptr) continue;
    if (!known) facts = *info;
    known = true;
    for (size_t i = 0; i < facts.params.size() && i < info->params.size(); ++i) {
      if (facts.params[i].stated.takes == 0) facts.params[i].stated = info->params[i].stated;
    }
  }
  if (!known) fail_no_kernel(name);
  state_types(facts, demangled(name));
  return facts;
}

void Module::fail_no_kernel(const std::string& name) const {
  const std::vector<std::string> known = names();
  if (known.empty()) {
    fail(
        {"no_kernel", "kernel '" + printable(name) + "'", "is not in " + origin_, "", "",
         "It holds no kernel at all: is the kernel a __global__ function, and if it is a template, "
         "is it instantiated?"});
  }
  fail({"no_kernel", "kernel '" + printable(name) + "'", "is not in " + origin_,
        nearest_names(known, name), "", kNamesAdvice});
}

Kernel& Module::kernel_called(const std::string& name) {
  refuse_forked();
  const Use use(*this);
  {
    std::lock_guard<std::mutex> lock(kernels_mutex_);
    const auto called = called_.find(name);
    if (called != called_.end()) return *called->second;
  }
  Kernel& found = kernel(one_of(symbols_called(names(), name), name, "kernel"));
  std::lock_guard<std::mutex> lock(kernels_mutex_);
  called_.emplace(name, &found);
  return found;
}

// The single symbol in `called`, or `name` if it is empty. Throws if there are several.
std::string Module::one_of(const std::vector<std::string>& called, const std::string& name,
                           const char* what) const {
  if (called.empty()) return name;
  if (called.size() == 1) return called.front();
  std::string found;
  for (size_t i = 0; i < called.size() && i < kMostNamesShown; ++i) {
    found += (found.empty() ? "" : ", ") + shown_symbol(called[i]);
  }
  if (called.size() > kMostNamesShown) found += ", ...";
  fail({"no_kernel", "the name '" + printable(name) + "'",
        "is that of " + counted(called.size(), what) + " in " + origin_, "one of them", found,
        "Give the symbol, or the scope, template arguments or parameters too."});
}

const SourceImage* Module::choose(const Device& device, const std::string& kernel) const {
  const SourceImage* best = nullptr;
  int best_rank = 0;
  for (const SourceImage& source : images_) {
    if (source.image.find(kernel) == nullptr) continue;
    const int value = rank(source, device.sm);
    if (value <= best_rank) continue;  // of equals, keep the first
    best = &source;
    best_rank = value;
  }
  return best;
}

const KernelInfo& Module::info(const Device& device, const std::string& kernel) const {
  const SourceImage* source = choose(device, kernel);
  if (source == nullptr) fail_no_image(device);
  return source->image.kernel(kernel);
}

bool Module::agree_on_shape(const std::string& kernel) const {
  const KernelInfo* first = nullptr;
  for (const SourceImage& source : images_) {
    const KernelInfo* info = source.image.find(kernel);
    if (info == nullptr) continue;
    if (first == nullptr) first = info;
    if (info->required_block != first->required_block || info->max_block != first->max_block ||
        info->cluster != first->cluster || info->grid_in_clusters != first->grid_in_clusters ||
        info->uses_dynamic_shared != first->uses_dynamic_shared ||
        !std::equal(info->params.begin(), info->params.end(), first->params.begin(),
                    first->params.end(), [](const ParamInfo& a, const ParamInfo& b) {
                      return a.multiple_of == b.multiple_of;
                    })) {
      return false;
    }
  }
  return true;
}

void Module::fail_no_image(const Device& device) const {
  std::string found;
  for (const SourceImage& source : images_) {
    found += (found.empty() ? "" : ", ") + std::string(source.is_ptx ? "PTX for " : "") +
             source.image.arch.name();
  }
  fail({"arch", origin_, "has no code for " + device.name,
        "an image that runs on compute capability " + device.capability(), found,
        "Build it with -arch=sm_" + std::to_string(device.sm) + "."});
}

std::shared_ptr<const LoadedImage> Module::load(const Device& device, const SourceImage& source) {
  refuse_forked();
  std::lock_guard<std::mutex> lock(mutex_);
  const auto index = static_cast<size_t>(&source - images_.data());
  std::shared_ptr<const LoadedImage>& loaded = loaded_images_[index];
  if (loaded == nullptr) {
    loaded = source.is_ptx
                 ? LoadedImage::compile(source.image, source.bytes, source.origin, device.index)
                 : LoadedImage::load(source.image, source.bytes, source.origin, device.index);
    std::vector<uint8_t>().swap(images_[index].bytes);  // the driver's copy serves all devices
    loaded_.store(true, std::memory_order_release);
  }
  used_[device.index] = true;
  return loaded;
}

std::shared_ptr<const LoadedImage> Module::on(const Device& device, const std::string& kernel) {
  const SourceImage* source = choose(device, kernel);
  if (source == nullptr) fail_no_image(device);
  return load(device, *source);
}

std::vector<std::string> Module::names() const {
  std::set<std::string> names;
  for (const SourceImage& source : images_) {
    for (const KernelInfo& kernel : source.image.kernels) names.insert(kernel.name);
  }
  return {names.begin(), names.end()};
}

std::vector<const SourceImage*> Module::images_of_kernels(const Device& device) const {
  std::set<const SourceImage*> used;
  for (const std::string& name : names()) used.insert(choose(device, name));
  std::vector<const SourceImage*> found;
  for (const SourceImage& source : images_) {
    if (used.count(&source) != 0) found.push_back(&source);
  }
  return found;
}

std::vector<const SourceImage*> Module::images_without_kernels(const Device& device) const {
  std::vector<const SourceImage*> found;
  for (const SourceImage& source : images_) {
    if (source.image.kernels.empty() && rank(source, device.sm) != 0) found.push_back(&source);
  }
  std::stable_sort(found.begin(), found.end(), [&](const SourceImage* a, const SourceImage* b) {
    return rank(*a, device.sm) > rank(*b, device.sm);
  });
  return found;
}

bool Module::may_have(const SourceImage& source, const std::string& symbol) {
  std::lock_guard<std::mutex> lock(mutex_);
  const std::vector<uint8_t>& bytes = source.bytes;
  if (bytes.empty()) return true;  // it is loaded, so asking the driver is cheap
  return source.is_ptx ? has_ptx_word(bytes.data(), bytes.size(), symbol)
                       : has_symbol(bytes.data(), bytes.size(), source.origin, symbol);
}

// Each image has its own instance of a variable, visible only to its own kernels, so that a
// variable in two images is ambiguous. Images without kernels may be variants for several
// architectures; of those, as for kernels, the best image with the variable is used.
Module::Global Module::global(const Device& device, const std::string& given) {
  const Use use(*this);
  const std::string name = variable_called(given);
  const ContextGuard guard(device);
  std::vector<const SourceImage*> images = images_of_kernels(device);
  const bool no_kernel_runs = images.empty() && !names().empty();
  for (const SourceImage* source : images_without_kernels(device)) images.push_back(source);
  Global global;
  const SourceImage* found = nullptr;
  for (const SourceImage* source : images) {
    const bool alone = source->image.kernels.empty();
    if (found != nullptr && alone && rank(*source, device.sm) < rank(*found, device.sm)) break;
    if (!may_have(*source, name)) continue;
    const std::shared_ptr<const LoadedImage> image = load(device, *source);
    CUdeviceptr address = 0;
    size_t bytes = 0;
    const CUresult result = with_device_memory(device.index, [&] {
      return driver().cuLibraryGetGlobal(&address, &bytes, image->handle(), name.c_str());
    });
    if (result == CUDA_ERROR_NOT_FOUND) continue;
    check(result, "driver",
          "cuLibraryGetGlobal of '" + printable(name) + "' in " + image->origin());
    if (found != nullptr) {
      fail({"image", "global variable '" + printable(name) + "'",
            "is in two images, whose kernels each see their own", "one",
            found->origin + " and " + source->origin,
            found->source == source->source ? kTakeOut : kLoadApart});
    }
    found = source;
    global.address = static_cast<uint64_t>(address);
    global.bytes = bytes;
  }
  if (found != nullptr) return global;
  if (images.empty() || no_kernel_runs) fail_no_image(device);
  fail(
      {"no_kernel", "global variable '" + printable(name) + "'", "is not in " + origin_,
       nearest_names(variable_names(), name), "",
       "A name is a symbol, or what C++ calls it; one that no kernel uses may have been dropped by "
       "the compiler."});
}

std::vector<std::string> Module::variable_names() const {
  std::set<std::string> names;
  for (const SourceImage& source : images_) {
    for (const VariableInfo& variable : source.image.variables) names.insert(variable.name);
  }
  return {names.begin(), names.end()};
}

std::string Module::variable_called(const std::string& name) const {
  return one_of(symbols_called(variable_names(), name), name, "variable");
}

void Module::preload(const Device& device) {
  const Use use(*this);
  const ContextGuard guard(device);
  const std::vector<std::string> kernels = names();
  const std::vector<const SourceImage*> images =
      kernels.empty() ? images_without_kernels(device) : images_of_kernels(device);
  if (images.empty()) fail_no_image(device);
  if (kernels.empty()) {
    const int best = rank(*images.front(), device.sm);
    for (const SourceImage* source : images) {
      if (rank(*source, device.sm) == best) load(device, *source);
    }
  }
  for (const std::string& name : kernels) {
    if (refused_.count(name) == 0 && choose(device, name) != nullptr) kernel(name).preload(device);
  }
}

void Module::look_for_capture(CUstream stream) {
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  // Errors are not reported here, because the launch that follows gets them too: the capture is
  // invalid, or the legacy stream is used during a capture.
  const CUresult result = driver().cuStreamIsCapturing(stream, &status);
  if (result == CUDA_SUCCESS && status == CU_STREAM_CAPTURE_STATUS_NONE) return;
  if (result == CUDA_SUCCESS || result == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT) captured_ = true;
}

// Synchronising a device during a capture is an error that also invalidates the capture.
void Module::refuse_during_capture(const Device& device, CurrentStream current_stream) const {
  if (current_stream == nullptr) return;
  const CUstream stream = current_stream(device.index).handle;
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  check(driver().cuStreamIsCapturing(stream, &status), "capture", "cuStreamIsCapturing");
  if (status == CU_STREAM_CAPTURE_STATUS_NONE) return;
  fail({"capture", origin_, "cannot be unloaded while a CUDA graph is captured", "", "",
        "Unload it after the capture."});
}

bool Module::unload(bool keep, CurrentStream current_stream) {
  if (loaded()) refuse_forked();
  std::lock_guard<std::mutex> one(unload_mutex_);
  bool used[kMaxDevices];
  {
    std::lock_guard<std::mutex> lock(mutex_);
    std::copy(std::begin(used_), std::end(used_), std::begin(used));
  }
  if (loaded() && !captured_ && !keep) {
    for (int i = 0; i < kMaxDevices; ++i) {
      if (used[i]) refuse_during_capture(device(i), current_stream);
    }
  }
  closed_.store(true);
  while (users_.load() != 0) pause_for_launches();
  if (!loaded()) return true;
  if (captured_ || keep) return false;
  // No launch is running and none can start, so used_ needs no lock.
  for (int i = 0; i < kMaxDevices; ++i) {
    if (!used_[i]) continue;
    const ContextGuard guard(device(i));
    const CUresult result = driver().cuCtxSynchronize();
    // A capture in another thread: the module stays open, as it does for refuse_during_capture().
    if (is_capture_error(result)) closed_.store(false);
    check(result, "driver",
          "cuCtxSynchronize of cuda:" + std::to_string(i) + ", to unload " + origin_);
  }
  std::lock_guard<std::mutex> kernels_lock(kernels_mutex_);
  for (auto& kernel : kernels_) kernel.second->forget();
  for (const std::shared_ptr<const LoadedImage>& image : loaded_images_) {
    if (image != nullptr) image->unload();
  }
  loaded_images_.assign(images_.size(), nullptr);
  loaded_.store(false, std::memory_order_release);
  return true;
}

}  // namespace torch_cubin
