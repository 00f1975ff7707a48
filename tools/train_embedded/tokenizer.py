"""The tokenizer: byte-level BPE in which words, digits, spaces and punctuation marks never share a token.

A name is then the same tokens after a space and after a quotation mark, so copying it is copying tokens, and any text
that a grammar forces ends where a token ends.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from tools.train_embedded.prompts import END, START, STOP

VOCAB_SIZE = 4096
CONTEXT = 1024

_TOOLS_BEFORE = "You may call these functions:\\n<tools>\\n"
_TOOLS_AFTER = (
    '</tools>\\nTo call one, write <tool_call>{"name": ..., "arguments": {...}}</tool_call> and nothing else. '
    "Several calls may follow each other. Answer in plain text when you need no function."
)
CHAT_TEMPLATE = (
    f"{{% if tools %}}{{{{ '{START}system\\n{_TOOLS_BEFORE}' }}}}"
    "{% for tool in tools %}"
    "{{ (tool.function if tool.function is defined else tool) | tojson }}{{ '\\n' }}"
    "{% endfor %}"
    f"{{{{ '{_TOOLS_AFTER}{END}\\n' }}}}{{% endif %}}"
    "{% for message in messages %}"
    f"{{{{ '{START}' + message.role + '\\n' + message.content }}}}"
    "{% for call in message.tool_calls or [] %}"
    """{{ '<tool_call>{"name":' + call.function.name | tojson + ',"arguments":' }}"""
    "{{ call.function.arguments | tojson(separators=(',', ':')) + '}</tool_call>' }}"
    "{% endfor %}"
    f"{{{{ '{END}\\n' }}}}"
    "{% endfor %}"
    f"{{% if add_generation_prompt %}}{{{{ '{START}assistant\\n' }}}}{{% endif %}}"
)
"""Turns as <|im_start|>role, content, <|im_end|>; tools as `sgl.describe_tools` lists them, calls as it wants them."""


def train(texts: Iterable[str]) -> Tokenizer:
    """Learn the merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{L}+|[^\p{L}]"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[STOP, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """tokenizer.json and tokenizer_config.json, as transformers reads them."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": STOP,
        "model_max_length": CONTEXT,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(
        json.dumps(config, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
    )
