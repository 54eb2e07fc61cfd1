"""The part of JSON Schema that docs/manifest.schema.json uses: `jsonschema` may be missing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

_TYPES = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "null": type(None),
}
_KNOWN = {
    *("$schema", "title", "description", "$defs", "$ref", "type", "const", "enum", "pattern"),
    *("required", "properties", "additionalProperties", "items", "prefixItems", "anyOf", "oneOf"),
    *("minItems", "maxItems", "minLength", "minimum", "maximum"),
}


def problems(value: Any, schema: Any, root: dict, where: str = "$") -> Iterator[str]:
    """The violations of a schema by a value."""
    if schema is False:
        yield f"{where}: not allowed"
    if isinstance(schema, bool):
        return
    assert set(schema) <= _KNOWN, set(schema) - _KNOWN
    if "$ref" in schema:
        target: Any = root
        for part in schema["$ref"].removeprefix("#/").split("/"):
            target = target[part]
        yield from problems(value, target, root, where)
    types = schema.get("type", [])
    types = [types] if isinstance(types, str) else types
    if types and not any(_is(value, name) for name in types):
        yield f"{where}: {value!r} is no {types}"
        return
    if "const" in schema and value != schema["const"]:
        yield f"{where}: {value!r} is not {schema['const']!r}"
    if "enum" in schema and not any(value == x and type(value) is type(x) for x in schema["enum"]):
        yield f"{where}: {value!r} is none of {schema['enum']}"
    for kind, most in (("anyOf", 99), ("oneOf", 1)):
        found = [list(problems(value, one, root, where)) for one in schema.get(kind, [])]
        if found and not 1 <= sum(not one for one in found) <= most:
            yield f"{where}: {value!r}: {kind}: {found}"
    if isinstance(value, str):
        if not re.search(schema.get("pattern", ""), value):
            yield f"{where}: {value!r} does not match"
        if len(value) < schema.get("minLength", 0):
            yield f"{where}: is too short"
    elif isinstance(value, int | float):
        if not schema.get("minimum", value) <= value <= schema.get("maximum", value):
            yield f"{where}: {value} is out of range"
    elif isinstance(value, list):
        if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)):
            yield f"{where}: has {len(value)} items"
        first = schema.get("prefixItems", [])
        for index, item in enumerate(value):
            inner = first[index] if index < len(first) else schema.get("items", True)
            yield from problems(item, inner, root, f"{where}[{index}]")
    elif isinstance(value, dict):
        for name in schema.get("required", []):
            if name not in value:
                yield f"{where}: lacks '{name}'"
        named = schema.get("properties", {})
        for name, item in value.items():
            inner = named.get(name, schema.get("additionalProperties", True))
            yield from problems(item, inner, root, f"{where}.{name}")


def _is(value: Any, name: str) -> bool:
    if name in ("number", "integer"):
        kinds = int if name == "integer" else (int, float)
        return isinstance(value, kinds) and not isinstance(value, bool)
    return isinstance(value, _TYPES[name])
