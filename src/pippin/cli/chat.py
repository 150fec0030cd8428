"""`pippin chat`: a conversation in the terminal.

Notable here:
- Ctrl-C stops the current answer, not the program; at the prompt, twice in a row leaves
- the same two functions split messages at a keyboard and in a pipe
- without a terminal each line is one turn and the first error ends the chat, so a chat can be scripted
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from pippin.cli.common import documents, inputs, options, terminal
from pippin.cli.common.declared_options import with_options
from pippin.cli.common.first_answer import explain_default_model
from pippin.core.errors import Cancelled, InvalidInput, PippinError
from pippin.core.store.catalog import DEFAULT_MODEL
from pippin.core.text_files import check_text, read_text
from pippin.engine.options import CacheOptions, ModelOptions
from pippin.session.options import GenerationOptions

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession

    from pippin.session.session import Session

HELP = """\
Enter sends the message. Alt-Enter starts a new line, and so does Enter after a
backslash; a message that starts with \""" continues until \""".
Ctrl-C stops the answer. Ctrl-D, or Ctrl-C twice, leaves.

/system TEXT   start a new conversation with these instructions
/reset         start a new conversation with the same instructions
/save FILE     save the conversation as JSON
/load FILE     continue a saved conversation
/help          show this text
/quit          leave"""

_FENCE = '"""'


def is_open(message: str) -> bool:
    r'''Whether a message continues on the next line: after a backslash, or in an open triple quote.

    >>> is_open("one line"), is_open("more follows \\"), is_open('"""a'), is_open('"""a\nb"""')
    (False, True, True, False)
    '''
    if message.startswith(_FENCE):
        return len(message) < 2 * len(_FENCE) or not message.endswith(_FENCE)
    return message.endswith("\\")


def finish(message: str) -> str:
    r'''The message without continuation backslashes and triple quotes.

    >>> finish("two \\\nlines"), finish('"""\na\nb"""')
    ('two \nlines', 'a\nb')
    '''
    if message.startswith(_FENCE):
        return message.removeprefix(_FENCE).removesuffix(_FENCE).strip("\n")
    return message.replace("\\\n", "\n").removesuffix("\\")


def messages(lines: Iterator[str]) -> Iterator[str]:
    r"""Join lines to messages; a message that is still open at the end of input is yielded as it is.

    >>> list(messages(iter(["one", "two \\", "lines"])))
    ['one', 'two \nlines']
    """
    pending: list[str] = []
    for line in lines:
        pending.append(line)
        if not is_open("\n".join(pending)):
            yield finish("\n".join(pending))
            pending = []
    if pending:
        yield finish("\n".join(pending))


@dataclass
class Chat:
    """A session and the chat commands that act on it."""

    session: Session
    given: GenerationOptions
    at_keyboard: bool
    answered: Callable[[], None] = lambda: None
    """Called after each answer."""

    def turn(self, message: str) -> bool:
        """Answer a message or run a command; returns False for `/quit`."""
        message = message.strip()
        command, _, argument = message.partition(" ")
        if not message:
            return True
        if command == "/quit":
            return False
        if command.startswith("/"):
            self._command(command, argument.strip())
        else:
            self._answer(check_text(message, "the message"))
        return True

    def _answer(self, message: str) -> None:
        with self.session.stream(message, options=self.given) as stream:
            try:
                with _interrupt(stream.cancel) if self.at_keyboard else nullcontext():
                    response = terminal.show_text(stream)
            except Cancelled:
                terminal.write("\n")
                terminal.note("stopped; the question and its answer were removed from the conversation")
                return
        if response.finish_reason == "length":
            terminal.note(f"the answer was cut off after {response.usage.output_tokens} tokens (see --max-tokens)")
        if self.at_keyboard:
            terminal.note(terminal.figures(response))
        self.answered()

    def _command(self, command: str, argument: str) -> None:
        if command == "/help":
            terminal.write(HELP + "\n")
        elif command == "/reset":
            self.session.reset()
            terminal.note("new conversation")
        elif command == "/system":
            self._begin(instructions=argument or None)
            terminal.note(
                "new conversation with these instructions" if argument else "new conversation without instructions"
            )
        elif command == "/save":
            self._save(_path(command, argument))
        elif command == "/load":
            self._load(_path(command, argument))
        else:
            raise InvalidInput(f"unknown command {command!r}; /help lists the commands")

    def _begin(self, **given: Any) -> None:
        import pippin

        old = self.session
        self.session = pippin.Session(old.provider, adapter=old.adapter, cache=old.cache, **given)

    def _save(self, path: Path) -> None:
        from pippin.core.files import atomic_write

        with documents.writing(path), atomic_write(path) as file:
            file.write(self.session.transcript.to_json().encode())
        terminal.note(f"saved to {path}")

    def _load(self, path: Path) -> None:
        import pippin

        self._begin(transcript=pippin.Transcript.from_json(read_text(path)))
        terminal.note(f"loaded {path}")


