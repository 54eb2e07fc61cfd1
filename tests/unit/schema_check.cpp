// Parses schemas for tests/unit/test_schema.py: one JSON string a line in, one object out.
#include <iostream>
#include <nlohmann/json.hpp>
#include <string>

#include "cubin/error.h"
#include "declared/schema.h"

using namespace torch_cubin;
using nlohmann::json;

int main() {
  for (std::string line; std::getline(std::cin, line);) {
    json out;
    try {
      const Schema schema = parse_schema(json::parse(line).get<std::string>());
      out = {
          {"text", schema.text()}, {"name", schema.qualified_name()}, {"returns", schema.returns}};
      for (const SchemaArgument& argument : schema.arguments) {
        out["arguments"].push_back({{"name", argument.name},
                                    {"type", argument.type_text},
                                    {"mutated", argument.is_mutated()},
                                    {"keyword_only", argument.keyword_only},
                                    {"default", argument.default_text}});
      }
    } catch (const Error& error) {
      out = {{"tag", error.tag()}, {"message", error.what()}};
    }
    std::cout << out.dump(-1, ' ', false, json::error_handler_t::replace) << "\n";
  }
}
