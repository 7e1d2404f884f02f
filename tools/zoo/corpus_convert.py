"""Format conversion: key-value lines, CSV rows, lists and nested records to JSON."""

from __future__ import annotations

import json
from collections.abc import Callable

from tools.zoo.corpus_schema import Example, field_list_text, schema_of
from tools.zoo.corpus_values import Values

Draw = Callable[[Values], object]

_COLUMNS: dict[str, Draw] = {
    "id": lambda v: v.integer(1, 999),
    "name": lambda v: v.name(),
    "surname": lambda v: v.surname(),
    "city": lambda v: v.city(),
    "age": lambda v: v.integer(18, 90),
    "price": lambda v: v.amount(),
    "stock": lambda v: v.integer(0, 500),
    "product": lambda v: v.product(),
    "code": lambda v: v.code(),
    "email": lambda v: v.email(),
    "date": lambda v: v.date()[0],
    "time": lambda v: v.time(),
    "active": lambda v: v.chance(0.5),
    "score": lambda v: v.integer(0, 100),
    "company": lambda v: v.company(),
    "topic": lambda v: v.topic(),
    "ip": lambda v: v.ip(),
    "port": lambda v: v.integer(1, 9999),
    "phone": lambda v: v.phone(),
    "street": lambda v: v.street(),
    "noun": lambda v: v.noun(),
    "total": lambda v: v.amount(),
    "owner": lambda v: v.name(),
    "weight": lambda v: v.integer(1, 120),
    "enabled": lambda v: v.chance(0.5),
}


def _show(value: object) -> str:
    return json.dumps(value) if isinstance(value, bool) else str(value)


def _record(v: Values, low: int, high: int) -> dict[str, object]:
    keys = v.rng.sample(list(_COLUMNS), v.integer(low, high))
    return {key: _COLUMNS[key](v) for key in keys}


def _lines(v: Values) -> Example:
    record = _record(v, 3, 6)
    template = v.choice(("{k}: {x}", "{k} = {x}", "- {k}: {x}", "{k}={x}"))
    text = "\n".join(template.format(k=k, x=_show(x)) for k, x in record.items())
    ask = v.choice((
        "Convert to JSON:\n{t}", "{t}\n\nWrite this as a JSON object.",
        "Make JSON from these lines.\n{t}", "Configuration:\n{t}\nAs JSON, please.",
    ))  # fmt: skip
    return _example(ask.format(t=text), record)


def _example(request: str, answer: object) -> Example:
    return Example("convert", request, json.dumps(answer), schema_of(answer))


def _csv(v: Values) -> Example:
    keys = v.rng.sample(list(_COLUMNS), v.integer(2, 3))
    rows = [{key: _COLUMNS[key](v) for key in keys} for _ in range(v.integer(1, 3))]
    separator = v.choice((",", ";", " | "))
    table = [separator.join(keys)]
    table += [separator.join(_show(x) for x in row.values()) for row in rows]
    ask = v.choice((
        "CSV to JSON:\n{t}", "Convert the rows to a JSON array.\n{t}",
        "{t}\n\nReturn these rows as JSON objects.",
    ))  # fmt: skip
    return _example(ask.format(t="\n".join(table)), rows)


def _list(v: Values) -> Example:
    key, draw = v.rng.choice((
        ("names", _COLUMNS["name"]), ("cities", _COLUMNS["city"]), ("codes", _COLUMNS["code"]),
        ("items", _COLUMNS["product"]), ("scores", _COLUMNS["score"]),
        ("prices", _COLUMNS["price"]), ("emails", _COLUMNS["email"]),
        ("topics", _COLUMNS["topic"]), ("hosts", _COLUMNS["ip"]),
    ))  # fmt: skip
    values = [draw(v) for _ in range(v.integer(2, 6))]
    if v.chance(0.5):
        text = ", ".join(map(_show, values[:-1])) + f" and {_show(values[-1])}"
    else:
        text = "\n".join(f"- {_show(x)}" for x in values)
    ask = v.choice((
        "List the {k} as JSON: {t}", "Put these {k} into a JSON object with one array:\n{t}",
        "{t}\n\nJSON with the key {k}.",
    ))  # fmt: skip
    answer: dict[str, object] = {key: values}
    if v.chance(0.3):
        answer["count"] = len(values)
        return _example(ask.format(k=f"{key} and their count", t=text), answer)
    return _example(ask.format(k=key, t=text), answer)


def _nested(v: Values) -> Example:
    outer, inner = _record(v, 1, 3), _record(v, 2, 3)
    name = v.choice(("details", "owner_info", "address", "meta", "settings", "contact"))
    inner = {k: x for k, x in inner.items() if k not in outer}
    if not inner:
        return _lines(v)
    answer: dict[str, object] = {**outer, name: inner}
    lines = [f"{k}: {_show(x)}" for k, x in outer.items()]
    if v.chance(0.5):
        lines += [f"{name}:"] + [f"  {k}: {_show(x)}" for k, x in inner.items()]
    else:
        lines += [f"{name}.{k}: {_show(x)}" for k, x in inner.items()]
    ask = v.choice((
        "YAML to JSON:\n{t}", "{t}\n\nGive the nested JSON.", "Convert to nested JSON:\n{t}",
    ))  # fmt: skip
    return _example(ask.format(t="\n".join(lines)), answer)


def _orders(v: Values) -> Example:
    items = [{"item": v.product(), "quantity": v.integer(1, 20)} for _ in range(v.integer(1, 3))]
    customer = v.name()
    listed = ", ".join(f"{x['quantity']} {x['item']}" for x in items)
    text = v.choice((
        "{c} orders {i}.", "{c} would like {i}.", "Cart of {c}: {i}.",
    )).format(c=customer, i=listed)  # fmt: skip
    ask = v.choice((
        "{t}\n\nJSON with customer and items (item, quantity).",
        "Extract customer and items (item, quantity) as JSON: {t}",
    ))  # fmt: skip
    return _example(ask.format(t=text), {"customer": customer, "items": items})


def _select(v: Values) -> Example:
    record = _record(v, 4, 6)
    kept_keys = v.rng.sample(list(record), v.integer(1, 3))
    kept = {key: record[key] for key in kept_keys}
    ask = v.choice((
        "From this JSON keep only {k}:\n{t}", "{t}\n\nSelect the fields {k} as JSON.",
    ))  # fmt: skip
    return _example(ask.format(k=field_list_text(kept), t=json.dumps(record)), kept)


_FORMS = (_lines, _lines, _csv, _csv, _list, _nested, _orders, _select)


def conversion(v: Values) -> Example:
    """Draw one conversion task."""
    return v.rng.choice(_FORMS)(v)
