"""Arcs: where the bytes of an expression lead, by sets of bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from sgl.grammar.regular.byteset import refine
from sgl.grammar.regular.expr_leaves import EMPTY, Arcs, Expr
from sgl.time_limit import check_time


def bytes_of_arcs(arcs: Arcs) -> int:
    """The bytes that lead anywhere."""
    found = 0
    for mask, _ in arcs:
        found |= mask
    return found


def beyond(arcs: Arcs, others: Arcs) -> Iterator[tuple[int, Expr]]:
    """Arcs of the bytes that lead nowhere by the others."""
    left = ~bytes_of_arcs(others)
    return ((mask & left, target) for mask, target in arcs if mask & left)


def merged(lists: Iterable[Arcs], join: Callable[..., Expr]) -> Arcs:
    """Arcs of all lists: bytes that several have lead to what `join` makes of the targets."""
    cells: list[tuple[int, list[Expr]]] = []
    covered = 0
    for i, arcs in enumerate(lists):
        if i % 64 == 63:
            check_time()
        for mask, target in arcs:
            if mask & covered:
                refine(cells, mask, target)
            else:
                cells.append((mask, [target]))
            covered |= mask
    return grouped((mask, targets[0] if len(targets) == 1 else join(*targets)) for mask, targets in cells)


def grouped(arcs: Iterable[tuple[int, Expr]]) -> Arcs:
    """Arcs with those to one target drawn together, and those that lead nowhere left out."""
    by_target: dict[Expr, int] = {}
    for mask, target in arcs:
        if target is not EMPTY:
            by_target[target] = by_target.get(target, 0) | mask
    return tuple((mask, target) for target, mask in by_target.items())
