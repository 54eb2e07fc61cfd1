// Module: one or more images, of which each device gets the best that has a kernel. What
// torch_cubin.load() returns is one, and so is each kernel of a package.
//
// Nothing reaches the driver before the first launch, global or preload. Nothing is unloaded but by
// unload(), which waits for launches under way and for submitted work; what a CUDA graph captured
// stays loaded, since a replay needs it and tells nobody.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cubin/error.h"
#include "runtime/kernel.h"
#include "runtime/loaded_image.h"

namespace torch_cubin {

// What to do where a launch gives no shared memory to a kernel that has none of its own.
constexpr const char* kNoSharedMemoryAdvice =
    "How much it needs is in no cubin; a launch that reaches none of it may ask for 1 byte.";

struct SourceImage {
  Image image;
  std::vector<uint8_t> bytes;  // PTX ends with a NUL
  std::string origin;          // for errors: "file 'x.cubin'"
  bool is_ptx = false;
  // Images of one number were built together: those of one file, archive member, image of a package
  // or file that torch_cubin.embed put into a program.
  size_t source = 0;
};

// The current stream of a device, for launches that name none. Null stands for the driver's default
// stream.
using CurrentStream = CUstream (*)(int device_index);

// kUntilExit: never unloaded, so that launches need not be counted, nor captures watched for.
enum class Lifetime { kUntilUnload, kUntilExit };

class Module {
 public:
  // Throws [image] where there is no image.
  Module(std::vector<SourceImage> images, std::string origin,
         Lifetime lifetime = Lifetime::kUntilUnload);
  Module(const Module&) = delete;
  Module& operator=(const Module&) = delete;

  const std::vector<SourceImage>& images() const { return images_; }
  const std::string& origin() const { return origin_; }

  // The kernel of that name, the same object every time; throws [no_kernel] with the nearest names,
  // [image] where two sources have different kernels of that name for one architecture, [params]
  // where two images disagree on its parameters.
  Kernel& kernel(const std::string& name);

  // The same, and takes the C++ name of a mangled one (cubin/demangle.h). Throws [no_kernel], with
  // all of them, where several kernels are called so.
  Kernel& kernel_called(const std::string& name);

  // The kernels' names, sorted.
  std::vector<std::string> names() const;

  struct Global {
    uint64_t address = 0;
    uint64_t bytes = 0;
  };
  // A __device__ or __constant__ variable on that device, of an image that kernels are taken from
  // there or of one that has no kernels, by its symbol or C++ name. Loads only images that may have
  // it. Throws [no_kernel] where none has or several are called so, [image] where two have it.
  Global global(const Device& device, const std::string& name);

  // Loads every kernel that runs on the device, completely; but those that kernel() refuses. Of a
  // module without kernels, loads the best images. Throws [arch] where it would load nothing.
  void preload(const Device& device);

  // True where everything is given back to the driver; false where all stays loaded: a CUDA graph
  // has captured a kernel, or the caller says that it is in use (`keep`). Either way the module is
  // closed. After an error it can be called again. `current_stream`, which may be null, says where
  // a capture may be under way: [capture].
  bool unload(bool keep, CurrentStream current_stream);

  // Whether the driver holds any of it. Such a module must not be deleted.
  bool loaded() const { return loaded_.load(std::memory_order_acquire); }

  // Keeps the module open for a call; throws [closed] after unload().
  class Use {
   public:
    explicit Use(Module& module) : module_(module) {
      if (module_.lifetime_ == Lifetime::kUntilExit) return;
      // The order of these two, and of their counterparts in unload(), is what keeps a launch and
      // an unload apart: both are sequentially consistent.
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

  // To be called before a launch on `stream`: remembers a capture. The legacy default stream, null,
  // cannot be captured, so the driver is not asked.
  void note_capture(CUstream stream) {
    if (stream != nullptr && !captured_.load(std::memory_order_relaxed)) look_for_capture(stream);
  }

  // The image with that kernel that suits the device best, given to the driver. Throws [arch] with
  // what is wanted and found.
  std::shared_ptr<const LoadedImage> on(const Device& device, const std::string& kernel);

  // What that image says of the kernel. Throws [arch], too.
  const KernelInfo& info(const Device& device, const std::string& kernel) const;

  // Whether some image with that kernel runs there.
  bool runs_on(const Device& device, const std::string& kernel) const {
    return choose(device, kernel) != nullptr;
  }

  // Whether all images that have the kernel say the same of its blocks, clusters and shared memory.
  bool agree_on_shape(const std::string& kernel) const;

 private:
  // Null where no image with that kernel runs there.
  const SourceImage* choose(const Device& device, const std::string& kernel) const;
  std::shared_ptr<const LoadedImage> load(const Device& device, const SourceImage& source);
  [[noreturn]] void fail_no_image(const Device& device) const;
  // The images that kernels are taken from on that device; empty where none runs there.
  std::vector<const SourceImage*> images_of_kernels(const Device& device) const;
  // Those with variables alone that run there, the best first.
  std::vector<const SourceImage*> images_without_kernels(const Device& device) const;
  // False where the image's own bytes show that it has no symbol of that name.
  bool may_have(const SourceImage& source, const std::string& symbol);
  void look_for_capture(CUstream stream);
  // These two fill refused_, while the images' bytes are all there.
  void find_different_sources();
  void find_different_params();
  KernelInfo facts_of(const std::string& name) const;
  [[noreturn]] void fail_no_kernel(const std::string& name) const;
  const std::string& one_of(const std::vector<std::string>& called, const std::string& name,
                            const char* what) const;
  std::vector<std::string> variable_names() const;
  std::string variable_called(const std::string& name) const;
  void refuse_during_capture(const Device& device, CurrentStream current_stream) const;

  std::vector<SourceImage> images_;  // their bytes, guarded by mutex_, go when they are loaded
  std::string origin_;
  // By name, of kernels that another kernel of the same name hides: what kernel() throws.
  std::map<std::string, Fault> refused_;
  std::mutex mutex_;                                               // guards what follows
  std::vector<std::shared_ptr<const LoadedImage>> loaded_images_;  // beside images_; null at first
  bool used_[kMaxDevices] = {};
  std::mutex kernels_mutex_;  // guards what follows; apart, as it is never held for long
  std::map<std::string, std::unique_ptr<Kernel>> kernels_;
  std::map<std::string, Kernel*> called_;  // by other names than their symbols
  std::mutex unload_mutex_;                // one unload at a time
  std::atomic<bool> loaded_{false};
  // What every launch touches, in one line of the cache: the driver leaves little of it there.
  alignas(64) const Lifetime lifetime_;
  std::atomic<bool> closed_{false};
  std::atomic<bool> captured_;  // true as well where captures need no watching (kUntilExit)
  std::atomic<int64_t> users_{0};
};

}  // namespace torch_cubin
