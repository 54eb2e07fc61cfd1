#include "runtime/module.h"

#include <time.h>

#include <algorithm>
#include <set>
#include <tuple>
#include <utility>

#include "cubin/arch.h"
#include "cubin/demangle.h"
#include "cubin/error.h"
#include "cubin/ptx.h"
#include "runtime/device_memory.h"

namespace torch_cubin {
namespace {

// The design's order: exactly this device's arch, its family, the same major at the nearest lower
// minor; PTX only where no cubin runs. 0: not at all.
int rank(const SourceImage& source, int device_sm) {
  constexpr int kBeforePtx = 1000000;
  if (source.is_ptx) return rank_ptx(source.image.arch, device_sm);
  const int cubin = rank_cubin(source.image.arch, device_sm);
  return cubin == 0 ? 0 : kBeforePtx + cubin;
}

constexpr const char* kLoadApart =
    "Load them apart; from an archive, extract the one that you want and load that file.";

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

// Names repeat from one compilation to the next: Inductor begins anew with each model, and tile
// configurations of one source file share their names. Within one source they do not matter: there
// C++'s one-definition rule holds, and libraries have one template's kernel in many of their
// images. Two libraries may both have a kernel that their users never ask for, so it is refused by
// its name.
void Module::find_different_sources() {
  // What was compared: two libraries may share thousands of kernels, all in one image of each.
  std::map<std::pair<const SourceImage*, const SourceImage*>, bool> same;
  std::map<std::tuple<std::string, std::string, bool>, const SourceImage*> first;
  for (const SourceImage& source : images_) {
    const std::string arch = source.image.arch.name();
    for (const KernelInfo& kernel : source.image.kernels) {
      const auto [at, added] = first.emplace(std::tuple(kernel.name, arch, source.is_ptx), &source);
      const SourceImage& other = *at->second;
      if (added || other.source == source.source) continue;
      const auto [compared, is_new] = same.try_emplace(std::make_pair(&other, &source));
      if (is_new) compared->second = other.bytes == source.bytes;
      if (compared->second) continue;
      refused_.emplace(kernel.name,
                       Fault{"image", "kernel '" + printable(kernel.name) + "' for " + arch,
                             "is in two of the files that are loaded together, and not the same",
                             "one kernel of a name and architecture",
                             other.origin + " and " + source.origin, kLoadApart});
    }
  }
}

// A call packs its arguments once, whatever device it goes to.
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
  const KernelInfo* known = nullptr;
  for (const SourceImage& source : images_) {
    for (const KernelInfo& info : source.image.kernels) {
      if (known == nullptr && info.name == name) known = &info;
    }
  }
  if (known == nullptr) known = &images_.front().image.kernel(name);  // throws: the nearest names
  auto kernel = std::make_unique<Kernel>(*this, *known);
  return *kernels_.emplace(name, std::move(kernel)).first->second;
}

Kernel& Module::kernel_called(const std::string& name) {
  std::vector<std::string> called;
  for (const std::string& symbol : names()) {
    if (symbol == name) return kernel(name);
    if (is_name_of(demangled(symbol), name)) called.push_back(symbol);
  }
  if (called.size() == 1) return kernel(called.front());
  if (called.empty()) return kernel(name);  // throws: the nearest names
  std::string found;
  for (const std::string& symbol : called) {
    found += (found.empty() ? "'" : ", '") + printable(symbol) + "' (" +
             printable(demangled(symbol)) + ")";
  }
  fail({"no_kernel", "the name '" + printable(name) + "'",
        "is that of " + counted(called.size(), "kernel") + " in " + origin_, "one of them", found,
        "Give the symbol, or the template arguments or parameters too."});
}

const SourceImage* Module::choose(const Device& device, const std::string& kernel) const {
  const SourceImage* best = nullptr;
  int best_rank = 0;
  for (const SourceImage& source : images_) {
    if (source.image.find(kernel) == nullptr) continue;
    const int value = rank(source, device.sm);
    if (value <= best_rank) continue;  // of equals the first
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
        info->cluster != first->cluster ||
        info->uses_dynamic_shared != first->uses_dynamic_shared) {
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
    std::vector<uint8_t>().swap(images_[index].bytes);  // the driver has its own, for all devices
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
  if (bytes.empty()) return true;  // it is loaded, so that asking the driver costs little
  return source.is_ptx ? has_ptx_word(bytes.data(), bytes.size(), symbol)
                       : has_symbol(bytes.data(), bytes.size(), source.origin, symbol);
}

// Each image has a variable of its own, which only its own kernels see: of two, neither can be
// meant without a warning. Images without kernels may be one for each architecture, with the same
// variables in all: there the best image with the variable is meant, as it is for a kernel.
Module::Global Module::global(const Device& device, const std::string& name) {
  const Use use(*this);
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
            found->source == source->source
                ? "Give the variables names of their own, or take the image that you want out of "
                  "the file, as `cuobjdump -xelf all FILE` does, and load it alone."
                : kLoadApart});
    }
    found = source;
    global.address = static_cast<uint64_t>(address);
    global.bytes = bytes;
  }
  if (found != nullptr) return global;
  if (images.empty() || no_kernel_runs) fail_no_image(device);
  fail({"no_kernel", "global variable '" + printable(name) + "'", "is not in " + origin_, "", "",
        "Names are the symbols: C++ mangles variables of namespaces and static ones; one that no "
        "kernel uses may have been dropped by the compiler."});
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
  // An error is not reported here, because the launch that follows gets it too: the capture is
  // invalid, or the legacy stream is used beside one.
  const CUresult result = driver().cuStreamIsCapturing(stream, &status);
  if (result == CUDA_SUCCESS && status == CU_STREAM_CAPTURE_STATUS_NONE) return;
  if (result == CUDA_SUCCESS || result == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT) captured_ = true;
}

// Waiting for a device whose stream is being captured is an error that ends the capture, too.
void Module::refuse_during_capture(const Device& device, CurrentStream current_stream) const {
  if (current_stream == nullptr) return;
  const CUstream stream = current_stream(device.index);
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
  // Nobody launches any more: nothing below needs a lock.
  for (int i = 0; i < kMaxDevices; ++i) {
    if (!used_[i]) continue;
    const ContextGuard guard(device(i));
    const CUresult result = driver().cuCtxSynchronize();
    // A capture in another thread: the module stays open, as where the capture was seen above.
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
