// choose_entry: which of several images serves a device.
#include <algorithm>

#include "cubin/arch.h"
#include "cubin/container.h"
#include "cubin/error.h"

namespace torch_cubin {
namespace {

constexpr size_t kMaxShown = 12;

std::string found_text(const std::vector<Entry>& entries) {
  std::vector<std::string> names;
  for (const Entry& entry : entries) {
    const bool ptx = entry.format == Format::kPtx;
    std::string name = ptx ? "PTX for " : "";
    name += entry.arch.name();
    if (entry.format == Format::kRelocatableCubin) name += " (relocatable)";
    if (entry.format == Format::kLtoIr) name += " (LTO-IR)";
    if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
    if (names.size() > kMaxShown) break;
  }
  std::string text;
  for (size_t i = 0; i < names.size() && i < kMaxShown; ++i) text += (i ? ", " : "") + names[i];
  if (names.size() > kMaxShown) text += ", ...";
  return text.empty() ? "nothing" : text;
}

}  // namespace

const Entry& choose_entry(const std::vector<Entry>& entries, int device_sm, bool jit,
                          const std::string& origin) {
  const auto best_of = [&](Format format, auto rank) -> const Entry* {
    const Entry* best = nullptr;
    int best_rank = 0;
    for (const Entry& entry : entries) {
      if (entry.format != format) continue;
      const int value = rank(entry.arch, device_sm);
      if (value <= best_rank) continue;  // of equals the first
      best = &entry;
      best_rank = value;
    }
    return best;
  };
  if (const Entry* cubin = best_of(Format::kCubin, rank_cubin)) return *cubin;
  const Entry* ptx = best_of(Format::kPtx, rank_ptx);
  if (ptx != nullptr && jit) return *ptx;
  const std::string device = "sm_" + std::to_string(device_sm);
  fail({"arch", origin, "has no cubin that runs on this GPU", "one for " + device,
        found_text(entries),
        ptx != nullptr ? "Its PTX would do: ask for it by name (jit=True), or compile a cubin with "
                         "`nvcc -cubin -arch=" +
                             device + "`."
                       : "Compile one with `nvcc -cubin -arch=" + device + "`."});
}

}  // namespace torch_cubin
