#include "package/fields.h"

#include <algorithm>

#include "cubin/error.h"

namespace torch_cubin {

using nlohmann::json;

std::string shown_json(const json& value) {
  return printable(value.dump(-1, ' ', false, json::error_handler_t::replace), 120);
}

bool is_identifier(const std::string& text) {
  const auto letter = [](char c) {
    return c == '_' || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
  };
  return !text.empty() && letter(text[0]) && std::all_of(text.begin(), text.end(), [&](char c) {
    return letter(c) || (c >= '0' && c <= '9');
  });
}

void refuse_json(const std::string& label, const std::string& expected, const json& got) {
  fail({"input", label, "is wrong", expected, shown_json(got), ""});
}

Fields::Fields(const json& object, std::string label) : object_(object), label_(std::move(label)) {
  if (!object.is_object()) refuse_json(label_, "an object", object);
}

std::string Fields::at(const char* name) const {
  // "op 'x'" + "kernels" is "op 'x': kernels"; a path continues with a dot.
  const bool path = label_.find("': ") != std::string::npos;
  return label_ + (path ? "." : ": ") + name;
}

const json* Fields::find(const char* name) {
  known_.push_back(name);
  const auto found = object_.find(name);
  return found == object_.end() || found->is_null() ? nullptr : &*found;
}

const json& Fields::get(const char* name) {
  const json* found = find(name);
  if (found == nullptr)
    fail({"input", label_, "lacks a field", std::string("'") + name + "'", "", ""});
  return *found;
}

std::string Fields::text(const char* name) {
  const json& found = get(name);
  if (!found.is_string()) refuse_json(at(name), "a string", found);
  return found.get<std::string>();
}

const json& Fields::list(const char* name) {
  const json& found = get(name);
  if (!found.is_array()) refuse_json(at(name), "a list", found);
  return found;
}

const json& Fields::object(const char* name) {
  const json& found = get(name);
  if (!found.is_object()) refuse_json(at(name), "an object", found);
  return found;
}

bool Fields::truth(const char* name, bool otherwise) {
  const json* found = find(name);
  if (found == nullptr) return otherwise;
  if (!found->is_boolean()) refuse_json(at(name), "true or false", *found);
  return found->get<bool>();
}

int64_t Fields::integer(const char* name, int64_t least, int64_t most) {
  const json& found = get(name);
  const bool fits = found.is_number_unsigned()
                        ? found.get<uint64_t>() <= static_cast<uint64_t>(most < 0 ? 0 : most)
                        : found.is_number_integer() && found.get<int64_t>() <= most;
  if (!fits || found.get<int64_t>() < least) {
    refuse_json(at(name),
                "an integer from " + std::to_string(least) + " to " + std::to_string(most), found);
  }
  return found.get<int64_t>();
}

void Fields::finish() const {
  for (const auto& item : object_.items()) {
    if (std::find(known_.begin(), known_.end(), item.key()) != known_.end()) continue;
    std::string expected;
    for (const std::string& name : known_) expected += (expected.empty() ? "" : ", ") + name;
    fail({"input", label_, "has an unknown field", expected, "'" + printable(item.key()) + "'",
          "It may be of a newer torch_cubin."});
  }
}

}  // namespace torch_cubin
