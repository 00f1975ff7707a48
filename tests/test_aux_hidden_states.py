"""Hidden states kept of a decoder's layers, against transformers: whatever the steps, exactly its hidden states."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from sgl.runtime.model.aux_hidden_states import AuxHiddenStates
from sgl.runtime.model.config import ModelConfig
from sgl.runtime.model.loader import load_decoder
from tests.test_models import Paged, Step, at_once, in_chunks, mixed, random_sequences
from tests.tiny_models import tiny_checkpoint


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "olmo2", "mixtral"])
@pytest.mark.parametrize("most_tokens", [4, 512])
def test_aux_hidden_states_are_what_transformers_calls_hidden_states(
    family: str, most_tokens: int, tmp_path: Path, device: str
) -> None:
    decoder = load_decoder(
        ModelConfig.from_pretrained(tiny_checkpoint(tmp_path, family)), device=device, dtype="float32"
    )
    layers = -1, 0, 1
    decoder.aux_hidden_states = AuxHiddenStates(
        layers, most_tokens, decoder.config.hidden_size, decoder.dtype, decoder.device
    )
    decoder.aux_hidden_states.is_on = True
    sequences = random_sequences(decoder.config.vocab_size)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, torch_dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = [model(torch.tensor([its]), output_hidden_states=True).hidden_states for its in sequences]
    for cut in (at_once, lambda its: in_chunks(its, 7), mixed):
        _compare(Paged(decoder, sequences, 16), cut, expected, layers)


def _compare(
    paged: Paged,
    cut: Callable[[list[list[int]]], Iterator[Step]],
    expected: list[tuple[torch.Tensor, ...]],
    layers: tuple[int, ...],
) -> None:
    for rows in cut(paged.sequences):
        before = dict(enumerate(paged.done))
        paged.step(rows)
        aux_hidden_states = paged.decoder.aux_hidden_states
        assert aux_hidden_states is not None
        kept = aux_hidden_states.hidden(sum(count for _, count in rows))
        for layer, its in zip(layers, kept, strict=True):
            parts = [expected[row][layer + 1][0, before[row] : before[row] + count] for row, count in rows]
            torch.testing.assert_close(its.cpu(), torch.cat(parts), atol=2e-4, rtol=1e-4)
