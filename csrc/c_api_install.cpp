// The C API behind install() and drop_in() (torch_cubin/_drop_in): registers our kernels for aten's
// operators, sets the policies, and returns the counts of declined calls.
#include <nlohmann/json.hpp>
#include <string>

#include "c_answer.h"
#include "cubin/error.h"
#include "ops/attention/api/aten_attention.h"
#include "ops/common/batch_invariant.h"
#include "ops/common/over_aten.h"
#include "ops/common/serving.h"
#include "ops/common/thread_objects.h"
#include "ops/matmul/aten_products.h"
#include "ops/rows/aten_norm.h"
#include "ops/rows/aten_sum.h"
#include "ops/scaled/aten_scaled.h"
#include "package/package.h"
#include "pytorch/aten_kernels.h"

using namespace torch_cubin;

namespace {

// For aten's operators and the dispatch key "CUDA" or "CPU". It and the key are leaked on purpose:
// PyTorch keeps the key's address, and registrations are never removed.
StableLibrary& library_over_aten(const std::string& key) {
  if (key != "CUDA" && key != "CPU") {
    fail({"internal", "a dispatch key", "has no kernels", "CUDA or CPU", key, ""});
  }
  return *new StableLibrary(StableLibrary::Kind::IMPL, "aten", key == "CUDA" ? "CUDA" : "CPU",
                            __FILE__, __LINE__);
}

Policy policy_of(int number) {
  if (number < static_cast<int>(Policy::kOff) || number > static_cast<int>(Policy::kAll)) {
    fail({"internal", "a serving policy", "is not known", "0, 1 or 2", std::to_string(number), ""});
  }
  return static_cast<Policy>(number);
}

}  // namespace

// Registers our kernels for aten's operators and the dispatch key "CUDA" or "CPU", permanently.
// Called once for each key, if the C shims of csrc/pytorch/aten_kernels.h exist. They change
// nothing until a policy is set.
TORCH_CUBIN_API char* torch_cubin_stand_over_aten(const char* key) {
  return answer([&] {
    const std::string name = given(key, "dispatch key");
    const bool on_cuda = name == "CUDA";
    StableLibrary& library = library_over_aten(name);
    library.impl("mm", TC_OVER_ATEN(aten_mm));
    library.impl("mm.out", TC_OVER_ATEN(aten_mm_out));
    library.impl("bmm", TC_OVER_ATEN(aten_bmm));
    library.impl("bmm.out", TC_OVER_ATEN(aten_bmm_out));
    library.impl("mv", TC_OVER_ATEN(aten_mv));
    if (aten_products(on_cuda).scaled_mm != nullptr) {
      library.impl("_scaled_mm", TC_OVER_ATEN(aten_scaled_mm));
    }
    register_aten_attention(library, on_cuda);
  });
}

// The same for PyTorch's flash attention; `arguments` is the number of those of
// aten::_flash_attention_forward in this PyTorch, `into` that of the variant with an output, or 0.
TORCH_CUBIN_API char* torch_cubin_stand_over_flash(const char* key, int arguments, int into) {
  return answer([&] {
    const std::string name = given(key, "dispatch key");
    register_aten_flash_attention(library_over_aten(name), name == "CUDA", arguments, into);
  });
}

// torch.nn.attention.activate_flash_attention_impl("cubin"): serves its calls whatever the policy.
TORCH_CUBIN_API void torch_cubin_set_flash_implementation(int on) {
  set_flash_implementation(on != 0);
}

// The same for aten::sum over dims, of which we serve those over the first ones.
TORCH_CUBIN_API char* torch_cubin_stand_over_sums(const char* key) {
  return answer([&] {
    library_over_aten(given(key, "dispatch key"))
        .impl("sum.dim_IntList", TC_OVER_ATEN(aten_sum_dims));
  });
}

// The same for layer norm and RMS norm, if this PyTorch has what forwards their calls.
TORCH_CUBIN_API char* torch_cubin_stand_over_norms(const char* key) {
  return answer([&] {
    const std::string name = given(key, "dispatch key");
    const bool on_cuda = name == "CUDA";
    StableLibrary& library = library_over_aten(name);
    if (has_aten_layer_norm(on_cuda)) {
      library.impl("native_layer_norm", TC_OVER_ATEN(aten_layer_norm));
      library.impl("native_layer_norm_backward", TC_OVER_ATEN(aten_layer_norm_backward));
    }
    if (on_cuda && has_aten_rms_norm()) {
      library.impl("_fused_rms_norm", TC_OVER_ATEN(aten_rms_norm));
      library.impl("_fused_rms_norm_backward", TC_OVER_ATEN(aten_rms_norm_backward));
    }
  });
}

