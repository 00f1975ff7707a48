"""Texts about one thing: a head and often tails, tails alone, scraps in any order, or a list of labels and values."""

from __future__ import annotations

import re

from tools.train_embedded.attributes import attribute_clause
from tools.train_embedded.domains import PERSPECTIVES, Domain, Pattern, spoken
from tools.train_embedded.patterns import Slot, say, with_article
from tools.train_embedded.rewriting import MARK, mark, other_verb, raised, rewritten
from tools.train_embedded.values import NUMBER_WORDS, Value, Values, phrases, read_lists, read_synonyms

TELLING = frozenset(phrases("telling"))
VAGUE = frozenset(phrases("vague"))
AROUND = frozenset(phrases("around"))  # kinds of values before which other words often stand
PLAIN = frozenset(phrases("plain"))  # kinds of values that are known by their form
CALLED = frozenset(phrases("called"))  # kinds of values that one may be told to visit, ask or join
PEOPLE = ("person", "someone", "first")
THINGS = frozenset(phrases("things"))  # kinds of values that may be what a sentence is about
COLORED = ("thing", "product")  # kinds of values that may begin with a color
COLORS = frozenset(
    word for split in ("train", "eval") for name in read_lists(split)["color"] for word in name.split()
)


class Telling:
    """One text about one thing: what has been said so far, by field."""

    def __init__(self, domain: Domain, values: Values) -> None:
        self.domain = domain
        self.values = values
        self.rng = values.rng
        self.said: dict[str, Value] = {}
        self.tight: frozenset[str] = frozenset()  # slots with nothing but a space between them and the next
        self.is_terse = False  # nothing but a space stands between any two values
        is_learnt = values.split == "train"
        self.is_calm = (
            not is_learnt or values.rng.random() < 0.3
        )  # in patterns' own words, with values of the lists
        self.wear = 0.0 if self.is_calm or values.rng.random() < 0.7 else values.rng.choice([0.06, 0.12, 0.2])
        self.change = 0.0 if self.is_calm or values.rng.random() < 0.3 else values.rng.choice([0.1, 0.2, 0.4])

    def value(self, slot: Slot) -> str:
        """The text of a slot's value, drawn at its first mention."""
        name = slot.name
        source, _, part = self.domain.fields[name].kind.partition(".")
        if part:  # said apart from the rest of its value, which is then no value of the text's
            while source not in self.said or part not in self.said[source].parts:
                self.said[source] = Value("", None, self.drawn(source).parts)
            return str(self.said[source].parts[part])
        if slot.setting is not None:
            self.said[name] = Value("", {"true": True, "false": False}.get(slot.setting, slot.setting))
        elif name not in self.said:
            self.said[name] = self.drawn(name)
            kind = self.domain.fields[name].kind
            if kind in AROUND and not self.values.is_plain and self.rng.random() < 0.06:
                return f"{self.rng.choice(phrases(f'around_{kind}'))} {self.said[name].text}"
        return self.said[name].text

    def drawn(self, name: str) -> Value:
        """A value for a field."""
        kind = self.domain.fields[name]
        if kind.options:
            text = self.rng.choice(kind.options)
            return Value(text, text)
        if kind.kind == "bool":
            data = self.rng.random() < 0.5
            return Value(self.rng.choice(["yes", "true"] if data else ["no", "false"]), data)
        if kind.kind == "orders":
            return self.values.orders()
        if kind.kind.startswith("list "):
            return self.values.several(kind.kind.removeprefix("list "))
        open_ended = not self.is_calm and not self.wear and not self.is_terse
        self.values.is_plain = not open_ended or name in self.tight
        taken = {word for value in self.said.values() for word in _words(value.text)}
        if kind.kind in COLORED and any(other.kind == "color" for other in self.domain.fields.values()):
            taken |= COLORS
        for _ in range(8):
            value = self._color() if kind.kind == "color" else self.values.draw(kind.kind.partition(".")[0])
            if not taken & _words(value.text):
                break
        return value

    def _color(self) -> Value:
        """In training now and then one word that no list holds: it is a color by where it stands."""
        if self.values.split == "eval" or self.is_terse or self.rng.random() < 0.7:
            return self.values.draw("color")
        text = self.values.made_up() if self.rng.random() < 0.6 else self.values.common()
        return Value(text, text)

    def text(self) -> str:
        """A whole text; `said` then holds what it says."""
        style = self.rng.random() if self.values.split == "train" else 1.0
        if style < 0.06:
            return self._labelled()
        head = self.rng.choice(self.domain.heads)
        words = self.rng.choice(PERSPECTIVES[head.kind])
        if style < 0.2 and self.domain.scraps:
            text = self._scraps()
        elif style < 0.28 and self.domain.tails:
            text = self.sentence(self.rng.choice(self.domain.tails), words)
        else:
            text = self.sentence(head, words)
        for _ in range(self.rng.choices(range(5), [4, 4, 3, 1, 0.5])[0]):
            text = self._go_on(text, words)
        if text[0].islower() and text.split()[0] in NUMBER_WORDS:
            text = text[0].upper() + text[1:]
        if text[-1] not in ".!?" and self.rng.random() < 0.85:
            text += self.rng.choice([".", ".", ".", "!"])
        if self.rng.random() < 0.1:
            text = f"{self.rng.choice(phrases('before'))} {text}"
        elif not self.is_calm and self.rng.random() < 0.04:
            text = f"{self.values.phrase().capitalize()}{self.rng.choice([':', ',', ' -', '!', '.'])} {text}"
        if not self.is_calm and "clauses" in self.values.corpora:
            text = self._amid_others(text)
        if self.rng.random() < 0.12:
            text += ("" if text[-1] in ".!?" else ".") + " " + self.rng.choice(phrases("after"))
        return re.sub(r"  +", " ", text)

    def _amid_others(self, text: str) -> str:
        """Now and then with words from books before or behind it, which say nothing of the thing."""
        if self.rng.random() < 0.06:
            return self._beside_values(text)
        form, pick = self.rng.random(), lambda name: self.rng.choice(self.values.corpora[name])
        called = [value.text for name, value in self.said.items() if self.domain.fields[name].kind in CALLED]
        if called and form > 0.94:
            mark = self.rng.choice(["! ", ". ", ": "])
            return f"{self.rng.choice(phrases('calls'))} {self.rng.choice(called)}{mark}{text}"
        if form < 0.12:
            return f"{text.rstrip('.!?')}{self.rng.choice([', ', ', ', ' ', ' - '])}{pick('clauses')}."
        if form < 0.16:
            return f"{pick('sentences')} {text}"
        return f"{text}{'' if text[-1] in '.!?' else '.'} {pick('sentences')}" if form < 0.2 else text

    def _beside_values(self, text: str) -> str:
        """With a sentence that holds a value of a kind that nothing here asks for."""
        kinds = {kind.kind for kind in self.domain.fields.values()}
        beside = [p for p in phrases("beside") if not kinds & set(re.findall(r"{(\w+)}", p))]
        if not beside:
            return text
        said = re.sub(r"{(\w+)}", lambda m: self.values.draw(m[1]).text, self.rng.choice(beside))
        return f"{said} {text}" if self.rng.random() < 0.5 else f"{text}{'' if text[-1] in '.!?' else '.'} {said}"

    def sentence(self, pattern: Pattern, words: dict[str, str]) -> str:
        """A pattern with `words` for the person it speaks of."""
        literal = self._changed if self.wear or self.change else str
        self.tight = pattern.tight
        marked: list[tuple[str, str]] = []  # each value's field and text

        def marked_value(slot: Slot) -> str:
            text = self.value(slot)
            marked.append((slot.name, text))
            return mark(len(marked) - 1) if slot.setting is None else text

        text = say(pattern.sequence, self.rng, marked_value, literal).strip() or self.values.common()
        text = re.sub(r"<(S|P|O|is|has|s)>", lambda match: words[match[1]], text)
        if self.values.split == "train" and pattern.kind != "c":
            text = self._otherwise(text, [name for name, _ in marked])
        filled = ""
        for part in re.split(f"({MARK})", text):
            value = marked[ord(part) - ord(mark(0))][1] if re.fullmatch(MARK, part) else ""
            filled = with_article(filled, value) + value if value else filled + part
        return filled

    def _otherwise(self, text: str, fields: list[str]) -> str:
        """The sentence in other words or another order, as often as not."""
        rng, kinds = self.rng, [kind.kind for kind in self.domain.fields.values()]

        def actor(marked: str) -> str:
            kind = self.domain.fields[fields[ord(marked) - ord(mark(0))]].kind
            return "person" if kind in PEOPLE else "thing" if kind in THINGS else ""

        if rng.random() < 0.15 and all(kinds.count(self.domain.fields[name].kind) == 1 for name in fields):
            text = other_verb(text, rng, actor, self.values.made_up)
        said = rewritten(text, rng, actor) if rng.random() < 0.4 else text
        return raised(said) if said != text and raised(text) == text else said

    def _changed(self, text: str) -> str:
        """Some words said otherwise, and some left out or replaced by any others, so that no one word is all there is
        to go by. Those beside a value are never replaced by any others: nothing would tell where the value begins."""
        words, rng = text.split(" "), self.rng
        for i, word in enumerate(words):
            others = self.change and read_synonyms().get(word.lower())
            if others and rng.random() < self.change:
                words[i] = rng.choice(others)
                if word[0].isupper():
                    words[i] = words[i][0].upper() + words[i][1:]
            elif word.isalpha() and word.islower() and word not in TELLING and rng.random() < self.wear:
                inside = 2 <= i < len(words) - 2
                words[i] = self.values.common() if inside and rng.random() < 0.6 else ""
        return " ".join(words)

    def _go_on(self, text: str, words: dict[str, str]) -> str:
        rng = self.rng
        tails = [tail for tail in self.domain.tails if not tail.slots & self.said.keys()]
        scraps = [scrap for scrap in self.domain.scraps if not scrap.slots & self.said.keys()]
        if scraps and rng.random() < 0.2:
            return (
                text.rstrip(".!?")
                + rng.choice([", ", ", ", "; ", " - ", " "])
                + self.sentence(rng.choice(scraps), words)
            )
        if tails and rng.random() < 0.85:
            more = self.sentence(rng.choice(tails), words)
            about = re.match(r"(it's|it|its) (?=[a-z])", more) if self.values.split == "train" else None
            if about and rng.random() < 0.3:
                return self._about_main(text, about[1], more[about.end() :])
        elif self.values.split == "eval":
            return text
        elif rng.random() < 0.3:
            more = rng.choice(phrases("asides"))
        else:
            name = rng.choice([*self.domain.fields])
            if name in self.said or "." in self.domain.fields[name].kind:
                return text
            label = spoken(rng.choice([n for n in self.domain.fields[name].names if n not in VAGUE] or [name]))
            value = self.value(Slot(name))
            more = attribute_clause(self.values, label, value)
        joint = rng.choices(
            [". ", ", ", "; ", " and ", " - ", "\n", " (", "! "], [8, 3, 1, 2.5, 0.5, 0.5, 0.5, 0.7]
        )[0]
        if (
            joint in (". ", "\n", "! ")
            and more[:1].islower()
            and not any(more.startswith(v.text) for v in self.said.values() if v.text)
        ):
            more = more[0].upper() + more[1:]
        if not any(text.endswith(value.text) for value in self.said.values() if value.text):
            text = text.rstrip(".!?")
        return text + joint + more + (")" if joint == " (" else "")

    def _about_main(self, text: str, pronoun: str, rest: str) -> str:
        """What is said of "it", as a relative clause or of the value that the text is about."""
        main, found = next(iter(self.said)), {"it": "", "it's": " is", "its": "'s"}[pronoun]
        if self.domain.fields[main].kind not in THINGS or not self.said[main].text or self.rng.random() < 0.5:
            relative = {"it": "which", "it's": "which is", "its": "whose"}[pronoun]
            return f"{text.rstrip('.!?')}, {relative} {rest}"
        the = self.rng.choice(["", "", "the ", "this "]) if self.said[main].text.islower() else ""
        return f"{text}{'' if text[-1] in '.!?' else '.'} {raised(the)}{self.said[main].text}{found} {rest}"

    def _scraps(self) -> str:
        """As people type in haste: pieces in any order, with little between them."""
        rng = self.rng
        joint = rng.choice([", ", ", ", ", ", "; ", " - ", " / ", " | ", "\n", ". ", " "])
        self.is_terse = joint == " "
        chosen: list[Pattern] = []
        for scrap in rng.sample(self.domain.scraps, len(self.domain.scraps)):
            if not any(scrap.slots & other.slots for other in chosen):
                chosen.append(scrap)
        forms = [form for form in self._plain_forms() if rng.random() < 0.7]
        count = rng.choice([2, 3, 3, 4, 4, 5, 6])
        pieces = [self.sentence(scrap, {}) for scrap in chosen[: max(1, count - len(forms))]]
        pieces += [form.format(self.value(Slot(name))) for name, form in forms[: count - len(pieces)]]
        rng.shuffle(pieces)
        text = joint.join(pieces)
        if rng.random() < 0.25:
            lead = rng.choice(phrases("leads")).format(rng.choice(self.domain.nouns).replace("_", " "))
            text = f"{lead[0].upper()}{lead[1:]} {text}"
        return text

    def _plain_forms(self) -> list[tuple[str, str]]:
        """Fields that are known by the form of their values, each with a way of saying it. Of several fields of one
        kind, only the first is."""
        first = {kind.kind: name for name, kind in reversed(self.domain.fields.items())}
        said = {word for scrap in self.domain.scraps for word in scrap.slots}
        return [
            (name, self.rng.choice(phrases(f"said_{kind}")))
            for kind, name in first.items()
            if kind in PLAIN and name not in said
        ]

    def _labelled(self) -> str:
        """As forms and notes have it: "Name: …; City: …"."""
        rng = self.rng
        names = [name for name, kind in self.domain.fields.items() if "." not in kind.kind]
        chosen = rng.sample(names, min(len(names), rng.randint(2, 6)))
        case = rng.choice([str.title, str.capitalize, str.lower, str.upper])
        between, joint = (
            rng.choice([": ", ": ", " = ", " - ", " is ", ":", " "]),
            rng.choice([", ", "\n", "; ", " | ", " / ", ". "]),
        )
        labels = {name: case(spoken(rng.choice(self.domain.fields[name].names))) for name in chosen}
        return joint.join(f"{labels[name]}{between}{self.value(Slot(name))}" for name in chosen)

    def data(self, name: str) -> tuple[Value, bool]:
        """What was said of a field (also by a value of another), and whether anything was."""
        source, _, part = self.domain.fields[name].kind.partition(".")
        if not part:
            value = self.said.get(name, Value("", None))
            return value, value.data is not None
        value = self.said.get(source)
        known = value is not None and part in value.parts
        return Value("", value.parts[part]) if value is not None and known else Value("", None), known


def _words(text: str) -> set[str]:
    return set(re.findall(r"\w{3,}", text.lower())) or {text}
