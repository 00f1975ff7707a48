"""How many examples a property test tries that has many parameters, too."""

from __future__ import annotations

from hypothesis import settings

few = settings(max_examples=settings().max_examples * 2 // 5)
