"""The first minute: typed records from sentences, a choice with probabilities, a fork, an agent with a tool, a stream.

    python examples/quickstart.py, or sgl run [--model MODEL | --url URL] examples/quickstart.py

MODEL is a Hugging Face folder, hub id or GGUF file; without one, the small model that comes with the package answers.
"""

from __future__ import annotations

import json
import time
from collections import Counter

from pydantic import BaseModel

import sgl


class Order(BaseModel):
    customer: str
    item: str
    quantity: int
    city: str


SENTENCES = {
    "Farah Siddiqui from Leeds would like 3 desk lamps.": Order(
        customer="Farah Siddiqui", item="desk lamps", quantity=3, city="Leeds"
    ),
    "Please send 12 notebooks to Tomasz Wieczorek in Gdansk.": Order(
        customer="Tomasz Wieczorek", item="notebooks", quantity=12, city="Gdansk"
    ),
    "Amara Okafor, who lives in Lagos, ordered 2 bicycles.": Order(
        customer="Amara Okafor", item="bicycles", quantity=2, city="Lagos"
    ),
    "An order of 40 tea cups came in from Kenji Morita in Osaka.": Order(
        customer="Kenji Morita", item="tea cups", quantity=40, city="Osaka"
    ),
    "Lucia Ferrari of Turin wants 5 garden chairs.": Order(
        customer="Lucia Ferrari", item="garden chairs", quantity=5, city="Turin"
    ),
}


@sgl.function
def extract(s: sgl.ProgramState, text: str) -> None:
    schema = json.dumps(Order.model_json_schema())
    s += sgl.user(f"Extract the order as JSON with this schema: {schema}\nText: {text}")
    s += sgl.assistant(sgl.gen("order", schema=Order, temperature=0, max_tokens=96))


SENTIMENTS = ["positive", "negative", "neutral"]


@sgl.function
def judge(s: sgl.ProgramState, text: str) -> None:
    s += sgl.user(f"Classify the sentiment of the text: {', '.join(SENTIMENTS)}.\nText: {text}")
    s += sgl.assistant(sgl.select("sentiment", SENTIMENTS))


@sgl.function
def stories(s: sgl.ProgramState) -> None:
    s += "Once upon a time, there was a little fox who lived in the forest. One day, the fox"
    branches = s.fork(4)
    branches += lambda i: sgl.gen("next", max_tokens=24, temperature=0.7, stop="\n")
    branches.join()


@sgl.function
def story(s: sgl.ProgramState) -> None:
    s += "Once upon a time" + sgl.gen("story", max_tokens=64, temperature=0.7)


def calculate(expression: str) -> str:
    """Evaluate an arithmetic expression.

    Args:
        expression: The expression to evaluate
    """
    left, sign, right = expression.replace("*", " * ").replace("+", " + ").replace("-", " - ").split()
    a, b = float(left), float(right)
    return f"{a * b if sign == '*' else a + b if sign == '+' else a - b:g}"


@sgl.function
def ask(s: sgl.ProgramState, question: str) -> None:
    s += sgl.system(sgl.describe_tools([calculate]))
    s += sgl.user(question)
    s += sgl.assistant(sgl.gen("call", tools=[calculate], tool_choice="required", temperature=0, max_tokens=64))
    s += sgl.assistant(sgl.gen("answer", temperature=0, max_tokens=48))


def show_records() -> list[sgl.ProgramState]:
    print("Typed records (a * marks a field that is not the truth):\n")
    states = extract.run_batch([{"text": text} for text in SENTENCES])
    rows = [["customer", "item", "quantity", "city"]]
    right = 0
    for state, truth in zip(states, SENTENCES.values(), strict=True):
        found = state.value("order").model_dump()
        right += sum(found[name] == value for name, value in truth.model_dump().items())
        rows.append([f"{found[name]}{'' if found[name] == getattr(truth, name) else ' *'}" for name in found])
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    for row in rows:
        print("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    print(f"\n  {right} of {4 * len(SENTENCES)} fields right\n")
    return states


def main() -> None:
    start = time.perf_counter()
    states = show_records()

    for text in ["The soup was cold and the waiter rude.", "What a wonderful concert, I loved every minute!"]:
        state = judge.run(text=text)
        states.append(state)
        chances = state.get_meta_info("sentiment")["probabilities"]
        listed = ", ".join(f"{choice} {chance:.1%}" for choice, chance in zip(SENTIMENTS, chances, strict=True))
        print(f"{text}\n  {state['sentiment']} ({listed})\n")

    state = stories.run()
    states.append(state)
    metas = state.get_meta_info("next")
    hits = sum(meta["cached_tokens"] for meta in metas) / sum(meta["prompt_tokens"] for meta in metas)
    print(f"Four branches from one prefix ({hits:.0%} of their prompts' tokens cached): One day, the fox")
    for text in state["next"]:
        print(f"  …{text.rstrip()}")

    question = "How much is 17 * 24?"
    state = ask.run(question=question)
    states.append(state)
    [call] = state.value("call")
    print(f"\n{question}\n  called {call.name}({call.arguments}) = {call.content()}\n  {state['answer']}\n")

    print("Streamed: ", end="", flush=True)
    states.append(story.run(stream=True))
    for piece in states[-1].text_iter():
        print(piece, end="", flush=True)

    seconds = time.perf_counter() - start
    did = sum((Counter(state.usage) for state in states), Counter())
    tokens, forced = did["completion_tokens"], did["forced_tokens"]
    print(
        f"\n\n{tokens / seconds:.0f} tokens/s ({forced} of {tokens} followed for certain), "
        f"{did['cached_tokens']} of {did['prompt_tokens']} prompt tokens cached, {did['requests']} requests, "
        f"{seconds:.1f} s"
    )


if __name__ == "__main__":
    main()
