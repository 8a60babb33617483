"""What is a memory of other requests worth to an agent? Prints tables, and one JSON document last.

    python benchmarks/agent_loop.py [--target DIR] [--limit 8] [--max-new-tokens 144] [--show] [--output FILE]

Three things that agents do over and over: tool calls as JSON ("tool-call"), edits of one file that is written out whole
("code-edit"), and second looks at an answer of one's own ("reflection"). A generator makes the requests from templates,
so that answers have one shape and other contents. Half of the requests of a category come first, outside the timing:
they fill the memory of the warm drafters. The other half is measured, every request with all variants one after the
other, in rotating order. No drafter has answered a request before it is measured with it. What the warm drafters
remember grows while they are measured, by other requests, as it does for an agent.

Variants: "suffix-cold" is a fresh Suffix in every call, which knows the request's own text only; "suffix-warm" and
"auto-warm" remember, each for itself, what they have answered.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from hf_specdec import Auto, Suffix
from hf_specdec.checks.bench import Bench, BenchOptions, Question, publish
from hf_specdec.checks.report import HOST_LOOKUP, PLAIN
from hf_specdec.checks.tables import host_table, lengths_table, table
from hf_specdec.loading import Chat

WARM = ("suffix-warm", "auto-warm")
Message = dict[str, str]

# --- the requests -----------------------------------------------------------------------------------------

PEOPLE = (
    *("Ines Maier", "Paul Okafor", "Lena Novak", "Omar Haddad", "Ruth Fischer", "Jan Kowalski", "Mei Tanaka"),
    *("Carla Rossi", "David Cohen", "Elif Demir", "Sven Larsen", "Nina Petrova", "Luis Romero", "Amy Walsh"),
)
FAULTS = {
    "printer": ("jams", "prints blank pages"),
    "projector": ("shows no picture", "is too dark"),
    "scanner": ("makes loud noises", "loses pages"),
    "phone": ("does not ring", "has a broken screen"),
    "heater": ("stays cold", "smells of smoke"),
    "lamp": ("flickers", "does not turn on"),
}

SHOP_FILE = '''```python
"""Settings of the shop."""

HOST = "localhost"
PORT = 8080
TIMEOUT = 30
CURRENCY = "EUR"


def price_with_tax(price, rate=0.19):
    return round(price * (1 + rate), 2)


def discount(price, percent=10):
    return price * (100 - percent) / 100
```'''
# What stands in the file, and what it may be changed to.
EDITS = {
    'HOST = "localhost"': ('HOST = "0.0.0.0"', 'HOST = "shop.example.com"', 'HOST = "192.168.0.7"'),
    "PORT = 8080": ("PORT = 9090", "PORT = 5000", "PORT = 8443", "PORT = 3000"),
    "TIMEOUT = 30": ("TIMEOUT = 60", "TIMEOUT = 5", "TIMEOUT = 120", "TIMEOUT = 45"),
    'CURRENCY = "EUR"': ('CURRENCY = "USD"', 'CURRENCY = "GBP"', 'CURRENCY = "CHF"', 'CURRENCY = "JPY"'),
    "rate=0.19": ("rate=0.07", "rate=0.21", "rate=0.25"),
    "percent=10": ("percent=15", "percent=20", "percent=5"),
}

PLACES = (
    *("library", "bakery", "bike shop", "museum", "swimming pool", "town hall", "garden centre", "book shop"),
    *("post office", "art gallery", "zoo", "climbing hall", "cinema", "theatre", "skating rink", "boat house"),
)
# Right and wrong wordings; an answer that is to be corrected has some of the wrong ones.
SENTENCES = (
    (
        "The {place} is open from {opens} am to {closes} pm on weekdays.",
        "The {place} is open form {opens} am to {closes} pm on weekdays.",
    ),
    (
        "On Saturday it closes at {saturday} pm, and on Sunday it is closed.",
        "On saturday it close at {saturday} pm, and on sunday it is close.",
    ),
    (
        "Tickets cost {price} euros, and children under {age} pay nothing.",
        "Tickets costs {price} euros, and childs under {age} pays nothing.",
    ),
    ("Please call 555-{phone} if you have any questions.", "Please call 555-{phone} if you has any question."),
)


def asked(text: str) -> Message:
    """A message of the user."""
    return {"role": "user", "content": text}


def answered(text: str) -> Message:
    """A message of the model."""
    return {"role": "assistant", "content": text}


def tool_call(chance: random.Random) -> Chat:
    """A request that is answered by one call of a tool that has been called twice before."""
    system = "You are the agent of a help desk. Answer every message with one JSON tool call and nothing else."
    first = _ticket("Maria Lopez", "coffee machine", "leaks", 207, "urgent")
    second = _ticket("Tom Becker", "door", "does not close", 114, "not urgent")
    device = chance.choice(list(FAULTS))
    fault, urgency = chance.choice(FAULTS[device]), chance.choice(("urgent", "not urgent"))
    request, _ = _ticket(chance.choice(PEOPLE), device, fault, chance.randint(100, 399), urgency)
    return [{"role": "system", "content": system}, *first, *second, request]


def _ticket(person: str, device: str, fault: str, room: int, urgency: str) -> Chat:
    """A request and the call that answers it."""
    arguments = {
        "customer": person,
        "device": device,
        "place": f"room {room}",
        "problem": fault,
        "priority": "high" if urgency == "urgent" else "low",
        "team": "it-support",
        "notify": ["reception"],
    }
    thought = f"{person} reports a problem with the {device}, so I open a ticket."
    call = {"thought": thought, "tool": "open_ticket", "arguments": arguments}
    request = f"{person} says: the {device} in room {room} {fault}. It is {urgency}."
    return [asked(request), answered(json.dumps(call))]


def code_edit(chance: random.Random) -> Chat:
    """The second change of a file; the first has been made."""
    (first, new_first), (second, new_second) = (
        (old, chance.choice(EDITS[old])) for old in chance.sample(list(EDITS), 2)
    )
    return [
        asked(f"Here is shop.py:\n\n{SHOP_FILE}\n\nChange {first} to {new_first} and write the whole file again."),
        answered(SHOP_FILE.replace(first, new_first)),
        asked(f"Change {second} to {new_second} and write the whole file again."),
    ]


def reflection(chance: random.Random) -> Chat:
    """An earlier answer that has mistakes, and the wish to have it checked."""
    place = chance.choice(PLACES)
    facts = {
        "place": place,
        "opens": chance.randint(6, 11),
        "closes": chance.randint(4, 9),
        "saturday": chance.randint(1, 3),
        "price": chance.randint(3, 19),
        "age": chance.randint(4, 15),
        "phone": f"{chance.randint(100, 199):04}",
    }
    wrong = chance.sample(range(len(SENTENCES)), 3)
    answer = " ".join(pair[number in wrong].format(**facts) for number, pair in enumerate(SENTENCES))
    return [
        asked(f"Write a short notice for the visitors of the {place}."),
        answered(answer),
        asked("Check your answer for mistakes and write the whole answer again with all corrections."),
    ]


CATEGORIES: dict[str, Callable[[random.Random], Chat]] = {
    "tool-call": tool_call,
    "code-edit": code_edit,
    "reflection": reflection,
}


def requests(limit: int, seed: int = 0) -> tuple[list[Question], list[Question]]:
    """Makes the requests, the same ones for the same seed.

    Args:
        limit: how many of each category, for either pass.
        seed: of the choice of names and numbers.

    Returns:
        Those that fill the memory and those that are measured; no two of them are equal.
    """
    warm, measured = [], []
    for category, made in CATEGORIES.items():
        chats = _distinct(made, random.Random(f"{category} {seed}"), 2 * limit)
        questions = [
            Question(f"{category}-{number}", category, (chat[-1]["content"],), tuple(chat[:-1]))
            for number, chat in enumerate(chats)
        ]
        warm += questions[:limit]
        measured += questions[limit:]
    return warm, measured


def _distinct(made: Callable[[random.Random], Chat], chance: random.Random, count: int) -> list[Chat]:
    chats: list[Chat] = []
    while len(chats) < count:
        if (chat := made(chance)) not in chats:
            chats.append(chat)
    return chats


# --- the measurement --------------------------------------------------------------------------------------


def run(options: BenchOptions, limit: int, console: Console, show: bool = False) -> dict[str, Any]:
    """Fills the memories, then measures.

    Args:
        options: target, precision and length of answers.
        limit: requests of each category, for either pass.
        console: where to show progress.
        show: whether to print what the first pass answers.

    Returns:
        The document of `Bench`, and under `memory` how much the warm drafters remembered when the measurement began.
    """
    remembering = {"suffix-warm": Suffix(), "auto-warm": Suffix()}
    others = {
        "suffix-cold": lambda: {"assistant": Suffix()},
        "suffix-warm": _always(remembering["suffix-warm"]),
        "auto-warm": _always(Auto([remembering["auto-warm"]])),
    }
    bench = Bench(options, others)
    warm, measured = requests(limit)
    for name in WARM:
        console.print(f"warm pass: {name}")
        fill(bench, name, warm, console if show and name == WARM[0] else None)
    memory = {name: {"requests": it.cached_requests, "tokens": it.cached_tokens} for name, it in remembering.items()}
    # The warm-up is a request of the first pass too: a measured one must not be known before.
    document = bench.document(measured, console, warm_up=warm[:1])
    return document | {"memory": memory, "limit": limit}


def _always(assistant: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {"assistant": assistant}


def fill(bench: Bench, name: str, questions: list[Question], console: Console | None) -> None:
    """Answers questions with one variant, outside the timing; a console shows the answers."""
    for question in questions:
        turn = bench.ask(name, [question], bench.options.max_new_tokens, "first").turns[0][0]
        if console is not None:
            text = bench.tokenizer.decode(turn.answer)
            console.print(f"--- {question.question_id}: {len(turn.prompt)} + {len(turn.answer)}\n{text}", markup=False)


def main() -> None:
    """Measures everything and prints it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", help="folder or Hub id (default: the demo model)")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--limit", type=int, default=8, help="requests of each category, for either pass")
    parser.add_argument("--max-new-tokens", type=int, default=144)
    parser.add_argument("--show", action="store_true", help="print the answers of the first pass")
    parser.add_argument("--output", type=Path, help="where to write the document")
    given = parser.parse_args()
    options = BenchOptions(
        questions="benchmarks/agent_loop.py",
        target=given.target,
        variants=(PLAIN, HOST_LOOKUP, "prompt-lookup"),
        dtype=given.dtype,
        max_new_tokens=given.max_new_tokens,
    )
    console = Console(width=160)
    document = run(options, given.limit, console, given.show)
    for shown in (table(document), host_table(document), lengths_table(document)):
        console.print(shown)
    publish(document, given.output)


if __name__ == "__main__":
    main()
