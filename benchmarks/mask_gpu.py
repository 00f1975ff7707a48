"""What token masks cost on a GPU: walking the vocabulary, applying masks while sampling.

    python benchmarks/mask_gpu.py TOKENIZER_JSON [--tokens 128256] [--json FILE]

Checks every kernel against the host's grammar first. Times are medians of CUDA graph replays in microseconds, launch
included; every case is timed twice, and the smaller median counts. Exits with 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from sgl.grammar import Grammar, Vocabulary, compile
from sgl.grammar.automaton.finished import Configuration, complete, finish
from sgl.grammar.automaton.place import Place, advance, start_of
from sgl.kernels.mask import ops as mask
from sgl.kernels.mask import triton as mask_triton
from sgl.kernels.mask.layout import GrammarTensors, Places
from sgl.kernels.sampling import ops as sampling
from sgl.kernels.sampling import triton as sampling_triton
from sgl.runtime.runner.device_grammars import places_arrays, vocabulary_tensors
from sgl.runtime.runner.device_masks import DeviceMasks
from sgl.runtime.runner.mask_table import MaskTable
from tests.mask_reference import automaton_tensors, grammar_tensors

DEVICE = torch.device("cuda")
MAX_STATES = 20_000
ROWS = 256
STRING = {"type": "string"}


def record(properties: dict[str, Any]) -> dict[str, Any]:
    """The schema of an object with exactly these fields."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


ADDRESS = record({"street": STRING, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}})
FIXED: list[tuple[dict[str, Any], Any]] = [
    (
        record(
            {
                "name": STRING,
                "email": STRING,
                "age": {"type": "integer"},
                "tags": {"type": "array", "items": STRING},
                "addr": ADDRESS,
                "score": {"type": "number"},
            }
        ),
        {
            "name": "Alice",
            "email": "a@b.c",
            "age": 31,
            "tags": ["x", "yy"],
            "addr": {"street": "Elm", "zip": "12345"},
            "score": 1.5,
        },
    ),
    (
        record(
            {
                "id": {"type": "integer", "minimum": 1, "maximum": 99999},
                "kind": {"enum": ["cat", "category", "dog"]},
                "born": {"type": "string", "format": "date"},
                "alive": {"type": "boolean"},
                "notes": {"type": ["string", "null"]},
            }
        ),
        {"id": 4711, "kind": "category", "born": "2019-04-30", "alive": True, "notes": None},
    ),
    (
        record(
            {
                "items": {"type": "array", "items": record({"sku": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}$"},
                    "count": {"type": "integer"}})},
                "total": {"type": "number"},
                "currency": {"enum": ["EUR", "USD", "CHF"]},
            }
        ),
        {"items": [{"sku": "ABC-1234", "count": 2}, {"sku": "XYZ-0001", "count": 1}], "total": 1.5, "currency": "EUR"},
    ),
]  # fmt: skip
COUNTED = record(
    {"title": {"type": "string", "maxLength": 200}, "tags": {"type": "array", "items": STRING, "maxItems": 9}}
)
FLAT = r'\{"name":"[^"\\]+","age":[0-9]+,"city":"[a-z]+"\}'
FLAT_TEXT = b'{"name":"Alice","age":31,"city":"rome"}'
REGEXES = {"words": r"[a-z ]{1,}x", "any text": r"(.|\n)*", "letters": r"[A-Za-z0-9_ ,.]*;"}


