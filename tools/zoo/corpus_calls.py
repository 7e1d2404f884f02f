"""Function calling: one to three tool signatures and a request in, a JSON call out."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.zoo.corpus_schema import Example, Schema, type_name
from tools.zoo.corpus_values import Values, is_held_out

BFCL_FILE = Path(__file__).parent / "data" / "bfcl_functions.json"
Draw = Callable[[Values], Any]


@dataclass(frozen=True)
class Tool:
    """A tool: parameter name -> JSON type, and ways to ask for it in words."""

    name: str
    description: str
    parameters: Mapping[str, str]
    requests: tuple[str, ...] = ()
    draws: tuple[Draw, ...] = ()


_UNITS = ("celsius", "fahrenheit")
_LANGUAGES = ["English", "French", "German", "Italian", "Japanese", "Polish", "Spanish", "Turkish"]
_CURRENCIES = ["USD", "EUR", "GBP", "JPY", "CHF", "CAD"]
_GENRES = [
    "comedy",
    "drama",
    "fantasy",
    "history",
    "horror",
    "jazz",
    "pop",
    "rock",
    "science",
    "sports",
]


def _tool(name: str, description: str, fields: Mapping[str, Draw], *requests: str) -> Tool:
    import random

    sample = Values(random.Random(0), held_out=False)
    types = {key: type_name(draw(sample)) for key, draw in fields.items()}
    return Tool(name, description, types, requests, tuple(fields.values()))


def _iso_date(v: Values) -> str:
    return v.date()[0]


def _integer(low: int, high: int) -> Draw:
    return lambda v: v.integer(low, high)


def _choice(options: Sequence[str]) -> Draw:
    return lambda v: v.choice(options)


TOOLS: tuple[Tool, ...] = (
    _tool("get_weather", "Weather forecast for a city.",
          {"city": Values.city, "days": _integer(1, 14), "unit": _choice(_UNITS)},
          "What will the weather be in {city} for the next {days} days, in {unit}?",
          "Show me a {days} day forecast for {city} in {unit}."),
    _tool("book_flight", "Book a flight.",
          {"origin": Values.city, "destination": Values.city, "date": _iso_date,
           "passengers": _integer(1, 6)},
          "Book {passengers} seats from {origin} to {destination} on {date}.",
          "I need to fly to {destination} from {origin} on {date}, {passengers} people."),
    _tool("send_email", "Send an email.",
          {"to": Values.email, "subject": Values.topic},
          "Send an email to {to} about the {subject}.",
          "Write to {to} with the subject {subject}."),
    _tool("create_event", "Create a calendar event.",
          {"title": Values.topic, "date": _iso_date, "time": Values.time},
          "Put the {title} in my calendar on {date} at {time}.",
          "Schedule a {title} for {date}, {time}."),
    _tool("transfer_money", "Transfer money to a person.",
          {"recipient": Values.name, "amount": Values.amount, "currency": _choice(_CURRENCIES)},
          "Send {amount} {currency} to {recipient}.",
          "Please transfer {amount} {currency} to the account of {recipient}."),
    _tool("search_products", "Search the shop.",
          {"query": Values.product, "max_price": Values.amount},
          "Find a {query} for less than {max_price}.",
          "I am looking for a {query}, at most {max_price}."),
    _tool("track_parcel", "Track a parcel.", {"tracking_id": Values.code},
          "Where is my parcel {tracking_id}?", "Track {tracking_id} please."),
    _tool("set_alarm", "Set an alarm.", {"time": Values.time, "label": Values.topic},
          "Wake me at {time} for the {label}.", "Set an alarm at {time}, call it {label}."),
    _tool("translate_text", "Translate a text.",
          {"text": Values.topic, "target": _choice(_LANGUAGES)},
          "Translate {text} to {target}.", "How do I say {text} in {target}?"),
    _tool("convert_currency", "Convert an amount.",
          {"amount": Values.amount, "source": _choice(_CURRENCIES),
           "target": _choice(_CURRENCIES)},
          "How much is {amount} {source} in {target}?", "Convert {amount} {source} to {target}."),
    _tool("find_hotel", "Find a hotel.",
          {"city": Values.city, "check_in": _iso_date, "nights": _integer(1, 14)},
          "Find a hotel in {city} from {check_in} for {nights} nights.",
          "I stay {nights} nights in {city}, arriving on {check_in}. Find me a hotel."),
    _tool("add_contact", "Add a contact.",
          {"name": Values.name, "phone": Values.phone, "email": Values.email},
          "Save {name} with the phone {phone} and the email {email}.",
          "New contact: {name}, {phone}, {email}."),
    _tool("open_ticket", "Open a support ticket.",
          {"product": Values.product, "priority": _choice(("low", "medium", "high")),
           "customer": Values.name},
          "Open a {priority} priority ticket for {customer} about a {product}.",
          "{customer} has a problem with the {product}. Make it {priority} priority."),
    _tool("play_music", "Play music.", {"artist": Values.name, "genre": _choice(_GENRES)},
          "Play some {genre} by {artist}.", "I want to hear {artist}, the {genre} songs."),
    _tool("set_temperature", "Set the temperature of a room.",
          {"room": _choice(("kitchen", "bedroom", "office", "bathroom", "garage")),
           "degrees": _integer(14, 28)},
          "Set the {room} to {degrees} degrees.", "Make it {degrees} degrees in the {room}."),
    _tool("get_stock_price", "Stock price of a company.",
          {"company": Values.company, "date": _iso_date},
          "What was the stock price of {company} on {date}?",
          "Give me the price of {company} shares for {date}."),
    _tool("calculate_loan", "Monthly payment of a loan.",
          {"amount": _integer(1000, 90000), "years": _integer(1, 30), "rate": Values.amount},
          "What do I pay monthly for a loan of {amount} over {years} years at {rate} percent?",
          "Compute a loan: {amount}, {years} years, {rate} %."),
    _tool("order_taxi", "Order a taxi.",
          {"pickup": Values.street, "time": Values.time, "passengers": _integer(1, 6)},
          "I need a taxi at {pickup} at {time} for {passengers} people.",
          "Order a cab for {passengers} to {pickup}, {time}."),
    _tool("cancel_order", "Cancel an order.",
          {"order_id": Values.code, "refund": lambda v: v.chance(0.5)},
          "Cancel order {order_id}, refund {refund}.",
          "Please cancel {order_id} (refund: {refund})."),
    _tool("block_ip", "Block an address in the firewall.",
          {"ip": Values.ip, "minutes": _integer(5, 600)},
          "Block {ip} for {minutes} minutes.", "Ban the address {ip}, {minutes} minutes."),
    _tool("update_address", "Change the address of a customer.",
          {"customer": Values.name, "street": Values.street, "city": Values.city},
          "{customer} now lives at {street} in {city}.",
          "Change the address of {customer} to {street}, {city}."),
    _tool("reserve_table", "Reserve a table.",
          {"restaurant": Values.surname, "guests": _integer(1, 12), "time": Values.time},
          "A table for {guests} at {restaurant} at {time} please.",
          "Reserve at {restaurant}, {time}, {guests} guests."),
)  # fmt: skip

_BFCL_TYPES = {"string": "string", "integer": "integer", "float": "number", "boolean": "boolean"}


@functools.cache
def bfcl_tools(held_out: bool) -> tuple[Tool, ...]:
    """Function signatures of bfcl-eval; a name's hash decides its split."""
    rows = json.loads(BFCL_FILE.read_text())["functions"]
    return tuple(
        Tool(
            row["name"],
            row["description"],
            {key: _BFCL_TYPES[spec["type"]] for key, spec in row["parameters"].items()},
        )
        for row in rows
        if is_held_out(row["name"]) == held_out
    )


