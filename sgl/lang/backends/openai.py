"""APIs of the OpenAI protocol, which lacks regexes, grammars and text inside an assistant turn: those raise."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from sgl.errors import BackendError, ConfigError, InvalidRequest
from sgl.lang.backends.http import HttpClient
from sgl.lang.backends.refusals import LIMITS, OPTIONAL, SENT, Refusals
from sgl.lang.backends.steps import Completion, GenParams, Prompt, TextBackend
from sgl.lang.environment import environment
from sgl.lang.ir import nodes as ir
from sgl.lang.ir.chat_template import ChatTemplate, as_template
from sgl.lang.ir.choices import Scores
from sgl.lang.ir.media import url_of
from sgl.lang.ir.sampling import DEFAULTS
from sgl.lang.typed.tools import call_schema

COMPLETION_MODELS = ("gpt-3.5-turbo-instruct", "davinci-002", "babbage-002")
_ELSEWHERE = "Or run the program where selects are exact: on `sgl serve`, SGLang or vLLM"


@dataclass
class TokenUsage:
    """Tokens used since creation or `reset`."""

    prompt_tokens: int = 0
    completion_tokens: int = 0

    def add(self, usage: Mapping[str, Any]) -> None:
        """Count an answer."""
        self.prompt_tokens += usage.get("prompt_tokens", 0)
        self.completion_tokens += usage.get("completion_tokens", 0)

    def reset(self) -> None:
        """Start over."""
        self.prompt_tokens = self.completion_tokens = 0


class OpenAI(TextBackend):
    """A model behind an OpenAI-compatible API. `extra_body` is merged into each request.

    The default key is the environment's. Parameters are sent if a program sets them, also those beyond the protocol
    (top_k, min_p …); all others are the API's to choose. The token limit is `max_tokens` or `max_completion_tokens`,
    by the model's name or the API's refusal. Refused fields that nobody asked for are left out from then on.
    `token_usage` counts all programs."""

    default_base_url: ClassVar[str] = "https://api.openai.com/v1"
    api_key_variable: ClassVar[str] = "OPENAI_API_KEY"
    constraints: ClassVar[frozenset[str]] = frozenset({"json"})
    checks_dtypes: ClassVar[bool] = True

    def __init__(
        self,
        model_name: str,
        is_chat_model: bool | None = None,
        chat_template: ChatTemplate | str | None = None,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        timeout: float = 600.0,
        max_retries: int = 3,
        max_connections: int = 256,
        extra_body: Mapping[str, Any] | None = None,
    ) -> None:
        key = api_key or environment(self.api_key_variable)
        if key is None and base_url is None:
            raise ConfigError(f"no key: pass api_key= or set {self.api_key_variable}", option="api_key")
        self.model_name = model_name
        self.is_chat_model = model_name not in COMPLETION_MODELS if is_chat_model is None else is_chat_model
        self.writes_whole_turns = self.is_chat_model
        self.token_usage = TokenUsage()
        self.chat_template = as_template(chat_template or "default")
        self._extra_body = dict(extra_body or {})
        self._refusals = Refusals(model_name, is_chat_model=self.is_chat_model)
        self._http = HttpClient(
            base_url or self.default_base_url,
            api_key=key,
            timeout=timeout,
            max_retries=max_retries,
            max_connections=max_connections,
        )

    async def generate(self, prompt: Prompt, params: GenParams) -> list[Completion]:
        return await self._generate(prompt, params, _optional(params))

    async def _generate(self, prompt: Prompt, params: GenParams, optional: frozenset[str]) -> list[Completion]:
        path, body = self._request(prompt, params)
        answer = await self._post(path, body, optional)
        usage = _usage(answer)
        self.token_usage.add(usage)
        completions = []
        for i, choice in enumerate(sorted(_choices(answer), key=lambda choice: choice.get("index", 0))):
            meta = {**(usage if i == 0 else _NO_USAGE), **_meta(choice)}
            message = choice.get("message") or {}
            completions.append(Completion(choice.get("text", message.get("content")) or "", meta))
        return completions

    async def stream(self, prompt: Prompt, params: GenParams) -> AsyncIterator[Completion]:
        path, body = self._request(prompt, params)
        calls: dict[int, dict[str, Any]] = {}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        async for event in self._events(path, body, _optional(params)):
            meta = _usage(event) if event.get("usage") else {}
            self.token_usage.add(meta)
            text = ""
            for choice in event.get("choices", ()):
                delta = choice.get("delta") or {}
                text = choice.get("text", delta.get("content")) or ""
                _merge_calls(calls, delta.get("tool_calls") or ())
                meta |= _meta({key: value for key, value in choice.items() if value is not None})
            if calls:
                meta["tool_calls"] = list(calls.values())
            yield Completion(text, meta)

    async def choose(self, prompt: Prompt, node: ir.Select) -> Completion:
        if not self.is_chat_model:
            return await super().choose(prompt, node)
        schema: dict[str, Any] = {"properties": {"choice": {"enum": list(node.choices)}}, "required": ["choice"]}
        schema |= {"type": "object", "additionalProperties": False}
        sampling = {**DEFAULTS, "temperature": 0.0}
        gen = ir.Gen(node.name)
        params = GenParams(sampling, [0], gen, ("json", schema))
        needs = (
            f"a select on a chat model needs an API that enforces JSON Schemas, and {self._http.base_url} does not"
        )
        try:
            [completion] = await self._generate(prompt, params, OPTIONAL | {"temperature"})
        except InvalidRequest as error:
            if error.param != "schema":
                raise
            raise BackendError(f"{needs}: {error.__cause__}. {_ELSEWHERE}") from error
        try:
            choice = json.loads(completion.text)["choice"]
        except (ValueError, KeyError, TypeError) as error:
            raise BackendError(
                f"the model did not choose: {completion.text[:200]!r}; {needs}. {_ELSEWHERE}"
            ) from error
        if choice not in node.choices:
            raise BackendError(f"the model chose {choice!r}, which is none of {list(node.choices)}")
        return Completion(choice, completion.meta)

    async def score(self, prompt: Prompt, choices: Sequence[str], *, unconditional: bool) -> list[Scores]:
        given = await self._echoed([prompt.text + choice for choice in choices])
        start = min(_num_before(logprobs, len(prompt.text)) for logprobs in given)
        scores = [Scores([logprob or 0.0 for logprob in logprobs["token_logprobs"][start:]]) for logprobs in given]
        if not unconditional:
            return scores
        alone = await self._echoed(list(choices))
        return [
            Scores(score.logprobs, score.token_ids, logprobs["token_logprobs"][-len(score.logprobs) :])
            for score, logprobs in zip(scores, alone, strict=True)
        ]

    async def _echoed(self, texts: list[str]) -> list[dict[str, Any]]:
        """Log-probabilities of the texts' tokens, from servers that echo."""
        body = {"model": self.model_name, "prompt": texts, "max_tokens": 0, "echo": True, "logprobs": 1}
        try:
            answer = await self._http.post("/completions", {**body, **self._extra_body})
        except (InvalidRequest, BackendError) as error:
            if re.search(r"echo|logprobs|max_tokens|\((404|405|501)\)", str(error)):
                raise self._no_logprobs(str(error)) from error
            raise
        choices = sorted(_choices(answer), key=lambda choice: choice.get("index") or 0)
        if len(choices) != len(texts):
            raise self._no_logprobs(f"asked for {len(texts)} texts at once, it answered {len(choices)}")
        for choice, text in zip(choices, texts, strict=True):
            if problem := _echo_problem(choice, text):
                raise self._no_logprobs(problem)
        return [choice["logprobs"] for choice in choices]

    def _no_logprobs(self, why: str) -> BackendError:
        return BackendError(
            f"a select needs the log-probabilities of its choices, which {self._http.base_url} does not give: {why}. "
            f"Let a chat model name the choice, by sgl.OpenAI(…, is_chat_model=True). {_ELSEWHERE}"
        )

    # What APIs refuse

    async def _post(self, path: str, body: dict[str, Any], optional: frozenset[str]) -> Any:
        """The answer. Refused fields that nobody asked for are changed and the request repeated."""
        body = self._refusals.left_out(body, optional)
        while True:
            try:
                return await self._http.post(path, body)
            except (InvalidRequest, BackendError) as error:
                body = self._refusals.changed(body, error, optional)

    async def _events(self, path: str, body: dict[str, Any], optional: frozenset[str]) -> AsyncIterator[Any]:
        """The same for a stream, which is refused before its first event."""
        body = self._refusals.left_out(body, optional)
        while True:
            try:
                async for event in self._http.events(path, body):
                    yield event
                return
            except (InvalidRequest, BackendError) as error:
                body = self._refusals.changed(body, error, optional)

    def _request(self, prompt: Prompt, params: GenParams) -> tuple[str, dict[str, Any]]:
        sampling = params.sampling
        body: dict[str, Any] = {"model": self.model_name, "seed": params.seeds[0] % 2**31}
        given = {**self._extra_body, **(sampling["extra"] or {})}
        if not given.keys() & set(LIMITS):  # otherwise given under its protocol name
            body[self._refusals.limit()] = sampling["max_tokens"]
        for name in SENT:
            value = sampling[name]
            if (value != DEFAULTS[name] or name in params.given) and value != []:
                body[name] = value
        if self.is_chat_model:
            body["messages"] = _messages(prompt)
            if sampling["return_logprob"]:
                body["logprobs"], body["top_logprobs"] = True, sampling["top_logprobs_num"] or 0
        else:
            body["prompt"] = prompt.text
            if sampling["return_logprob"]:
                body["logprobs"] = sampling["top_logprobs_num"] or 0
        tools = params.node.tools
        if tools:
            body["tools"] = [{"type": "function", "function": dict(tool)} for tool in tools]
        if tools and params.constraint == ("json", call_schema(tools)):  # the protocol's own way
            body |= {"tool_choice": "required", "parallel_tool_calls": False}
        elif params.constraint:
            schema = {"name": params.node.name or "answer", "schema": params.constraint[1], "strict": True}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        return "/chat/completions" if self.is_chat_model else "/completions", body | given


