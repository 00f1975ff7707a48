"""Splits a reasoning model's text into reasoning and answer, whole or streamed."""

from __future__ import annotations

from dataclasses import dataclass

from sgl.errors import InvalidRequest, nearest_name


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Tags around reasoning; `starts_inside`: the template opens it."""

    begin: str
    end: str
    starts_inside: bool = False


_MAY_THINK = ReasoningFormat("<think>", "</think>")
_THINKS = ReasoningFormat("<think>", "</think>", starts_inside=True)
_INNER = ReasoningFormat("<|inner_prefix|>", "<|inner_suffix|>")
_MM_THINK = ReasoningFormat("<mm:think>", "</mm:think>")
_COHERE = ReasoningFormat("<|START_THINKING|>", "<|END_THINKING|>")
_HARMONY = ReasoningFormat("<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>")
FORMATS = {
    "apertus": _INNER,
    "apertus2509": _INNER,
    "apriel": ReasoningFormat("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]", starts_inside=True),
    "cohere_command3": _COHERE,
    "cohere_command4": _COHERE,
    "deepseek-r1": _THINKS,
    "deepseek-v3": _MAY_THINK,
    "deepseek-v4": _MAY_THINK,
    "deepseek_r1": _THINKS,
    "deepseek_v3": _MAY_THINK,
    "deepseek_v4": _MAY_THINK,
    "gemma4": ReasoningFormat("<|channel>thought", "<channel|>"),
    "glm45": _MAY_THINK,
    "glm47": _MAY_THINK,
    "gigachat35": _MAY_THINK,
    "gpt-oss": _HARMONY,
    "granite": ReasoningFormat("Here is my thought process:", "Here is my response:"),
    "holo2": _MAY_THINK,
    "hunyuan": _MAY_THINK,
    "hy_v3": _MAY_THINK,
    "interns1": _MAY_THINK,
    "kimi": ReasoningFormat("◁think▷", "◁/think▷"),
    "kimi_k2": _MAY_THINK,
    "kimi_k3": ReasoningFormat("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    "ling3": _MAY_THINK,
    "mimo": _MAY_THINK,
    "minicpm3": ReasoningFormat("<|thought_start|>", "<|thought_end|>"),
    "minimax": _THINKS,
    "minimax-m3": _MM_THINK,
    "minimax_m2": _THINKS,
    "minimax_m3": _MM_THINK,
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
    "nemotron_3": _THINKS,
    "nemotron_v3": _THINKS,
    "olmo3": _THINKS,
    "openai_gptoss": _HARMONY,
    "poolside_v1": _MAY_THINK,
    "qwen3": _MAY_THINK,
    "qwen3-thinking": _THINKS,
    "seed_oss": ReasoningFormat("<seed:think>", "</seed:think>"),
    "solar_open2": ReasoningFormat("<|think:start|>", "<|think:end|>"),
    "step3": _THINKS,
    "step3p5": _THINKS,
    "telechat4": _MAY_THINK,
}
"""By the names of SGLang and vLLM."""


def is_begun(prompt: str, format: ReasoningFormat) -> bool | None:
    """Whether a prompt, given by its end, began the reasoning; False if it ended it; None if it says nothing."""
    end = prompt.rstrip()
    return True if end.endswith(format.begin) else False if end.endswith(format.end) else None


def begun_by(text: str) -> ReasoningFormat | None:
    """The format whose reasoning the end of a text begins."""
    return next((format for format in FORMATS.values() if is_begun(text, format)), None)


def reasoning_format(name: str | None) -> ReasoningFormat:
    """The format of that name. Raises InvalidRequest."""
    if name not in FORMATS:
        hint = nearest_name(str(name), FORMATS)
        raise InvalidRequest(
            f"no reasoning format {name!r}{hint}; there are {', '.join(FORMATS)}", param="model_type"
        )
    return FORMATS[name]


class ReasoningSplitter:
    """Takes text in any pieces; returns (reasoning, answer). Holds back partial tags."""

    def __init__(
        self, name: str, *, is_inside: bool | None = None, streams: bool = True, only_leading: bool = False
    ) -> None:
        """is_inside: whether the prompt began the reasoning; None: as the format says. streams: else reasoning comes
        in one piece, when it has ended. only_leading: no reasoning comes behind what is none."""
        self._format = reasoning_format(name)
        self._is_inside = self._format.starts_inside if is_inside is None else is_inside
        self._streams = streams
        self._only_leading = only_leading
        self._reasoning = ""  # that does not stream
        self._held = ""
        self._seen_any = False
        self._is_fresh = False  # after the end tag: drop blank lines

    def feed(self, text: str, *, final: bool = False) -> tuple[str, str]:
        """The next (reasoning, answer); `final` releases held text."""
        reasoning, answer = self._split(text, final=final)
        if self._streams:
            return reasoning, answer
        self._reasoning += reasoning
        if self._is_inside and not final:
            return "", answer
        reasoning, self._reasoning = self._reasoning, ""
        return reasoning, answer

    def _split(self, text: str, *, final: bool) -> tuple[str, str]:
        reasoning, answer = [], []
        self._held += text
        while self._held:
            tag = self._format.end if self._is_inside else self._format.begin
            if not self._seen_any:
                start = self._held.lstrip()
                if start.startswith(self._format.begin):
                    self._held = start[len(self._format.begin) :]
                    self._is_inside, self._seen_any = True, True
                    continue
                if self._format.begin.startswith(start) and not final:
                    break
                self._seen_any = True
            before, found, after = self._held.partition(tag)
            if self._only_leading and not self._is_inside:
                before, found, after = self._held, "", ""
            elif not found:
                keep = 0 if final else half_tag(self._held, tag)
                before, after = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
            if self._is_inside:
                reasoning.append(before)
            else:
                if self._is_fresh:
                    before = before.lstrip()
                self._is_fresh = self._is_fresh and not before
                answer.append(before)
            self._held = after
            if not found:
                break
            self._is_fresh = self._is_inside
            self._is_inside = not self._is_inside
        return "".join(reasoning), "".join(answer)


def half_tag(text: str, tag: str) -> int:
    """Length of the longest suffix of `text` that begins `tag`."""
    return next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if tag.startswith(text[-n:])), 0)
