"""Plain characters, which strings of JSON hold as they stand: how far a thread goes on reading them.

Nearly every token is made of them, and in most strings they lead from a place back to it.
"""

from __future__ import annotations

from typing import Final

from sgl.grammar.automaton.nfa import Counted, Lexeme, Thread, UniqueText
from sgl.grammar.regular.byteset import byte_range
from sgl.grammar.regular.expr import EMPTY, Expr, Union

NOT_PLAIN: Final = -1
ENDLESS: Final = 1 << 60
KEEPS, LOOPS = 1, 2
NEVER_REACHED: Final = 1 << 30
"""Characters or items: no text is so long."""
_PLAIN_ASCII: Final = byte_range(0x20, 0x7F) & ~(1 << 0x22 | 1 << 0x5C)
_PLAIN_OR_LONGER: Final = _PLAIN_ASCII | byte_range(0x80, 0xFF)
_CONTINUED: Final = byte_range(0x80, 0xBF)
_LONGER_CHARS: Final = (
    (byte_range(0xC2, 0xDF), _CONTINUED),
    (byte_range(0xE0, 0xE0), byte_range(0xA0, 0xBF), _CONTINUED),
    (byte_range(0xE1, 0xEF) & ~(1 << 0xED), _CONTINUED, _CONTINUED),
    (byte_range(0xED, 0xED), byte_range(0x80, 0x9F), _CONTINUED),
    (byte_range(0xF0, 0xF0), byte_range(0x90, 0xBF), _CONTINUED, _CONTINUED),
    (byte_range(0xF1, 0xF3), _CONTINUED, _CONTINUED, _CONTINUED),
    (byte_range(0xF4, 0xF4), byte_range(0x80, 0x8F), _CONTINUED, _CONTINUED),
)


def thread_limit(thread: Thread) -> int:
    """Up to how many characters of a string a plain one keeps the thread alive: ENDLESS if for ever, NOT_PLAIN if not
    all of them do."""
    if isinstance(thread, Counted):
        if thread.rest is not None or thread.region == 2 or plain_kind(thread.text.loop) != LOOPS:
            return NOT_PLAIN
        return ENDLESS if thread.text.high is None else min(thread.text.high, NEVER_REACHED)
    if isinstance(thread, Lexeme | UniqueText) and plain_kind(thread.expr):
        return ENDLESS
    return NOT_PLAIN


def stays(thread: Thread) -> bool:
    """Whether such a thread stays where it is."""
    return not isinstance(thread, Lexeme | UniqueText) or plain_kind(thread.expr) == LOOPS


def moves_on_plain(thread: Thread) -> bool:
    """Whether plain characters lead anywhere from there."""
    return any(mask & _PLAIN_OR_LONGER for mask, _ in thread.moves())


def plain_kind(expr: Expr) -> int:
    """LOOPS if every character that JSON strings hold as it stands leads from the expression back to itself, KEEPS if
    from one that it is a union with, and is again such a union; else 0."""
    if expr.known_plain is None:
        parts = expr.members if isinstance(expr, Union) else (expr,)
        expr.known_plain = (
            LOOPS if _keeps(expr, LOOPS) else KEEPS if any(_keeps(one, KEEPS) for one in parts) else 0
        )
    return expr.known_plain


def _keeps(expr: Expr, kind: int) -> bool:
    def is_kept(found: Expr) -> bool:
        return found is expr or (kind == KEEPS and isinstance(found, Union) and expr in found.members)

    if not is_kept(expr.step(0x20)):
        return False
    return all(all(map(is_kept, _reached(expr, char))) for char in ((_PLAIN_ASCII,), *_LONGER_CHARS))


def _reached(expr: Expr, char: tuple[int, ...]) -> set[Expr]:
    """Where the byte strings of a product of byte sets lead; EMPTY among them if some lead nowhere."""
    places = {expr}
    for mask in char:
        following = set()
        for place in places:
            left = mask
            for arc, target in place.arcs():
                if arc & mask:
                    following.add(target)
                    left &= ~arc
            if left:
                following.add(EMPTY)
        places = following
    return places
