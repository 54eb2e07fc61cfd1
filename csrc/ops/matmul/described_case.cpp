// A MatmulCase that is described in JSON, for tools and tests that ask what a product would run on
// without a tensor: tools/plan_changes.py, benchmarks/fit_planner.py.
#include <nlohmann/json.hpp>

#include "cubin/error.h"
#include "ops/matmul/plan.h"
#include "ops/matmul/tuned.h"
#include "package/fields.h"

namespace torch_cubin {
namespace {

using nlohmann::json;

ScalarType type_of(Math math) {
  constexpr ScalarType kTypes[kMathCount] = {ScalarType::Half, ScalarType::BFloat16,
                                             ScalarType::Float, ScalarType::Float,
                                             ScalarType::Double};
  return kTypes[math];
}

MatmulCase read_case(const json& from) {
  const auto flag = [&](const char* name, bool otherwise = false) {
    return from.value(name, otherwise);
  };
  MatmulCase c = tuned_case(from);
  if (c.math == kMathFloat16 && from.value("dtype", "bfloat16") == "bfloat16") {
    c.math = kMathBFloat16;
  }
  c.input = type_of(c.math);
  c.output = flag("float_output") ? ScalarType::Float : c.input;
  c.batch_dims = c.batch > 1 ? 1 : 0;
  c.a_mappable = is_vectors(c.a);
  c.b_mappable = is_vectors(c.b);
  c.a_unit = flag("a_unit", true);
  c.b_unit = flag("b_unit", true);
  c.a_apart = flag("a_apart", true);
  c.b_apart = flag("b_apart", true);
  c.a_broadcast = flag("a_broadcast");
  c.b_broadcast = flag("b_broadcast");
  c.has_bias = flag("bias");
  c.activation = static_cast<Activation>(from.value("activation", 0));
  c.aux = flag("aux");
  c.scaled = flag("scaled");
  c.has_addend = flag("addend");
  c.out_vectors = flag("out_vectors", c.n * element_size(c.output) % kVectorBytes == 0);
  c.batch_invariant = flag("batch_invariant");
  const bool short_types = c.math == kMathFloat16 || c.math == kMathBFloat16;
  const bool in_parts = c.batch_invariant && short_types && c.a == kKVectors && c.b == kKVectors;
  c.k_parts = in_parts ? k_parts_of(c.n, c.k) : 1;
  c.split_sums = flag("split_sums");
  c.symmetric = flag("symmetric");
  c.needs_mirror = flag("needs_mirror");
  c.own_transpose = flag("own_transpose", c.symmetric && c.a == c.b);
  return c;
}

}  // namespace

MatmulCase described_case(const json& from) {
  try {
    return read_case(from);
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    fail({"input", "a product", "cannot be planned", "sizes, math and access, as tuned.h has them",
          printable(error.what()), ""});
  }
}

}  // namespace torch_cubin
