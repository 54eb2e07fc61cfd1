// The facts of images as JSON values. docs/inspect.md lists the keys.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "cubin/image.h"
#include "cubin/ptx.h"

namespace torch_cubin {

const char* kind_name(ParamKind kind);  // "pointer", "value", "unknown"

nlohmann::json to_json(const Image& image);
nlohmann::json to_json(const Ptx& ptx);

// Names may have any byte except NUL; invalid UTF-8 becomes U+FFFD instead of an exception.
std::string dump(const nlohmann::json& value);

}  // namespace torch_cubin
