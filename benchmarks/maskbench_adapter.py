"""The grammar engine for the MaskBench runner: `run.py run --engine benchmarks.maskbench_adapter:Engine`.

MaskBench writes its instances with json.dumps' spacing and with keys in any order, so the adapter asks for flexible
white space and any key order; `SchemaOrder` and `Strict` show what the other choices cost.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from sgl.grammar.automaton.nfa import KeyOrder
from sgl.grammar.compiler import Grammar
from sgl.grammar.compiler import compile as compile_grammar
from sgl.grammar.matching.matcher import Matcher
from sgl.grammar.vocabulary.tokens import Vocabulary


class Engine:
    """Lenient, keys in any order."""

    name = "sgl"
    lenient = True
    key_order: KeyOrder = "any"
    eos_id: int

    def setup(self, tok_dir: str, hf: Any, token_bytes: list[bytes | None], eos_id: int, n_vocab: int) -> None:
        self.vocabulary = Vocabulary(token_bytes, [eos_id], n_vocab)
        self.vocabulary.trie  # noqa: B018  # built once, not in the first compile

    def compile(self, schema: Any) -> Grammar:
        return compile_grammar(
            json_schema=schema,
            vocabulary=self.vocabulary,
            whitespace="flexible",
            lenient=self.lenient,
            key_order=self.key_order,
        )

    def start(self, compiled: Grammar) -> Matcher:
        return compiled.matcher()

    def fill(self, state: Matcher, row: npt.NDArray[np.int32]) -> None:
        state.fill_mask(row)

    def commit(self, state: Matcher, token: int) -> bool:
        return state.accept(token)

    def can_end(self, state: Matcher, row: npt.NDArray[np.int32]) -> bool:
        return state.is_accepting()

    def version(self) -> str:
        return "0.1"

    def compiled_bytes(self, compiled: Grammar) -> int:
        return compiled.num_bytes


class Strict(Engine):
    """What cannot be enforced is refused."""

    name = "sgl_strict"
    lenient = False


class SchemaOrder(Engine):
    """Keys in the order of the schema, as generation has them by default."""

    name = "sgl_schema_order"
    key_order: KeyOrder = "schema"
