"""Shared pieces of the corpus: examples, prompts, JSON schemas and how prompts state them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["extract", "call", "convert", "code", "chat"]
JSON_KINDS: tuple[Kind, ...] = ("extract", "call", "convert")
Schema = dict[str, Any]

_PYTHON_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
}


@dataclass(frozen=True)
class Example:
    """One user turn and the wanted answer; `schema` describes the answer when it is JSON."""

    kind: Kind
    request: str
    answer: str
    schema: Schema | None = None


def type_name(value: object) -> str:
    """JSON Schema's name for the type of a Python value."""
    if isinstance(value, bool):
        return "boolean"
    return next(name for name, types in _PYTHON_TYPES.items() if isinstance(value, types))


def schema_of(value: object) -> Schema:
    """The strict schema of one JSON value: all keys required, no others allowed."""
    name = type_name(value)
    if isinstance(value, dict):
        properties = {key: schema_of(v) for key, v in value.items()}
        return {
            "type": "object",
            "properties": properties,
            "required": list(properties),
            "additionalProperties": False,
        }
    if isinstance(value, list):
        return {"type": "array", "items": schema_of(value[0]) if value else {}}
    return {"type": name}


def matches(value: object, schema: Mapping[str, Any]) -> bool:
    """Whether a decoded JSON value satisfies `schema`.

    Covers what the corpus uses: type, properties, required, additionalProperties, items, enum.
    """
    if "enum" in schema and value not in schema["enum"]:
        return False
    wanted = schema.get("type")
    if wanted is None:
        return True
    if not isinstance(value, _PYTHON_TYPES[wanted]):
        return False
    if isinstance(value, bool) and wanted != "boolean":
        return False
    if isinstance(value, list):
        return all(matches(v, schema.get("items", {})) for v in value)
    if isinstance(value, dict):
        return _object_matches(value, schema)
    return True


def _object_matches(value: Mapping[str, object], schema: Mapping[str, Any]) -> bool:
    properties: Mapping[str, Any] = schema.get("properties", {})
    if any(key not in value for key in schema.get("required", ())):
        return False
    if schema.get("additionalProperties") is False and any(k not in properties for k in value):
        return False
    return all(matches(v, properties[k]) for k, v in value.items() if k in properties)


def json_schema_text(fields: Mapping[str, object]) -> str:
    """A JSON Schema of a flat object as prompts print it."""
    properties = {key: {"type": type_name(value)} for key, value in fields.items()}
    return json.dumps({"type": "object", "properties": properties})


def field_list_text(fields: Mapping[str, object]) -> str:
    """The short form: `name (string), total (number)`."""
    return ", ".join(f"{key} ({type_name(value)})" for key, value in fields.items())


def bullet_text(lines: Sequence[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)
