// Module: one or more images. For each kernel and device, the best image with the kernel is used.
// torch_cubin.load() returns a module, and each kernel of a package has one.
//
// The driver loads an image at the first launch, global or preload. Only unload() unloads, after
// running launches and submitted work have finished. Captured kernels stay loaded, since a CUDA
// graph's replay needs them and cannot be observed.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "cubin/error.h"
#include "runtime/kernel.h"
#include "runtime/launch_notes.h"
#include "runtime/loaded_image.h"

namespace torch_cubin {

// The advice for a launch without shared memory of a kernel that needs dynamic shared memory.
constexpr const char* kNoSharedMemoryAdvice =
    "How much it needs is in no cubin; a launch that reaches none of it may ask for 1 byte.";

struct SourceImage {
  Image image;
  std::vector<uint8_t> bytes;  // PTX ends with a NUL
  std::string origin;          // for errors: "file 'x.cubin'"
  bool is_ptx = false;
  // Images with the same number were built together: they come from one file, archive member,
  // package image, or file embedded by torch_cubin.embed.
  size_t source = 0;
  std::optional<LaunchNotes> notes;  // of one kernel in it
};

// `lasts`: whether the stream outlives its work. A kernel with programmatic dependent launch never
// ends if its stream is destroyed meanwhile (driver 580), so that it has none on other streams.
struct LaunchStream {
  CUstream handle = nullptr;
  bool lasts = true;
};

// Returns the current stream of a device, for launches that name none. A null function pointer
// means the driver's default stream.
using CurrentStream = LaunchStream (*)(int device_index);

// kUntilExit: never unloaded, so that launches are not counted and captures not tracked.
enum class Lifetime { kUntilUnload, kUntilExit };

class Module {
 public:
  // Throws [image] if `images` is empty.
  Module(std::vector<SourceImage> images, std::string origin,
         Lifetime lifetime = Lifetime::kUntilUnload);
  Module(const Module&) = delete;
  Module& operator=(const Module&) = delete;

  const std::vector<SourceImage>& images() const { return images_; }
  const std::string& origin() const { return origin_; }

  // The kernel of that name, the same object every time. Throws [no_kernel] with the nearest names,
  // [image] if two sources have different kernels of that name for one architecture, and [params]
  // if two images disagree on its parameters.
  Kernel& kernel(const std::string& name);

  // The same, and also accepts a C++ name (cubin/demangle.h). Throws [no_kernel] with the
  // candidates if several kernels have that name.
  Kernel& kernel_called(const std::string& name);

  // The kernels' names, sorted.
  std::vector<std::string> names() const;

  struct Global {
    uint64_t address = 0;
    uint64_t bytes = 0;
  };
  // A __device__ or __constant__ variable on the device, by symbol or C++ name. Searches the images
  // that the device's kernels come from and those without kernels; loads only images that may have
  // it. Throws [no_kernel] if no image has it or the name is ambiguous, and [image] if two images
  // have it.
  Global global(const Device& device, const std::string& name);

  // Loads every kernel that runs on the device, with its code, except those that kernel() refuses.
  // For a module without kernels, loads the best images. Throws [arch] if there is nothing to load.
  void preload(const Device& device);

  // Closes the module and unloads its images. Returns false if the images stay loaded, because a
  // CUDA graph captured a kernel or the caller passes `keep`. After an error it can be called
  // again. Throws [capture] during a capture of `current_stream`, which may be null.
  bool unload(bool keep, CurrentStream current_stream);

  // Whether any image is loaded. Such a module must not be deleted.
  bool loaded() const { return loaded_.load(std::memory_order_acquire); }

  // Keeps the module loaded during a call. Throws [closed] after unload().
  class Use {
   public:
    explicit Use(Module& module) : module_(module) {
      if (module_.lifetime_ == Lifetime::kUntilExit) return;
      // The order of these two operations and their counterparts in unload() excludes a launch
      // during an unload. They must stay sequentially consistent.
      module_.users_.fetch_add(1);
      if (module_.closed_.load()) refuse();
    }
    ~Use() {
      if (module_.lifetime_ == Lifetime::kUntilUnload) module_.users_.fetch_sub(1);
    }
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;

   private:
    [[noreturn]] void refuse();
    Module& module_;
  };

  // Must be called before a launch on `stream`: records whether it is being captured. The legacy
  // default stream, null, cannot be captured, so the driver is not asked.
  void note_capture(CUstream stream) {
    if (stream != nullptr && !captured_.load(std::memory_order_relaxed)) look_for_capture(stream);
  }

  // The best image for the device with that kernel, loaded. Throws [arch] with the required and the
  // available archs.
  std::shared_ptr<const LoadedImage> on(const Device& device, const std::string& kernel);

  // That image's facts about the kernel. Throws [arch] too.
  const KernelInfo& info(const Device& device, const std::string& kernel) const;

  // Whether an image with that kernel runs on the device.
  bool runs_on(const Device& device, const std::string& kernel) const {
    return choose(device, kernel) != nullptr;
  }

  // Whether all images with the kernel agree on its blocks, clusters and shared memory.
  bool agree_on_shape(const std::string& kernel) const;

 private:
  // Null if no image with that kernel runs on the device.
  const SourceImage* choose(const Device& device, const std::string& kernel) const;
  std::shared_ptr<const LoadedImage> load(const Device& device, const SourceImage& source);
  [[noreturn]] void fail_no_image(const Device& device) const;
  // The images that the device's kernels come from; empty if no kernel runs on it.
  std::vector<const SourceImage*> images_of_kernels(const Device& device) const;
  // The images without kernels that run on the device, the best first.
  std::vector<const SourceImage*> images_without_kernels(const Device& device) const;
  // False if the image's bytes show that it has no such symbol.
  bool may_have(const SourceImage& source, const std::string& symbol);
  void look_for_capture(CUstream stream);
  // These two fill refused_ while all images still have their bytes.
  void find_different_sources();
  void find_different_params();
  KernelInfo facts_of(const std::string& name) const;
  [[noreturn]] void fail_no_kernel(const std::string& name) const;
  std::string one_of(const std::vector<std::string>& called, const std::string& name,
                     const char* what) const;
  std::vector<std::string> variable_names() const;
  std::string variable_called(const std::string& name) const;
  void refuse_during_capture(const Device& device, CurrentStream current_stream) const;

  std::vector<SourceImage> images_;  // bytes are freed on load, guarded by mutex_
  std::string origin_;
  // The errors that kernel() throws for conflicting kernels, by name.
  std::map<std::string, Fault> refused_;
  std::mutex mutex_;  // guards the following members
  std::vector<std::shared_ptr<const LoadedImage>>
      loaded_images_;  // parallel to images_; null until loaded
  bool used_[kMaxDevices] = {};
  // Guards the following members; separate because it is held only briefly.
  std::mutex kernels_mutex_;
  std::map<std::string, std::unique_ptr<Kernel>> kernels_;
  std::map<std::string, Kernel*> called_;  // kernel_called()'s results
  std::mutex unload_mutex_;                // serialises unload()
  std::atomic<bool> loaded_{false};
  // The members that every launch touches share a cache line, since the driver evicts most others.
  alignas(64) const Lifetime lifetime_;
  std::atomic<bool> closed_{false};
  std::atomic<bool> captured_;  // also true if captures are not tracked (kUntilExit)
  std::atomic<int64_t> users_{0};
};

}  // namespace torch_cubin
