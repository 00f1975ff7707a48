"""A chat template of each format of calls, and a tiny model whose tokenizer has the tokens of all."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tokenizers import AddedToken

from tests.tiny_models import byte_tokenizer, edit_json, tiny_checkpoint

_NAME, _JSON = "{{ c.function.name }}", "{{ c.function.arguments | tojson }}"
_ITEMS = "{% for k, v in c.function.arguments.items() %}%s{% endfor %}"
_VALUE = "{{ v if v is string else v | tojson }}"
_COMMA = "{% if not loop.last %}, {% endif %}"


def _assigned(assigns: str, comma: str, value: str) -> str:
    return _ITEMS.replace("%s", "{{ k }}" + assigns + value + "{% if not loop.last %}" + comma + "{% endif %}")


def _in_gemma(begin: str, end: str, quote: str) -> tuple[str, str, str]:
    value = f"{{{{ '{quote}' + v + '{quote}' if v is string else v | tojson }}}}"
    return "", f"{begin}call:{_NAME}{{{{ '{{' }}}}" + _assigned(":", ",", value) + f"}}{end}", ""


def _in_hy(suffix: str) -> tuple[str, str, str]:
    item = f"<arg_key{suffix}>{{{{ k }}}}</arg_key{suffix}>\n<arg_value{suffix}>{_VALUE}</arg_value{suffix}>\n"
    call = (
        f"<tool_call{suffix}>{_NAME}<tool_sep{suffix}>\n" + _ITEMS.replace("%s", item) + f"</tool_call{suffix}>\n"
    )
    return f"<tool_calls{suffix}>\n", call, f"</tool_calls{suffix}>"


def _in_language(name: str, section: str) -> tuple[str, str, str]:
    mark = f"｜{name}｜"
    begin = f'<{mark}parameter name="{{{{ k }}}}" string="{{{{ (v is string) | tojson }}}}">'
    items = _ITEMS.replace("%s", f"{begin}{_VALUE}</{mark}parameter>\n")
    call = f'<{mark}invoke name="{_NAME}">\n{items}</{mark}invoke>\n'
    return f"\n\n<{mark}{section}>\n", call, f"</{mark}{section}>"


def _quoted(key: str) -> str:
    return '{"name": "' + _NAME + f'", "{key}": ' + _JSON + "}"


_CALLS: Final = {
    # before, each, behind
    "hermes": ("", "<tool_call>\n" + _quoted("arguments") + "\n</tool_call>", ""),
    "llama3": ("", _quoted("parameters"), ""),
    "llama4": ("<|python_start|><|python_end|>", _quoted("parameters"), ""),
    "hy_v3": _in_hy(""),
    "hy_v3_open": _in_hy(":opensource"),
    "mistral": ("[TOOL_CALLS] [", _quoted("arguments") + _COMMA, "]"),
    "mistral_args": ("", f"[TOOL_CALLS]{_NAME}[ARGS]{_JSON}", ""),
    "mistral_ids": ("", f"[TOOL_CALLS]{_NAME}[CALL_ID]{{{{ c.id }}}}[ARGS]{_JSON}", ""),
    "deepseekv3": (
        "<｜tool▁calls▁begin｜>",
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{_NAME}\n```json\n{_JSON}\n```<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    ),
    "deepseekv31": (
        "<｜tool▁calls▁begin｜>",
        f"<｜tool▁call▁begin｜>{_NAME}<｜tool▁sep｜>{_JSON}<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    ),
    "kimi_k2": (
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>" + _JSON + "<|tool_call_end|>",
        "<|tool_calls_section_end|>",
    ),
    "qwen3_coder": (
        "",
        f"<tool_call>\n<function={_NAME}>\n"
        + _ITEMS.replace("%s", "<parameter={{ k }}>\n" + _VALUE + "\n</parameter>\n")
        + "</function>\n</tool_call>",
        "",
    ),
    "glm45": (
        "",
        f"<tool_call>{_NAME}\n"
        + _ITEMS.replace("%s", "<arg_key>{{ k }}</arg_key>\n<arg_value>" + _VALUE + "</arg_value>\n")
        + "</tool_call>",
        "",
    ),
    "seed_oss": (
        "",
        f"\n<seed:tool_call>\n<function={_NAME}>\n"
        + _ITEMS.replace("%s", "<parameter={{ k }}>" + _VALUE + "</parameter>\n")
        + "</function>\n</seed:tool_call>",
        "",
    ),
    "minimax_m2": (
        "\n<minimax:tool_call>\n",
        f'<invoke name="{_NAME}">\n'
        + _ITEMS.replace("%s", '<parameter name="{{ k }}">' + _VALUE + "</parameter>\n")
        + "</invoke>\n",
        "</minimax:tool_call>",
    ),
    "deepseekv32": _in_language("DSML", "function_calls"),
    "deepseekv4": _in_language("DSML", "tool_calls"),
    "gigachat35": _in_language("GCML", "tool_calls"),
    "step3": (
        "<｜tool_calls_begin｜>\n",
        f'<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="{_NAME}">\n'
        + _ITEMS.replace("%s", '<steptml:parameter name="{{ k }}">' + _VALUE + "</steptml:parameter>\n")
        + "</steptml:invoke><｜tool_call_end｜>\n",
        "<｜tool_calls_end｜>",
    ),
    "nemotron_json": ("<TOOLCALL>[", _quoted("arguments") + _COMMA, "]</TOOLCALL>"),
    "apriel": (
        "\n<tool_calls>[",
        '{"name": "' + _NAME + '", "arguments": {{ c.function.arguments | string }}, "id": "{{ c.id }}"}' + _COMMA,
        "]</tool_calls>",
    ),
    "granite": ("<|tool_call|>[", _quoted("arguments") + _COMMA, "]"),
    "phi4_mini_json": ("functools[", _quoted("arguments") + _COMMA, "]"),
    "internlm": ("", "<|action_start|><|plugin|>\n" + _quoted("parameters") + "<|action_end|>", ""),
    "longcat": ("", "<longcat_tool_call>\n" + _quoted("arguments") + "\n</longcat_tool_call>", ""),
    "xlam": ("[", _quoted("arguments") + _COMMA, "]"),
    "pythonic": ("[", _NAME + "(" + _assigned("=", ", ", '"{{ v }}"') + ")" + _COMMA, "]"),
    "lfm2": (
        "<|tool_call_start|>[",
        _NAME + "(" + _assigned("=", ", ", """{{ "'" + v + "'" if v is string else v | string }}""") + ")" + _COMMA,
        "]<|tool_call_end|>",
    ),
    "olmo3": (
        "<function_calls>\n",
        _NAME + "(" + _assigned("=", ", ", "{{ v | tojson }}") + ")\n",
        "</function_calls>",
    ),
    "gemma4": _in_gemma("<|tool_call>", "<tool_call|>", '<|"|>'),
    "functiongemma": _in_gemma("<start_function_call>", "<end_function_call>", "<escape>"),
    "minicpm3": (
        "<|tool_call_start|>\n```python\n",
        _NAME + "(" + _assigned("=", ",", "{{ v | tojson }}") + ")\n",
        "```\n<|tool_call_end|>",
    ),
    "minicpm5": (
        "",
        f'<function name="{_NAME}">'
        + _ITEMS.replace("%s", '<param name="{{ k }}">' + _VALUE + "</param>")
        + "</function>\n",
        "",
    ),
    "apertus": ("<|tools_prefix|>[", '{"' + _NAME + '": ' + _JSON + "}" + _COMMA, "]<|tools_suffix|>"),
    "dots": (
        "<dots_function_call>\n",
        f'<invoke name="{_NAME}">\n'
        + _ITEMS.replace("%s", '<parameter name="{{ k }}">' + _VALUE + "</parameter>\n")
        + "</invoke>\n",
        "</dots_function_call>",
    ),
    "gigachat3": (
        "",
        "{% if loop.first %}<|message_sep|>\n\nfunction call<|role_sep|>\n"
        + _quoted("arguments")
        + "<|message_sep|>{% endif %}",
        "",
    ),
    "gigachat31": ("", "{% if loop.first %}<|function_call|>" + _quoted("arguments") + "{% endif %}", ""),
    "function_call": ("", "<function_call>\n" + _quoted("arguments") + "\n</function_call>", ""),
    "granite-20b-fc": ("", "<function_call> " + _quoted("arguments"), ""),
    "k2_horizon": (
        "<ifm|tool_calls>\n",
        f"<ifm|tool_call>{_NAME}\n"
        + _ITEMS.replace("%s", f"<ifm|arg_key>{{{{ k }}}}</ifm|arg_key>\n<ifm|arg_value>{_VALUE}</ifm|arg_value>\n")
        + "</ifm|tool_call>\n",
        "</ifm|tool_calls>",
    ),
    "k2_horizon_json": (
        "<ifm|tool_calls>\n",
        "<ifm|tool_call>" + _quoted("arguments") + "</ifm|tool_call>\n",
        "</ifm|tool_calls>",
    ),
    "solar_open2": (
        "",
        f"<|tool_call:start|>{_NAME}\n"
        + _ITEMS.replace("%s", f"<|tool_arg:start|>{{{{ k }}}}<|tool_arg:value|>{_VALUE}<|tool_arg:end|>\n")
        + "<|tool_call:end|>\n",
        "",
    ),
    **dict.fromkeys(
        ("cohere_command3", "cohere_command4"),
        (
            "<|START_ACTION|>[\n",
            '    {"tool_call_id": "{{ loop.index0 }}", "tool_name": "'
            + _NAME
            + '", "parameters": '
            + _JSON
            + "}{% if not loop.last %},{% endif %}\n",
            "]<|END_ACTION|>",
        ),
    ),
    "kimi_k3": (
        "<|open|>tools<|sep|>",
        f'<|open|>call tool="{_NAME}" index="{{{{ loop.index }}}}"<|sep|>'
        + _ITEMS.replace(
            "%s",
            '<|open|>argument key="{{ k }}" type="{{ "string" if v is string else "number" }}"<|sep|>'
            + _VALUE
            + "<|close|>argument<|sep|>",
        )
        + "<|close|>call<|sep|>",
        "<|close|>tools<|sep|>",
    ),
    "gpt-oss": (
        "",
        f" to=functions.{_NAME}<|channel|>commentary json<|message|>{_JSON}<|call|>",
        "",
    ),
}
_COHERE = ("<|START_THINKING|>", "<|END_THINKING|>")
_BLOCKS: Final = {
    # around what is thought, and what is said
    "cohere_command3": (*_COHERE, "<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    "cohere_command4": (*_COHERE, "<|START_TEXT|>", "<|END_TEXT|>"),
    "kimi_k3": (
        *("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
        *("<|open|>response<|sep|>", "<|close|>response<|sep|>"),
    ),
}
SPECIAL: Final = [
    "[TOOL_CALLS]",
    "[ARGS]",
    "[CALL_ID]",
    "<|python_tag|>",
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|start|>",
    "<|channel|>",
    "<|message|>",
    "<|end|>",
    "<|call|>",
    "<|return|>",
    "<|constrain|>",
    "<|tool_call|>",
    "<|action_start|>",
    "<|plugin|>",
    "<|action_end|>",
]
"""Tokens that are called special."""
OTHER: Final = [
    "<tool_call>",
    "</tool_call>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "<think>",
    "</think>",
    "◁think▷",
    "◁/think▷",
    "[THINK]",
    "[/THINK]",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
    "<seed:think>",
    "</seed:think>",
    "<|channel>thought",
    "<channel|>",
    "<seed:tool_call>",
    "<minimax:tool_call>",
    "<｜DSML｜function_calls>",
    "<｜DSML｜tool_calls>",
    "<｜tool_calls_begin｜>",
    "<TOOLCALL>",
    "<tool_calls>",
    "<longcat_tool_call>",
    "functools[",
    '[{"name": "',
]
LATER: Final = [
    "<|tool_call_start|>",
    "<|python_start|>",
    "<|python_end|>",
    "<tool_calls:opensource>",
    "<arg_value:opensource>",
    "<|tool_call>",
    "<tool_call|>",
    '<|"|>',
    "<start_function_call>",
    "<end_function_call>",
    "<escape>",
]
"""More of the special ones: the ids of those above stay, and with them what the random model says."""
LATER_OTHER: Final = ["<function_calls>", "[order("]
LATEST: Final = [
    *("<|tools_prefix|>", "<|tools_suffix|>", "<|message_sep|>", "<|role_sep|>", "<|function_call|>"),
    *("<｜GCML｜tool_calls>", "<function_call>", "<ifm|tool_calls>", "<ifm|tool_call>", "<|tool_call:start|>"),
    *("<function name=", "<dots_function_call>", "<|tool_call:end|>", "</ifm|arg_value>"),
    *("<|inner_prefix|>", "<|inner_suffix|>", "<mm:think>", "</mm:think>", "<|thought_start|>", "<|thought_end|>"),
    *("<|think:start|>", "<|think:end|>"),
    *("<|START_THINKING|>", "<|END_THINKING|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_ACTION|>"),
    *("<|END_ACTION|>", "<|START_TEXT|>", "<|END_TEXT|>", "<|open|>", "<|close|>", "<|sep|>"),
    *("<|message_model|>", "<|content_thinking|>", "<|content_text|>", "<|content_invoke_tool_json|>"),
    *("<|end_message|>", "<|content_model_end_sampling|>"),
]
"""Special ones of later families."""
_VOCABULARY: Final = 512


def template_of(name: str) -> str:
    """The template of a model that writes calls in the format."""
    before, each, behind = _CALLS[name]
    calls = "{% if m.tool_calls %}" + before + "{% for c in m.tool_calls %}" + each + "{% endfor %}" + behind
    tools = "{% if tools %}[tools]{{ tools | tojson }}\n{% endif %}"
    begin, end, answer = "[{{ m.role }}]", "\n", "[assistant]"
    if name == "gpt-oss":
        begin, end, answer = "<|start|>{{ m.role }}", "", "<|start|>assistant"
        text = (
            "{% if m.thinking %}<|channel|>analysis<|message|>{{ m.thinking }}<|end|><|start|>assistant{% endif %}"
        )
        text += "{% if not m.tool_calls %}<|channel|>final<|message|>{{ m.content }}<|end|>{% endif %}"
    elif (blocks := _BLOCKS.get(name)) is not None:
        said = f"{{% if not m.tool_calls %}}{blocks[2]}{{{{ m.content }}}}{blocks[3]}{{% endif %}}"
        text = "{% if m.role != 'assistant' %}{{ m.content }}{% else %}" + said + "{% endif %}"
    else:
        text = "{{ m.content or '' }}"
    turns = "{% for m in messages %}" + begin + text + calls + "{% endif %}" + end + "{% endfor %}"
    return tools + turns + "{% if add_generation_prompt %}" + answer + "{% endif %}"


def every_format_checkpoint(path: Path) -> Path:
    """A tiny random model; its tokenizer has no chat template."""
    tiny_checkpoint(path, vocab_size=_VOCABULARY, max_position_embeddings=2048)
    tokenizer = byte_tokenizer(384)
    tokenizer.add_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    tokenizer.add_tokens([AddedToken(name, special=False, normalized=False) for name in OTHER])
    tokenizer.add_tokens([AddedToken(name, special=True, normalized=False) for name in LATER])
    tokenizer.add_tokens([AddedToken(name, special=False, normalized=False) for name in LATER_OTHER])
    tokenizer.add_tokens([AddedToken(name, special=True, normalized=False) for name in LATEST])
    assert len(tokenizer) <= _VOCABULARY
    tokenizer.save_pretrained(path)
    ends = tokenizer.convert_tokens_to_ids(["</s>", "<|return|>", "<|call|>"])
    edit_json(path / "generation_config.json", eos_token_id=ends)
    return path