class Anthropic(OpenAI):
    """Claude models, by Anthropic's OpenAI-compatible API."""

    default_base_url = "https://api.anthropic.com/v1"
    api_key_variable = "ANTHROPIC_API_KEY"


class Crusoe(OpenAI):
    """Models served by Crusoe."""

    default_base_url = "https://managed-inference-api-proxy.crusoecloud.com/v1"
    api_key_variable = "CRUSOE_API_KEY"


class LiteLLM(OpenAI):
    """Models behind a LiteLLM proxy at `base_url`."""

    default_base_url = "http://localhost:4000/v1"
    api_key_variable = "LITELLM_API_KEY"


class VertexAI(OpenAI):
    """Gemini models, by Google's OpenAI-compatible API."""

    default_base_url = "https://generativelanguage.googleapis.com/v1beta/openai"
    api_key_variable = "GEMINI_API_KEY"


_NO_USAGE = {"prompt_tokens": 0, "completion_tokens": 0}


def _optional(params: GenParams) -> frozenset[str]:
    """What may be left out where it is refused: also what a program gives that says no more than its absence."""
    return OPTIONAL | {name for name in params.given & {*SENT} if params.sampling[name] == DEFAULTS[name]}


def _echo_problem(choice: Mapping[str, Any], text: str) -> str | None:
    """Why a choice lacks an echoed text's log-probabilities, or None."""
    logprobs = choice.get("logprobs")
    if not isinstance(logprobs, dict):
        return "there are no logprobs in its answer"
    lists = [logprobs.get(name) for name in ("tokens", "token_logprobs", "text_offset")]
    if not all(isinstance(items, list) and items for items in lists):
        return "its logprobs have no tokens, token_logprobs and text_offset"
    if len({len(items) for items in lists if items}) > 1:
        return "its lists of tokens and of their logprobs differ in length"
    tokens, values, _ = lists
    if sum(len(token) for token in tokens or ()) < len(text):
        return "it does not echo the prompt"
    if any(value is None for value in (values or ())[1:]):
        return "it gives the prompt's tokens no log-probabilities"
    return None


