// Tuned tables: for products that were measured on one kind of GPU, the config that was quickest.
// torch_cubin.tune() and load_tuned() add them. A table of another GPU is never used.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "ops/matmul/backend.h"
#include "runtime/device.h"

namespace torch_cubin {

// The name (MatmulKernels::name) of the measured config; "" where the product was not measured
// there.
std::string tuned_config(const Device& device, const MatmulCase& problem);

// Rises whenever a table is added: what was planned before may be planned otherwise.
uint64_t tuned_generation();

// Adds a table, whose lines replace older ones of the same products. Throws [input] for a malformed
// table, or where no GPU of this process is the one that it was measured on.
void add_tuned_table(const nlohmann::json& table);

// The sizes, math and access of a case that a table's line names; the rest is not set. Throws
// std::exception for a line that is malformed.
MatmulCase tuned_case(const nlohmann::json& line);

// What a table says of a product's kind: {"m", "n", "k", "batch", "math", "a", "b"}.
nlohmann::json tuned_product(const MatmulCase& problem);

}  // namespace torch_cubin
