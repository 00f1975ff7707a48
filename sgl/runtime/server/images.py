"""Images in bodies. A client may send base64, data: URLs and http URLs, but no path: files here are not its own."""

from __future__ import annotations

from typing import Any

from sgl.errors import InvalidRequest
from sgl.runtime.server.protocol import ChatBody, Part

_KINDS = ("image_url", "image", "input_image")


def image_of(part: Part) -> str | None:
    """What a part of a message shows; None for texts. Raises InvalidRequest."""
    given = part.image if part.image_url is None else part.image_url
    url = given if isinstance(given, str) or given is None else given.url
    if url and part.text:
        raise InvalidRequest(f"a part of type {part.type!r:.80} has a text or an image, not both", param="messages")
    if part.type not in _KINDS:
        return None
    if not url:
        raise InvalidRequest(f"a part of type {part.type} needs image_url: {{url: …}}", param="messages")
    return located(url, "messages")


def content_of(parts: list[Part]) -> str | list[Part]:
    """A message's content: its text where there is nothing else."""
    if all(image_of(part) is None for part in parts):
        return "".join(part.text or "" for part in parts)
    return parts


def images_of(body: ChatBody) -> list[str]:
    """Of all messages, in order."""
    parts = [part for message in body.messages if isinstance(message.content, list) for part in message.content]
    return [image for part in parts if (image := image_of(part)) is not None]


def located(text: str, param: str) -> str:
    """A client's image as the engine takes it: never a path."""
    if not isinstance(text, str):
        raise InvalidRequest(f"an image is a URL or base64, not {type(text).__name__}", param=param)
    return text if text.startswith(("http://", "https://", "data:")) else f"data:image/png;base64,{text}"


def all_located(given: Any, param: str) -> Any:
    """`located`, of a value that may be missing, or lists of them."""
    if isinstance(given, list):
        return [all_located(each, param) for each in given]
    if isinstance(given, dict) and param == "video_data":
        return {**given, "frames": all_located(given.get("frames"), param)}
    return None if given is None else located(given, param)
