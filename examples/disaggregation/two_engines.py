"""One engine computes prompts, another one pulls their KV pages and generates: the same tokens as of one engine.

    python examples/disaggregation/two_engines.py [--model PATH]

Both run here in one process, for show; servers do the same with fields of the same names (docs/disaggregation.md).
"""

from __future__ import annotations

import argparse

import sgl

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="embedded")
model = parser.parse_args().model
prompt = "The committee met on Monday and talked about the new bridge over the river. " * 4

with sgl.Engine(model, disaggregation_mode="prefill") as prefill:
    computed = prefill.generate(
        prompt=prompt, sampling_params={"max_new_tokens": 0}, return_kv_transfer_params=True
    )
    params = computed["kv_transfer_params"]
    print(f"{params['num_tokens']} tokens in {params['num_pages']} pages wait at {params['host']}")
    with sgl.Engine(model, disaggregation_mode="decode") as decode:
        answer = decode.generate(
            prompt=prompt,
            sampling_params={"max_new_tokens": 12, "temperature": 0.0},
            kv_transfer_params=params,
        )
meta = answer["meta_info"]
print(f"{meta['cached_tokens']} of {meta['prompt_tokens']} tokens were not computed again: {answer['text']!r}")
