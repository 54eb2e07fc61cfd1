#include "ops/common/value_checks.h"

#include <cstdlib>
#include <string>

#include "cubin/error.h"

namespace torch_cubin {

bool checks_values() {
  const char* const chosen = std::getenv("TORCH_CUBIN_CHECK");
  const std::string value = chosen == nullptr ? "" : chosen;
  if (value == "1") return true;
  if (value.empty() || value == "0") return false;
  fail({"input", "environment variable TORCH_CUBIN_CHECK", "has an unknown value", "1, 0",
        "'" + value + "'", ""});
}

}  // namespace torch_cubin
