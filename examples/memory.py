"""Chats that come back after others took their memory, and after a restart: host memory and files keep their KV.

    python examples/memory.py [--model PATH]

Two engines run one after the other with the same folder. The second one finds what the first one computed. On a GPU,
and with a model of some size, loading is several times as fast as computing; the embedded model computes faster than a
file is read, so that its second engine may decline to load (see `declined`).
"""

from __future__ import annotations

import argparse
import tempfile

import sgl

parser = argparse.ArgumentParser()
parser.add_argument("--model", default=None)
arguments = parser.parse_args()

document = "The committee met on Monday and talked about the new bridge over the river. " * 12
questions = ["When did it meet?", "What did it talk about?", "What does the bridge cross?"]

with tempfile.TemporaryDirectory() as folder:
    options = {} if arguments.model is None else {"model_path": arguments.model}
    for run in ("first", "second"):
        with sgl.Engine(
            **options,
            enable_hierarchical_cache=True,
            hicache_storage_backend="file",
            hicache_storage_dir=folder,
        ) as engine:
            for question in questions:
                engine.generate(prompt=f"{document}\n{question}\n", sampling_params={"max_new_tokens": 8})
            options = {"model_path": engine.config.model_path}
            state = engine.get_server_info()["internal_states"][0]
            print(
                f"{run} engine: {state['prompt_tokens']} prompt tokens, {state['cached_tokens']} cached,",
                f"{state['file_read_tokens']} read from files, {state['num_declined_loads']} loads declined",
            )
