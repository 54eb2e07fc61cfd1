// Checks of a parsed schema, and its text. schema_parser.cpp parses.
#include "declared/schema.h"

#include <algorithm>

#include "cubin/error.h"

namespace torch_cubin {
namespace {

// Names that PyTorch and this library keep for their own ops.
constexpr const char* kReserved[] = {"aten", "prim",      "prims",   "cubin",
                                     "onnx", "quantized", "inductor"};

// The number without a decimal point: "25e-2" for "0.25". PyTorch's schema parser uses the
// process's locale and would stop at the point if that has a decimal comma. Other text is returned
// unchanged, for PyTorch to refuse.
std::string without_point(const std::string& number) {
  const size_t point = number.find('.');
  const size_t exponent = std::min(number.find_first_of("eE"), number.size());
  if (point == std::string::npos || point > exponent) return number;
  const std::string whole = number.substr(0, point);
  const std::string fraction = number.substr(point + 1, exponent - point - 1);
  const std::string power = number.substr(std::min(exponent + 1, number.size()));
  const size_t sign = !whole.empty() && (whole[0] == '-' || whole[0] == '+') ? 1 : 0;
  const size_t power_sign = !power.empty() && (power[0] == '-' || power[0] == '+') ? 1 : 0;
  const auto are_digits = [](const std::string& text, size_t from) {
    return text.find_first_not_of("0123456789", from) == std::string::npos;
  };
  const bool is_decimal = are_digits(whole, sign) && are_digits(fraction, 0) &&
                          are_digits(power, power_sign) && whole.size() + fraction.size() > sign &&
                          power.size() < 10 &&
                          (exponent == number.size() || power.size() > power_sign);
  if (!is_decimal) return number;
  const long long shift =
      (power.empty() ? 0 : std::stoll(power)) - static_cast<long long>(fraction.size());
  return whole + fraction + "e" + std::to_string(shift);
}

}  // namespace

std::string Schema::unqualified_name() const {
  return overload.empty() ? name : name + "." + overload;
}

std::string Schema::qualified_name() const { return name_space + "::" + unqualified_name(); }

std::string Schema::unqualified_schema() const { return written(false); }

std::string Schema::schema_for_pytorch() const { return written(true); }

std::string Schema::written(bool for_pytorch) const {
  std::string text = unqualified_name() + "(";
  bool keyword_only = false, first = true;
  for (const SchemaArgument& argument : arguments) {
    if (!first) text += ", ";
    first = false;
    if (argument.keyword_only && !keyword_only) text += "*, ";
    keyword_only = argument.keyword_only;
    text += argument.is_mutated() ? "Tensor(" + argument.alias + "!)" : argument.type_text;
    text += " " + argument.name;
    if (argument.default_text.empty()) continue;
    const bool point = !for_pytorch || !argument.is_float();
    text += "=" + (point ? argument.default_text : without_point(argument.default_text));
  }
  text += ") -> ";
  const bool single = returns.size() == 1;
  if (!single) text += '(';
  for (size_t i = 0; i < returns.size(); ++i) {
    text += (i > 0 ? ", Tensor" : "Tensor") + (returns[i].empty() ? "" : " " + returns[i]);
  }
  return text + (single ? "" : ")");
}

std::string Schema::text() const { return name_space + "::" + unqualified_schema(); }

void check_schema(const Schema& schema) {
  const std::string op = "op '" + schema.qualified_name() + "'";
  for (const char* reserved : kReserved) {
    if (schema.name_space != reserved) continue;
    fail({"input", op, "lies in a namespace that is taken", "a name of your own",
          "'" + schema.name_space + "'", ""});
  }
  if (std::none_of(schema.arguments.begin(), schema.arguments.end(),
                   [](const SchemaArgument& argument) { return argument.is_tensor(); })) {
    fail({"input", op, "takes no tensor", "at least one Tensor argument, which says the device",
          schema.text(), "Add one, or launch the kernel directly: torch_cubin.load(...)."});
  }
  if (schema.returns.empty() && !schema.mutates()) {
    fail({"input", op, "returns nothing and changes nothing",
          "an output, or an argument that is changed: Tensor(a!)", schema.text(),
          "A compiled graph would leave the call out."});
  }
  for (const SchemaArgument& argument : schema.arguments) {
    for (const std::string& result : schema.returns) {
      if (argument.name != (result.empty() ? "out" : result)) continue;
      fail({"input", op, "has an argument and an output of one name", "names of their own",
            "'" + argument.name + "'",
            result.empty() ? "A single output is called 'out' unless the schema names it." : ""});
    }
  }
}

void check_differentiable(const Schema& schema) {
  const std::string op = "op '" + schema.qualified_name() + "'";
  if (schema.mutates()) {
    fail({"input", op, "changes its arguments, so it can have no derivative",
          "a schema without (a!)", schema.text(), ""});
  }
  for (const SchemaArgument& argument : schema.arguments) {
    if (!argument.keyword_only || !argument.is_tensor()) continue;
    fail({"input", op,
          "has the keyword-only tensor '" + argument.name +
              "', which PyTorch's autograd does not take",
          "tensors before the '*' of the schema", "", ""});
  }
}

void check_gradient_names(const Schema& schema) {
  std::vector<std::string> names;
  names.reserve(schema.arguments.size() + schema.returns.size());
  for (const SchemaArgument& argument : schema.arguments) names.push_back(argument.name);
  for (const std::string& name : schema.returns) names.push_back(name.empty() ? "out" : name);
  for (size_t i = schema.arguments.size(); i < names.size(); ++i) {
    const std::string gradient = "grad_" + names[i];
    if (std::find(names.begin(), names.end(), gradient) == names.end()) continue;
    fail({"input", "op '" + schema.qualified_name() + "'",
          "has '" + names[i] + "' and '" + gradient +
              "', which its backward op could not tell from the gradient of '" + names[i] + "'",
          "names of their own", gradient, ""});
  }
}

}  // namespace torch_cubin
