#include "package/archived_files.h"

#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <mutex>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cubin/decompress.h"
#include "cubin/error.h"

namespace torch_cubin {
namespace {

using nlohmann::json;

constexpr size_t kMaxArchiveBytes = 64u << 20;  // unpacked, and packed
// At most 16 MB of those that build/archives.py writes, of half a megabyte each.
constexpr size_t kDecompressedArchives = 32;

using Content = std::shared_ptr<const Buffer>;

struct PackedArchive {
  std::string file;
  size_t index = 0;
  size_t size = 0;
};

struct PlaceInArchive {
  const PackedArchive* archive = nullptr;
  size_t offset = 0, size = 0;
};

// The decompressed archives of one process.
struct Decompressed {
  explicit Decompressed(size_t archives) : of_archive(archives) {}

  const pid_t process = getpid();
  std::mutex mutex;                                             // guards recent
  std::deque<std::pair<const PackedArchive*, Content>> recent;  // the oldest first
  // Held while an archive is decompressed, so that several threads do not repeat it.
  std::deque<std::mutex> of_archive;
};

class ArchivedFiles : public PackageFiles {
 public:
  ArchivedFiles(std::shared_ptr<const PackageFiles> files, const json& archives)
      : files_(std::move(files)) {
    for (const json& archive : archives) add(archive);
    decompressed_ = new Decompressed(archives_.size());
  }
  ~ArchivedFiles() override {
    const Decompressed* last = decompressed_.load();
    if (last->process == getpid()) delete last;  // see decompressed()
  }

  std::vector<uint8_t> read(const std::string& name, size_t limit) const override {
    const auto found = places_.find(name);
    if (found == places_.end()) return files_->read(name, limit);
    const PlaceInArchive& place = found->second;
    if (place.size > limit) {
      fail({"file", origin(name), "is too large", "at most " + std::to_string(limit) + " bytes",
            std::to_string(place.size) + " bytes", ""});
    }
    const Content content = content_of(*place.archive);
    const uint8_t* begin = content->data() + place.offset;
    return {begin, begin + place.size};
  }

  std::string origin(const std::string& name) const override {
    const auto found = places_.find(name);
    if (found == places_.end()) return files_->origin(name);
    return "file '" + printable(name) + "' in " + files_->origin(found->second.archive->file);
  }

 private:
  void add(const json& entry) {
    PackedArchive& archive = archives_.emplace_back();
    archive.index = archives_.size() - 1;
    archive.file = file_of(entry);
    for (const json& each : entry.at("files")) {
      const json& size = each.at("size");
      if (!size.is_number_unsigned() || size.get<uint64_t>() > kMaxArchiveBytes - archive.size) {
        throw std::runtime_error("archive '" + archive.file + "' has a size out of range");
      }
      const PlaceInArchive place{&archive, archive.size, size.get<size_t>()};
      archive.size += place.size;
      if (!places_.emplace(file_of(each), place).second) {
        throw std::runtime_error("file '" + file_of(each) + "' stands twice in archives");
      }
    }
  }

  static std::string file_of(const json& entry) {
    std::string file = entry.at("file").get<std::string>();
    if (!is_inside_package(file)) {
      throw std::runtime_error("file '" + file + "' leaves the folder");
    }
    return file;
  }

  // A forked child has a state of its own: in its parent's, a lock may be held by a thread that the
  // child does not have. It leaves its copy of the parent's alone, which may be half changed.
  Decompressed& decompressed() const {
    Decompressed* found = decompressed_.load(std::memory_order_acquire);
    if (found->process == getpid()) return *found;
    auto own = std::make_unique<Decompressed>(archives_.size());
    if (decompressed_.compare_exchange_strong(found, own.get())) return *own.release();
    return *found;  // another thread of the child was first
  }

  Content content_of(const PackedArchive& archive) const {
    Decompressed& own = decompressed();
    if (Content content = recent(own, archive)) return content;
    std::lock_guard<std::mutex> lock(own.of_archive[archive.index]);
    if (Content content = recent(own, archive)) return content;  // another thread's
    const std::vector<uint8_t> packed = files_->read(archive.file, kMaxArchiveBytes);
    Content content = std::make_shared<const Buffer>(lzma_decompress(
        Bytes(packed.data(), packed.size()), archive.size, files_->origin(archive.file)));
    keep(own, archive, content);
    return content;
  }

  static Content recent(Decompressed& own, const PackedArchive& archive) {
    std::lock_guard<std::mutex> lock(own.mutex);
    for (const auto& [of, content] : own.recent) {
      if (of == &archive) return content;
    }
    return nullptr;
  }

  static void keep(Decompressed& own, const PackedArchive& archive, const Content& content) {
    std::lock_guard<std::mutex> lock(own.mutex);
    own.recent.emplace_back(&archive, content);
    if (own.recent.size() > kDecompressedArchives) own.recent.pop_front();
  }

  std::shared_ptr<const PackageFiles> files_;
  std::deque<PackedArchive> archives_;  // elements never move: places point to them
  std::unordered_map<std::string, PlaceInArchive> places_;
  mutable std::atomic<Decompressed*> decompressed_{nullptr};  // never null after construction
};

}  // namespace

std::shared_ptr<const PackageFiles> with_archives(std::shared_ptr<const PackageFiles> files,
                                                  const json& manifest) {
  const auto archives = manifest.find("archives");
  if (archives == manifest.end()) return files;
  return std::make_shared<const ArchivedFiles>(std::move(files), *archives);
}

}  // namespace torch_cubin