// install(): the policy of the process (Policy in ops/common/serving.h).
TORCH_CUBIN_API char* torch_cubin_set_process_policy(int policy) {
  return answer([&] { set_process_policy(policy_of(policy)); });
}

// drop_in(): the policy of this thread. Returns the previous one, or -1 for an unknown one.
TORCH_CUBIN_API int torch_cubin_set_thread_policy(int policy) {
  if (policy < static_cast<int>(Policy::kOff) || policy > static_cast<int>(Policy::kAll)) return -1;
  return static_cast<int>(set_thread_policy(static_cast<Policy>(policy)));
}

TORCH_CUBIN_API int torch_cubin_thread_object_policy() {
  return static_cast<int>(thread_object_policy());
}

// Removes an object that drop_in() left in this thread for the threads of backward().
TORCH_CUBIN_API void torch_cubin_forget_thread_object(const char* key) {
  forget_thread_object(key);
}

// Whether this thread's calls are served by kernels whose rows are independent of each other.
TORCH_CUBIN_API int torch_cubin_serves_invariant() {
  return serving_policy() != Policy::kOff && batch_invariant();
}

// The number of calls that were served in this thread.
TORCH_CUBIN_API int64_t torch_cubin_calls_served() { return calls_served(); }

// The known speed of our kernels (ops/common/serving.h), before the first call.
TORCH_CUBIN_API char* torch_cubin_set_known_speed(const char* text) {
  return answer([&] { set_known_speed(parse_json(given(text, "table"), "known speed")); });
}

// The function that measures a GPU which the known speeds do not name (ops/common/serving.h).
TORCH_CUBIN_API void torch_cubin_set_calibrate(int (*calibrate)(int device)) {
  set_calibrate(calibrate);
}

TORCH_CUBIN_API char* torch_cubin_set_calibrated_speed(int index, const char* text) {
  return answer([&] {
    set_calibrated_speed(device(index).index, parse_json(given(text, "table"), "measured speed"));
  });
}

// 0: this thread's calls are those of a program; 1, 2: they run PyTorch's kernels or ours, to be
// measured, and are not counted.
TORCH_CUBIN_API void torch_cubin_set_measuring(int state) {
  set_measuring(static_cast<Measuring>(state));
}

// {"calls": [...]}: declined_calls() of ops/common/serving.h.
TORCH_CUBIN_API char* torch_cubin_declined_calls(int clear) {
  return answer([&] { return nlohmann::json{{"calls", declined_calls(clear != 0)}}; });
}

// Deletes the handle of a tensor that torch_cubin_aten_sum returned.
TORCH_CUBIN_API void torch_cubin_release_tensor(void* tensor) {
  aoti_torch_delete_tensor_object(static_cast<AtenTensorHandle>(tensor));
}

// For the extension module (csrc/python_products.c): aten_sum() of ops/matmul/aten_products.h.
// `factors` are beta and alpha; null if a number does not fit a double. Returns 1 if the call was
// computed, 0 if the caller must run PyTorch's kernel through Python, -1 with the error's text,
// which is valid until this thread's next error, or -2 with that of a lack of memory.
TORCH_CUBIN_API int torch_cubin_aten_sum(int op, int form, void* const* tensors,
                                         const double* factors, void** result, const char** text) {
  static thread_local std::string error;
  bool lacks_memory = false;
  const auto handle = [&](int i) { return static_cast<AtenTensorHandle>(tensors[i]); };
  try {
    SumCall call{static_cast<SumOp>(op),
                 static_cast<SumForm>(form),
                 handle(0),
                 handle(1),
                 handle(2),
                 handle(3),
                 factors != nullptr,
                 1,
                 1};
    if (call.has_factors) {
      call.beta = factors[0];
      call.alpha = factors[1];
    }
    AtenTensorHandle made = nullptr;
    const bool computed = aten_sum(call, &made);
    *result = made;
    return computed ? 1 : 0;
  } catch (const Error& thrown) {
    error = thrown.what();
    lacks_memory = thrown.tag() == "oom";
  } catch (const std::exception& thrown) {
    error = thrown.what();
  } catch (...) {
    error = "torch_cubin [internal]: an unknown error.";
  }
  *text = error.c_str();
  return lacks_memory ? -2 : -1;
}
