#include "runtime/launch_notes.h"

#include <tuple>
#include <vector>

#include "cubin/error.h"
#include "runtime/module.h"

namespace torch_cubin {
namespace {

bool has_kernel(const SourceImage& source, const std::string& name) {
  for (const KernelInfo& info : source.image.kernels) {
    if (info.name == name) return true;
  }
  return false;
}

const LaunchNotes* notes_in(const SourceImage& source, const std::string& name) {
  return source.notes.has_value() && source.notes->kernel == name ? &*source.notes : nullptr;
}

auto filling(const LaunchNotes& notes) {
  return std::make_tuple(notes.hidden, notes.shared_memory, notes.threads, notes.cooperative,
                         notes.dependent);
}

std::string hidden_pointers(size_t count) {
  return count == 1 ? "parameter is a hidden pointer" : "2 parameters are hidden pointers";
}

}  // namespace

const LaunchNotes* filled_notes(const Kernel& kernel) {
  const LaunchNotes* filled = nullptr;
  const SourceImage* without = nullptr;
  for (const SourceImage& source : kernel.module().images()) {
    if (!has_kernel(source, kernel.name())) continue;
    const LaunchNotes* notes = notes_in(source, kernel.name());
    if (notes == nullptr || !notes->is_filled) {
      without = &source;
    } else if (filled != nullptr && filling(*filled) != filling(*notes)) {
      fail({"params", "kernel '" + printable(kernel.name()) + "'",
            "is launched differently from each of two folders", filled->origin, notes->origin,
            "Load each as a module of its own."});
    } else {
      filled = notes;
    }
  }
  if (filled != nullptr && without != nullptr) {
    fail({"params", "kernel '" + printable(kernel.name()) + "'",
          "is in a Triton folder, which says how it is launched, and in a file that does not",
          filled->origin, without->origin, "Load each as a module of its own."});
  }
  return filled;
}

std::string hidden_advice(const Kernel& kernel, size_t given) {
  const std::vector<ParamInfo>& params = kernel.info().params;
  for (const SourceImage& source : kernel.module().images()) {
    const LaunchNotes* notes = notes_in(source, kernel.name());
    if (notes == nullptr || notes->is_filled || notes->hidden == 0) continue;
    return "Triton's " + notes->origin + ": the last " + hidden_pointers(notes->hidden) +
           " to scratch memory: " +
           (notes->scratch == 0 ? "pass null pointers, as 0 bytes are needed"
                                : std::to_string(notes->scratch) + " bytes a block are needed") +
           "; shared memory " + std::to_string(notes->shared_memory) + " bytes, block " +
           std::to_string(notes->threads) +
           ". Open the cache folder instead of the cubin, and all of this is filled in.";
  }
  const size_t missing = params.size() > given ? params.size() - given : 0;
  if (missing != 1 && missing != 2) return "";
  for (size_t i = given; i < params.size(); ++i) {
    if (params[i].kind != ParamKind::kPointer) return "";
  }
  return "In a kernel of Triton's the last " + hidden_pointers(missing) +
         " to scratch memory; pass null pointers where its .json says global_scratch_size and "
         "profile_scratch_size 0.";
}

}  // namespace torch_cubin
