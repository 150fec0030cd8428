"""`pippin chat`: a conversation in the terminal.

Notable here:
- Ctrl-C ends the answer that is being written, not the program; at the prompt, twice in a row leaves
- what counts as one message is decided by two small functions, the same at a keyboard and in a pipe
- without a terminal each line is one turn and the first error ends the chat, so a chat can be scripted and tested
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
from pippin.core.errors import Cancelled, InvalidInput, PippinError
from pippin.core.store.catalog import DEFAULT_MODEL
from pippin.core.text_files import check_text, read_text
from pippin.engine.options import ModelOptions
from pippin.session.options import GenerationOptions

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession

    from pippin.session.session import Session

HELP = """\
Enter sends the message. Alt-Enter starts a new line, and so does Enter after a
backslash; \""" at the start holds a message open until \""" ends it.
Ctrl-C stops the answer. Ctrl-D, or Ctrl-C twice, leaves.

/system TEXT   instructions for the model; begins anew
/reset         begin anew, with the same instructions
/save FILE     write the conversation as JSON
/load FILE     go on with a conversation that was saved
/help          this text
/quit          leave"""

_FENCE = '"""'


def is_open(message: str) -> bool:
    r'''Whether a message goes on in the next line: after a backslash, or inside an unclosed triple quote.

    >>> is_open("one line"), is_open("more follows \\"), is_open('"""a'), is_open('"""a\nb"""')
    (False, True, True, False)
    '''
    if message.startswith(_FENCE):
        return len(message) < 2 * len(_FENCE) or not message.endswith(_FENCE)
    return message.endswith("\\")


def finish(message: str) -> str:
    r'''The message without the marks that held it open.

    >>> finish("two \\\nlines"), finish('"""\na\nb"""')
    ('two \nlines', 'a\nb')
    '''
    if message.startswith(_FENCE):
        return message.removeprefix(_FENCE).removesuffix(_FENCE).strip("\n")
    return message.replace("\\\n", "\n").removesuffix("\\")


def messages(lines: Iterator[str]) -> Iterator[str]:
    r"""Whole messages out of lines; one that the end of input leaves open is taken as it is.

    >>> list(messages(iter(["one", "two \\", "lines"])))
    ['one', 'two \nlines']
    """
    held: list[str] = []
    for line in lines:
        held.append(line)
        if not is_open("\n".join(held)):
            yield finish("\n".join(held))
            held = []
    if held:
        yield finish("\n".join(held))


@dataclass
class Chat:
    """One conversation: a session, and what the commands do to it."""

    session: Session
    given: GenerationOptions
    at_keyboard: bool

    def turn(self, message: str) -> bool:
        """Answer a message or carry out a command; False when it is time to leave."""
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
                terminal.note("stopped; this question and its answer are forgotten")
                return
        if response.finish_reason == "length":
            terminal.note(f"the answer was cut off after {response.usage.output_tokens} tokens (see --max-tokens)")
        if self.at_keyboard:
            terminal.note(terminal.figures(response))

    def _command(self, command: str, argument: str) -> None:
        if command == "/help":
            terminal.write(HELP + "\n")
        elif command == "/reset":
            self.session.reset()
            terminal.note("a new conversation")
        elif command == "/system":
            self._begin(instructions=argument or None)
            terminal.note("a new conversation, with these instructions" if argument else "no instructions")
        elif command == "/save":
            self._save(_path(command, argument))
        elif command == "/load":
            self._load(_path(command, argument))
        else:
            raise InvalidInput(f"there is no command {command!r}; /help lists them")

    def _begin(self, **given: Any) -> None:
        import pippin

        self.session = pippin.Session(self.session.provider, adapter=self.session.adapter, **given)

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
    sampling: GenerationOptions = options.ANSWER,
) -> None:
    """Talk with a model.

    /help, once inside, lists the commands. Without a terminal each line piped in is one turn.
    """
    import pippin

    with options.provider(model, url, model_options, adapter) as provider:
        session = pippin.Session(provider, instructions=instructions, adapter=options.ADAPTER if adapter else None)
        conversation = Chat(session, sampling, at_keyboard=terminal.watched(sys.stdin) and terminal.watched(sys.stdout))
        if conversation.at_keyboard:
            terminal.note(f"{provider.name}; /help for help, Ctrl-D to leave")
            _at_keyboard(conversation)
        else:
            for message in messages(inputs.stdin_lines()):
                if not conversation.turn(message):
                    break


def _at_keyboard(conversation: Chat) -> None:
    """Read, answer, repeat; an error is shown and the conversation goes on."""
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
        path.touch(mode=0o600)  # what was said is nobody else's business
        history = FileHistory(str(path))
    except OSError as error:
        terminal.note(f"no history: {path} cannot be written ({error.strerror})")
    return PromptSession(history=history, key_bindings=keys, multiline=True, prompt_continuation="  ")


@contextmanager
def _interrupt(cancel: Callable[[], object]) -> Iterator[None]:
    """While this lasts, Ctrl-C calls `cancel` instead of raising KeyboardInterrupt in the middle of a step."""

    def handle(number: int, frame: FrameType | None) -> Any:
        cancel()

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _path(command: str, argument: str) -> Path:
    if not argument:
        raise InvalidInput(f"{command} needs the name of a file")
    return Path(argument).expanduser()