def _signature(tool: Tool) -> str:
    fields = ", ".join(f"{key}: {kind}" for key, kind in tool.parameters.items())
    return f"{tool.name}({fields})"


def _json_signature(tool: Tool) -> str:
    parameters = {key: {"type": kind} for key, kind in tool.parameters.items()}
    return json.dumps({"name": tool.name, "parameters": parameters})


def _show(value: object) -> str:
    return json.dumps(value) if isinstance(value, bool) else str(value)


def _any_value(v: Values, key: str, kind: str) -> object:
    if kind == "integer":
        return v.integer(1, 2500) if v.chance(0.5) else v.integer(1, 30)
    if kind == "number":
        return v.amount()
    if kind == "boolean":
        return v.chance(0.5)
    by_key: dict[str, Draw] = {
        "city": Values.city, "location": Values.city, "name": Values.name, "date": _iso_date,
        "email": Values.email, "time": Values.time, "company": Values.company,
    }  # fmt: skip
    for word, draw in by_key.items():
        if word in key.lower():
            return draw(v)
    return v.choice((v.topic(), v.surname(), v.noun(), v.code(), v.product()))


def _generic_request(v: Values, tool: Tool, arguments: Mapping[str, object]) -> str:
    words = {key: key.replace("_", " ") for key in arguments}
    style = v.integer(0, 2)
    if style == 0:
        given = ", ".join(f"{words[k]} {_show(a)}" for k, a in arguments.items())
        return f"{tool.description} Use {given}."
    if style == 1:
        given = " and ".join(f"{words[k]} = {_show(a)}" for k, a in arguments.items())
        return f"{tool.description[:-1]} with {given}."
    given = "\n".join(f"{words[k]}: {_show(a)}" for k, a in arguments.items())
    return f"{tool.description}\n{given}"


