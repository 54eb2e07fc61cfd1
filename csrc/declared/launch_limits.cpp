#include "declared/launch_limits.h"

#include <algorithm>
#include <array>
#include <climits>

#include "cubin/error.h"
#include "runtime/launch_config.h"

namespace torch_cubin {
namespace {

// Three sizes, each of which may be unknown.
class Sizes {
 public:
  explicit Sizes(const std::vector<Expression>& expressions) : expressions_(expressions) {
    for (size_t i = 0; i < expressions.size(); ++i) {
      known_[i] = expressions[i].is_constant();
      if (known_[i]) values_[i] = expressions[i].evaluate(Arguments()).integer;
    }
  }

  bool known(size_t i) const { return known_[i]; }
  int64_t operator[](size_t i) const { return values_[i]; }

  // The product of the known sizes, each at least 1; results above `most` become most + 1.
  int64_t product(int64_t most) const {
    int64_t result = 1;
    for (size_t i = 0; i < 3; ++i) {
      if (known_[i]) result = values_[i] > most / result ? most + 1 : result * values_[i];
    }
    return result;
  }

  std::string text() const {
    return "(" + expressions_[0].text() + ", " + expressions_[1].text() + ", " +
           expressions_[2].text() + ")";
  }

 private:
  const std::vector<Expression>& expressions_;
  bool known_[3] = {};
  int64_t values_[3] = {};
};

void check_range(const std::string& label, const Sizes& sizes, const int64_t* most,
                 const char* what) {
  for (size_t i = 0; i < 3; ++i) {
    if (!sizes.known(i) || (sizes[i] >= 1 && sizes[i] <= most[i])) continue;
    fail({"input", label, "can never be launched",
          "1 to " + std::to_string(most[i]) + " " + what + " in " + kAxes[i], sizes.text(), ""});
  }
}

void check_product(const std::string& label, const Sizes& sizes, int64_t most,
                   const std::string& what) {
  if (sizes.product(most) <= most) return;
  fail({"input", label, "can never be launched",
        "at most " + std::to_string(most) + " " + what + " in all", sizes.text(), ""});
}

// An image that has the kernel, and the facts in its binary.
struct KernelImage {
  const SourceImage* source;
  const KernelInfo* info;
  std::string arch() const { return source->image.arch.name(); }
};

std::vector<KernelImage> images_with(const Module& module, const std::string& kernel) {
  std::vector<KernelImage> found;
  for (const SourceImage& source : module.images()) {
    const KernelInfo* info = source.image.find(kernel);
    if (info != nullptr) found.push_back({&source, info});
  }
  return found;
}

// Compares constants with the block or cluster that the images require. If the images differ, no
// constant fits all of them, and the error names two.
void check_demand(const std::string& label, const Sizes& sizes,
                  const std::vector<KernelImage>& images,
                  std::array<uint32_t, 3> KernelInfo::* demand) {
  const auto of = [&](const KernelImage& image) {
    return triple((image.info->*demand).data()) + " for " + image.arch();
  };
  for (const KernelImage& image : images) {
    const std::array<uint32_t, 3>& wanted = image.info->*demand;
    bool fits = true;
    for (size_t i = 0; i < 3; ++i) fits &= !sizes.known(i) || sizes[i] == wanted[i];
    if (wanted[0] == 0 || fits) continue;
    for (const KernelImage& other : images) {
      const std::array<uint32_t, 3>& others = other.info->*demand;
      if (others[0] == 0 || others == wanted) continue;
      fail({"params", label, "cannot be what all images of the kernel demand",
            of(image) + " and " + of(other), sizes.text(),
            "Give each architecture a kernel of its own in `kernels`, with `when`."});
    }
    fail({"params", label, "is another than the kernel was compiled for", of(image), sizes.text(),
          ""});
  }
}

void check_bounds(const std::string& label, const Sizes& block,
                  const std::vector<KernelImage>& images) {
  for (const KernelImage& image : images) {
    const auto& max = image.info->max_block;
    const int64_t most = int64_t{max[0]} * max[1] * max[2];
    if (most == 0 || block.product(most) <= most) continue;
    fail({"params", label, "is larger than the kernel was compiled for",
          "at most " + std::to_string(most) + " threads (__launch_bounds__) for " + image.arch(),
          block.text(), ""});
  }
}

// Requires a grid of whole clusters, of the contract's cluster or each image's.
void check_multiple(const std::string& label, const Sizes& grid, size_t axis, int64_t cluster) {
  // A damaged image may require 0; then the launch is refused.
  if (!grid.known(axis) || cluster < 1 || grid[axis] % cluster == 0) return;
  fail({"input", label, "is no whole number of clusters",
        "a multiple of " + std::to_string(cluster) + " blocks in " + kAxes[axis], grid.text(), ""});
}

// The most shared memory of a block, static and dynamic, on any GPU that runs the image. (CUDA
// Programming Guide, "Technical Specifications per Compute Capability".)
int64_t most_shared_memory(const SourceImage& source) {
  constexpr int64_t kKiB = 1024;
  if (source.is_ptx) return INT_MAX;
  switch (source.image.arch.sm / 10) {
    case 7:
      return 96 * kKiB;
    case 8:
      return 163 * kKiB;
    case 9:
    case 10:
    case 11:
      return 227 * kKiB;
    case 12:
      return 99 * kKiB;
    default:
      return INT_MAX;
  }
}

void check_shared_memory(const std::string& label, int64_t bytes,
                         const std::vector<KernelImage>& images) {
  int64_t most = 0;
  for (const KernelImage& image : images) {
    most = std::max(most, most_shared_memory(*image.source) - image.info->static_shared);
  }
  if (bytes >= 0 && bytes <= most) return;
  fail({"input", label, "can never be launched",
        "0 to " + std::to_string(most) +
            " bytes of dynamic shared memory, on the GPUs that the kernel is compiled for",
        std::to_string(bytes), ""});
}

// A kernel that uses dynamic shared memory without getting any fails with an illegal address.
void check_given_shared_memory(const std::string& label, const std::vector<KernelImage>& images) {
  for (const KernelImage& image : images) {
    if (!image.info->uses_dynamic_shared) continue;
    fail({"params", label, "is 0, and the kernel uses shared memory that only a launch can give",
          "as many bytes as the kernel's source or its compiler's notes say",
          "0, for the image for " + image.arch(), kNoSharedMemoryAdvice});
  }
}

}  // namespace

void check_constants(const std::string& label, const LaunchShape& shape, const Module& module,
                     const std::string& kernel) {
  const std::vector<KernelImage> images = images_with(module, kernel);
  const Sizes grid(shape.grid), block(shape.block);
  check_range(label + ".grid", grid, kMaxGrid, "blocks");
  check_range(label + ".block", block, kMaxBlock, "threads");
  check_product(label + ".block", block, kMaxThreads, "threads");
  check_demand(label + ".block", block, images, &KernelInfo::required_block);
  check_bounds(label + ".block", block, images);
  if (!shape.cluster.empty()) {
    const Sizes cluster(shape.cluster);
    const int64_t most[3] = {kMaxCluster, kMaxCluster, kMaxCluster};
    check_range(label + ".cluster", cluster, most, "blocks");
    check_product(label + ".cluster", cluster, kMaxCluster, "blocks");
    check_demand(label + ".cluster", cluster, images, &KernelInfo::cluster);
    const bool in_clusters =
        std::any_of(images.begin(), images.end(),
                    [](const KernelImage& image) { return image.info->grid_in_clusters; });
    for (size_t i = 0; i < 3; ++i) {
      if (cluster.known(i) && !in_clusters) check_multiple(label + ".grid", grid, i, cluster[i]);
    }
  }
  for (const KernelImage& image : images) {
    for (size_t i = 0; i < 3; ++i) {
      if (image.info->cluster[0] == 0 || image.info->grid_in_clusters) break;
      check_multiple(label + ".grid", grid, i, image.info->cluster[i]);
    }
  }
  if (shape.shared_memory.is_constant()) {
    const int64_t bytes = shape.shared_memory.evaluate(Arguments()).integer;
    check_shared_memory(label + ".shared_memory", bytes, images);
    if (bytes == 0) check_given_shared_memory(label + ".shared_memory", images);
  }
}

}  // namespace torch_cubin
