#include "package/triton_notes.h"

#include <dirent.h>

#include <algorithm>
#include <climits>
#include <cstdlib>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "cubin/error.h"
#include "package/fields.h"
#include "package/files.h"

namespace torch_cubin {
namespace {

using nlohmann::json;

constexpr size_t kMaxNotesBytes = 16 << 20;
constexpr int64_t kMostNotesBytes = INT_MAX;
constexpr size_t kMaxIrBytes = 64 << 20;
constexpr uint64_t kMostMultiple = 1 << 16;
constexpr char kCubin[] = ".cubin";
constexpr size_t kCubinLetters = sizeof(kCubin) - 1;

bool is_cubin(const std::string& name) {
  return name.size() > kCubinLetters &&
         name.compare(name.size() - kCubinLetters, kCubinLetters, kCubin) == 0;
}

std::string notes_path(const std::string& cubin) {
  return cubin.substr(0, cubin.size() - kCubinLetters) + ".json";
}

bool is_folder(const std::string& path) {
  const std::unique_ptr<DIR, int (*)(DIR*)> opened(opendir(path.c_str()), closedir);
  return opened != nullptr;
}

std::vector<std::string> cubins_with_notes(const std::string& folder) {
  const std::unique_ptr<DIR, int (*)(DIR*)> opened(opendir(folder.c_str()), closedir);
  std::vector<std::string> names;
  while (const dirent* entry = opened != nullptr ? readdir(opened.get()) : nullptr) {
    const std::string name = entry->d_name;
    if (is_cubin(name) && is_regular_file(folder + "/" + notes_path(name))) names.push_back(name);
  }
  std::sort(names.begin(), names.end());
  return names;
}

// Empty for JSON that is not Triton's.
std::optional<json> triton_json(const std::string& path) {
  const std::vector<uint8_t> bytes = read_file(path, kMaxNotesBytes);
  json found = json::parse(bytes, nullptr, false);
  if (!found.is_object() || !found.contains("num_warps") || !found.contains("shared")) return {};
  return found;
}

LaunchNotes notes_from(const json& found, const std::string& origin) {
  Fields fields(found, origin);
  LaunchNotes notes;
  notes.origin = origin;
  notes.kernel = fields.text("name");
  notes.shared_memory = fields.integer("shared", 0, kMostNotesBytes);
  const bool says_lanes = fields.find("warp_size") != nullptr;
  notes.threads =
      fields.integer("num_warps", 1, 64) * (says_lanes ? fields.integer("warp_size", 1, 64) : 32);
  for (const char* name : {"global_scratch_size", "profile_scratch_size"}) {
    if (fields.find(name) == nullptr) continue;  // an older Triton, without this parameter
    ++notes.hidden;
    notes.scratch += fields.integer(name, 0, kMostNotesBytes);
  }
  notes.cooperative = fields.truth("launch_cooperative_grid", false);
  notes.dependent = fields.truth("launch_pdl", false);
  return notes;
}

// The IR beside a cubin; empty if Triton wrote none (TRITON_STORE_BINARY_ONLY).
std::string ir_of(const std::string& cubin) {
  const std::string path = cubin.substr(0, cubin.size() - kCubinLetters) + ".ttir";
  if (!is_regular_file(path)) return "";
  const std::vector<uint8_t> bytes = read_file(path, kMaxIrBytes);
  return {bytes.begin(), bytes.end()};
}

// Of which number Triton took each parameter's values to be multiples, by the kernel's function in
// its IR: `@add(%x: !tt.ptr<f32> {tt.divisibility = 16 : i32} loc("x"), %n: i32)` is {16, 1}. Empty
// if the IR has no such function.
std::vector<uint32_t> multiples_in(const std::string& ir, const std::string& kernel) {
  const std::string head = "tt.func public @" + kernel + "(", mark = "tt.divisibility = ";
  size_t at = ir.find(head);
  if (at == std::string::npos) return {};
  at += head.size();
  std::vector<uint32_t> multiples(1, 1);
  bool quoted = false;
  for (int depth = 0; at < ir.size(); ++at) {
    const char c = ir[at];
    if (c == '"') quoted = !quoted;
    if (quoted) continue;
    if (c == ')' && depth == 0) return multiples;
    if (c == ',' && depth == 0) multiples.push_back(1);
    depth += c == '(' || c == '<' || c == '{' || c == '[';
    depth -= c == ')' || c == '>' || c == '}' || c == ']';
    if (c == 't' && ir.compare(at, mark.size(), mark) == 0) {
      const uint64_t number = std::strtoull(ir.c_str() + at + mark.size(), nullptr, 10);
      const bool is_power = number != 0 && number <= kMostMultiple && (number & (number - 1)) == 0;
      if (is_power) multiples.back() = static_cast<uint32_t>(number);
    }
  }
  return {};
}

// Refuses launches that need more than null pointers and a plain grid.
void check_fillable(const json& found, const LaunchNotes& notes) {
  const std::string object = "Triton's kernel '" + printable(notes.kernel) + "' of " + notes.origin;
  if (notes.scratch != 0) {
    fail({"input", object, "needs scratch memory, which a launch does not allocate", "0 bytes",
          std::to_string(notes.scratch) + " bytes a block",
          "Open its .cubin and pass the memory, or make it an op: "
          "torch_cubin.producers.triton.define_op."});
  }
  Fields fields(found, notes.origin);
  const int64_t blocks =
      fields.find("num_ctas") == nullptr ? 1 : fields.integer("num_ctas", 1, INT_MAX);
  if (blocks != 1) {
    fail({"input", object, "runs in clusters, whose grid the notes do not say", "num_ctas 1",
          std::to_string(blocks), "Open its .cubin and pass the grid in blocks and the cluster."});
  }
}

}  // namespace

std::string cubin_at(const std::string& path) {
  if (!is_folder(path)) return path;
  const std::string& folder = path;
  const std::vector<std::string> names = cubins_with_notes(folder);
  if (names.size() == 1) return folder + "/" + names.front();
  std::string list;
  for (size_t i = 0; i < names.size() && i < 20; ++i) {
    list += (i == 0 ? "" : ", ") + printable(names[i]);
  }
  fail({"file", "folder '" + printable(folder, PATH_MAX) + "'",
        names.empty() ? "holds no kernel" : "holds several of Triton's kernels",
        "a package (manifest.json), or Triton's NAME.cubin with NAME.json",
        names.empty() ? "neither" : list, names.empty() ? "" : "Give the path of one cubin."});
}

void add_triton_notes(const std::string& path, std::vector<SourceImage>& images) {
  const bool folder = is_folder(path);
  const std::string cubin = cubin_at(path);
  if (!is_cubin(cubin) || !is_regular_file(notes_path(cubin))) return;
  const std::string origin = "file '" + printable(notes_path(cubin), PATH_MAX) + "'";
  LaunchNotes notes;
  try {
    const std::optional<json> found = triton_json(notes_path(cubin));
    if (!found.has_value()) {
      if (!folder) return;
      fail(
          {"input", origin, "does not describe a Triton kernel", "num_warps, shared, ...", "", ""});
    }
    notes = notes_from(*found, origin);
    notes.is_filled = folder;
    if (folder) check_fillable(*found, notes);
  } catch (const Error&) {
    if (folder) throw;
    return;  // a cubin needs no notes
  }
  const std::vector<uint32_t> multiples = multiples_in(ir_of(cubin), notes.kernel);
  bool is_used = false;
  for (SourceImage& image : images) {
    for (KernelInfo& kernel : image.image.kernels) {
      if (kernel.name != notes.kernel || kernel.params.size() < notes.hidden) continue;
      image.notes = notes;
      is_used = true;
      if (kernel.params.size() != notes.hidden + multiples.size()) continue;
      for (size_t i = 0; i < multiples.size(); ++i) kernel.params[i].multiple_of = multiples[i];
    }
  }
  if (folder && !is_used) {
    fail({"input", origin, "does not describe the cubin beside it",
          "a kernel with " + std::to_string(notes.hidden) + " hidden parameters",
          "'" + printable(notes.kernel) + "'", "Compile it again."});
  }
}

}  // namespace torch_cubin
