#include "ops/attention/problem/options.h"

#include <locale>
#include <sstream>

namespace torch_cubin {

std::string option_schema(const std::string& name, const OptionalTensor&) {
  return "Tensor? " + name + "=None";
}

std::string option_schema(const std::string& name, const std::optional<double>&) {
  return "float? " + name + "=None";
}

std::string option_schema(const std::string& name, bool value) {
  return "bool " + name + (value ? "=True" : "=False");
}

std::string option_schema(const std::string& name, int64_t value) {
  return "int " + name + "=" + std::to_string(value);
}

std::string option_schema(const std::string& name, double value) {
  std::ostringstream text;
  text.imbue(std::locale::classic());  // std::to_string writes the process's decimal comma
  text << "float " << name << "=" << value;
  return text.str();
}

const std::vector<OptionEntry<AttentionOptions>>& AttentionOptions::entries() {
  using Options = AttentionOptions;
  static const std::vector<OptionEntry<Options>> all = {TC_ATTENTION_OPTIONS(TC_OPTION_ENTRY)};
  return all;
}

AttentionViews views_of(const AttentionOptions& options) {
  AttentionViews views;
  TC_ATTENTION_OPTIONS(TC_OPTION_OPENED)
  views.e4m3 = options.e4m3;
  return views;
}

}  // namespace torch_cubin
