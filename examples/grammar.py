"""A grammar: what a regex cannot say, nested to any depth. The notation is that of llama.cpp and XGrammar.

python examples/grammar.py, or sgl run [--model MODEL | --url URL] examples/grammar.py
(needs pip install 'sgl[ebnf]')
"""

from __future__ import annotations

import sgl

SUM = r"""
root  ::= part op part ";"      # the whole text
part  ::= digit{1,3} | "(" part op part ")"
op    ::= " + " | " - "
digit ::= [0-9]
"""


@sgl.function
def task(s: sgl.ProgramState, topic: str) -> None:
    s += f"A task about {topic}: compute "
    s += sgl.gen("sum", ebnf=SUM, max_tokens=100)


def main() -> None:
    for topic in ("apples", "trains", "money"):
        state = task.run(topic, temperature=0.8, seed=1)
        print(f"{topic:>8}: {state['sum']}")


if __name__ == "__main__":
    main()
