"""Token masks on the device: torch and Triton (interpreted where there is no GPU) against plain Python."""

from __future__ import annotations

import importlib.util
import os

import numpy as np
import pytest
import torch

from sgl.kernels import mask
from sgl.runtime.runner.mask_table import MaskTable

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are imported, which nothing does before

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed (pip install triton)"
)


@pytest.fixture(params=["torch", pytest.param("triton", marks=needs_triton)])
def kernels(request: pytest.FixtureRequest):  # type: ignore[no-untyped-def]  # a module
    """The same functions twice: plain torch on the CPU, and the Triton kernels."""
    if request.param == "torch":
        return mask
    from sgl.kernels import mask_triton

    return mask_triton


def device_of(kernels: object) -> torch.device:
    return torch.device("cpu") if kernels is mask else DEVICE


def random_masks(generator: np.random.Generator, num_rows: int, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Allowed tokens, bool [R, V], and the same packed."""
    words = -(-vocab_size // 32)
    allowed = generator.random((num_rows, words * 32)) < generator.random((num_rows, 1))
    return allowed[:, :vocab_size], np.packbits(allowed, axis=1, bitorder="little").view(np.int32)


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 257, 5000, 9001])
def test_forbidden_tokens_become_minus_infinity_and_nothing_else_changes(kernels, vocab_size: int) -> None:  # type: ignore[no-untyped-def]
    generator = np.random.default_rng(vocab_size)
    allowed, packed = random_masks(generator, 5, vocab_size)
    logits = generator.normal(size=(7, vocab_size)).astype(np.float32)
    logits[generator.random(logits.shape) < 0.1] = -np.inf
    mask_rows = np.array([3, -1, 0, 4, 3, -1, 2], np.int32)
    expected = logits.copy()
    for row, mask_row in enumerate(mask_rows):
        if mask_row >= 0:
            expected[row, ~allowed[mask_row]] = -np.inf
    device = device_of(kernels)
    given = torch.from_numpy(logits).to(device)
    kernels.apply_token_mask_(given, torch.from_numpy(packed).to(device), torch.from_numpy(mask_rows).to(device))
    assert given.cpu().numpy().tobytes() == expected.tobytes()


def test_a_batch_without_constraints_is_left_alone(kernels) -> None:  # type: ignore[no-untyped-def]
    device = device_of(kernels)
    logits = torch.randn(3, 40, device=device)
    given = logits.clone()
    masks = torch.zeros(1, 2, dtype=torch.int32, device=device)
    kernels.apply_token_mask_(given, masks, torch.full((3,), -1, dtype=torch.int32, device=device))
    assert torch.equal(given, logits)


def test_the_mask_table_holds_what_was_asked_for_last() -> None:
    generator = np.random.default_rng(0)
    masks = list(random_masks(generator, 12, 100)[1])
    table = MaskTable(5, 100, torch.device("cpu"))
    for _ in range(200):
        chosen = generator.choice(12, size=generator.integers(0, 6), replace=False)
        wanted = [masks[i] for i in chosen] + [None] * int(generator.integers(0, 2))
        wanted += wanted[:1]
        for given, row in zip(wanted, table.find(wanted), strict=True):
            assert (row == -1) == (given is None)
            if given is not None:
                assert table.rows[row].tolist() == given.tolist()


def test_a_mask_is_uploaded_once_while_it_is_in_use() -> None:
    first, second, third = random_masks(np.random.default_rng(0), 3, 64)[1]
    table = MaskTable(2, 64, torch.device("cpu"))
    rows = table.find([first, second])
    table.rows.zero_()
    assert table.find([second, first]).tolist() == rows[::-1].tolist()
    assert not table.rows.any()
    replaced = table.find([third])  # second is the least recently used
    assert replaced.tolist() == [rows[1]]
    assert table.find([first]).tolist() == [rows[0]]
