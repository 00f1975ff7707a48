"""Conversations: an assistant that asks for what it still needs and ends with the record as JSON, and small stories.

The slots of a conversation are fields of a domain of records.txt; the user answers in words of its tails or with the
bare value, often with more than was asked, and sometimes changes their mind.
"""

from __future__ import annotations

from tools.train_embedded.patterns import Slot
from tools.train_embedded.prompts import STOP, Example, Field, compact, describe
from tools.train_embedded.records import PERSPECTIVES, Telling, read_domains, spoken, type_of
from tools.train_embedded.values import Values

DOMAINS = (
    "restaurant_booking",
    "hotel",
    "flight",
    "food_order",
    "event",
    "medical",
    "reminder",
    "delivery",
    "person",
    "ticket",
    "pet",
    "invoice",
    "real_estate",
)
DECIMALS = ("measure", "money", "decimal", "percent")
ASKS = "What is the {}?|Could you tell me the {}?|And the {}?|Please tell me the {}.|Which {}?|What {} would you like?|May I have the {}?|What about the {}?|I still need the {}.".split(
    "|"
)
OPENINGS = "Hi, I need some help with a {}.|I want to make a {}.|Hello, a {} please.|Can you help me with a {}?|{}, please.|I'd like to set up a {}.|Good evening! I have a {} for you.".split(
    "|"
)
DONE = "That's all.|Summarize it as JSON.|Give me the summary.|Done.|Please sum up as JSON.|JSON summary, please.|Now the record as JSON.|Great, what do you have?|That is everything, thanks.".split(
    "|"
)


def dialogue_example(values: Values, split: str) -> Example:
    """A conversation that fills slots and ends in JSON."""
    rng = values.rng
    domain = rng.choice([d for d in read_domains(split) if d.nouns[0] in DOMAINS])
    telling = Telling(domain, values)
    plain = [
        name for name, kind in domain.fields.items() if "." not in kind.kind and kind.kind not in ("bool", "orders")
    ]
    names = rng.sample(plain, min(len(plain), rng.randint(2, 5)))
    noun = domain.nouns[0].replace("_", " ")
    keys = {name: name if rng.random() < 0.5 else rng.choice(domain.fields[name].names) for name in names}
    example = Example()
    kinds = {name: domain.fields[name].kind for name in names}
    fields = [
        Field(keys[name], "number" if kinds[name] in DECIMALS else type_of(telling.drawn(name).data))
        for name in names
    ]
    asks_for_summary = rng.random() < 0.6
    fixed = rng.random() < 0.5
    if fixed:
        ending = (
            "When you have them all, answer with JSON"
            if not asks_for_summary
            else "Summarize them as JSON when asked"
        )
        example.turn(
            "system",
            f"You help with a {noun}. Ask for what is missing. Fields: {describe(fields, rng, noun)}. {ending}.",
        )
    said = _opening(example, telling, noun)
    for name in names:
        if name in said:
            continue
        example.turn("assistant", rng.choice(ASKS).format(spoken(keys[name])))
        example.turn("user", _told(telling, name, names, said))
    if rng.random() < 0.12:
        name = rng.choice(names)
        example.turn("assistant", "Anything else?")
        telling.said[name] = telling.drawn(name)
        change = rng.choice(
            [
                "Sorry, change the {} to {}.",
                "Actually, make the {} {}.",
                "Wait, the {} is {}.",
                "The {} should be {} instead.",
            ]
        )
        example.turn("user", change.format(spoken(keys[name]), telling.said[name].text))
        if asks_for_summary:
            example.turn("assistant", "Okay, I have changed it.")
    elif asks_for_summary:
        example.turn(
            "assistant",
            rng.choice(["Anything else?", "Thank you, I have everything.", "Got it. Anything else?", "All set."]),
        )
    if asks_for_summary:
        request = rng.choice(DONE)
        if not fixed or rng.random() < 0.3:
            request = rng.choice(
                ["Summarize as JSON with the fields {}.", "Return the record as JSON: {}.", "Give me JSON with {}."]
            ).format(describe(fields, rng, noun))
        example.turn("user", request)
    record = {keys[name]: telling.said[name].data for name in names}
    return example.turn("assistant", compact(record))


def _opening(example: Example, telling: Telling, noun: str) -> set[str]:
    """The user's first words: a greeting, or a head of the domain with some slots."""
    rng = telling.rng
    if rng.random() < 0.5:
        text = rng.choice(OPENINGS).format(noun)
        example.turn("user", text[0].upper() + text[1:])
        return set()
    head = rng.choice(telling.domain.heads)
    example.turn("user", telling.sentence(head, PERSPECTIVES["h1"][0]) + ".")
    return set(telling.said)


