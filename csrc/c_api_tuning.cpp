// The C API behind torch_cubin.tune (torch_cubin/_tuning): which ways a product has, how it is made to
// take one of them, and the tables of what was measured.
#include <nlohmann/json.hpp>

#include "c_answer.h"
#include "ops/matmul/plan.h"
#include "ops/matmul/tuned.h"
#include "package/package.h"

using namespace torch_cubin;

// Turns the watching of matmul plans on or off (ops/matmul/plan.h).
TORCH_CUBIN_API char* torch_cubin_watch_plans(int on) {
  return answer([&] {
    watch_plans(on != 0);
    return std::string("{}");
  });
}

// {"plans": [...]} since watching began.
TORCH_CUBIN_API char* torch_cubin_watched_plans() {
  return answer([] { return nlohmann::json{{"plans", watched_plans()}}.dump(); });
}

// Makes this thread's products take the way of that name where they have it; null or "" ends that.
TORCH_CUBIN_API char* torch_cubin_force_way(const char* name) {
  return answer([&] {
    force_way(name != nullptr ? name : "");
    return std::string("{}");
  });
}

// Adds a tuned table, given as JSON (ops/matmul/tuned.h), to this process.
TORCH_CUBIN_API char* torch_cubin_add_tuned_table(const char* table) {
  return answer([&] {
    add_tuned_table(parse_json(given(table, "table"), "a tuned table"));
    return std::string("{}");
  });
}
