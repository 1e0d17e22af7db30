"""`tandem chat`: a conversation in the terminal."""

import argparse
import sys

from cli import connection
from cli.text_input import expecting_text
from cluster.errors import ConfigError
from tandem.client import Client
from tandem.errors import TandemError
from tandem.options import GenerateOptions

HELP = "talk with the model; Ctrl-C stops an answer, Ctrl-D ends the conversation"
_FORGET = "/clear"
_OPTIONS = ("model", "max_tokens", "temperature", "top_p", "seed")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    connection.add_arguments(parser)
    parser.add_argument("--system", metavar="TEXT", default="", help="the system message of the conversation")
    parser.add_argument("--model", help="name of a served model (default: the only one)")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="maximum tokens of an answer")
    parser.add_argument("--temperature", type=float, metavar="X", help="0 always chooses the most likely token")
    parser.add_argument("--top-p", type=float, metavar="X", help="keep the most likely tokens up to this probability")
    parser.add_argument("--seed", type=int, metavar="N", help="seed of sampling; the same seed gives the same tokens")


def run(arguments: argparse.Namespace) -> int:
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        import readline  # noqa: F401 -- `input` has a history and can be edited where this is imported

        print(f"{_FORGET} forgets the conversation, Ctrl-C stops an answer, Ctrl-D ends")
    with connection.open_client(arguments) as client:
        conversation = _Conversation(client, arguments)
        while (text := _read("> " if is_terminal else "")) is not None:
            if text.strip() == _FORGET:
                conversation.forget()
            elif text.strip():
                _answer(conversation, text, is_terminal=is_terminal)
    return 0


class _Conversation:
    def __init__(self, client: Client, arguments: argparse.Namespace) -> None:
        given = {name: getattr(arguments, name) for name in _OPTIONS}
        self._options: GenerateOptions = {name: value for name, value in given.items() if value is not None}  # type: ignore[assignment]
        self._client = client
        self._system = [{"role": "system", "content": arguments.system}] if arguments.system else []
        self._messages = list(self._system)

    def forget(self) -> None:
        self._messages = list(self._system)

    def stream(self, text: str) -> None:
        """Print the answer as it comes. If Ctrl-C stops the answer, its part so far stays in the conversation; a failed
        turn is removed from it. Raises TandemError, and ConfigError for a value that no message can carry.
        """
        asked = [*self._messages, {"role": "user", "content": text}]
        parts: list[str] = []
        try:
            generation = self._client.generate(messages=asked, **self._options)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        try:
            with generation:
                for delta in generation:
                    parts.append(delta.text)
                    sys.stdout.write(delta.text)
                    sys.stdout.flush()
        except KeyboardInterrupt:
            sys.stdout.write(" [stopped]")
        sys.stdout.write("\n")
        self._messages = [*asked, {"role": "assistant", "content": "".join(parts)}]


def _answer(conversation: _Conversation, text: str, *, is_terminal: bool) -> None:
    """Answer one message. In a terminal a failure is printed and the conversation continues. Raises TandemError, and
    ConfigError for a value that no message can carry."""
    try:
        conversation.stream(text)
    except TandemError as error:
        if not is_terminal:
            raise
        sys.stderr.write(f"\ntandem: {error.reason}: {error.message}\n")


def _read(prompt: str) -> str | None:
    """Return the user's next line; None at the end. Ctrl-C drops the line that is being written. Raises ConfigError."""
    while True:
        try:
            with expecting_text():
                return input(prompt)
        except EOFError:
            if prompt:
                print()
            return None
        except KeyboardInterrupt:
            if not prompt:
                raise
            print()