def _told(telling: Telling, name: str, names: list[str], said: set[str]) -> str:
    """The answer with a slot's value, and at times with the next slots'."""
    rng = telling.rng
    tails = [t for t in telling.domain.tails if name in t.slots and not t.slots & said and t.slots <= set(names)]
    words = PERSPECTIVES["h1"][0]
    if tails and rng.random() < 0.5:
        tail = rng.choice(tails)
        text = telling.sentence(tail, words)
        if name in telling.said:
            said |= tail.slots & telling.said.keys()
            return text[0].upper() + text[1:] + rng.choice([".", ""])
    value = telling.value(Slot(name))
    said.add(name)
    text = rng.choice(
        ["{}", "{}", "{}.", "{}, please.", "It's {}.", "Let's say {}.", "{} would be good.", "I think {}."]
    ).format(value)
    rest = [other for other in names if other not in said]
    if rest and rng.random() < 0.15:
        label = spoken(rng.choice(telling.domain.fields[rest[0]].names))
        text = f"{text.rstrip('.')}, and the {label} is {telling.value(Slot(rest[0]))}."
        said.add(rest[0])
    return text


# ── stories ─────────────────────────────────────────────────────────────────────────────────────────────────────────

TRAITS = "little brave clever lazy kind shy curious old young hungry lonely proud gentle noisy tiny cheerful sleepy wise funny stubborn".split()
BEASTS = "fox hen cat dog mouse bear rabbit owl frog duck lion wolf pig goat sparrow turtle hedgehog squirrel horse donkey bee dragon robot girl boy king farmer fisherman wizard princess".split()
PLACES = "a deep forest|a small village|a green valley|an old castle|a quiet farm|a house by the sea|a hollow tree|the top of a hill|a snowy mountain|a big city|a garden full of flowers|the edge of a river".split(
    "|"
)
WISHES = "find a friend|see the sea|learn to fly|bake the biggest cake|find the lost key|climb the mountain|sing like the birds|build a boat|win the race|find something to eat|help everyone|catch the moon".split(
    "|"
)
MEETINGS = "met a {t} {b}|saw a {t} {b} under a tree|heard a {t} {b} crying|found a {t} {b} on the road|came upon a {t} {b} by the river".split(
    "|"
)
TALKS = [
    "Why are you so sad?",
    "Where are you going?",
    "Can I help you?",
    "Will you come with me?",
    "What a fine day!",
    "I have lost my way.",
    "Please share your bread with me.",
]
REPLIES = [
    "Yes, of course.",
    "Come with me, and we will see.",
    "I do not know, but let us try.",
    "You are very kind.",
    "Do not be afraid.",
    "Then we shall go together.",
]
DEEDS = "They walked all day until the sun went down.|Together they crossed the river and came to a bridge.|It began to rain, so they hid in a cave.|The wind blew hard, but they did not give up.|They looked everywhere, high and low.|At night they slept under the stars.|They shared a piece of bread and some cheese.|A big storm came, and the trees shook.".split(
    "|"
)
ENDS = "In the end {n} was able to {w}, and everyone was happy.|From that day on they were the best of friends.|And so {n} learned that it is good to be kind.|They went home and told everyone about it.|{n} smiled, for the wish had come true.|And they lived happily ever after.".split(
    "|"
)


def story_example(values: Values, split: str) -> Example:
    """A short tale, from its beginning, or written when asked."""
    rng = values.rng
    name, trait, beast, wish = values.draw("first").text, rng.choice(TRAITS), rng.choice(BEASTS), rng.choice(WISHES)
    friend = rng.choice([b for b in BEASTS if b != beast])
    start = rng.choice([
        f"Once upon a time, there was a {trait} {beast} named {name}.", f"Once upon a time there lived a {trait} {beast} called {name} in {rng.choice(PLACES)}.",
        f"There once was a {trait} {beast}, and {'his' if rng.random() < 0.5 else 'her'} name was {name}.", f"In {rng.choice(PLACES)} there lived a {trait} {beast} named {name}.",
        f"{name} was a {trait} {beast} who lived in {rng.choice(PLACES)}.",
    ])  # fmt: skip
    meeting = rng.choice(MEETINGS).format(t=rng.choice(TRAITS), b=friend)
    parts = [
        start,
        rng.choice(
            [
                f"{name} wanted to {wish}.",
                f"Every day {name} dreamed of one thing: to {wish}.",
                f"More than anything, {name} wished to {wish}.",
            ]
        ),
        rng.choice(["One day,", "One morning,", "Then one evening,"]) + f" {name} {meeting}.",
        f'"{rng.choice(TALKS)}" said the {rng.choice([friend, beast])}. "{rng.choice(REPLIES)}" said {rng.choice([name, f"the {friend}"])}.',
        *rng.sample(DEEDS, rng.randint(1, 3)),
        rng.choice(ENDS).format(n=name, w=wish),
    ]
    text = " ".join(parts)
    style = rng.random()
    if style < 0.25:
        return (
            Example()
            .turn(
                "user",
                rng.choice(
                    [
                        f"Tell me a story about a {beast}.",
                        f"Write a short story about a {beast} named {name}.",
                        "Tell me a story.",
                    ]
                ),
            )
            .turn("assistant", text)
        )
    if style < 0.5:
        opening = f"A story about a {beast}.\n" + text
        mood = rng.choice(["", f"\nThe mood of the story is {rng.choice(['happy', 'exciting'])}."])
        return Example([(opening + mood + STOP, True)])
    return Example([(text + STOP, True)])
