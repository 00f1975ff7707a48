"""Runs whole programs on a server, and prints a line of JSON for each kind: programs, seconds, characters.

    python -m benchmarks.gpu.program_client --language sgl|sglang --url URL --texts FILE [--only chat,tips]
                                            [--scale 1] [--threads 128] [--reps 2] [--skip-warm-up]

The same source runs in both languages, ours and the original: benchmarks.gpu.programs starts it, for the original with
its packages instead of ours. Greedy, and to the full length; in kinds that end in `_fixed`, a regex of as many digits,
so that texts are equally long in any engine. Seconds are the best of `reps`, each with an empty prefix cache.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.gpu.flush import flush_cache

THREADS = 128
TEMPLATE = "default"  # of chats, by the name that both languages know it by
RECORD = (
    r'\{"name": "[A-Za-z ]{1,24}", "house": "(Gryffindor|Slytherin|Ravenclaw|Hufflepuff)", "age": [1-9][0-9]{0,2}, '
    r'"alive": (true|false), "wand": \{"wood": "[a-z]{3,12}", "length": [0-9]{1,2}\.[0-9]\}, '
    r'"friends": \["[A-Za-z]{2,12}"(, "[A-Za-z]{2,12}"){0,3}\]\}'
)
DIMENSIONS = ("clarity", "originality", "evidence", "structure", "style", "depth")
Output = Callable[[int], dict[str, Any]]  # arguments of a gen of so many tokens
Kinds = dict[str, tuple[Any, list[dict[str, Any]]]]  # a program and its rows, by name


def free(num_tokens: int) -> dict[str, Any]:
    """Whatever the model says."""
    return {"max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}


def fixed(num_tokens: int) -> dict[str, Any]:
    """As many digits, each of which is a token in vocabularies that join none."""
    return {"max_tokens": num_tokens, "temperature": 0, "regex": f"[0-9]{{{num_tokens}}}"}


class Programs:
    """The programs in one of the languages, a module, with the examples of one set of texts."""

    def __init__(self, language: Any, texts: dict[str, Any]) -> None:
        self._sgl = language
        self._texts = texts

    def kinds(self, scale: float) -> Kinds:
        """All of them. scale: of the numbers of rows."""
        texts = self._texts

        def rows(name: str, count: int, *keys: str) -> list[dict[str, Any]]:
            values = texts[name]
            chosen = [values[i % len(values)] for i in range(max(1, int(count * scale)))]
            return [dict(zip(keys, value if len(keys) > 1 else (value,), strict=True)) for value in chosen]

        return {
            "few_shot": (self.few_shot(), rows("gsm8k", 512, "question")),
            "choose": (self.choose(), rows("hella", 256, "context", "endings")),
            "tree_of_thought": (self.tree_of_thought(), rows("gsm8k", 32, "question")),
            "tips": (self.tips(free), rows("topics", 128, "topic")),
            "chat": (self.chat(free), rows("chats", 128, "turns")),
            "react": (self.react(), rows("react", 96, "question", "observations")),
            "record": (self.record(), rows("names", 256, "name")),
            "judge": (self.judge(), rows("articles", 96, "article")),
            "tips_fixed": (self.tips(fixed), rows("topics", 128, "topic")),
            "chat_fixed": (self.chat(fixed), rows("chats", 128, "turns")),
        }

    def few_shot(self) -> Any:
        """A question after eight examples."""
        sgl, shots = self._sgl, self._texts["gsm8k_shots"]

        @sgl.function
        def few_shot(s: Any, question: str) -> None:
            s += shots + "Question: " + question + "\nAnswer:"
            s += sgl.gen("answer", **free(128))

        return few_shot

    def choose(self) -> Any:
        """One of four endings, after 20 examples."""
        sgl, shots = self._sgl, self._texts["hella_shots"]

        @sgl.function
        def choose(s: Any, context: str, endings: list[str]) -> None:
            s += shots + context
            s += sgl.select("ending", choices=endings)

        return choose

    def tree_of_thought(self) -> Any:
        """Four plans, four executions of each, a reflection on each of these."""
        sgl = self._sgl

        @sgl.function
        def tree_of_thought(s: Any, question: str) -> None:
            s += "Question: " + question + "\n"
            plans, leaves = s.fork(4), []
            for i, plan in enumerate(plans):
                plan += f"Plan {i + 1}: " + sgl.gen("plan", **free(64))
                for j, leaf in enumerate(plan.fork(4)):
                    leaf += f"\nExecution {j + 1}: " + sgl.gen("run", **free(64))
                    leaf += "\nReflection: " + sgl.gen("reflection", **free(32))
                    leaves.append(leaf)
            for leaf in leaves:
                leaf["reflection"]

        return tree_of_thought

    def tips(self, output: Output) -> Any:
        """An outline, five points side by side, and a summary of their texts."""
        sgl = self._sgl

        @sgl.function
        def tips(s: Any, topic: str) -> None:
            s += "Suggest five tips about " + topic + ".\n"
            s += "Outline: " + sgl.gen("outline", **output(48)) + "\n"
            points = s.fork(5)
            for i, point in enumerate(points):
                point += f"Expand tip {i + 1} into a paragraph: " + sgl.gen("paragraph", **output(96))
            for i in range(5):
                s += f"Tip {i + 1}: " + points[i]["paragraph"] + "\n"
            s += "In summary, " + sgl.gen("summary", **output(64))

        return tips

    def chat(self, output: Output) -> Any:
        """Five turns, nothing observed between them."""
        sgl = self._sgl

        @sgl.function
        def chat(s: Any, turns: list[str]) -> None:
            s += sgl.system("You are a helpful assistant.")
            for i, turn in enumerate(turns):
                s += sgl.user(turn)
                s += sgl.assistant(sgl.gen(f"answer_{i}", **output(64)))

        return chat

    def react(self) -> Any:
        """Thoughts and actions; Python reads each action before it answers."""
        sgl, shots = self._sgl, self._texts["react_shots"]

        @sgl.function
        def react(s: Any, question: str, observations: list[str]) -> None:
            s += shots + "Question: " + question + "\n"
            for i, observation in enumerate(observations):
                s += f"Thought {i + 1}: " + sgl.gen(f"thought_{i}", **free(48)) + "\n"
                s += f"Action {i + 1}: " + sgl.gen(f"action_{i}", **free(16)) + "\n"
                len(s[f"action_{i}"])
                s += f"Observation {i + 1}: " + observation + "\n"

        return react

    def record(self) -> Any:
        """A record under a regex."""
        sgl, shots = self._sgl, self._texts["json_shots"]

        @sgl.function
        def record(s: Any, name: str) -> None:
            s += shots + name + " is a character. Fill in:\n"
            s += sgl.gen("record", max_tokens=160, temperature=0, regex=RECORD)

        return record

    def judge(self) -> Any:
        """An essay judged in six dimensions side by side, then a grade and its reason."""
        sgl = self._sgl

        @sgl.function
        def judge(s: Any, article: str) -> None:
            s += "Read the essay.\n" + article + "\n"
            judges = s.fork(len(DIMENSIONS))
            for one, dimension in zip(judges, DIMENSIONS, strict=True):
                one += f"Judge its {dimension}: " + sgl.gen("judgment", **free(48))
            for one, dimension in zip(judges, DIMENSIONS, strict=True):
                s += dimension + ": " + one["judgment"] + "\n"
            s += "Grade: " + sgl.select("grade", choices=["A", "B", "C", "D"])
            s += "\nReason: " + sgl.gen("reason", **free(64))

        return judge


def main() -> None:
    """Run them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--language", choices=("sgl", "sglang"), required=True)
    parser.add_argument("--url", required=True)
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--only", default="")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--threads", type=int, default=THREADS)
    parser.add_argument("--reps", type=int, default=2)
    parser.add_argument("--skip-warm-up", action="store_true")
    options = parser.parse_args()
    language = importlib.import_module(options.language)
    language.set_default_backend(language.RuntimeEndpoint(options.url, chat_template_name=TEMPLATE))
    programs = Programs(language, json.loads(options.texts.read_text(encoding="utf-8")))
    for name, (program, rows) in programs.kinds(options.scale).items():
        if options.only and name not in options.only.split(","):
            continue
        if not options.skip_warm_up:
            program.run_batch(rows[:4], num_threads=4, progress_bar=False)  # what must be compiled is
        seconds = []
        for _ in range(options.reps):
            flush_cache(options.url)
            began = time.perf_counter()
            states = program.run_batch(rows, num_threads=options.threads, progress_bar=False)
            said = [state.text() for state in states]
            seconds.append(time.perf_counter() - began)
        row = {"name": name, "programs": len(rows), "seconds": min(seconds), "all": seconds}
        row["characters"] = sum(map(len, said))
        if name == "record":
            row["matching"] = sum(re.fullmatch(RECORD, state["record"]) is not None for state in states)
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
