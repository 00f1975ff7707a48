"""Whether an expression has any string: by its parts, or by a search of its derivatives."""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Final

from sgl.grammar.regular.expr_leaves import Expr
from sgl.time_limit import check_size, check_time

EXPLORE_LIMIT: Final = 20_000
"""How many derivatives a search may look at before it gives up with GrammarTooLarge."""


def is_empty(expr: Expr) -> bool:
    """Whether nothing is in the language; exact. Raises GrammarTooLarge past EXPLORE_LIMIT derivatives."""
    if expr.known_empty is None:
        found = expr.parts_are_empty()
        expr.known_empty = _explore_empty(expr) if found is None else found
    return expr.known_empty


def _explore_empty(start: Expr) -> bool:
    parents: dict[Expr, Expr | None] = {start: None}
    # What may be nearest to its end comes first: products with bounds on lengths are large, most of their ways long.
    heap = [(start.least, 0, start)]
    while heap:
        check_size(len(parents), EXPLORE_LIMIT, "an intersection or complement has more than {} derivatives")
        check_time()
        expr = heappop(heap)[2]
        for _, target in expr.raw_arcs():
            if target.nullable or target.known_empty is False:
                step: Expr | None = expr
                target.known_empty = False
                while step is not None:
                    step.known_empty = False
                    step = parents[step]
                return False
            if target not in parents and not target.known_empty:
                parents[target] = expr
                heappush(heap, (target.least, -len(parents), target))
    for expr in parents:
        expr.known_empty = True
    return True
