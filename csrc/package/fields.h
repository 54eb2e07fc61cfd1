// Fields: one JSON object, read strictly: what is missing, of another type or unknown is an error
// that says where it stands.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace torch_cubin {

// "a list", "null" and so on: what a JSON value is, for errors; short values as they are.
std::string shown_json(const nlohmann::json& value);

class Fields {
 public:
  // `label` names the object in errors: "op 'mylib::vec_add': kernels[0]". Both must outlive this.
  Fields(const nlohmann::json& object, std::string label);

  // Null where the field is absent or null. What follows throws [input] for a field of another type,
  // and for one that is absent, but for truth().
  const nlohmann::json* find(const char* name);
  const nlohmann::json& get(const char* name);

  std::string text(const char* name);
  const nlohmann::json& list(const char* name);
  const nlohmann::json& object(const char* name);
  bool truth(const char* name, bool otherwise);
  int64_t integer(const char* name, int64_t least, int64_t most);

  // To be called when all are read: throws for a field that nobody asked for.
  void finish() const;

  // "op 'mylib::vec_add': kernels[0].grid"
  std::string at(const char* name) const;

 private:
  const nlohmann::json& object_;
  std::string label_;
  std::vector<std::string> known_;
};

// Whether it is a name as C and Python have them.
bool is_identifier(const std::string& text);

// Throws [input]: what stands at `label` is not what it should be.
[[noreturn]] void refuse_json(const std::string& label, const std::string& expected,
                              const nlohmann::json& got);

}  // namespace torch_cubin
