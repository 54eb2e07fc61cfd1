// UserModule: what torch_cubin.load() returns: one or more images. Of those that have a kernel, each
// device gets the best. UserKernel: one of the kernels.
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

#include "runtime/kernel.h"

namespace torch_cubin {

// What to do where a launch gives no shared memory to a kernel that has none of its own.
constexpr const char* kNoSharedMemoryAdvice =
    "How much it needs is in no cubin; a launch that reaches none of it may ask for 1 byte.";

struct SourceImage {
  Image image;
  std::vector<uint8_t> bytes;  // PTX ends with a NUL
  std::string origin;          // for errors: "file 'x.cubin'"
  bool is_ptx = false;
};

class UserKernel;

class UserModule {
 public:
  // Throws [image] where there is no image, [params] where two images disagree on a kernel.
  UserModule(std::vector<SourceImage> images, std::string origin);
  UserModule(const UserModule&) = delete;
  UserModule& operator=(const UserModule&) = delete;

  const std::vector<SourceImage>& images() const { return images_; }
  const std::string& origin() const { return origin_; }

  // The kernel of that name, the same object every time; throws [no_kernel] with the nearest names.
  UserKernel& kernel(const std::string& name);

  struct Global {
    uint64_t address = 0;
    uint64_t bytes = 0;
  };
  // A __device__ or __constant__ variable on that device; throws [no_kernel] where there is none.
  Global global(const Device& device, const std::string& name);

  // Loads every kernel that the device's image has, completely.
  void preload(const Device& device);

  // True where everything is given back to the driver; false where all stays loaded: a CUDA graph
  // has captured a kernel, or the caller says that it is in use (`keep`). Either way the module is
  // closed. After an error it can be called again.
  bool unload(bool keep);

  // Whether the driver holds any of it. Such a module must not be deleted.
  bool loaded() const { return loaded_.load(std::memory_order_acquire); }

  // Keeps the module open for a call; throws [closed] after unload().
  class Use {
   public:
    explicit Use(UserModule& module) : module_(module) {
      // The order of these two, and of their twins in unload(), is what keeps a launch and an
      // unload apart: both are sequentially consistent.
      module_.users_.fetch_add(1);
      if (module_.closed_.load()) refuse();
    }
    ~Use() { module_.users_.fetch_sub(1); }
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;

   private:
    [[noreturn]] void refuse();
    UserModule& module_;
  };

  // To be called before a launch on `stream`: remembers a capture. The legacy default stream, null,
  // cannot be captured, so the driver is not asked.
  void note_capture(CUstream stream) {
    if (stream != nullptr && !captured_.load(std::memory_order_relaxed)) look_for_capture(stream);
  }

  // The image with that kernel that suits the device best, given to the driver. Throws [arch] with
  // what is wanted and found.
  std::shared_ptr<const Module> on(const Device& device, const std::string& kernel);

  // What that image says of the kernel. Throws [arch], too.
  const KernelInfo& info(const Device& device, const std::string& kernel) const;

  // Whether all images that have the kernel say the same of its blocks, clusters and shared memory.
  bool agree_on_shape(const std::string& kernel) const;

 private:
  // Null where no image with that kernel runs there.
  const SourceImage* choose(const Device& device, const std::string& kernel) const;
  std::shared_ptr<const Module> load(const Device& device, const SourceImage& source);
  [[noreturn]] void fail_no_image(const Device& device) const;
  // Of every image that some kernel is taken from on that device, one such kernel.
  std::map<const SourceImage*, std::string> chosen(const Device& device) const;
  std::vector<std::string> names() const;
  void look_for_capture(CUstream stream);
  void check_same_params() const;
  void refuse_during_capture(const Device& device) const;

  std::vector<SourceImage> images_;  // their bytes, guarded by mutex_, go when they are loaded
  std::string origin_;
  std::mutex mutex_;                                    // guards what follows
  std::vector<std::shared_ptr<const Module>> modules_;  // beside images_, null until loaded
  std::map<std::string, std::unique_ptr<UserKernel>> kernels_;
  bool used_[kMaxDevices] = {};
  std::mutex unload_mutex_;  // one unload at a time
  std::atomic<bool> loaded_{false};
  std::atomic<bool> closed_{false};
  std::atomic<bool> captured_{false};
  std::atomic<int64_t> users_{0};
};

class UserKernel {
 public:
  // `info` is of any image that has the kernel: its parameters are those of all of them, its blocks,
  // clusters and shared memory only where they agree.
  UserKernel(UserModule& module, KernelInfo info)
      : module_(module), info_(std::move(info)), same_shape_(module.agree_on_shape(info_.name)) {}
  ~UserKernel() { forget(); }
  UserKernel(const UserKernel&) = delete;
  UserKernel& operator=(const UserKernel&) = delete;

  // The most that can run at once of a launch of that shape: cooperative grids and clusters.
  struct Residency {
    CUlaunchConfig config{};
    uint32_t cluster[3] = {0, 0, 0};
    int64_t blocks = -1;
  };

  // The kernel on one device, with what its launches are checked against.
  struct OnDevice {
    OnDevice(std::shared_ptr<const Module> module, const std::string& name)
        : kernel(std::move(module), name) {}
    CUcontext context = nullptr;  // the device's
    int max_threads = 0;          // a block; registers may allow fewer than 1024
    // Of a launch that asks for nothing special: at most so many threads a block, and where
    // common_block[0] is not 0, that block. 0 threads: the kernel has clusters.
    int64_t common_threads = 0;
    int64_t common_block[3] = {0, 0, 0};
    uint64_t least_shared = 0;  // dynamic bytes, 1 where the kernel cannot do without
    Kernel kernel;
    std::mutex mutex;             // guards what follows
    Residency residency;          // of the last shape asked for
    bool large_clusters = false;  // more than 8 blocks were asked for, and allowed
    int priorities[2] = {1, 0};   // greatest (a lower number) and least; unknown at first
  };

  UserModule& module() const { return module_; }
  const std::string& name() const { return info_.name; }
  const KernelInfo& info() const { return info_; }

  // What launches on that device are checked against, without touching it where that is the same
  // everywhere.
  const KernelInfo& info_on(int32_t device_index) const {
    return same_shape_ ? info_ : module_.info(device(device_index), name());
  }

  OnDevice& on(const Device& device) {
    OnDevice* ready = find(device.index);
    return ready != nullptr ? *ready : make(device);
  }

  // Null before on() was called for the device.
  OnDevice* find(int device_index) const {
    return on_[device_index].load(std::memory_order_acquire);
  }

  // Loads the code onto the device now, rather than at the first launch.
  void preload(const Device& device);

  // Frees what on() made; no launch may be under way.
  void forget();

 private:
  OnDevice& make(const Device& device);

  UserModule& module_;  // owns this kernel
  KernelInfo info_;
  bool same_shape_;
  std::mutex mutex_;  // guards the making of on_
  std::atomic<OnDevice*> on_[kMaxDevices] = {};
};

}  // namespace torch_cubin