class Bench:
    """Grammars on the device, and places in them."""

    def __init__(self, vocabulary: Vocabulary, block: int) -> None:
        self.vocabulary = vocabulary
        self.tensors = vocabulary_tensors(vocabulary, DEVICE, block)
        self.grammars: list[Grammar] = []
        self.device: GrammarTensors | None = None

    def add(self, **constraint: Any) -> int:
        """Compile and work out all of a grammar."""
        grammar = compile(vocabulary=self.vocabulary, **constraint)
        assert complete(grammar.automaton, MAX_STATES), f"{constraint} has more than {MAX_STATES} states"
        self.grammars.append(grammar)
        return len(self.grammars) - 1

    def upload(self) -> GrammarTensors:
        """All grammars so far."""
        tensors = [automaton_tensors(grammar.automaton, DEVICE) for grammar in self.grammars]
        self.device = grammar_tensors(tensors, DEVICE)
        return self.device

    def path(self, number: int, text: bytes) -> list[tuple[int, Place]]:
        """The places before each byte of a text, and at its end."""
        automaton = self.grammars[number].automaton
        places = [start_of(automaton)]
        for byte in text:
            following = advance(automaton, places[-1], bytes([byte]))
            assert following is not None, (text, byte)
            places.append(following)
        return [(number, place) for place in places]

    def places(self, chosen: list[tuple[int, Place]]) -> Places:
        """Places on the device."""
        return Places(*(torch.from_numpy(one).to(DEVICE) for one in places_arrays(chosen, 32)))

    def host_masks(self, chosen: list[tuple[int, Place]]) -> list[np.ndarray]:
        """The host's masks."""
        return [self.grammars[number].masks.look_up(place).row for number, place in chosen]


def text_of(value: Any) -> bytes:
    """Compact JSON."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def microseconds(run: Callable[[], Any], repeats: int = 30) -> float:
    """Median time of one call, replayed as a CUDA graph; the smaller of two medians."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    torch.cuda.synchronize()
    medians = []
    for _ in range(2):
        times = []
        for _ in range(repeats):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) * 1e3)
        medians.append(statistics.median(times))
    return min(medians)


def check_masks(bench: Bench, chosen: list[tuple[int, Place]]) -> None:
    """Masks on the device against those of the host."""
    assert bench.device is not None
    places, rows = bench.places(chosen), torch.arange(len(chosen), dtype=torch.int32, device=DEVICE)
    masks = torch.full((len(chosen), bench.vocabulary.words), -1, dtype=torch.int32, device=DEVICE)
    mask.compute_masks_(masks, rows, places, bench.device, bench.tensors)
    wrong = [chosen[i] for i in np.flatnonzero((masks.cpu().numpy() != np.stack(bench.host_masks(chosen))).any(1))]
    assert not wrong, f"{len(wrong)} masks differ, the first at {wrong[0]}"


def time_masks(bench: Bench, chosen: list[tuple[int, Place]], **options: Any) -> float:
    """Microseconds to find the masks of fresh places."""
    assert bench.device is not None
    grammars = options.pop("grammars", bench.device)
    places, rows = bench.places(chosen), torch.arange(len(chosen), dtype=torch.int32, device=DEVICE)
    masks = torch.full((len(chosen), bench.vocabulary.words), -1, dtype=torch.int32, device=DEVICE)
    return microseconds(lambda: mask_triton.compute_masks_(masks, rows, places, grammars, bench.tensors, **options))


def time_cached(bench: Bench, chosen: list[tuple[int, Place]], results: dict[str, float]) -> None:
    """Masks that are all there already: what the host takes to find their rows, and the device to learn of them."""
    finished = [finish(grammar.automaton, MAX_STATES) for grammar in bench.grammars]
    table = MaskTable(ROWS, bench.vocabulary.size, DEVICE, DeviceMasks(bench.vocabulary, ROWS, DEVICE))
    configurations = []
    for number, place in chosen:
        automaton = finished[number]
        assert automaton is not None
        configurations.append(Configuration(automaton, place))
    found = table.ensure_rows(configurations)
    times = []
    for _ in range(30):
        begin = time.perf_counter()
        assert (table.ensure_rows(configurations) == found).all()
        times.append((time.perf_counter() - begin) * 1e6)
    rows, on_device = (
        torch.from_numpy(found).pin_memory(),
        torch.empty(len(found), dtype=torch.int32, device=DEVICE),
    )
    results[f"cached, {len(chosen)}"] = microseconds(lambda: on_device.copy_(rows, non_blocking=True))
    results[f"cached, {len(chosen)}, on the host"] = statistics.median(times)


