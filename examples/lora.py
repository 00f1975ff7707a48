"""LoRA adapters: one model, several behaviours in one batch, and what loading one takes.

python examples/lora.py. It writes an adapter of random numbers for the embedded model, so what that says is nonsense.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import sgl


def write_adapter(folder: Path, config: dict[str, Any], rank: int = 8) -> None:
    """What peft saves of a trained one, for the queries of every layer."""
    hidden, wide = config["hidden_size"], config["num_attention_heads"] * config["head_dim"]
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors[f"{name}.lora_A.weight"] = torch.randn(rank, hidden) / hidden**0.5
        tensors[f"{name}.lora_B.weight"] = torch.randn(wide, rank)
    save_file(tensors, folder / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(fields))


@sgl.function
def capital(s: sgl.ProgramState) -> None:
    s += "Q: What is the capital of France?\nA:" + sgl.gen("answer", max_tokens=8, stop="\n")


def main() -> None:
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder, sgl.Engine(enable_lora=True) as engine:
        model = Path(engine.get_server_info()["model_path"])
        write_adapter(Path(folder), json.loads((model / "config.json").read_text()))
        loaded = engine.load_lora_adapter(lora_name="noise", lora_path=folder)
        print("adapters:", *loaded.loaded_adapters)
        prompt, params = (
            "Q: What is the capital of France?\nA:",
            {"max_new_tokens": 8, "temperature": 0, "stop": "\n"},
        )
        # one batch, in which one row has the adapter
        for name, result in zip(
            (None, "noise"), engine.generate([prompt] * 2, params, lora_path=[None, "noise"]), strict=True
        ):
            print(f"{name or 'the model alone'}: {result['text']!r}")
        state = capital.run(backend=engine, temperature=0, extra={"lora_path": "noise"})
        print(f"in a program: {state['answer']!r}")
        engine.unload_lora_adapter(lora_name="noise")


if __name__ == "__main__":
    main()
