"""Token masks on a CPU beside llguidance, over the schemas of MaskBench.

    python -m benchmarks.mask_peers MASKBENCH_DIR TOKENIZER_DIR [--number 300] [--seed 1] [--json OUT]

Both engines compile each schema and follow the same valid documents, in turn, token by token. Times are CPU time of the
one thread that works. `first mask` is compiling and one mask; a mask is `cold` where ours is not in the cache yet, and
`warm` on a second reading of the same documents; `budgeted` masks are those of a third and fourth reading by fresh
grammars, without and with as many tokens left as the document needs and a few more.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
from collections import defaultdict
from pathlib import Path
from time import thread_time
from typing import Any

import llguidance
import llguidance.hf
import numpy as np
from transformers import AutoTokenizer

from sgl import grammar
from sgl.errors import GrammarError
from sgl.grammar import Grammar, Vocabulary

SPARE = 8  # tokens of a budget beyond what the document takes
Times = dict[str, list[float]]


class Peer:
    """llguidance over one tokenizer."""

    def __init__(self, tokenizer: Any, size: int) -> None:
        self.tokenizer = llguidance.hf.from_tokenizer(tokenizer, n_vocab=size)

    def compile(self, schema: Any) -> Any:
        """A matcher, or None for what it refuses."""
        text = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema))
        matcher = llguidance.LLMatcher(self.tokenizer, text)
        return None if matcher.is_error() else matcher


def ours(schema: Any, vocabulary: Vocabulary) -> Grammar | None:
    """None for what we refuse."""
    try:
        return grammar.compile(json_schema=schema, vocabulary=vocabulary, whitespace="flexible")
    except GrammarError:
        return None


def measure(schema: Any, documents: list[list[int]], vocabulary: Vocabulary, peer: Peer, times: Times) -> bool:
    """Add to `times`; False: one of the engines refuses the schema."""
    row = np.zeros(vocabulary.words, np.int32)

    def first_of_peer() -> Any:
        start = thread_time()
        found = peer.compile(schema)
        if found is not None:
            found.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        times["peer first"].append(thread_time() - start)
        return found

    start = thread_time()
    compiled = ours(schema, vocabulary)
    if compiled is not None:
        compiled.matcher().fill_mask(row)
    times["first"].append(thread_time() - start)
    other = first_of_peer()
    if compiled is None or other is None:
        del times["first"][-1], times["peer first"][-1]
        return False
    assert compiled.masks is not None
    for reading in ("cold", "warm"):
        for ids in documents:
            matcher, follower = compiled.matcher(), other.deep_copy()
            for token in ids:
                walks = compiled.masks.walks
                start = thread_time()
                matcher.fill_mask(row)
                mid = thread_time()
                follower.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
                end = thread_time()
                if reading == "warm" or compiled.masks.walks > walks:
                    times[reading].append(mid - start)
                    times[f"peer {reading}"].append(end - mid)
                times[f"all {reading}"].append(mid - start)
                times[f"peer all {reading}"].append(end - mid)
                if not matcher.accept(token) or not follower.consume_token(token):
                    break
    for name, budgeted in (("unbudgeted", False), ("budgeted", True)):
        compiled = ours(schema, vocabulary)
        assert compiled is not None
        for ids in documents:
            matcher = compiled.matcher()
            for position, token in enumerate(ids):
                start = thread_time()
                matcher.fill_mask(row, len(ids) - position + SPARE if budgeted else None)
                times[name].append(thread_time() - start)
                if not row[token // 32] >> token % 32 & 1 or not matcher.accept(token):
                    break
    return True


def report(times: Times) -> dict[str, dict[str, float]]:
    """Print and return the figures, in µs."""
    found = {}
    print(f"{'µs':>16}{'number':>9}{'mean':>10}{'p50':>10}{'p95':>10}{'p99':>10}{'max':>10}")
    for name, values in times.items():
        array = np.array(values or [0.0]) * 1e6
        found[name] = {"number": len(values), "mean": float(array.mean()), "max": float(array.max())}
        found[name] |= {f"p{at}": float(np.percentile(array, at)) for at in (50, 95, 99)}
        columns = "".join(f"{found[name][key]:10.1f}" for key in ("mean", "p50", "p95", "p99", "max"))
        print(f"{name:>16}{len(values):9}{columns}")
    for name in ("first", "cold", "warm", "all cold"):
        print(f"{name}: mean {found[name]['mean'] / found[f'peer {name}']['mean']:.2f}x of llguidance's")
    print(f"a budget: {found['budgeted']['mean'] / found['unbudgeted']['mean']:.2f}x")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("maskbench", type=Path)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("--number", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer)
    vocabulary = Vocabulary.from_tokenizer(tokenizer)
    vocabulary.work_out()
    peer = Peer(tokenizer, vocabulary.size)
    files = sorted(arguments.maskbench.rglob("*.json"))
    random.Random(arguments.seed).shuffle(files)
    times: Times = defaultdict(list)
    for text in ({"type": "string"}, {"type": "array", "items": {}}):  # what is worked out once
        measure(text, [], vocabulary, peer, defaultdict(list))
    gc.collect()
    gc.freeze()
    compared, slow = 0, []
    for file in files[: arguments.number]:
        content = json.loads(file.read_text())
        valid = [json.dumps(test["data"], ensure_ascii=False) for test in content["tests"] if test["valid"]]
        documents = [list(tokenizer.encode(text, add_special_tokens=False)) for text in valid]
        gc.collect()
        gc.disable()
        before = len(times["cold"])
        try:
            compared += measure(content["schema"], documents, vocabulary, peer, times)
        except GrammarError as error:
            print(f"{file.name}: {error}")
        finally:
            gc.enable()
        slow.append((max(times["cold"][before:], default=0.0) * 1e3, file.name))
    print(f"{compared} of {min(len(files), arguments.number)} schemas compared, {vocabulary.size} tokens")
    found = report(times)
    print("slowest masks, ms:", ", ".join(f"{each:.1f} {name}" for each, name in sorted(slow)[-5:]))
    if arguments.json:
        arguments.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
