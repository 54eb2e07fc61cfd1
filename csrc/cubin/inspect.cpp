// inspect_to_json: walks a container's entries, at most two containers deep.
#include "cubin/inspect.h"

#include <utility>

#include "cubin/container.h"
#include "cubin/error.h"
#include "cubin/json_facts.h"

namespace torch_cubin {
namespace {

using nlohmann::json;

class Inspector {
 public:
  explicit Inspector(size_t size) : unpacker_(size) {}

  json look(const uint8_t* data, size_t size, const std::string& origin) {
    const Format format = sniff(data, size, origin).format;
    if (format == Format::kPtx) return to_json(parse_ptx(data, size, origin));
    if (format == Format::kCubin || format == Format::kRelocatableCubin) {
      return to_json(inspect_cubin(data, size, origin));
    }
    return container(data, size, origin);
  }

 private:
  json container(const uint8_t* data, size_t size, const std::string& origin) {
    const Container found = list_entries(data, size, origin);
    if (found.entries.size() > entries_left_) {
      fail({"image", origin, "holds too many images", "at most " + std::to_string(kMaxEntries), "",
            "Take the part that you want out of it."});
    }
    entries_left_ -= found.entries.size();
    json entries = json::array();
    for (size_t i = 0; i < found.entries.size(); ++i) {
      entries.push_back(entry(found.entries[i], "entry " + std::to_string(i) + " of " + origin));
    }
    json out = {
        {"kind", format_name(found.format)}, {"size", size}, {"entries", std::move(entries)}};
    out["machine"] = found.machine.empty() ? json(nullptr) : json(found.machine);
    return out;
  }

  json entry(const Entry& entry, const std::string& origin) {
    json out = {{"kind", format_name(entry.format)},
                {"name", entry.name},
                {"arch", entry.arch.sm != 0 ? json(entry.arch.name()) : json(nullptr)},
                {"offset", entry.offset},
                {"stored_size", entry.stored.size()},
                {"size", entry.size},
                {"compression", compression_name(entry.compression)},
                {"flags", entry.flags},
                {"options", entry.options},
                {"content", nullptr},
                {"error", nullptr}};
    try {
      json content = content_of(entry, origin);
      if (!content.is_null()) out["kind"] = content["kind"];
      out["content"] = std::move(content);
    } catch (const Error& error) {
      out["error"] = {{"tag", error.tag()}, {"message", error.what()}};
    }
    return out;
  }

  json content_of(const Entry& entry, const std::string& origin) {
    const bool readable = entry.format == Format::kCubin || entry.format == Format::kPtx ||
                          entry.format == Format::kRelocatableCubin ||
                          entry.format == Format::kFatbin;
    if (!readable) return nullptr;
    Buffer unpacked;
    const Bytes bytes = unpacker_.open(entry, origin, unpacked);
    // By the container's statement, so that nesting is bounded.
    if (entry.format == Format::kFatbin) return container(bytes.data(), bytes.size(), origin);
    if (entry.format == Format::kPtx) {
      return to_json(parse_ptx(bytes.data(), bytes.size(), origin));
    }
    return to_json(inspect_cubin(bytes.data(), bytes.size(), origin));
  }

  Unpacker unpacker_;
  size_t entries_left_ = kMaxEntries;
};

}  // namespace

std::string inspect_to_json(const uint8_t* data, size_t size, const std::string& origin) {
  return dump(Inspector(size).look(data, size, origin));
}

}  // namespace torch_cubin
