// Evaluates expressions for tests/unit/test_expressions.py, one JSON object a line in, one out; or,
// with the argument "schemas", parses them for test_schema.py, one JSON string a line in.
#include <iostream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cubin/error.h"
#include "declared/expression.h"
#include "declared/schema.h"

using namespace torch_cubin;
using nlohmann::json;

namespace {

// null is an int that is not given.
Value value_of(const json& x) {
  if (x.is_null()) return {ValueType::kNone, 0, 0};
  if (x.is_boolean()) return Value::of(x.get<bool>());
  return x.is_number_float() ? Value::of(x.get<double>()) : Value::of(x.get<int64_t>());
}

json to_json(const Value& x) {
  if (x.type == ValueType::kBool) return x.integer != 0;
  return x.type == ValueType::kInt ? json(x.integer) : json(x.number);
}

json evaluated(const json& line) {
  Scope scope;
  std::vector<Value> numbers;
  for (const auto& [name, x] : line["numbers"].items()) {
    numbers.push_back(value_of(x));
    scope.numbers.emplace_back(name, x.is_null() ? ValueType::kInt : numbers.back().type);
  }
  std::vector<std::string> held;
  for (const auto& [name, x] : line["texts"].items()) {
    scope.texts.push_back(name);
    held.push_back(x.get<std::string>());
  }
  const std::vector<std::string_view> texts(held.begin(), held.end());
  std::vector<TensorFacts> tensors;
  std::vector<std::vector<int64_t>> storage;
  std::vector<std::string> dtypes;
  storage.reserve(2 * line["tensors"].size());
  dtypes.reserve(line["tensors"].size());
  for (const auto& [name, x] : line["tensors"].items()) {
    scope.tensors.push_back(name);
    TensorFacts facts;
    if (!x.is_null()) {
      storage.push_back(x["sizes"].get<std::vector<int64_t>>());
      facts.sizes = storage.back().data();
      facts.dim = static_cast<int64_t>(storage.back().size());
      storage.push_back(x["strides"].get<std::vector<int64_t>>());
      facts.strides = storage.back().data();
      facts.itemsize = x["itemsize"].get<int64_t>();
      dtypes.push_back(x["dtype"].get<std::string>());
      facts.dtype = dtypes.back().c_str();
      facts.defined = true;
    }
    tensors.push_back(facts);
  }
  try {
    const Expression expression(line["tree"], scope, "a test");
    const Value value =
        expression.evaluate({tensors.data(), numbers.data(), 90, 132, texts.data()});
    return {{"value", to_json(value)}, {"text", expression.text()}};
  } catch (const Error& error) {
    return {{"tag", error.tag()}, {"message", error.what()}};
  }
}

json parsed(const json& line) {
  try {
    const Schema schema = parse_schema(line.get<std::string>());
    json out = {
        {"text", schema.text()}, {"name", schema.qualified_name()}, {"returns", schema.returns}};
    for (const SchemaArgument& argument : schema.arguments) {
      out["arguments"].push_back({{"name", argument.name},
                                  {"type", argument.type_text},
                                  {"mutated", argument.is_mutated()},
                                  {"keyword_only", argument.keyword_only},
                                  {"default", argument.default_text}});
    }
    return out;
  } catch (const Error& error) {
    return {{"tag", error.tag()}, {"message", error.what()}};
  }
}

}  // namespace

int main(int count, char** words) {
  const bool schemas = count > 1 && std::string(words[1]) == "schemas";
  for (std::string line; std::getline(std::cin, line);) {
    const json in = json::parse(line);
    std::cout << (schemas ? parsed(in) : evaluated(in))
                     .dump(-1, ' ', false, json::error_handler_t::replace)
              << "\n";
  }
}
