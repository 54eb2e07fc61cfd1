// images_of: walks a file's containers as inspect() does, and keeps the images that a driver can
// load.
#include "package/user_images.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "cubin/container.h"
#include "cubin/demangle.h"
#include "cubin/embedded.h"
#include "cubin/error.h"
#include "cubin/ptx.h"
#include "cubin/sniff.h"
#include "package/package_images.h"

namespace torch_cubin {
namespace {

constexpr size_t kMostImportsShown = 4;

// The facts of PTX as an Image.
Image image_of(const Ptx& ptx) {
  Image image;
  image.arch = ptx.arch;
  image.size = ptx.size;
  image.variables = ptx.variables;
  for (const PtxKernel& entry : ptx.kernels) image.kernels.push_back(kernel_info_of(entry));
  std::sort(image.kernels.begin(), image.kernels.end(),
            [](const KernelInfo& a, const KernelInfo& b) { return a.name < b.name; });
  std::sort(image.variables.begin(), image.variables.end(),
            [](const VariableInfo& a, const VariableInfo& b) { return a.name < b.name; });
  return image;
}

size_t next_source(const std::vector<SourceImage>& images) {
  size_t next = 0;
  for (const SourceImage& image : images) next = std::max(next, image.source + 1);
  return next;
}

class Opener {
 public:
  Opener(size_t size, bool jit) : jit_(jit), unpacker_(size) {}

  void open(const uint8_t* data, size_t size, const std::string& origin) {
    const Format format = sniff(data, size, origin).format;
    if (format == Format::kPtx) {
      if (jit_) {
        add_ptx(data, size, origin);
        if (images_.empty()) refuse_unlinked(origin);
        return;
      }
      fail({"image", origin, "is PTX text", "a cubin", "",
            "PTX is never compiled behind your back: pass jit=True, or run `ptxas -arch=sm_XY FILE "
            "-o FILE.cubin`."});
    }
    const bool is_library = format == Format::kHostElf || format == Format::kStaticLibrary;
    if (is_library || format == Format::kFatbin || format == Format::kText) {
      if (is_library) packages(Bytes(data, size), origin);
      source_of_next_image_ = last_source_ = next_source(images_);
      container(data, size, origin);
      if (!images_.empty()) return;
      if (skipped_relocatable_ || !imports_.empty()) refuse_unlinked(origin);
      fail({"image", origin, "holds nothing that the driver can load", "a cubin",
            skipped_ptx_ ? "PTX only" : "none",
            skipped_ptx_ ? "Pass jit=True to have the driver compile the PTX."
                         : "`python -m torch_cubin inspect FILE` lists what it holds."});
    }
    add_cubin(data, size, origin);  // refuses anything else and names its format
  }

  std::vector<SourceImage> take() { return std::move(images_); }

 private:
  [[noreturn]] void refuse_unlinked(const std::string& origin) const {
    fail({"image", origin, "holds relocatable device code (nvcc -dc or -rdc=true)", "a cubin",
          imports_.empty() ? "code that is not linked" : "PTX that imports " + imports_,
          "Link it: `nvcc -dlink -cubin -arch=sm_XY FILES -o linked.cubin` with the file that "
          "defines the missing symbols, or compile without -dc."});
  }

  // Adds the images of embedded packages: those that the manifests list, after the signature check.
  void packages(const Bytes& library, const std::string& origin) {
    for (Bundle& bundle : embedded_bundles(library, origin)) {
      if (!is_package(bundle)) continue;
      append_source(images_of_package(files_in_library(origin, std::move(bundle)), origin, jit_),
                    images_);
    }
  }

  void container(const uint8_t* data, size_t size, const std::string& origin) {
    const Container found = list_entries(data, size, origin);
    const size_t own = source_of_next_image_;
    std::optional<Error> damage;  // an exception_ptr would require a newer libstdc++
    for (size_t i = 0; i < found.entries.size(); ++i) {
      const Entry& entry = found.entries[i];
      if (entry.in_package) continue;
      if (entry.format == Format::kPtx && !jit_) {
        skipped_ptx_ = true;
        continue;
      }
      if (entry.format != Format::kCubin && entry.format != Format::kPtx &&
          entry.format != Format::kFatbin) {
        skipped_relocatable_ |= entry.format == Format::kRelocatableCubin;
        continue;
      }
      const std::string name = "entry " + std::to_string(i) + " of " + origin;
      source_of_next_image_ = entry.is_file ? ++last_source_ : own;
      try {
        add(entry, name);
      } catch (const Error& error) {
        // A program's data may contain damaged images, such as test data. The valid ones still
        // load.
        if (!entry.is_guess) throw;
        if (!damage) damage = error;
      }
    }
    // Running out of memory ends the process anyway.
    // NOLINTNEXTLINE(bugprone-exception-copy-constructor-throws)
    if (images_.empty() && damage) throw *damage;
  }

  void add(const Entry& entry, const std::string& name) {
    Buffer unpacked;
    const Bytes bytes = unpacker_.open(entry, name, unpacked);
    if (entry.format == Format::kFatbin) {
      container(bytes.data(), bytes.size(), name);
    } else if (entry.format == Format::kPtx) {
      add_ptx(bytes.data(), bytes.size(), name);
    } else if (sniff(bytes.data(), bytes.size(), name).format != Format::kRelocatableCubin) {
      add_cubin(bytes.data(), bytes.size(), name);
    } else {
      skipped_relocatable_ = true;
    }
  }

  void add_cubin(const uint8_t* data, size_t size, const std::string& origin) {
    SourceImage image;
    image.image = parse_cubin(data, size, origin);
    image.bytes.assign(data, data + size);
    image.origin = origin;
    image.source = source_of_next_image_;
    images_.push_back(std::move(image));
  }

  void add_ptx(const uint8_t* data, size_t size, const std::string& origin) {
    const Ptx ptx = parse_ptx(data, size, origin);
    if (!ptx.imports.empty()) {  // the driver cannot load it
      for (size_t i = 0; i < ptx.imports.size() && i < kMostImportsShown; ++i) {
        imports_ += (imports_.empty() ? "" : ", ") + shown_symbol(ptx.imports[i]);
      }
      return;
    }
    SourceImage image;
    image.image = image_of(ptx);
    image.bytes.assign(data, data + size);
    image.bytes.push_back(0);
    image.origin = origin;
    image.is_ptx = true;
    image.source = source_of_next_image_;
    images_.push_back(std::move(image));
  }

  bool jit_;
  bool skipped_ptx_ = false;
  bool skipped_relocatable_ = false;
  std::string imports_;  // of PTX that was skipped because of them
  // SourceImage::source of the images that are added next, and the last one assigned.
  size_t source_of_next_image_ = 0, last_source_ = 0;
  Unpacker unpacker_;
  std::vector<SourceImage> images_;
};

}  // namespace

void append_source(std::vector<SourceImage> images, std::vector<SourceImage>& all) {
  const size_t first = next_source(all);
  for (SourceImage& image : images) {
    image.source += first;
    all.push_back(std::move(image));
  }
}

std::vector<SourceImage> images_of(const uint8_t* data, size_t size, const std::string& origin,
                                   bool jit) {
  Opener opener(size, jit);
  opener.open(data, size, origin);
  return opener.take();
}

}  // namespace torch_cubin
