"""Throughput and latency on one GPU, beside vLLM, SGLang and what the machine allows: a table, JSON, a picture.

    python -m benchmarks.gpu.throughput MODEL [--only W3,W4] [--reps 3] [--json FILE] [--plot FILE.svg]
                                              [--peers ROWS.jsonl] [--option NAME=VALUE …]

MODEL is a folder with a config.json; weights are random. --peers names what benchmarks.gpu.peers measured on this
machine; without, their figures are of runs of their own on an H200 (2026-11-20, medians of two): not of this run, nor
of this machine. W6 and W7 are in benchmarks.gpu.constrained; `python -m benchmarks.gpu` runs all.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import time
from pathlib import Path

import torch

from benchmarks.gpu import peers
from benchmarks.gpu.workloads import Figure, Machine, Workloads
from sgl import Engine
from sgl.runtime.config import EngineConfig, parse_options


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("model", type=Path)
    parser.add_argument("--only", default="W3,W4,W5,W2,W1,W9,host")
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="an SVG file")
    parser.add_argument("--peers", type=Path, metavar="ROWS", help="what benchmarks.gpu.peers measured here")
    parser.add_argument("--option", action="append", default=[], help="of the engine, NAME=VALUE")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    given = dict(option.split("=", 1) for option in arguments.option)
    options = {"context_length": 17_408, **parse_options(EngineConfig, given)}
    names = arguments.only.split(",")
    from sgl.runtime.model.choice import read_config  # versions.py imports this file beside older engines

    width = read_config(str(arguments.model), "sgl").hidden_size
    of_peers, where = peers.figures_for(width, arguments.peers)
    machine = Machine.measure()
    print(
        f"this machine: {machine.bandwidth / 1e12:.2f} TB/s copied, {machine.matrix_rate / 1e12:.0f} TFLOP/s bf16"
    )
    began = time.perf_counter()
    with Engine(arguments.model, load_format="dummy", skip_tokenizer_init=True, **options) as engine:
        started, allocated = time.perf_counter() - began, _allocated()
        if engine.config.quantization is None:
            _flatten_weights(engine)
        workloads = Workloads(engine, arguments.model, machine, arguments.reps)
        workloads.warm_up()
        print(f"ready after {started:.1f} s, warm after {time.perf_counter() - began:.1f} s", flush=True)
        figures = []
        print(f"{'':18} {'sgl':>10} {'of floor':>9} {'SGLang':>9} {'vLLM':>9} {'ratio':>6}")
        for figure in workloads.run(names):
            figures.append(figure)
            print(_line(figure, of_peers.get(figure.name)), flush=True)
        calls, held = (now - before for now, before in zip(_allocated(), allocated, strict=True))
        print(f"allocated on the device after ready: {held / 2**20:.0f} MiB in {calls} calls")
        print(f"SGLang and vLLM: {where}; ratio: how many times better than the better of the two")
        if arguments.json:
            rows = [dataclasses.asdict(f) | {"peers": of_peers.get(f.name)} for f in figures]
            body = {"config": dataclasses.asdict(engine.config), "ready_s": started, "peers_ran": where}
            body |= {"machine": dataclasses.asdict(machine), "figures": rows}
            arguments.json.write_text(json.dumps(body, indent=1))
        if arguments.plot:
            arguments.plot.write_text(_picture(figures, of_peers, f"SGLang and vLLM {where}"))


def _allocated() -> tuple[int, int]:
    """Calls of the device's allocator so far, and bytes that torch holds."""
    statistics = torch.cuda.memory_stats()
    return statistics["num_device_alloc"], statistics["reserved_bytes.all.current"]


def _flatten_weights(engine: Engine) -> None:
    """Every weight uniform in ±1e-3, as both peers make theirs: what is multiplied decides power and clocks."""
    for tensor in engine._started.runner._model.weights.tensors():
        tensor.uniform_(-1e-3, 1e-3)


def _ratio(figure: Figure, of_peers: tuple[float, ...]) -> float:
    """How many times better than the best of the peers."""
    return min(of_peers) / figure.value if figure.is_time else figure.value / max(of_peers)


def _of_floor(figure: Figure) -> float | None:
    """How near to what the machine allows."""
    if figure.floor is None:
        return None
    return figure.floor / figure.value if figure.is_time else figure.value / figure.floor


def _line(figure: Figure, of_peers: tuple[float, ...] | None) -> str:
    digits = 0 if figure.value >= 100 else 2
    share = _of_floor(figure)
    text = f"{figure.name:18} {figure.value:10.{digits}f} {'' if share is None else f'{share:.0%}':>9}"
    if of_peers is None:
        return f"{text} {'':26} {figure.unit}"
    columns = " ".join(f"{value:9.{digits}f}" for value in of_peers)
    return f"{text} {columns} {_ratio(figure, of_peers):6.2f} {figure.unit}"


def _picture(figures: list[Figure], of_peers: peers.Figures, caption: str) -> str:
    """An SVG of bars: each figure's share of the machine's floor, and its ratio to the better peer."""
    rows = []
    for i, figure in enumerate(figures):
        y, share, of_them = 40 + 26 * i, _of_floor(figure), of_peers.get(figure.name)
        rows.append(f'<text x="8" y="{y + 13}">{figure.name}: {figure.value:,.4g} {figure.unit}</text>')
        for x, value, text in (
            (240, share, f"{share or 0:.0%} of the floor"),
            (
                500,
                of_them and _ratio(figure, of_them),
                f"{_ratio(figure, of_them) if of_them else 0:.2f}x the better",
            ),
        ):
            if value:
                width = min(130.0, 100 * value)
                rows.append(f'<rect x="{x}" y="{y}" width="{width:.0f}" height="18" fill="#7a9fd4"/>')
                rows.append(f'<text x="{x + 4}" y="{y + 13}">{text}</text>')
    height = 60 + 26 * len(figures)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="720" height="{height}" font-family="sans-serif" '
        f'font-size="12"><rect width="720" height="{height}" fill="white"/>'
        f'<text x="8" y="22">sgl on one GPU; {caption}. Right bars: 100 px are as fast as the better of the two'
        f"</text>{''.join(rows)}</svg>\n"
    )


if __name__ == "__main__":
    main()
