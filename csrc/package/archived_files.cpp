#include "package/archived_files.h"

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
  size_t size = 0;
  std::mutex mutex;  // held while it is decompressed, so that several threads do not repeat it
};

struct PlaceInArchive {
  PackedArchive* archive = nullptr;
  size_t offset = 0, size = 0;
};

class ArchivedFiles : public PackageFiles {
 public:
  ArchivedFiles(std::shared_ptr<const PackageFiles> files, const json& archives)
      : files_(std::move(files)) {
    for (const json& archive : archives) add(archive);
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

  Content content_of(PackedArchive& archive) const {
    if (Content content = recent(archive)) return content;
    std::lock_guard<std::mutex> lock(archive.mutex);
    if (Content content = recent(archive)) return content;  // another thread's
    const std::vector<uint8_t> packed = files_->read(archive.file, kMaxArchiveBytes);
    Content content = std::make_shared<const Buffer>(lzma_decompress(
        Bytes(packed.data(), packed.size()), archive.size, files_->origin(archive.file)));
    keep(archive, content);
    return content;
  }

  Content recent(const PackedArchive& archive) const {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [of, content] : recent_) {
      if (of == &archive) return content;
    }
    return nullptr;
  }

  void keep(const PackedArchive& archive, const Content& content) const {
    std::lock_guard<std::mutex> lock(mutex_);
    recent_.emplace_back(&archive, content);
    if (recent_.size() > kDecompressedArchives) recent_.pop_front();
  }

  std::shared_ptr<const PackageFiles> files_;
  mutable std::deque<PackedArchive> archives_;  // elements never move: places point to them
  std::unordered_map<std::string, PlaceInArchive> places_;
  mutable std::mutex mutex_;                                             // guards recent_
  mutable std::deque<std::pair<const PackedArchive*, Content>> recent_;  // the oldest first
};

}  // namespace

std::shared_ptr<const PackageFiles> with_archives(std::shared_ptr<const PackageFiles> files,
                                                  const json& manifest) {
  const auto archives = manifest.find("archives");
  if (archives == manifest.end()) return files;
  return std::make_shared<const ArchivedFiles>(std::move(files), *archives);
}

}  // namespace torch_cubin
