"""A drafter that reads on in a request's constraint: through forced text, and where few bytes may follow, by the first
of them: the next key, a value of an enum, one more item."""

from __future__ import annotations

from collections.abc import Sequence

from sgl.grammar.matching.jump import MAX_TAIL_TOKENS
from sgl.runtime.constraints.request_matcher import RequestMatcher
from sgl.runtime.speculate.drafter import NO_DRAFT, Draft, Drafter, DraftRequest

_MOST_CHOICES = 3


class GrammarDrafter(Drafter):
    """See `Drafter`. Grades are how often it had to choose."""

    name = "grammar"

    def propose(self, wanted: Sequence[DraftRequest]) -> list[Draft]:
        return [self._draft(asked) for asked in wanted]

    def _draft(self, asked: DraftRequest) -> Draft:
        matcher: RequestMatcher | None = asked.request.owner.matcher
        if matcher is None:
            return NO_DRAFT
        token_ids, num_choices = matcher.likely_tokens(asked.request.output_ids[-MAX_TAIL_TOKENS:], _MOST_CHOICES)
        return Draft(token_ids[: asked.most], num_choices) if token_ids else NO_DRAFT