def time_sampling(bench: Bench, chosen: list[tuple[int, Place]], results: dict[str, float]) -> None:
    """Sampling with and without masks, 256 rows: the general passes, and the kernel that takes one."""
    vocab_size = bench.vocabulary.size
    logits = torch.randn(ROWS, vocab_size, device=DEVICE)
    masks = torch.from_numpy(np.stack(bench.host_masks(chosen))).to(DEVICE)
    mask_rows = torch.arange(ROWS, dtype=torch.int32, device=DEVICE)
    temperature = torch.ones(ROWS, device=DEVICE)
    cold = torch.zeros(ROWS, device=DEVICE)
    seeds = torch.arange(ROWS, device=DEVICE)
    positions = torch.arange(ROWS, device=DEVICE)
    latest = torch.empty_like(seeds)
    masked = logits.clone()
    mask.apply_token_mask_(masked, masks, mask_rows)
    for warmth in (temperature, cold):
        drawn = sampling_triton.draw(logits, warmth, seeds, positions, positions, latest, masks, mask_rows)
        expected = sampling.sample(masked, warmth, seeds, positions)
        assert (drawn != expected).sum() <= 1, "the fused kernel draws other tokens"  # a tie in the last bits
    results["apply masks, 256"] = microseconds(lambda: mask.apply_token_mask_(logits, masks, mask_rows))
    logits = torch.randn(ROWS, vocab_size, device=DEVICE)
    results["argmax (torch)"] = microseconds(lambda: sampling.greedy(logits))
    results["sample (torch)"] = microseconds(lambda: sampling.sample(logits, temperature, seeds, positions), 5)
    for name, warmth in (("greedy", cold), ("draw", temperature)):
        given = logits, warmth, seeds, positions, positions, latest
        results[f"{name}, fused"] = microseconds(lambda g=given: sampling_triton.draw(*g))
        results[f"{name}, fused, masked"] = microseconds(lambda g=given: sampling_triton.draw(*g, masks, mask_rows))


