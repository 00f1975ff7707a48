"""A model to run the examples on where none is at hand: a tiny Llama with random weights and a byte tokenizer.

Everything works as with a trained model, except that what it writes means nothing.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 344,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 257,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "bos_token_id": 256,
    "eos_token_id": 256,
    "initializer_range": 0.2,
}


def random_model() -> str:
    """Write config and tokenizer to a new temporary folder; load it with load_format="dummy"."""
    folder = Path(tempfile.mkdtemp(prefix="sgl-random-"))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={byte: i for i, byte in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"bos_token": "<|end|>", "eos_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(special))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return str(folder)
