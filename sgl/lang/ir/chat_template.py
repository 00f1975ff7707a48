"""Chat templates: the text that opens and closes a turn, given earlier turns' roles. `PrefixTemplate` has a prefix and
suffix per role; `RenderedTemplate` cuts turns from rendered messages, such as a model's Jinja template's. Executors
encode their output, and nothing else, with control tokens. No template is guessed from a model's name. Whole
conversations of the chat endpoint are rendered at once instead, by `sgl.runtime.server.chat`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from sgl.errors import InvalidRequest, nearest_name
from sgl.lang.ir.reasoning import begun_by

Messages = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class TurnBegin:
    """A turn's opening text; `system`: the default system turn inside it."""

    text: str
    system: str | None = None


class ChatTemplate(Protocol):
    """`roles`: of the closed turns."""

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts that end a turn."""

    @property
    def image_token(self) -> str:
        """An image's placeholder in the text."""

    def begin(self, roles: tuple[str, ...], role: str) -> TurnBegin:
        """The opening of a `role` turn."""

    def end(self, roles: tuple[str, ...], role: str) -> str:
        """The closing of a `role` turn."""


@dataclass(frozen=True)
class PrefixTemplate(ChatTemplate):
    """A prefix and suffix per role. `merges_system`: the system turn opens the first user turn (Llama 2)."""

    name: str
    roles: Mapping[str, tuple[str, str]]
    default_system: str | None = None
    stops: tuple[str, ...] = ()
    image_token: str = "<image>"
    merges_system: bool = False

    def begin(self, roles: tuple[str, ...], role: str) -> TurnBegin:
        prefix = self._affixes(role)[0]
        if roles:
            return TurnBegin("" if self.merges_system and roles == ("system",) and role == "user" else prefix)
        if role == "system":
            return TurnBegin(self._affixes("user")[0] + prefix if self.merges_system else prefix)
        if self.default_system is None:
            return TurnBegin(prefix)
        before, after = self._affixes("system")
        return TurnBegin(f"{before}{self.default_system}{after}{prefix}", self.default_system)

    def end(self, roles: tuple[str, ...], role: str) -> str:
        return self._affixes(role)[1]

    def _affixes(self, role: str) -> tuple[str, str]:
        if role not in self.roles:
            hint = nearest_name(role, self.roles)
            raise InvalidRequest(f"chat template {self.name!r} has no role {role!r}{hint}", param="role")
        return self.roles[role]


@dataclass(frozen=True)
class RenderedTemplate(ChatTemplate):
    """Turns cut from `render(messages, add_generation_prompt)` of marked contents, once for each sequence of roles."""

    name: str
    render: Callable[[Messages, bool], str]
    stops: tuple[str, ...] = ()
    image_token: str = "<image>"
    _begin: dict[tuple[tuple[str, ...], str], TurnBegin] = field(default_factory=dict, compare=False)
    _end: dict[tuple[str, ...], str] = field(default_factory=dict, compare=False)
    _said: dict[tuple[str, ...], TurnBegin] = field(default_factory=dict, compare=False)

    def begin(self, roles: tuple[str, ...], role: str) -> TurnBegin:
        key = (roles, role)
        if key not in self._begin:
            written = self.end(roles[:-1], roles[-1]) if roles else ""
            self._begin[key] = TurnBegin(self._gap(roles, role).removeprefix(written))
        return self._begin[key]

    def begin_said(self, roles: tuple[str, ...]) -> TurnBegin:
        """The opening of an assistant's turn that says something at once, where a generated one begins with reasoning:
        as the template has earlier ones, or behind an empty thought."""
        if roles not in self._said:
            try:
                text = self._gap_before((*roles, "assistant"))
                text = text.removeprefix(self.end(roles[:-1], roles[-1]) if roles else "")
            except (InvalidRequest, ValueError):  # it has such a turn in no other way
                text = self.begin(roles, "assistant").text
            format = begun_by(text)
            self._said[roles] = TurnBegin(text if format is None else f"{text}{format.end}\n\n")
        return self._said[roles]

    def end(self, roles: tuple[str, ...], role: str) -> str:
        key = (*roles, role)
        if key not in self._end:
            try:
                self._end[key] = self._after_last(key, add_generation_prompt=False)
            except InvalidRequest:
                if role != "system":
                    raise
                self._end[key] = ""  # shows only with the next turn
        return self._end[key]

    def _gap(self, roles: tuple[str, ...], role: str) -> str:
        """The text between the last content and the new turn's."""
        if role != "assistant":
            return self._gap_before((*roles, role))
        try:
            return self._after_last(roles, add_generation_prompt=True)
        except InvalidRequest:
            if roles:
                raise
            return self._gap_before((role,))  # many templates need a message

    def _gap_before(self, roles: tuple[str, ...]) -> str:
        """The text between the last two turns' contents."""
        try:
            rendered = self._rendered(roles, False)
            last = rendered.index(_marker(len(roles) - 1))
        except (InvalidRequest, ValueError):
            if roles[-1] != "system":
                raise
            rendered = self._rendered((*roles, "user"), False)
            last = rendered.index(_marker(len(roles) - 1))
        if len(roles) == 1:
            return rendered[:last]
        before = _marker(len(roles) - 2)
        return rendered[rendered.index(before) + len(before) : last]

    def _after_last(self, roles: tuple[str, ...], *, add_generation_prompt: bool) -> str:
        rendered = self._rendered(roles, add_generation_prompt)
        if not roles:
            return rendered
        marker = _marker(len(roles) - 1)
        if marker not in rendered:
            raise InvalidRequest(f"chat template {self.name!r} leaves out a {roles[-1]} turn here", param="role")
        return rendered.rpartition(marker)[2]

    def _rendered(self, roles: tuple[str, ...], add_generation_prompt: bool) -> str:
        messages = [{"role": role, "content": _marker(i)} for i, role in enumerate(roles)]
        try:
            rendered = self.render(messages, add_generation_prompt)
            if not isinstance(rendered, str):
                raise TypeError(f"it made {type(rendered).__name__}, not text")
            return rendered
        except Exception as error:
            shown = ", ".join(roles) or "no turn"
            message = f"chat template {self.name!r} refuses the turns {shown}: {error}"
            raise InvalidRequest(message, param="role") from error