def main() -> int:
    """Print a table; 1 if a bar was missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("--tokens", type=int, default=128_256, help="use the first so many of the vocabulary")
    parser.add_argument("--block", type=int, nargs="*", default=[128])
    parser.add_argument("--warps", type=int, nargs="*", default=[1])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    whole = Vocabulary.from_tokenizer(Tokenizer.from_file(str(arguments.tokenizer)), eos_ids=[])
    tokens = whole.token_bytes[: arguments.tokens - 1]
    vocabulary = Vocabulary([*tokens, None], [len(tokens)])
    print(f"{torch.cuda.get_device_name()}, {vocabulary.size} tokens, torch {torch.__version__}", flush=True)
    results: dict[str, float] = {}
    for block in arguments.block:
        bench = Bench(vocabulary, block)
        begin = time.perf_counter()
        fixed = [bench.add(json_schema=schema) for schema, _ in FIXED]
        counted, any_json = bench.add(json_schema=COUNTED), bench.add(json_schema={})
        texts = [bench.add(regex=regex) for regex in REGEXES.values()]
        plain = bench.add(regex=FLAT)
        results["compile and complete all, ms"] = (time.perf_counter() - begin) * 1e3
        bench.upload()
        everywhere = [
            place
            for number, (_, value) in zip(fixed, FIXED, strict=True)
            for place in bench.path(number, text_of(value))
        ]
        nested = bench.path(any_json, b'{"a":[1,{"b":2.5,"c":[[[{"x":"y"}]]]},true,null],"k":"Elm street"}')
        strings = bench.path(counted, b'{"title":"Abc","tags":["x","y","z"]}')
        if block == arguments.block[0]:
            check_masks(bench, everywhere[:ROWS])
            check_masks(bench, nested + strings)
            for number in texts:
                check_masks(bench, bench.path(number, b"abc"))
            check_masks(bench, bench.path(plain, FLAT_TEXT))
            print("masks: right", flush=True)
        places256 = [everywhere[i % len(everywhere)] for i in range(ROWS)]
        free = everywhere[10]  # inside the first string
        for warps in arguments.warps:
            tag = f" [block {block}, {warps} warps]"
            options = {"num_warps": warps}
            results["fresh, object begins" + tag] = time_masks(bench, everywhere[:1], **options)
            results["fresh, key" + tag] = time_masks(bench, everywhere[3:4], **options)
            results["fresh, free string" + tag] = time_masks(bench, [free], **options)
            results["fresh, any JSON begins" + tag] = time_masks(bench, nested[:1], **options)
            results["fresh, counted string" + tag] = time_masks(bench, strings[11:12], **options)
            for name, number in zip(REGEXES, texts, strict=True):
                results[f"fresh, regex {name}{tag}"] = time_masks(bench, bench.path(number, b"a")[1:], **options)
            results["fresh, 64 places of fixed fields" + tag] = time_masks(bench, places256[:64], **options)
            results["fresh, 256 places of fixed fields" + tag] = time_masks(bench, places256, **options)
            results["fresh, 256 in free strings" + tag] = time_masks(bench, [free] * ROWS, **options)
            results["fresh, 256 in counted strings" + tag] = time_masks(bench, [strings[11]] * ROWS, **options)
            results["fresh, 256 in any JSON" + tag] = time_masks(bench, (nested * 4)[:ROWS], **options)
            flat = bench.path(plain, FLAT_TEXT)
            flat = [flat[i % len(flat)] for i in range(ROWS)]
            device = bench.device
            assert device is not None
            for name, stacks, counters in (
                ("plain", False, False),
                ("pushdown", True, False),
                ("+ counters", True, True),
            ):
                variant = GrammarTensors(device.automata, device.addresses, stacks, counters)
                for which, chosen in (("256 flat places", flat), ("1 in letters", bench.path(texts[2], b"a")[1:])):
                    results[f"{name} walk, {which}{tag}"] = time_masks(bench, chosen, grammars=variant, **options)
        for count in (1, ROWS):
            time_cached(bench, places256[:count], results)
        if block == arguments.block[0]:
            time_sampling(bench, places256, results)
            for name, number in (("six fields", fixed[0]), ("any JSON", any_json)):
                tables, copy = bench.grammars[number].automaton.tables, bench.device.automata[number]
                size = sum(getattr(copy, field).nbytes for field in copy.__slots__)
                print(
                    f"{name}: {tables.num_states} states, {tables.nbytes / 1e3:.0f} kB, on the device {size / 1e3:.0f}"
                )
            every = [(fixed[0], Place(state, None, 0, 0)) for state in range(len(bench.grammars[0].automaton))]
            results[f"all {len(every)} states of six fields at once"] = time_masks(bench, every)
            begin = time.perf_counter()
            bench.host_masks(places256)
            results["the host finds 256 masks that it has"] = (time.perf_counter() - begin) * 1e6
            afresh = bench.path(bench.add(json_schema=FIXED[0][0]), text_of(FIXED[0][1]))
            begin = time.perf_counter()
            bench.host_masks(afresh)
            walks = bench.grammars[-1].masks.walks
            results["the host walks a mask, mean"] = (time.perf_counter() - begin) * 1e6 / walks
    for name, value in results.items():
        print(f"{value:10.1f}  {name}")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))
    return report(results)


def report(results: dict[str, float]) -> int:
    """The bars, each with what was measured at the first block size and number of warps; 1 if one was missed."""
    tag = next(name for name in results if "[" in name).partition(" [")[2]
    found = {name.removesuffix(" [" + tag): value for name, value in results.items()}
    alone = ["object begins", "key", "free string", "any JSON begins", "counted string"]
    alone += [f"regex {name}" for name in REGEXES]
    ratios = [
        found[f"pushdown walk, {which}"] / found[f"plain walk, {which}"]
        for which in ("256 flat places", "1 in letters")
    ]
    bars = [
        (
            "mask of a fresh state, 1 request, the slowest",
            max(found[f"fresh, {name}"] for name in alone),
            30.0,
            "us",
        ),
        ("256 places of fixed fields", found["fresh, 256 places of fixed fields"], 250.0, "us"),
        ("256 in free strings", found["fresh, 256 in free strings"], 1000.0, "us"),
        ("cached, 256 requests", max(found["cached, 1"], found["cached, 256"]), 20.0, "us"),
        ("a mask adds to greedy", found["greedy, fused, masked"] - found["greedy, fused"], 40.0, "us"),
        ("a mask adds to a draw", found["draw, fused, masked"] - found["draw, fused"], 40.0, "us"),
        ("pushdown walk over the plain one", max(ratios), 1.5, "x"),
    ]
    for name, value, bar, unit in bars:
        print(f"{'ok    ' if value <= bar else 'MISSED'} {name}: {value:.2f} {unit}, bar {bar:g}")
    return int(any(value > bar for _, value, bar, _ in bars))


if __name__ == "__main__":
    sys.exit(main())
