"""`tandem generate`: one prompt, streamed."""

import argparse
import json
import sys
from dataclasses import asdict

from cli import connection
from cli.ledger import ledger_text
from cluster.errors import ConfigError
from tandem.client import Generation
from tandem.options import GenerateOptions
from tandem.results import Result

HELP = "continue a prompt and stream the text"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="?", help="the text; - reads it from stdin")
    parser.add_argument("--prompt-token-ids", metavar="IDS", type=_ids, help="instead of text: 1,2,3")
    parser.add_argument("--chat", action="store_true", help="take the text as a user's message in a conversation")
    parser.add_argument("--json", action="store_true", help="print one object at the end instead of text as it comes")
    parser.add_argument("--ledger", action="store_true", help="show where the request's time went")
    connection.add_arguments(parser)
    sampling = parser.add_argument_group("generation", "What is left out is the model's own default.")
    sampling.add_argument("--model", help="name of a served model; default: the only one")
    sampling.add_argument("--request-id", metavar="ID", help="names it in logs; default: a random one")
    sampling.add_argument("--label", metavar="NAME", help="a further name in logs, which need not be unique")
    sampling.add_argument("--n", type=int, metavar="N", help="continuations of the prompt")
    sampling.add_argument("--max-tokens", type=int, metavar="N", help="most tokens to generate")
    sampling.add_argument("--min-tokens", type=int, metavar="N", help="no end before so many")
    sampling.add_argument("--temperature", type=float, metavar="X", help="0 takes the likeliest token each time")
    sampling.add_argument("--top-p", type=float, metavar="X", help="keep the likeliest tokens up to this probability")
    sampling.add_argument("--top-k", type=int, metavar="N", help="keep the N likeliest tokens; 0 keeps all")
    sampling.add_argument("--min-p", type=float, metavar="X", help="drop tokens below this share of the likeliest one")
    sampling.add_argument("--seed", type=int, metavar="N", help="same seed, same tokens")
    sampling.add_argument("--stop", action="append", metavar="TEXT", help="end before this text; may be repeated")
    sampling.add_argument("--stop-token-ids", metavar="IDS", type=_ids, help="end with one of these: 1,2,3")
    sampling.add_argument("--ignore-eos", action="store_true", default=None, help="go on past the end of sequence")
    sampling.add_argument("--logprobs", type=int, metavar="K", help="with --json: and those of the K likeliest tokens")
    sampling.add_argument("--cache-salt", metavar="TEXT", help="share KV with requests of the same salt only")
    sampling.add_argument("--priority", type=int, metavar="N", help="less goes first, where workers go by priority")
    sampling.add_argument(
        "--is-batch", action="store_true", default=None, help="use only what no other request wants just now"
    )
    sampling.add_argument("--timeout-s", type=float, metavar="X", default=600.0, help="deadline (default: 600)")


def run(arguments: argparse.Namespace) -> int:
    text, token_ids, messages = _prompt(arguments)
    with connection.open_client(arguments) as client:
        try:
            generation = client.generate(
                text, token_ids=token_ids, messages=messages, timeout_s=arguments.timeout_s, **_options(arguments)
            )
        except ValueError as error:  # what no message can hold, such as a negative token id
            raise ConfigError(str(error)) from error
        with generation:
            result = generation.result() if arguments.json else _stream(generation)
    if arguments.json:
        json.dump(result_object(result), sys.stdout, ensure_ascii=False)
        sys.stdout.write("\n")
    elif arguments.ledger:
        print(f"\n{ledger_text(result)}")
    return 0


def result_object(result: Result) -> dict[str, object]:
    """The first choice at the top, as scripts with one choice want it; all of them under `choices` where there are
    more."""
    choices = [
        {
            "token_ids": list(choice.token_ids),
            "text": choice.text,
            "finish_reason": choice.finish_reason,
            **({"stop_cause": choice.stop_cause} if choice.stop_cause else {}),
            **({"logprobs": [asdict(position) for position in choice.logprobs]} if choice.logprobs else {}),
        }
        for choice in result.choices
    ]
    return {
        "request_id": result.request_id,
        **choices[0],
        **({"choices": choices} if len(choices) > 1 else {}),
        "usage": asdict(result.usage),
        "ledger": {
            **asdict(result.ledger),
            "phases": {phase.name: phase.duration_s for phase in result.ledger.phases},
        },
    }


def _stream(generation: Generation) -> Result:
    """One choice as it comes; several one after the other, because their texts would run into each other."""
    for delta in generation:
        if delta.choice == 0:
            # a model without a tokenizer has no text: its tokens are what there is to show
            sys.stdout.write(delta.text or "".join(f"{token_id} " for token_id in delta.token_ids if not delta.text))
            sys.stdout.flush()
    sys.stdout.write("\n")
    result = generation.result()
    for number, choice in enumerate(result.choices[1:], start=1):
        print(f"--- choice {number}\n{choice.text or ' '.join(map(str, choice.token_ids))}")
    return result


def _prompt(
    arguments: argparse.Namespace,
) -> tuple[str | None, list[int] | None, list[dict[str, str]] | None]:
    """Text, token ids or messages: one of them. Raises ConfigError."""
    if (arguments.prompt is None) == (arguments.prompt_token_ids is None):
        raise ConfigError("give either a prompt or --prompt-token-ids")
    if arguments.prompt_token_ids is not None:
        return None, arguments.prompt_token_ids, None
    text = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    if arguments.chat:
        return None, None, [{"role": "user", "content": text}]
    return text, None, None


def _options(arguments: argparse.Namespace) -> GenerateOptions:
    given = {name: getattr(arguments, name) for name in GenerateOptions.__annotations__}
    options: GenerateOptions = {name: value for name, value in given.items() if value is not None}  # type: ignore[assignment]
    return options


def _ids(text: str) -> list[int]:
    try:
        return [int(word) for word in text.replace(",", " ").split()]
    except ValueError:
        raise argparse.ArgumentTypeError(f"token ids are whole numbers with commas: 1,2,3, not {text!r}") from None
