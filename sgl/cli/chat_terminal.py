"""`sgl chat` in a terminal: the prompt with its history, the commands, the footer."""

from __future__ import annotations

from collections.abc import Callable

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.enums import DEFAULT_BUFFER
from prompt_toolkit.filters import has_focus
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from rich.console import Console

from sgl.cli.conversation import Conversation, Turn
from sgl.errors import ConfigError, SglError, nearest_name

HELP = {
    "/help": "this list",
    "/reset": "begin anew, with the same system prompt",
    "/system TEXT": "the system prompt; none without TEXT",
    "/save FILE": "write the conversation as JSON",
    "/load FILE": "go on with a saved conversation",
    "/schema FILE-or-JSON": "answers are JSON of this schema; any without it",
    "/regex PATTERN": "answers match this; any without it",
    "/retry": "another answer to the last message",
    "/quit": "end, as Ctrl-D does",
}
KEYS = """Enter sends; Alt-Enter, or Enter after a \\ at the end of a line, begins a new line.
Up, Down and Ctrl-R find what was sent before. Ctrl-C stops an answer.
A message that begins with a / is written with two: //"""
_COMMANDS = [line.partition(" ")[0] for line in HELP]
# What a model writes must not steer the terminal: control characters are shown as their pictures.
_PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"}
_PICTURES |= {127: 0x2421} | dict.fromkeys(range(128, 160), 0xFFFD)


def talk(conversation: Conversation, console: Console, url: str) -> int:
    """Until /quit or Ctrl-D."""
    return _Talk(conversation, console).run(url)


class _Talk:
    def __init__(self, conversation: Conversation, console: Console) -> None:
        self._conversation = conversation
        self._console = console
        self._turn: Turn | None = None
        self._is_over = False
        self._does: dict[str, Callable[[str], None]] = {
            "/help": self._help,
            "/reset": self._reset,
            "/system": conversation.set_system,
            "/save": self._save,
            "/load": self._load,
            "/schema": conversation.set_schema,
            "/regex": conversation.set_regex,
            "/retry": lambda _: self._finish(conversation.ask_again(self._show)),
            "/quit": self._quit,
        }

    def run(self, url: str) -> int:
        self._say(f"Talking with {url}; /help lists the commands, Ctrl-D ends it.")
        prompt: PromptSession[str] = PromptSession(
            [("bold", "> ")],
            multiline=True,
            prompt_continuation="  ",
            key_bindings=_keys(),
            bottom_toolbar=self._footer,
            completer=WordCompleter(_COMMANDS, sentence=True),
            complete_while_typing=False,
        )
        while not self._is_over:
            try:
                text = prompt.prompt().strip()
                if text:
                    self._send(text)
            except EOFError:
                break
            except KeyboardInterrupt:
                self._say("Ctrl-D or /quit ends the chat.")
            except SglError as error:
                self._fail(error)
        return 0

    def _send(self, text: str) -> None:
        if not text.startswith("/") or text.startswith("//"):
            self._finish(self._conversation.ask(text.removeprefix("/"), self._show))
            return
        name, *rest = text.split(maxsplit=1)
        if name not in self._does:
            raise ConfigError(f"there is no command {name}{nearest_name(name, self._does)}; /help lists them")
        self._does[name](rest[0] if rest else "")

    def _finish(self, turn: Turn) -> None:
        self._turn = turn
        if turn.first is not None:
            self._console.print()
        if turn.error is not None:
            self._fail(turn.error)
        elif turn.finish_reason is None:
            self._say("(stopped)")
        elif turn.finish_reason == "length":
            self._say("(cut off: no more tokens were left)")

    def _show(self, text: str, is_reasoning: bool) -> None:
        style = "dim" if is_reasoning else None
        self._console.print(text.translate(_PICTURES), end="", markup=False, style=style)

    def _say(self, text: str) -> None:
        self._console.print(text.translate(_PICTURES), style="dim", markup=False)

    def _fail(self, error: SglError) -> None:
        self._console.print(str(error).translate(_PICTURES), style="red", markup=False)

    def _footer(self) -> str:
        constraint = [name.replace("_", " ") for name in self._conversation.constraint]
        figures = self._turn.figures() if self._turn else ""
        return " | ".join(filter(None, [figures, *constraint])) or "/help"

    def _help(self, _: str) -> None:
        width = max(map(len, HELP))
        self._say("\n".join([*(f"{name:{width}}  {does}" for name, does in HELP.items()), KEYS]))

    def _reset(self, _: str) -> None:
        self._conversation.reset()
        self._turn = None

    def _save(self, name: str) -> None:
        self._conversation.save(_named(name, "/save"))
        self._say(f"Saved as {name}.")

    def _load(self, name: str) -> None:
        self._conversation.load(_named(name, "/load"))
        number = len(self._conversation.messages)
        self._say(f"Loaded {number} message{'' if number == 1 else 's'}.")

    def _quit(self, _: str) -> None:
        self._is_over = True


def _named(name: str, command: str) -> str:
    if not name:
        raise ConfigError(f"{command} needs the name of a file: {command} FILE")
    return name


def _keys() -> KeyBindings:
    """Enter sends, unless the line ends with a backslash; Alt-Enter begins a line."""
    keys = KeyBindings()
    in_text = has_focus(DEFAULT_BUFFER)

    @keys.add("enter", filter=in_text)
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.is_cursor_at_the_end and buffer.text.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.newline(copy_margin=False)
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter", filter=in_text)
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.newline(copy_margin=False)

    return keys
