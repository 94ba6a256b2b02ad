"""A long document in the template grammar that the embedded model was trained on.

The model recalls five-digit access codes that a text states; filler sentences lie between them. It
was trained on texts of 256 to 8192 tokens with a fact about every 60, and so is this one made.
"""

import random
from dataclasses import dataclass
from itertools import product


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


PLACES = _words("harbor museum workshop library market forest kitchen station garden temple")
NAMES = _words("Anna Ben Clara David Emma Felix Grace Henry Julia Kevin Laura Martin Nina Paul")
JOBS = _words("sailor driver merchant captain nurse pilot carpenter gardener teacher painter")
ANIMALS = _words("turtle duck sheep rabbit owl fox mouse goat")
MOODS = _words("happy sad calm proud hungry brave tired curious")
WEATHER = _words("windy rainy foggy sunny cold warm stormy snowy")
TIMES = _words("morning evening night noon winter summer spring autumn")
NUMBERS = _words("two three four five six seven eight nine ten twelve")
ACTIONS = _words("opened found moved painted borrowed carried lost polished")
ADJECTIVES = _words(
    "amber black blue broken brown crimson giant golden green grey heavy narrow old orange pink "
    "purple red shiny silver tiny violet white wooden yellow"
)
OBJECTS = _words(
    "anchor balloon barrel basket bell boat bridge bucket camera candle carpet clock compass "
    "crown drum engine flag gate globe guitar hammer helmet kettle key ladder lamp lantern map "
    "mirror needle piano radio ring robot rope shovel statue sword teapot telescope tent ticket "
    "train trumpet violin wagon wallet whistle window"
)

FACT_FORMS = (
    "The access code of the {name} is {code}.",
    "Remember that the access code of the {name} is {code}.",
    "Please note that the access code of the {name} is {code}.",
)
QUESTION_FORMS = (
    "What is the access code of the {name}?",
    "Tell me the access code of the {name}.",
    "Please give me the access code of the {name}.",
)
# Sentences from one fact to the next; one has 11 to 17 tokens, so a fact comes about every 60.
SENTENCES_PER_FACT = 5


@dataclass(frozen=True)
class Fact:
    """The access code of one thing, and which sentence of the document (from 0) states it."""

    name: str
    code: str
    sentence: int


@dataclass(frozen=True)
class Document:
    """The text and what it states, in the order of the text."""

    text: str
    facts: tuple[Fact, ...]


@dataclass(frozen=True)
class Question:
    """A question about the document and the one right answer."""

    text: str
    answer: str


def build_document(num_facts: int = 80, seed: int = 7) -> Document:
    """A document with ``num_facts`` access codes, the same for the same arguments.

    Args:
        num_facts: facts, each of another thing and with another code; 80 make about 4500 tokens.
        seed: of the random choices.

    Raises:
        ValueError: there are fewer things than facts.
    """
    things = [f"{adjective} {thing}" for adjective, thing in product(ADJECTIVES, OBJECTS)]
    if not 0 < num_facts <= len(things):
        raise ValueError(f"num_facts is {num_facts}, wanted 1 to {len(things)}")
    rng = random.Random(seed)
    names = rng.sample(things, num_facts)
    codes = [f"{code:05d}" for code in rng.sample(range(100_000), num_facts)]
    sentences: list[str] = []
    facts: list[Fact] = []
    for name, code in zip(names, codes, strict=True):
        place = rng.randrange(SENTENCES_PER_FACT)
        for index in range(SENTENCES_PER_FACT):
            if index == place:
                facts.append(Fact(name, code, len(sentences)))
                sentences.append(rng.choice(FACT_FORMS).format(name=name, code=code))
            else:
                sentences.append(_filler(rng))
    return Document(" ".join(sentences), tuple(facts))


def choose_questions(document: Document, count: int = 5) -> tuple[Question, ...]:
    """Questions about facts spread evenly from the document's beginning to its end.

    Raises:
        ValueError: fewer than two questions, or more than facts.
    """
    facts = document.facts
    if not 2 <= count <= len(facts):
        raise ValueError(f"count is {count}, wanted 2 to {len(facts)}")
    chosen = [facts[index * (len(facts) - 1) // (count - 1)] for index in range(count)]
    return tuple(
        Question(QUESTION_FORMS[index % len(QUESTION_FORMS)].format(name=fact.name), fact.code)
        for index, fact in enumerate(chosen)
    )


def prompt(document: Document, question: Question) -> str:
    """The user's message: the document, then the question on a line of its own."""
    return f"{document.text}\n{question.text}"


def _filler(rng: random.Random) -> str:
    """One sentence that states no access code."""
    pick = rng.choice
    forms = (
        lambda: (
            f"The {pick(JOBS)} was {pick(MOODS)} because the {pick(OBJECTS)} was "
            f"{pick(ADJECTIVES)}."
        ),
        lambda: f"It was a {pick(WEATHER)} {pick(TIMES)} at the {pick(PLACES)}.",
        lambda: (
            f"The {pick(ANIMALS)} slept beside the {pick(ADJECTIVES)} {pick(OBJECTS)} all "
            f"{pick(TIMES)}."
        ),
        lambda: f"There were {pick(NUMBERS)} {pick(ADJECTIVES)} stones behind the {pick(PLACES)}.",
        lambda: (
            f"{pick(NAMES)} put the {pick(OBJECTS)} under the {pick(ADJECTIVES)} {pick(OBJECTS)}."
        ),
        lambda: f"The weather in the {pick(PLACES)} was {pick(WEATHER)} and {pick(WEATHER)}.",
        lambda: f"The {pick(PLACES)} was quiet, and the {pick(ANIMALS)} was {pick(MOODS)}.",
        lambda: f"{pick(NAMES)} asked the {pick(JOBS)} about the {pick(PLACES)}.",
        lambda: (
            f"In the {pick(TIMES)}, the {pick(JOBS)} {pick(ACTIONS)} a {pick(ADJECTIVES)} "
            f"{pick(OBJECTS)}."
        ),
        lambda: f"The old road from the {pick(PLACES)} to the {pick(PLACES)} was {pick(WEATHER)}.",
        lambda: (
            f"{pick(NAMES)} said that the {pick(PLACES)} was {pick(WEATHER)} that {pick(TIMES)}."
        ),
    )
    return pick(forms)()