@with_options
def chat(
    instructions: options.Instructions = None,
    model: options.Model = DEFAULT_MODEL,
    adapter: options.Adapter = None,
    url: options.Url = None,
    model_options: ModelOptions = options.HERE,
    cache_options: CacheOptions = options.EVERYTHING,
    sampling: GenerationOptions = options.ANSWER,
) -> None:
    """Chat with a model.

    /help lists the commands. Without a terminal, each line of standard input is one turn.
    """
    import pippin

    cache = options.bounded_cache(cache_options, url)
    with options.provider(model, url, model_options, adapter) as provider:
        session = pippin.Session(
            provider, instructions=instructions, adapter=options.adapter_name(adapter), cache=cache
        )
        conversation = Chat(
            session,
            sampling,
            at_keyboard=terminal.watched(sys.stdin) and terminal.watched(sys.stdout),
            answered=lambda: explain_default_model(model, url),
        )
        if conversation.at_keyboard:
            terminal.note(f"{provider.name}; /help for help, Ctrl-D to leave")
            _at_keyboard(conversation)
        else:
            for message in messages(inputs.stdin_lines()):
                if not conversation.turn(message):
                    break


def _at_keyboard(conversation: Chat) -> None:
    """Run turns until the user leaves; errors are printed and the chat continues."""
    prompt = _prompt_session()
    interrupted = False
    while True:
        try:
            message = finish(prompt.prompt("> "))
        except KeyboardInterrupt:
            if interrupted:
                return
            interrupted = True
            terminal.note("Ctrl-C again, or Ctrl-D, leaves")
            continue
        except EOFError:
            return
        interrupted = False
        try:
            if not conversation.turn(message):
                return
        except PippinError as error:
            terminal.error(str(error))


def _prompt_session() -> PromptSession[str]:
    """A line editor with history; Enter sends unless the message is open, Alt-Enter always starts a new line."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import FileHistory, History, InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    from pippin.core.store import store

    keys = KeyBindings()

    @keys.add("enter")
    def _(event: KeyPressEvent) -> None:
        if is_open(event.current_buffer.text):
            event.current_buffer.insert_text("\n")
        else:
            event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    path = store.home() / "chat_history"
    history: History = InMemoryHistory()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)  # prompts are private
        history = FileHistory(str(path))
    except OSError as error:
        terminal.note(f"no history: {path} cannot be written ({error.strerror})")
    return PromptSession(history=history, key_bindings=keys, multiline=True, prompt_continuation="  ")


@contextmanager
def _interrupt(cancel: Callable[[], object]) -> Iterator[None]:
    """Within this context, Ctrl-C calls `cancel` instead of raising KeyboardInterrupt in the middle of a step."""

    def handle(number: int, frame: FrameType | None) -> Any:
        cancel()

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _path(command: str, argument: str) -> Path:
    if not argument:
        raise InvalidInput(f"{command} needs a file name")
    return Path(argument).expanduser()