def jinja_template(
    source: str, *, special_tokens: Mapping[str, str] | None = None, stops: Sequence[str] = ()
) -> RenderedTemplate:
    """A tokenizer's Jinja template; `special_tokens` are its variables, such as bos_token."""
    try:
        template = _environment().from_string(source)
    except Exception as error:
        raise InvalidRequest(f"the chat template is not valid Jinja: {error}", param="chat_template") from error

    def render(messages: Messages, add_generation_prompt: bool) -> str:
        variables = {"bos_token": "", "eos_token": "", **(special_tokens or {})}
        return str(template.render(messages=messages, add_generation_prompt=add_generation_prompt, **variables))

    return RenderedTemplate("jinja", render, tuple(stops))


def as_template(value: ChatTemplate | str | Callable[[Messages, bool], str]) -> ChatTemplate:
    """A template from a registered name, Jinja source, render function or template."""
    if isinstance(value, str):
        if value in registry:
            return registry[value]
        if "{{" in value or "{%" in value:
            return jinja_template(value)
        hint = nearest_name(value, registry)
        raise InvalidRequest(
            f"no chat template {value!r}{hint}; there are {', '.join(registry)}", param="chat_template"
        )
    if callable(value):
        return RenderedTemplate(getattr(value, "__name__", "callable"), value)
    if not (hasattr(value, "begin") and hasattr(value, "end")):
        wanted = "a name, Jinja source, a function that renders messages, or a template"
        raise InvalidRequest(f"chat_template must be {wanted}, not {value!r}", param="chat_template")
    return value


def register_chat_template(template: ChatTemplate, name: str | None = None) -> ChatTemplate:
    """Register a template under its name."""
    registry[name or template.name] = template  # type: ignore[attr-defined]
    return template


def get_chat_template(name: str) -> ChatTemplate:
    """The template registered under that name."""
    return as_template(name)


def _marker(index: int) -> str:
    return f"\ue000{index}\ue001"  # private-use characters, which templates leave alone


@functools.cache
def _environment() -> Any:
    import jinja2
    import jinja2.ext
    import jinja2.sandbox

    def raise_exception(message: str) -> None:
        raise jinja2.exceptions.TemplateError(message)

    def strftime_now(form: str) -> str:
        import datetime

        return datetime.datetime.now().strftime(form)

    class Generation(jinja2.ext.Extension):
        """`{% generation %}` marks what a model is trained to write; here, what it holds is rendered."""

        tags = {"generation"}  # noqa: RUF012 - as the base class has it

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body, lineno=line)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, Generation]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment


def _tojson(value: Any, indent: int | None = None, **_: Any) -> str:
    import json

    return json.dumps(value, ensure_ascii=False, indent=indent)


registry: dict[str, ChatTemplate] = {}


def _add(name: str, system: str, user: str, assistant: str, tool: str | None = None, **options: Any) -> None:
    """Register a template from each role's turn with `…` for its content; tools default to users."""
    shapes = {"system": system, "user": user, "assistant": assistant, "tool": tool or user}
    affixes = {
        role: (before, after) for role, shape in shapes.items() for before, _, after in [shape.partition("…")]
    }
    registry[name] = PrefixTemplate(name, affixes, **options)


