"""`sgl chat` in a real pseudo-terminal: what is typed, what is shown, and what the server is asked for."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import sgl
from tests.house import REPOSITORY
from tests.live_server import OPTIONS, LiveServer, chat_checkpoint, served, slow_steps
from tests.patience import PATIENCE, wait_until

ENTER, NEW_LINE, CTRL_C, CTRL_D, UP = "\r", "\x1b\r", "\x03", "\x04", "\x1b[A"
READY = "\x1b[?2004h"  # a prompt takes pasted text


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with (
        sgl.Engine(chat_checkpoint(tmp_path_factory.mktemp("chat")), **OPTIONS) as engine,
        served(engine) as server,
    ):
        yield server


@pytest.fixture
def asked(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The arguments of what the engine is asked for, as they come."""
    found: list[dict[str, Any]] = []
    stream = type(server.service.engine).stream

    def seen(self: Any, **arguments: Any) -> Any:
        found.append(arguments)
        return stream(self, **arguments)

    monkeypatch.setattr(type(server.service.engine), "stream", seen)
    return found


class Terminal:
    """A chat in a pseudo-terminal of 100 columns."""

    def __init__(self, url: str, folder: Path, *flags: str, **environment: str) -> None:
        self._end, inner = pty.openpty()
        termios.tcsetwinsize(inner, (40, 100))
        kept = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "CI")}
        kept |= {"TERM": "xterm-256color", "COLUMNS": "100", "LINES": "40", "PYTHONPATH": str(REPOSITORY)}
        command = [sys.executable, "-m", "sgl", "chat", "--url", url, "--temperature", "0", *flags]
        self._process = subprocess.Popen(
            command,
            stdin=inner,
            stdout=inner,
            stderr=inner,
            cwd=folder,
            env=kept | environment,
            start_new_session=True,
            preexec_fn=_control_the_terminal,
        )
        os.close(inner)
        self.shown = ""
        self._read = 0
        self._places = 0  # how often it was told

    def until(self, what: str) -> str:
        """What is shown up to and including a text, after what was waited for before."""
        deadline = time.monotonic() + PATIENCE
        while (found := self.shown.find(what, self._read)) < 0:
            left = deadline - time.monotonic()
            assert left > 0, f"{what!r} was not shown: {self.shown[self._read :]!r}"
            if select.select([self._end], [], [], left)[0]:
                self.shown += os.read(self._end, 65536).decode(errors="replace")
                self._say_where_the_cursor_is()
        since, self._read = self._read, found + len(what)
        return self.shown[since : self._read]

    def _say_where_the_cursor_is(self) -> None:
        """As terminals do; a footer is shown only where that is known."""
        while self._places < self.shown.count("\x1b[6n"):
            self._places += 1
            os.write(self._end, b"\x1b[1;1R")

    def type(self, keys: str) -> None:
        os.write(self._end, keys.encode())

    def send(self, line: str) -> str:
        """What is shown between a line and the next prompt."""
        self.type(line + ENTER)
        self.until("\x1b[?2004l")
        return plain(self.until(READY))

    def end(self) -> int:
        """Its exit code, after Ctrl-D."""
        self.type(CTRL_D)
        return self._process.wait(PATIENCE)

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait(PATIENCE)
        os.close(self._end)


def _control_the_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # so that Ctrl-C is a signal


def plain(text: str) -> str:
    return re.sub(r"\x1b(\[[0-9;?]*[A-Za-z]|[=>])", "", text)


@pytest.fixture
def terminal(server: LiveServer, tmp_path: Path) -> Iterator[Terminal]:
    chat = Terminal(server.url, tmp_path, "--max-tokens", "8")
    try:
        chat.until(READY)
        yield chat
    finally:
        chat.close()


def test_a_turn_goes_on_from_the_last_and_the_footer_counts(
    terminal: Terminal, server: LiveServer, asked: list[dict[str, Any]]
) -> None:
    terminal.send("hello")
    terminal.send("and then?")
    terminal.until("prompt tokens cached")
    text = plain(terminal.shown)
    assert re.search(
        r"8 tokens, [\d.]+ tokens/s, first token after \d+ ms, [1-9]\d* of \d+ prompt tokens cached", text
    )
    first, second = [server.engine.tokenizer.decode(request["input_ids"]) for request in asked]
    assert "[user]hello\n[assistant]" in first
    assert second.startswith(first)
    assert second.endswith("[user]and then?\n[assistant]")
    assert terminal.end() == 0


