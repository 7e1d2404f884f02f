"""Extraction: a short text and a schema in, a JSON object out."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tools.zoo.corpus_schema import Example, field_list_text, json_schema_text, schema_of
from tools.zoo.corpus_values import Values

# A drawn field: the JSON value and, where it differs, its form in running text.
Drawn = Any


@dataclass(frozen=True)
class Domain:
    """A family of texts. `draw` gives the fields; templates name them in braces; `aliases`
    are other key names a schema may use for a field."""

    draw: Callable[[Values], dict[str, Drawn]]
    templates: tuple[str, ...]
    aliases: dict[str, tuple[str, ...]]


def _order(v: Values) -> dict[str, Drawn]:
    return {
        "order_id": v.code(), "customer": v.name(), "item": v.product(),
        "quantity": v.integer(1, 24), "total": v.amount(), "date": v.date(),
    }  # fmt: skip


def _contact(v: Values) -> dict[str, Drawn]:
    return {
        "name": v.name(), "email": v.email(), "phone": v.phone(), "company": v.company(),
        "city": v.city(),
    }  # fmt: skip


def _event(v: Values) -> dict[str, Drawn]:
    return {
        "title": v.topic(), "date": v.date(), "time": v.time(), "place": f"room {v.digits(3)}",
        "organizer": v.name(),
    }  # fmt: skip


def _ticket(v: Values) -> dict[str, Drawn]:
    return {
        "ticket_id": v.code(), "user": v.name(), "product": v.product(),
        "priority": v.choice(("low", "medium", "high", "urgent")),
        "status": v.choice(("open", "closed", "pending", "resolved")),
    }  # fmt: skip


def _log(v: Values) -> dict[str, Drawn]:
    return {
        "level": v.choice(("INFO", "WARN", "ERROR", "DEBUG")), "service": f"{v.noun()}-service",
        "host": v.ip(), "code": v.choice(("200", "301", "404", "429", "500", "503")),
        "latency_ms": v.integer(1, 1900), "time": v.time(),
    }  # fmt: skip


def _address(v: Values) -> dict[str, Drawn]:
    return {
        "name": v.name(), "street": v.street(), "city": v.city(), "zip": v.digits(5),
    }  # fmt: skip


def _invoice(v: Values) -> dict[str, Drawn]:
    return {
        "invoice": v.code(), "vendor": v.company(), "amount": v.amount(), "due_date": v.date(),
        "currency": v.choice(("USD", "EUR", "GBP", "JPY")),
        "paid": (v.chance(0.5),),
    }  # fmt: skip


def _flight(v: Values) -> dict[str, Drawn]:
    return {
        "passenger": v.name(), "flight": f"{v.choice(('LH', 'BA', 'AF', 'UA'))}{v.digits(3)}",
        "origin": v.city(), "destination": v.city(), "date": v.date(),
        "seat": f"{v.integer(1, 40)}{v.choice('ABCDEF')}",
    }  # fmt: skip


def _job(v: Values) -> dict[str, Drawn]:
    return {
        "candidate": v.name(), "role": v.choice((
            "data analyst", "designer", "nurse", "product manager", "sales agent",
            "software engineer", "teacher", "technician")),
        "company": v.company(), "salary": v.integer(30, 180) * 1000, "start_date": v.date(),
    }  # fmt: skip


def _review(v: Values) -> dict[str, Drawn]:
    return {
        "product": v.product(), "rating": v.integer(1, 5), "reviewer": v.name(),
        "recommended": (v.chance(0.5),),
    }  # fmt: skip


def _shipment(v: Values) -> dict[str, Drawn]:
    return {
        "tracking": v.code(), "sender": v.company(), "recipient": v.name(), "city": v.city(),
        "weight_kg": v.amount(),
    }  # fmt: skip


def _sensor(v: Values) -> dict[str, Drawn]:
    return {
        "sensor": v.code(), "location": v.city(), "temperature": v.integer(-20, 45),
        "humidity": v.integer(10, 99), "time": v.time(),
    }  # fmt: skip


def _payment(v: Values) -> dict[str, Drawn]:
    return {
        "sender": v.name(), "recipient": v.name(), "amount": v.amount(), "date": v.date(),
        "reference": v.code(),
    }  # fmt: skip


def _booking(v: Values) -> dict[str, Drawn]:
    return {
        "guest": v.name(), "hotel": f"Hotel {v.surname()}", "nights": v.integer(1, 14),
        "rooms": v.integer(1, 5), "check_in": v.date(), "city": v.city(),
    }  # fmt: skip


_PERSON = ("name", "person", "full_name")
DOMAINS: tuple[Domain, ...] = (
    Domain(_order, (
        "Order {order_id}: {customer} bought {quantity} x {item} on {date} for ${total}.",
        "On {date} {customer} ordered {quantity} {item}. Total ${total}, order number {order_id}.",
        "Hello, I am {customer}. My order {order_id} of {date} has {quantity} {item} and cost"
        " ${total}.",
        "{customer} paid ${total} for {quantity} units of {item} ({order_id}, {date}).",
    ), {"customer": ("buyer", *_PERSON), "order_id": ("order", "id"), "item": ("product",),
        "quantity": ("count",), "total": ("price", "amount")}),
    Domain(_contact, (
        "{name} works at {company} in {city}. Email {email}, phone {phone}.",
        "Please add {name} ({company}, {city}) to my contacts: {phone}, {email}.",
        "Best regards, {name}\n{company}\n{city}\n{email}\nTel {phone}",
        "You can reach {name} of {company} at {email} or {phone}. The office is in {city}.",
    ), {"name": ("person", "contact"), "company": ("employer",), "phone": ("telephone",)}),
    Domain(_event, (
        "The {title} is on {date} at {time} in {place}, organized by {organizer}.",
        "{organizer} invites you to the {title}: {date}, {time}, {place}.",
        "Reminder from {organizer}: {title} in {place} on {date}. We start at {time}.",
        "Calendar: {date} {time} {title} ({place}). Host: {organizer}.",
    ), {"title": ("event", "subject"), "organizer": ("host", *_PERSON), "place": ("location",)}),
    Domain(_ticket, (
        "Ticket {ticket_id} from {user} about the {product} is {status} with {priority} priority.",
        "{user} reported a broken {product}. Ticket {ticket_id}, priority {priority}, status"
        " {status}.",
        "[{ticket_id}] {priority} / {status}: the {product} of {user} does not work.",
    ), {"ticket_id": ("ticket", "id"), "user": ("customer", *_PERSON), "product": ("item",)}),
    Domain(_log, (
        "{time} {level} {service} host={host} code={code} latency={latency_ms}ms",
        "[{level}] {time} {host} {service} returned {code} in {latency_ms} ms",
        "At {time} {service} on {host} logged {level}: code {code}, {latency_ms} ms.",
    ), {"service": ("app",), "host": ("ip",), "code": ("status",), "level": ("severity",)}),
    Domain(_address, (
        "Send it to {name}, {street}, {city} {zip}.",
        "{name} has moved to {street} in {city}. The new zip code is {zip}.",
        "Deliver to:\n{name}\n{street}\n{zip} {city}",
    ), {"name": ("recipient", "person"), "zip": ("postal_code", "zip_code")}),
    Domain(_invoice, (
        "Invoice {invoice} from {vendor}: {amount} {currency}, due {due_date}. {paid?It is"
        " paid.|It is not paid.}",
        "{vendor} sent invoice {invoice} over {amount} {currency}. Due date {due_date}. {paid?Paid"
        " already.|Still open.}",
        "We {paid?have paid|have not paid} {amount} {currency} to {vendor} ({invoice}, due"
        " {due_date}).",
    ), {"vendor": ("company", "supplier"), "amount": ("total",), "invoice": ("invoice_id", "id")}),
    Domain(_flight, (
        "{passenger} flies from {origin} to {destination} on {date} with {flight}, seat {seat}.",
        "Boarding pass: {flight} {origin} - {destination}, {date}, {passenger}, seat {seat}.",
        "Flight {flight} on {date}: seat {seat} for {passenger}. Route {origin} to {destination}.",
    ), {"passenger": ("traveler", *_PERSON), "origin": ("from",), "destination": ("to",)}),
    Domain(_job, (
        "{candidate} joins {company} as {role} on {start_date} for {salary} a year.",
        "{company} offers {candidate} the job of {role}: salary {salary}, start {start_date}.",
        "New {role} at {company}: {candidate}, from {start_date}, {salary} per year.",
    ), {"candidate": ("employee", *_PERSON), "role": ("position", "job"),
        "company": ("employer",)}),
    Domain(_review, (
        "{reviewer} gave the {product} {rating} stars and {recommended?would|would not} buy it"
        " again.",
        "Review of the {product} by {reviewer}: {rating} of 5."
        " {recommended?I recommend it.|I do not recommend it.}",
    ), {"product": ("item",), "rating": ("stars", "score"), "reviewer": ("author", *_PERSON)}),
    Domain(_shipment, (
        "Parcel {tracking} from {sender} to {recipient} in {city} weighs {weight_kg} kg.",
        "{sender} shipped {weight_kg} kg to {recipient}, {city}. Tracking number {tracking}.",
        "{recipient} ({city}) will get a parcel of {weight_kg} kg from {sender}: {tracking}.",
    ), {"tracking": ("tracking_number", "id"), "sender": ("company",), "weight_kg": ("weight",)}),
    Domain(_sensor, (
        "Sensor {sensor} in {location} at {time}: {temperature} C, humidity {humidity} %.",
        "{time} {location}: {temperature} degrees and {humidity} % humidity, says {sensor}.",
        "{sensor} | {location} | {time} | temp={temperature} | hum={humidity}",
    ), {"location": ("city", "place"), "sensor": ("device", "id"), "temperature": ("temp",)}),
    Domain(_payment, (
        "{sender} sent ${amount} to {recipient} on {date}, reference {reference}.",
        "Transfer {reference}: ${amount} from {sender} to {recipient}, {date}.",
        "{recipient} received ${amount} from {sender} ({date}, {reference}).",
    ), {"sender": ("from", "payer"), "recipient": ("to", "payee"), "reference": ("id",)}),
    Domain(_booking, (
        "{guest} booked {rooms} rooms for {nights} nights at {hotel} in {city} from {check_in}.",
        "{hotel}, {city}: {guest}, {nights} nights, {rooms} rooms, check-in {check_in}.",
        "Please reserve {rooms} rooms at {hotel} in {city} for {guest}. We arrive {check_in} and"
        " stay {nights} nights.",
    ), {"guest": ("customer", *_PERSON), "check_in": ("date", "arrival"), "hotel": ("place",)}),
)  # fmt: skip

_ASKS = (
    "Extract the data as JSON.\n{schema}\n\n{text}",
    "{text}\n\nReturn JSON with this schema: {schema}",
    "Read the text and fill the schema.\nSchema: {schema}\nText: {text}",
    "Text: {text}\nSchema: {schema}\nAnswer only with JSON.",
)
_ASKS_FIELDS = (
    "Extract as JSON: {schema}\n\n{text}",
    "{text}\n\nGive me a JSON object with {schema}.",
    "Fields: {schema}\nText: {text}",
    "Turn this into JSON with the fields {schema}:\n{text}",
)


def _value(drawn: Drawn) -> object:
    return drawn[0] if isinstance(drawn, tuple) else drawn


def _render(template: str, fields: dict[str, Drawn]) -> str:
    text = template
    for key, drawn in fields.items():
        if isinstance(drawn, tuple) and isinstance(drawn[0], bool):
            text = _render_choice(text, key, drawn[0])
        else:
            shown = drawn[1] if isinstance(drawn, tuple) else drawn
            text = text.replace("{" + key + "}", str(shown))
    return text


def _render_choice(text: str, key: str, truth: bool) -> str:
    """Resolve `{key?words if true|words if false}`."""
    mark = "{" + key + "?"
    begin = text.find(mark)
    if begin < 0:
        raise ValueError(f"template without a phrase for the boolean field {key!r}: {text}")
    end = text.index("}", begin)
    options = text[begin + len(mark) : end].split("|")
    return text[:begin] + options[0 if truth else 1] + text[end + 1 :]


def extraction(v: Values) -> Example:
    """Draw one extraction task: 2 to 5 fields of one domain, in the order the schema gives."""
    domain = v.rng.choice(DOMAINS)
    fields = domain.draw(v)
    text = _render(v.choice(domain.templates), fields)
    chosen = v.rng.sample(list(fields), v.integer(2, min(5, len(fields))))
    answer: dict[str, object] = {}
    for key in chosen:
        names = (key, key, key, *domain.aliases.get(key, ()))
        name = v.choice(names)
        answer[key if name in answer or name in fields else name] = _value(fields[key])
    if v.chance(0.35) and len(answer) <= 4:
        request = v.choice(_ASKS).format(schema=json_schema_text(answer), text=text)
    else:
        request = v.choice(_ASKS_FIELDS).format(schema=field_list_text(answer), text=text)
    return Example("extract", request, json.dumps(answer), schema_of(answer))