def _add_tagged(name: str, shape: str, names: Mapping[str, str] | None = None, **options: Any) -> None:
    """Register a template with one shape for all roles; `{}` is the role's name, or its name in `names`."""
    shown = ((names or {}).get(role, role) for role in ("system", "user", "assistant", "tool"))
    _add(name, *map(shape.format, shown), **options)


_HELPFUL = {"default_system": "You are a helpful assistant."}
_VICUNA_SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)
_CHATML: dict[str, dict[str, Any]] = {
    "chatml": {},
    "chatml-llava": _HELPFUL,
    "qwen": _HELPFUL,
    "qwen2-vl": {**_HELPFUL, "image_token": "<|vision_start|><|image_pad|><|vision_end|>"},
    "dbrx-instruct": {},
    "internvl-2-5": {"stops": ("<|im_end|>", "<|action_end|>")},
    "interns1": {"stops": ("<|im_end|>", "<|action_end|>")},
    "minicpmv": {"image_token": "(<image>./</image>)"},
    "minicpmo": {"image_token": "(<image>./</image>)"},
}
for _name, _options in _CHATML.items():
    _add_tagged(_name, "<|im_start|>{}\n…<|im_end|>\n", **{"stops": ("<|im_end|>",), **_options})
for _name, _options in {"llama-3-instruct": {"image_token": "<|image|>"}, "llama-3-instruct-llava": {}}.items():
    _shape = "<|start_header_id|>{}<|end_header_id|>\n\n…<|eot_id|>"
    _add_tagged(_name, _shape, {"tool": "ipython"}, stops=("<|eot_id|>",), **_options)
_add_tagged(
    "llama-4",
    "<|header_start|>{}<|header_end|>\n\n…<|eot|>",
    {"tool": "ipython"},
    stops=("<|eot|>",),
    image_token="<|image|>",
)
_add_tagged(
    "gemma-it",
    "<start_of_turn>{}\n…<end_of_turn>\n",
    {"system": "user", "assistant": "model", "tool": "user"},
    stops=("<end_of_turn>",),
)
_add_tagged("gemma-4-it", "<|turn>{}\n…<turn|>\n", {"assistant": "model"}, stops=("<turn|>",))
_add_tagged(
    "c4ai-command-r",
    "<|START_OF_TURN_TOKEN|><|{}_TOKEN|>…<|END_OF_TURN_TOKEN|>",
    {"system": "SYSTEM", "user": "USER", "assistant": "CHATBOT", "tool": "SYSTEM"},
)
_add_tagged("granite-3-instruct", "<|start_of_role|>{}<|end_of_role|>…<|end_of_text|>", stops=("<|end_of_text|>",))
_add_tagged(
    "glm-4v",
    "<|{}|>\n…",
    {"tool": "observation"},
    stops=("<|user|>", "<|endoftext|>", "<|observation|>"),
    image_token="<|begin_of_image|><|image|><|end_of_image|>",
)
_add("default", "SYSTEM:…\n", "USER:…\n", "ASSISTANT:…\n")
_add("claude", "…", "\n\nHuman: …", "\n\nAssistant:…")
_add("vicuna_v1.1", "… ", "USER:… ", "ASSISTANT:…</s>", default_system=_VICUNA_SYSTEM, image_token=" <image>\n")
_add("llama-2-chat", "<<SYS>>\n…\n<</SYS>>\n\n", "[INST] … [/INST]", "…  </s><s>", merges_system=True)
_add("mistral", "[SYSTEM_PROMPT] … [/SYSTEM_PROMPT]", "[INST] … [/INST]", "… </s><s>", stops=("</s>",))
_add("yi-1.5", "…", "<|im_start|>user\n…<|im_end|>\n<|im_start|>assistant\n", "…<|im_end|>\n")
_add("yi-vl", "…\n\n", "### Human:…\n", "### Assistant:…\n", image_token=" <image_placeholder>\n")
_END_OF_SENTENCE = "<｜end▁of▁sentence｜>"
_add("deepseek-v3", "…", "<｜User｜>…", f"<｜Assistant｜>…{_END_OF_SENTENCE}", stops=(_END_OF_SENTENCE,))
for _name in ("janus", "janus-pro"):
    _assistant = f"<|Assistant|>…{_END_OF_SENTENCE}"
    _options = {"stops": (_END_OF_SENTENCE,), "image_token": "<image_placeholder>\n"}
    _add(_name, "…", "<|User|>…", _assistant, **_options)
