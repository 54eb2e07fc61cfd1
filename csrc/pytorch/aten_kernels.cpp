#include "pytorch/aten_kernels.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "cubin/error.h"
#include "pytorch/internals.h"
#include "pytorch/torch_error.h"

namespace torch_cubin {
namespace {

template <class Function>
void find_shim(Function& function, const std::string& symbol) {
  function = reinterpret_cast<Function>(pytorch_symbol(symbol.c_str()));
}

AtenProducts find_products(const std::string& device) {
  AtenProducts found{};
  find_shim(found.mm_out, "aoti_torch_" + device + "_mm_out");
  find_shim(found.bmm_out, "aoti_torch_" + device + "_bmm_out");
  find_shim(found.addmm_out, "aoti_torch_" + device + "_addmm_out");
  find_shim(found.baddbmm_out, "aoti_torch_" + device + "_baddbmm_out");
  find_shim(found.addmv, "aoti_torch_" + device + "_addmv");
  find_shim(found.scaled_mm, "aoti_torch_" + device + "__scaled_mm");
  return found;
}

AtenAttentions find_attentions() {
  const std::string start = "aoti_torch_cuda__scaled_dot_product_";
  AtenAttentions found{};
  find_shim(found.flash, start + "flash_attention");
  find_shim(found.flash_backward, start + "flash_attention_backward");
  find_shim(found.efficient, start + "efficient_attention");
  find_shim(found.efficient_backward, start + "efficient_attention_backward");
  find_shim(found.cudnn, start + "cudnn_attention");
  find_shim(found.cudnn_backward, start + "cudnn_attention_backward");
  find_shim(found.packed, "aoti_torch_cuda__flash_attention_forward");
  find_shim(found.paged, "aoti_torch_cuda__flash_attention_forward_v2");
  find_shim(found.into, "aoti_torch_cuda__flash_attention_forward_no_dropout_inplace_v2");
  find_shim(found.packed_backward, "aoti_torch_cuda__flash_attention_backward");
  return found;
}

}  // namespace

const AtenAttentions& aten_attentions() {
  static const AtenAttentions found = find_attentions();
  return found;
}

const AtenProducts& aten_products(bool on_cuda) {
  static const AtenProducts cpu = find_products("cpu");
  if (!on_cuda) return cpu;
  static const AtenProducts cuda = find_products("cuda");  // at the first call on a GPU
  return cuda;
}

void check_aten_dim(int64_t dim, int64_t rank) {
  using WrapDim = int64_t (*)(int64_t dim, int64_t rank, bool wrap_scalar);
  static const auto wrap =
      reinterpret_cast<WrapDim>(pytorch_symbol("_ZN3c106detail19maybe_wrap_dim_slowIlEET_S2_S2_b"));
  const int64_t dims = std::max<int64_t>(rank, 1);  // a scalar has one, too
  if (wrap != nullptr && (dim < -dims || dim >= dims)) wrap(dim, rank, true);
}

void check_aten(AOTITorchError error, const char* op) {
  if (error == AOTI_TORCH_SUCCESS) return;
  const std::string text = torch_error();
  if (text.rfind("CUDA out of memory", 0) == 0) fail_with_text("oom", text);
  if (!text.empty()) throw std::runtime_error(text);
  fail({"internal", std::string("PyTorch's own kernel of ") + op, "raised an error", "",
        "a text that this version of PyTorch prints on stderr",
        "Look above, or use torch 2.13 or newer, which carries it here."});
}

}  // namespace torch_cubin
