"""Opens runs: where they go and what they inherit from the body that calls them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from sgl.errors import InvalidRequest
from sgl.lang.config import backend_of, global_config
from sgl.lang.ir.sampling import sampling_params
from sgl.lang.record.run import Run, child_seed, current_run, program_of
from sgl.lang.record.trace import NestedCallError, TracedRun


def take_sampling(options: dict[str, Any]) -> Mapping[str, Any]:
    """Take the option `sampling` out. Raises InvalidRequest if it is no dict."""
    sampling = options.pop("sampling", None) or {}
    if not isinstance(sampling, Mapping):
        raise InvalidRequest(f"sampling must be a dict of parameters, not {sampling!r}", param="sampling")
    return sampling


def opened(
    name: str,
    sampling: Mapping[str, Any],
    *,
    backend: Any = None,
    chat_template: Any = None,
    stream: bool = False,
    **fields: Any,
) -> Run:
    """A run with these options and `fields` of its ir.Program. Within a body, what they leave out is the body's, and
    the seed follows from its. Raises InvalidRequest and ProgramError."""
    outer, sampling = current_run.get(), sampling_params(**sampling)
    if isinstance(outer, TracedRun):
        raise NestedCallError(f"a trace holds one program, and this one calls {name!r}")
    if outer is not None:
        sampling = {**outer.program.defaults, **sampling}
        if "seed" not in sampling:
            sampling["seed"] = child_seed(outer)
        backend = outer.backend if backend is None else backend
        chat_template = chat_template or outer.program.chat_template
    program = program_of(name, sampling, stream=stream, chat_template=chat_template, **fields)
    run = Run(program, backend_of(backend))
    if outer is not None:
        run.user_loop = outer.user_loop
    if global_config.verbosity >= 2:
        run.when_done(lambda: sys.stdout.write(run.root.partial_text() + "\n"))
    return run
