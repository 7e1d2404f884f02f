"""Composed values for the corpus: names, codes, dates, amounts, places, products.

Every value comes from small parts, so there are far more of them than a model can memorise: it
has to copy. A hash of the finished value decides whether it belongs to training or to the
held-out set, so a held-out name, code or product never occurs in training.
"""

# ruff: noqa: SIM905 - a list of words is read more easily as words
from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence

_FIRST = (
    "Ada Alan Alice Amir Ana Anita Ben Bianca Boris Carla Carlos Chen Clara Daniel Diana Diego"
    " Dmitri"
    " Elena Emil Emma Erik Eva Farid Fatima Felix Fiona George Grace Hana Hannah Hugo Ines Irene"
    " Ivan Jack James Jana Jonas Julia Kaito Karim Kate Kenji Lara Laura Leo Lena Lin Lucas Lucia"
    " Maria Marco Mark Marta Mei Mia Mila Mona Nadia Nina Noah Nora Oleg Olga Omar Oscar Paul Petra"
    " Priya Rahul Raj Rosa Ruth Sami Sara Sofia Stefan Susan Tara Theo Tom Tomas Uma Vera Victor"
    " Wei Yara Yuki Zara Zoe"
).split()
_SURNAME_START = (
    "Al An Ber Bor Car Cas Dal Dor El Fal Fer Gar Gol Hal Har Hol Jan Kal Kar Kov Lan Lar Lin Mal"
    " Mar Mor Nor Ol Par Pet Ram Ros Sal Sand San Sor Tan Tor Val Var Vel Wal Wer Win Zan"
).split()
_SURNAME_END = (
    "a ada ano aro dale den der dez do ell en er es field ford gren ham i ic ides in ini ins is"
    " kin ko ley man mann mer mont ner ni nov o off ova ra rez ria ris ro sen ska son stad ston ter"
    " ton va ville wood"
).split()
_CITIES = (
    "Amsterdam Athens Austin Berlin Boston Cairo Chicago Dallas Delhi Denver Dublin Geneva Hanoi"
    " Helsinki Istanbul Kyoto Lagos Lima Lisbon London Lyon Madrid Manila Miami Milan Montreal"
    " Munich Nairobi Naples Osaka Oslo Paris Porto Prague Quito Riga Rome Seattle Seoul Sofia"
    " Sydney Tokyo Toronto Turin Vienna Warsaw Zurich"
).split()
_PLACE_START = (
    "Ash Brook Cedar Clear East Fair Glen Green High Lake Mill North Oak Red River"
).split()
_PLACE_END = "bury dale field ford gate ham mont port side ton view ville wood".split()
_STREET_END = ("Street", "Road", "Avenue", "Lane", "Drive")
_ADJECTIVES = (
    "black blue compact digital electric folding glass green heavy large leather light metal mini"
    " portable red round silver small smart soft steel travel white wireless wooden"
).split()
_NOUNS = (
    "backpack bag bench bottle bowl cable camera chair charger clock cup desk drill fan headset"
    " jacket kettle keyboard knife ladder lamp laptop mat mirror monitor mouse mug notebook pan pen"
    " phone pillow printer radio router scanner shelf shoes sofa speaker stool table tablet tent"
    " towel vase wallet watch"
).split()
_TOPIC_A = (
    "annual budget client design hiring launch marketing monthly network product project quarterly"
    " release research sales security support team training weekly"
).split()
_TOPIC_B = (
    "audit briefing call check demo meeting planning review session summary sync update"
).split()
_COMPANY_A = (
    "Alpha Apex Atlas Blue Bright Delta Echo Ever Global Iron Nova Orion Peak Pine Solar Terra"
).split()
_COMPANY_B = (
    "Data Energy Foods Freight Health Labs Logic Media Motors Systems Tech Trade Works"
).split()
_COMPANY_C = ("Inc", "Ltd", "GmbH", "Group")
_DOMAINS = ("example.com", "mail.com", "inbox.org", "post.net", "work.io")
_PREFIXES = "AB AX BK CN CR EV FX GT HR INV KL MX ORD PO QT RX SKU TK TR VX ZN".split()
MONTHS = (
    "January February March April May June July August September October November December"
).split()


def is_held_out(value: str) -> bool:
    """Whether a composed value is reserved for held-out prompts (about one in eight)."""
    return hashlib.blake2b(value.encode(), digest_size=2).digest()[0] < 32


class Values:
    """Draws composed values for one split.

    `held_out` chooses the split; `rng` makes the draw reproducible.
    """

    def __init__(self, rng: random.Random, held_out: bool) -> None:
        self.rng = rng
        self.held_out = held_out

    def composed(self, draw: Callable[[], str]) -> str:
        while True:
            value = draw()
            if is_held_out(value) == self.held_out:
                return value

    def choice(self, options: Sequence[str]) -> str:
        return options[int(self.rng.random() * len(options))]

    def integer(self, low: int, high: int) -> int:
        return low + int(self.rng.random() * (high - low + 1))

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def surname(self) -> str:
        return self.composed(lambda: self.choice(_SURNAME_START) + self.choice(_SURNAME_END))

    def first_name(self) -> str:
        return self.choice(_FIRST)

    def name(self) -> str:
        return f"{self.first_name()} {self.surname()}"

    def email(self) -> str:
        user = f"{self.first_name()}.{self.surname()}" if self.chance(0.5) else self.surname()
        return f"{user.lower()}@{self.choice(_DOMAINS)}"

    def phone(self) -> str:
        return f"{self.digits(3)}-{self.digits(4)}"

    def digits(self, count: int) -> str:
        return self.composed(lambda: "".join(self.choice("0123456789") for _ in range(count)))

    def code(self) -> str:
        return f"{self.choice(_PREFIXES)}-{self.digits(4)}"

    def city(self) -> str:
        if self.chance(0.6):
            return self.choice(_CITIES)
        return self.composed(lambda: self.choice(_PLACE_START) + self.choice(_PLACE_END))

    def street(self) -> str:
        road = self.composed(lambda: f"{self.surname()} {self.choice(_STREET_END)}")
        return f"{self.integer(1, 299)} {road}"

    def product(self) -> str:
        return self.composed(lambda: f"{self.choice(_ADJECTIVES)} {self.choice(_NOUNS)}")

    def noun(self) -> str:
        return self.choice(_NOUNS)

    def topic(self) -> str:
        return self.composed(lambda: f"{self.choice(_TOPIC_A)} {self.choice(_TOPIC_B)}")

    def company(self) -> str:
        parts = (_COMPANY_A, _COMPANY_B, _COMPANY_C)
        return self.composed(lambda: " ".join(self.choice(p) for p in parts))

    def amount(self) -> float:
        """A price with cents whose last digit is not zero, so text and JSON agree."""
        whole = self.integer(1, 99) if self.chance(0.6) else self.integer(100, 1999)
        return float(f"{whole}.{self.integer(0, 9)}{self.integer(1, 9)}")

    def time(self) -> str:
        return f"{self.integer(7, 21):02d}:{self.integer(0, 11) * 5:02d}"

    def date(self) -> tuple[str, str]:
        """A day as (ISO form, form for running text); the latter is sometimes written out."""
        year, month, day = self.integer(2019, 2027), self.integer(1, 12), self.integer(1, 28)
        iso = f"{year}-{month:02d}-{day:02d}"
        if self.chance(0.7):
            return iso, iso
        return iso, f"{MONTHS[month - 1]} {day}, {year}"

    def ip(self) -> str:
        return f"10.{self.integer(0, 255)}.{self.integer(0, 255)}.{self.integer(1, 254)}"