def test_ctrl_c_stops_the_answer_and_not_the_chat(server: LiveServer, tmp_path: Path) -> None:
    chat = Terminal(server.url, tmp_path, "--max-tokens", "400", "--system", "s")
    try:
        chat.until(READY)
        with slow_steps(server.engine, 0.05):
            chat.type("hello" + ENTER)
            wait_until(lambda: server.engine._calls.rids)
            chat.type(CTRL_C)
            chat.until("(stopped)")
            wait_until(lambda: not server.engine._calls.rids, "the server still answers")
        chat.until(READY)
        chat.type(CTRL_C)
        chat.until("Ctrl-D or /quit ends the chat.")
        chat.until(READY)
        assert "Saved as c.json." in chat.send("/save c.json")
        messages = json.loads((tmp_path / "c.json").read_text())["messages"]
        assert messages[0] == {"role": "system", "content": "s"}
        assert chat.end() == 0
    finally:
        chat.close()


def test_lines_are_joined_and_found_again(
    terminal: Terminal, server: LiveServer, asked: list[dict[str, Any]]
) -> None:
    terminal.type("one" + NEW_LINE + "two\\" + ENTER)
    terminal.send("three")
    terminal.type(UP)
    terminal.send("")
    texts = [server.engine.tokenizer.decode(request["input_ids"]) for request in asked]
    assert [text.count("[user]one\ntwo\nthree\n") for text in texts] == [1, 2]


def test_commands_change_what_the_next_answer_is(
    terminal: Terminal, server: LiveServer, asked: list[dict[str, Any]], tmp_path: Path
) -> None:
    assert "/schema FILE-or-JSON" in terminal.send("/help")
    terminal.send("/system Be brief.")
    terminal.send("/regex (yes|no)")
    answer = re.search(r"yes|no", terminal.send("Really?"))
    assert answer is not None
    terminal.send("/retry")
    terminal.send('/schema {"enum": [17]}')
    assert "17" in terminal.send("//slash")
    (tmp_path / "s.json").write_text('{"const": true}')
    terminal.send("/schema s.json")
    assert "Saved as a.json." in terminal.send("/save a.json")
    terminal.send("/reset")
    terminal.send("/schema")
    terminal.send("free")
    assert "Loaded 5 messages." in terminal.send("/load a.json")
    assert "true" in terminal.send("so?")
    texts = [server.engine.tokenizer.decode(request["input_ids"]) for request in asked]
    assert "[system]Be brief.\n[user]Really?\n[assistant]" in texts[0]
    assert texts[1] == texts[0]
    assert texts[2].endswith("[user]/slash\n[assistant]")
    assert texts[3].endswith("[system]Be brief.\n[user]free\n[assistant]")
    assert texts[4] == f"{texts[2]}17\n[user]so?\n[assistant]"
    saved = json.loads((tmp_path / "a.json").read_text())
    assert saved["json_schema"] == {"const": True}
    assert saved["messages"][1:3] == [
        {"role": "user", "content": "Really?"},
        {"role": "assistant", "content": answer[0]},
    ]
    terminal.type("/quit" + ENTER)
    assert terminal._process.wait(PATIENCE) == 0


def test_mistakes_are_explained_and_the_chat_goes_on(terminal: Terminal, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("{}")
    for line, words in {
        "/sav x": "there is no command /sav (did you mean '/save'?)",
        "/save": "/save needs the name of a file",
        "/save mine.txt": "mine.txt exists already",
        "/save no/such": "no/such cannot be written",
        "/load nothing.json": "nothing.json cannot be read",
        "/load mine.txt": "mine.txt holds no conversation",
        "/schema {": "the schema is not JSON",
        "/retry": "nothing was asked yet",
    }.items():
        assert words in " ".join(terminal.send(line).split()), line
    assert (tmp_path / "mine.txt").read_text() == "{}"
    terminal.send("/regex (")
    assert "refused the request (400)" in " ".join(terminal.send("hello").split())
    terminal.send("/regex yes")
    assert "yes" in terminal.send("/retry"), "what had no answer is asked again"
    assert terminal.end() == 0


def test_no_color_is_heeded(server: LiveServer, tmp_path: Path) -> None:
    chat = Terminal(server.url, tmp_path, "--max-tokens", "4", NO_COLOR="1")
    try:
        chat.until(READY)
        chat.send("/nothing")
        chat.send("hello")
        codes = {code for found in re.findall(r"\x1b\[([0-9;]*)m", chat.shown) for code in found.split(";")}
        assert not {code for code in codes if re.fullmatch(r"[349]\d|10\d", code)}, "colours"
    finally:
        chat.close()
