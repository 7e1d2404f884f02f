"""Short answers in words: explanations, replies and rewrites, so that not all is JSON."""

from __future__ import annotations

from tools.zoo.corpus_schema import Example
from tools.zoo.corpus_values import Values

_TERMS: dict[str, tuple[str, str]] = {
    "cache": ("a fast store for results that are needed again", "saves time"),
    "database": ("a program that keeps records and answers queries", "keeps data safe"),
    "list": ("an ordered collection that can change", "holds many values in order"),
    "tuple": ("an ordered collection that cannot change", "is safe to share"),
    "dictionary": ("a map from keys to values", "finds a value quickly"),
    "function": ("a named piece of code with inputs and a result", "avoids repeated code"),
    "class": ("a plan for objects with data and methods", "groups data with behavior"),
    "loop": ("a block of code that runs many times", "handles every item"),
    "thread": ("a line of work inside a process", "lets work overlap"),
    "process": ("a running program with its own memory", "isolates work"),
    "server": ("a computer that answers requests of clients", "shares one service"),
    "router": ("a device that sends packets between networks", "finds the way for data"),
    "firewall": ("a filter for network traffic", "blocks unwanted access"),
    "token": ("a small piece of text that a model reads", "turns text into numbers"),
    "model": ("a function with learned weights", "predicts the next token"),
    "compiler": ("a program that turns source code into machine code", "makes programs fast"),
    "parser": ("a program that reads text by a grammar", "finds the structure of text"),
    "queue": ("a line where the first in is the first out", "keeps the order of work"),
    "stack": ("a pile where the last in is the first out", "remembers where to return"),
    "index": ("a sorted table that points to records", "speeds up search"),
    "backup": ("a second copy of data", "protects against loss"),
    "budget": ("a plan for income and spending", "keeps costs under control"),
    "invoice": ("a document that asks for payment", "states what is owed"),
    "contract": ("an agreement between two parties", "makes duties clear"),
    "meeting": ("a time when people talk about a topic", "helps people decide"),
    "schema": ("a description of the shape of data", "tells valid data from invalid data"),
    "test": ("a check that code does what it should", "finds mistakes early"),
    "branch": ("a separate line of changes in a repository", "keeps work apart"),
    "gradient": ("the direction in which a loss grows fastest", "shows how to change weights"),
    "hash": ("a short number computed from data", "compares data quickly"),
}


_EXPLAIN_ASKS = (
    "What is a {t}?",
    "Explain the word {t}.",
    "Tell me what a {t} is and why it is useful.",
    "Define {t} in two sentences.",
    "My colleague asked about a {t}. What is that?",
)
_COMPARE_ASKS = (
    "What is the difference between a {a} and a {b}?",
    "Compare a {a} with a {b}.",
)


def _explain(v: Values) -> Example:
    term = ""

    def draw() -> str:
        nonlocal term
        term = v.choice(tuple(_TERMS))
        return v.choice(_EXPLAIN_ASKS).format(t=term)

    ask = v.composed(draw)
    meaning, use = _TERMS[term]
    frame = v.integer(0, 1) if ask.startswith(("What", "Explain")) else 2
    answers = (
        f"A {term} is {meaning}. It {use}.",
        f"A {term} is {meaning}. People use it because it {use}.",
        f"In short, a {term} is {meaning}. It is useful because it {use}.",
    )
    return Example("chat", ask, answers[frame])


def _difference(v: Values) -> Example:
    pair: list[str] = []

    def draw() -> str:
        pair[:] = v.rng.sample(list(_TERMS), 2)
        return v.choice(_COMPARE_ASKS).format(a=pair[0], b=pair[1])

    ask = v.composed(draw)
    one, two = pair
    answer = f"A {one} is {_TERMS[one][0]}, while a {two} is {_TERMS[two][0]}."
    return Example("chat", ask, answer)


def _reply(v: Values) -> Example:
    name, topic, day, time = v.first_name(), v.topic(), v.date()[0], v.time()
    ask = v.choice((
        "Write a short reply to {n}: the {s} moves to {d} at {t}.",
        "Tell {n} that the {s} is now on {d} at {t}.",
    ))  # fmt: skip
    answer = (
        f"Hi {name}, the {topic} has been moved to {day} at {time}. Please let me know if that"
        " works for you. Best regards"
    )
    return Example("chat", ask.format(n=name, s=topic, d=day, t=time), answer)


def _thanks(v: Values) -> Example:
    name, item, code = v.name(), v.product(), v.code()
    ask = v.choice((
        "Thank {n} for the order {c} of a {p}.", "Write a thank you note to {n} for buying a {p}"
        " (order {c}).",
    ))  # fmt: skip
    answer = (
        f"Dear {name}, thank you for your order {code}. Your {item} will be shipped soon. We hope"
        " to see you again."
    )
    return Example("chat", ask.format(n=name, c=code, p=item), answer)


def _apology(v: Values) -> Example:
    name, item, city = v.name(), v.product(), v.city()
    request = f"Apologize to {name} in {city} because the {item} is late."
    answer = (
        f"Dear {name}, we are sorry that your {item} is late. It is on its way to {city} and will"
        " arrive within three days."
    )
    return Example("chat", request, answer)


def _to_sentence(v: Values) -> Example:
    name, company, city, role = v.name(), v.company(), v.city(), v.choice(("manager", "engineer"))
    request = (
        f'Write one sentence from this JSON: {{"name": "{name}", "company": "{company}", "city":'
        f' "{city}", "role": "{role}"}}'
    )
    return Example("chat", request, f"{name} is a {role} at {company} in {city}.")


def _upper_list(v: Values) -> Example:
    items = [v.product() for _ in range(v.integer(2, 5))]
    request = "Number these items: " + ", ".join(items) + "."
    return Example("chat", request, "\n".join(f"{i}. {x}" for i, x in enumerate(items, 1)))


_FORMS = (_explain, _explain, _difference, _reply, _thanks, _apology, _to_sentence, _upper_list)


def chat(v: Values) -> Example:
    """Draw one short conversation turn without JSON."""
    return v.rng.choice(_FORMS)(v)
