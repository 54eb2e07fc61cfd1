// The facts of images as JSON values, for the files that write JSON. docs/inspect.md lists the
// keys.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "cubin/image.h"
#include "cubin/ptx.h"

namespace torch_cubin {

const char* kind_name(ParamKind kind);  // "pointer", "value", "unknown"

nlohmann::json to_json(const Image& image);
nlohmann::json to_json(const Ptx& ptx);

// A name may hold any byte but NUL: what is not UTF-8 becomes U+FFFD rather than an exception.
std::string dump(const nlohmann::json& value);

}  // namespace torch_cubin