def _call(v: Values, tool: Tool) -> tuple[str, dict[str, object]]:
    if not tool.requests:
        arguments = {key: _any_value(v, key, kind) for key, kind in tool.parameters.items()}
        return _generic_request(v, tool, arguments), arguments
    arguments = {key: draw(v) for key, draw in zip(tool.parameters, tool.draws, strict=True)}
    text = v.choice(tool.requests)
    return text.format(**{key: _show(a) for key, a in arguments.items()}), arguments


def call_schema(tools: Sequence[Tool], chosen: Tool) -> Schema:
    """Schema of a call: the name must be an offered tool, the arguments fit the chosen one."""
    properties = {key: {"type": kind} for key, kind in chosen.parameters.items()}
    arguments = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {
        "type": "object",
        "properties": {
            "name": {"type": "string", "enum": [t.name for t in tools]},
            "arguments": arguments,
        },
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


_ASKS = (
    "Tools:\n{tools}\n\n{request}",
    "You can call:\n{tools}\nRequest: {request}",
    "{request}\n\nAvailable functions:\n{tools}",
    "Functions:\n{tools}\nAnswer with a JSON call.\n{request}",
)


def function_call(v: Values) -> Example:
    """Draw one call: a generated family (70 %) or a bfcl-eval signature, with distractors."""
    generated = v.chance(0.7)
    chosen = v.rng.choice(TOOLS if generated else bfcl_tools(v.held_out))
    tools = [chosen]
    for _ in range(v.integer(0, 2) if generated else v.integer(0, 1)):
        other = v.rng.choice(TOOLS if v.chance(0.7) else bfcl_tools(v.held_out))
        if other.name not in {t.name for t in tools}:
            tools.append(other)
    v.rng.shuffle(tools)
    request, arguments = _call(v, chosen)
    shown = _json_signature if len(tools) == 1 and v.chance(0.5) else _signature
    listing = "\n".join(shown(t) for t in tools)
    text = v.choice(_ASKS).format(tools=listing, request=request)
    answer = json.dumps({"name": chosen.name, "arguments": arguments})
    return Example("call", text, answer, call_schema(tools, chosen))