def _choices(answer: Any) -> list[dict[str, Any]]:
    if not isinstance(answer, dict) or not isinstance(answer.get("choices"), list):
        raise BackendError(f"the server's answer has no choices: {str(answer)[:200]}")
    choices: list[dict[str, Any]] = answer["choices"]
    return choices


def _messages(prompt: Prompt) -> list[dict[str, Any]]:
    """The prompt as messages; without turns, one user message."""
    if prompt.role is None and not prompt.messages:
        return [{"role": "user", "content": _content(prompt.text, prompt.images)}]
    if prompt.role != "assistant" or prompt.turn.strip():
        raise InvalidRequest("a chat API only writes whole assistant turns: append assistant(gen(…))", param="role")
    return [_message(message) for message in prompt.messages]


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    sent = {key: value for key, value in message.items() if key != "images"}
    sent["content"] = _content(message["content"], message.get("images", ()))
    return sent


def _content(text: str, images: Sequence[ir.Media]) -> Any:
    if not images:
        return text
    urls = [{"type": "image_url", "image_url": {"url": url_of(image)}} for image in images]
    return [{"type": "text", "text": text}, *urls]


def _usage(answer: Mapping[str, Any]) -> dict[str, Any]:
    usage = answer.get("usage") or {}
    details = usage.get("prompt_tokens_details") or {}
    return {
        "prompt_tokens": usage.get("prompt_tokens") or 0,
        "completion_tokens": usage.get("completion_tokens") or 0,
        "cached_tokens": details.get("cached_tokens") or 0,
    }


def _meta(choice: Mapping[str, Any]) -> dict[str, Any]:
    meta: dict[str, Any] = {}
    if reason := choice.get("finish_reason"):
        meta["finish_reason"] = {"type": reason}
    if choice.get("logprobs"):
        meta["logprobs"] = choice["logprobs"]
    if calls := (choice.get("message") or {}).get("tool_calls"):
        meta["tool_calls"] = calls
    return meta


def _merge_calls(calls: dict[int, dict[str, Any]], pieces: Sequence[Mapping[str, Any]]) -> None:
    """Merge streamed tool calls."""
    for piece in pieces:
        empty = {"id": None, "type": "function", "function": {"name": "", "arguments": ""}}
        call = calls.setdefault(piece.get("index", 0), empty)
        call["id"] = piece.get("id") or call["id"]
        function = piece.get("function") or {}
        call["function"]["name"] += function.get("name") or ""
        call["function"]["arguments"] += function.get("arguments") or ""


def _num_before(logprobs: Mapping[str, Any], length: int) -> int:
    """Tokens within an echoed text's first `length` characters."""
    tokens = zip(logprobs["tokens"], logprobs["text_offset"], strict=True)
    return sum(offset + len(token) <= length for token, offset in tokens)
