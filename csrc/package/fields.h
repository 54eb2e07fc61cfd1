// Fields: strict reading of a JSON object. A missing, mistyped or unknown field is an error that
// names its location.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace torch_cubin {

// A JSON value as text for errors, shortened.
std::string shown_json(const nlohmann::json& value);

class Fields {
 public:
  // `label` names the object in errors: "op 'mylib::vec_add': kernels[0]". `object` must outlive
  // this.
  Fields(const nlohmann::json& object, std::string label);

  // Null if the field is absent or null. The functions below throw [input] for a field of the wrong
  // type and, except truth(), for an absent one.
  const nlohmann::json* find(const char* name);
  const nlohmann::json& get(const char* name);

  std::string text(const char* name);
  const nlohmann::json& list(const char* name);
  const nlohmann::json& object(const char* name);
  bool truth(const char* name, bool otherwise);
  int64_t integer(const char* name, int64_t least, int64_t most);

  // Must be called after all fields are read. Throws for a field that was not requested.
  void finish() const;

  // "op 'mylib::vec_add': kernels[0].grid"
  std::string at(const char* name) const;

 private:
  const nlohmann::json& object_;
  std::string label_;
  std::vector<std::string> known_;
};

// Whether the text is an identifier of C and Python (ASCII only).
bool is_identifier(const std::string& text);

// Throws [input]: the value at `label` is not the expected one.
[[noreturn]] void refuse_json(const std::string& label, const std::string& expected,
                              const nlohmann::json& got);

}  // namespace torch_cubin
