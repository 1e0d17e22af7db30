"""`tandem generate`: one prompt, streamed."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from cli import connection
from cli.argument_types import seconds
from cli.table import ledger_text
from cli.text_input import expecting_text
from cluster.errors import ConfigError
from tandem.client import Client, Generation
from tandem.options import GenerateOptions
from tandem.results import Result

HELP = "continue a prompt and stream the text"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="?", help="the prompt's text; - reads it from stdin")
    parser.add_argument("--prompt-token-ids", metavar="IDS", type=_ids, help="token ids instead of text, such as 1,2,3")
    parser.add_argument("--chat", action="store_true", help="send the text as a user's chat message")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object at the end instead of streaming text"
    )
    parser.add_argument("--ledger", action="store_true", help="show where the request's time went")
    connection.add_arguments(parser)
    sampling = parser.add_argument_group("generation", "Options that are not given have the model's defaults.")
    _add_request(sampling)
    _add_drawing(sampling)
    _add_logit_rules(sampling)
    _add_grammars(sampling)
    _add_text(sampling)


def _add_request(sampling: "argparse._ArgumentGroup") -> None:
    sampling.add_argument("--model", help="name of a served model (default: the only one)")
    sampling.add_argument(
        "--request-id", metavar="ID", help="id of the request, which logs show (default: a random one)"
    )
    sampling.add_argument("--label", metavar="NAME", help="another name for logs, which need not be unique")
    sampling.add_argument("--cache-salt", metavar="TEXT", help="share KV with requests of the same salt only")
    sampling.add_argument(
        "--priority", type=int, metavar="N", help="a lower value is served first, under --scheduling-policy priority"
    )
    sampling.add_argument(
        "--is-batch", action="store_true", default=None, help="use only capacity that no other request needs"
    )
    sampling.add_argument(
        "--slo-ttft-s",
        type=float,
        metavar="X",
        help="refuse it at once if its time to first token is predicted above X s",
    )
    sampling.add_argument(
        "--slo-tpot-s",
        type=float,
        metavar="X",
        help="refuse it at once if its mean time between tokens is predicted above X s",
    )
    sampling.add_argument(
        "--timeout-s", type=seconds, metavar="X", default=600.0, help="timeout in seconds (default: 600)"
    )


def _add_drawing(sampling: "argparse._ArgumentGroup") -> None:
    sampling.add_argument("--n", type=int, metavar="N", help="number of continuations of the prompt")
    sampling.add_argument("--max-tokens", type=int, metavar="N", help="maximum tokens to generate")
    sampling.add_argument("--min-tokens", type=int, metavar="N", help="minimum tokens to generate")
    sampling.add_argument("--temperature", type=float, metavar="X", help="0 always chooses the most likely token")
    sampling.add_argument(
        "--top-p", type=float, metavar="X", help="keep the most likely tokens up to this total probability"
    )
    sampling.add_argument("--top-k", type=int, metavar="N", help="keep the N most likely tokens; 0 keeps all")
    sampling.add_argument(
        "--min-p", type=float, metavar="X", help="drop tokens below this share of the most likely token's probability"
    )
    sampling.add_argument("--seed", type=int, metavar="N", help="seed of sampling; the same seed gives the same tokens")


def _add_text(sampling: "argparse._ArgumentGroup") -> None:
    sampling.add_argument("--stop", action="append", metavar="TEXT", help="stop before this text; may be repeated")
    sampling.add_argument(
        "--stop-token-ids", metavar="IDS", type=_ids, help="stop at one of these tokens, such as 1,2,3"
    )
    sampling.add_argument(
        "--include-stop-str-in-output",
        action="store_true",
        default=None,
        help="end the text after the stop string or stop token, not before it",
    )
    sampling.add_argument(
        "--show-special-tokens",
        action="store_false",
        default=None,
        dest="skip_special_tokens",
        help="show special tokens in the text by their names",
    )
    sampling.add_argument(
        "--truncate-prompt-tokens",
        type=int,
        metavar="N",
        help="keep the prompt's last N tokens; -1: all that fit the context",
    )
    sampling.add_argument(
        "--ignore-eos", action="store_true", default=None, help="continue after the end-of-sequence token"
    )
    sampling.add_argument(
        "--logprobs", type=int, metavar="K", help="with --json: log-probabilities of each token and the K most likely"
    )
    sampling.add_argument(
        "--prompt-logprobs",
        type=int,
        metavar="K",
        help="with --json: log-probabilities of the prompt's tokens but the first, and of the K most likely",
    )
    sampling.add_argument(
        "--stream-interval",
        type=int,
        metavar="N",
        help="N tokens of a continuation come together, except its first ones; 0: as they are generated",
    )


def _add_logit_rules(sampling: "argparse._ArgumentGroup") -> None:
    sampling.add_argument(
        "--presence-penalty",
        type=float,
        metavar="X",
        help="subtract X from the logits of tokens that occur in the output",
    )
    sampling.add_argument(
        "--frequency-penalty",
        type=float,
        metavar="X",
        help="subtract X from a token's logit for each time that it occurs in the output",
    )
    sampling.add_argument(
        "--repetition-penalty",
        type=float,
        metavar="X",
        help="divide positive logits of tokens of the prompt and the output by X, and multiply negative ones",
    )
    sampling.add_argument(
        "--logit-bias", type=_bias, action="append", metavar="ID=X", help="add X to this token's logit; may be repeated"
    )
    sampling.add_argument("--allowed-token-ids", metavar="IDS", type=_ids, help="generate only these tokens")
    sampling.add_argument("--bad-words", action="append", metavar="TEXT", help="never generate TEXT; may be repeated")


def _add_grammars(sampling: "argparse._ArgumentGroup") -> None:
    grammars = sampling.add_mutually_exclusive_group()
    grammars.add_argument("--json-schema", metavar="JSON", help="the text is JSON that this schema admits")
    grammars.add_argument("--regex", metavar="REGEX", help="the whole text matches this regular expression")
    grammars.add_argument("--choice", action="append", metavar="TEXT", help="the text is one of these; may be repeated")
    grammars.add_argument("--grammar", metavar="TEXT", help="the text follows this grammar, in Lark or GBNF")


def run(arguments: argparse.Namespace) -> int:
    text, token_ids, messages = _prompt(arguments)
    with connection.open_client(arguments) as client:
        try:
            generation = client.generate(
                text,
                token_ids=token_ids,
                messages=messages,
                timeout_s=arguments.timeout_s,
                **_options(arguments),
            )
        except ValueError as error:  # a value that no message can carry, such as a negative token id
            raise ConfigError(str(error)) from error
        with generation:
            texts = _Texts(client, arguments.model)
            result = generation.result() if arguments.json else _stream(generation, texts)
    if arguments.json:
        json.dump(result_object(result), sys.stdout, ensure_ascii=False)
        sys.stdout.write("\n")
    elif arguments.ledger:
        print(f"\n{ledger_text(result)}")
    return 0


def result_object(result: Result) -> dict[str, object]:
    """Return the object for --json. The first choice is at the top level; with several choices, `choices` has all."""
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
        **({"prompt_logprobs": prompt} if (prompt := [asdict(token) for token in result.prompt_logprobs]) else {}),
        "usage": asdict(result.usage),
        "ledger": {
            **asdict(result.ledger),
            "phases": {phase.name: phase.duration_s for phase in result.ledger.phases},
        },
    }


class _Texts:
    """Shows tokens as their text, or by their ids where the model has no tokenizer."""

    def __init__(self, client: Client, model: str | None) -> None:
        self._client, self._model = client, model
        self._has_tokenizer: bool | None = None  # None: not asked yet

    def of(self, text: str, token_ids: Sequence[int]) -> str:
        if text or not token_ids or self._shows_text():
            return text
        return "".join(f"{token_id} " for token_id in token_ids)

    def _shows_text(self) -> bool:
        if self._has_tokenizer is None:
            models = self._client.models()
            self._has_tokenizer = any(each.has_tokenizer for each in models if self._model in (None, "", each.id))
        return self._has_tokenizer


def _stream(generation: Generation, texts: _Texts) -> Result:
    """Stream the first choice, then print the others one after the other, so that their texts are not mixed."""
    for delta in generation:
        if delta.choice == 0:
            sys.stdout.write(texts.of(delta.text, delta.token_ids))
            sys.stdout.flush()
    sys.stdout.write("\n")
    result = generation.result()
    for number, choice in enumerate(result.choices[1:], start=1):
        print(f"--- choice {number}\n{texts.of(choice.text, choice.token_ids)}")
    return result


def _prompt(
    arguments: argparse.Namespace,
) -> tuple[str | None, list[int] | None, list[dict[str, str]] | None]:
    """Return text, token ids or messages; exactly one is not None. Raises ConfigError."""
    if (arguments.prompt is None) == (arguments.prompt_token_ids is None):
        raise ConfigError("give either a prompt or --prompt-token-ids")
    if arguments.prompt_token_ids is not None:
        return None, arguments.prompt_token_ids, None
    with expecting_text():
        text = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    if arguments.chat:
        return None, None, [{"role": "user", "content": text}]
    return text, None, None


def _options(arguments: argparse.Namespace) -> GenerateOptions:
    given = {name: getattr(arguments, name) for name in GenerateOptions.__annotations__}
    given["logit_bias"] = dict(arguments.logit_bias) if arguments.logit_bias else None
    options: GenerateOptions = {name: value for name, value in given.items() if value is not None}  # type: ignore[assignment]
    return options


def _ids(text: str) -> list[int]:
    try:
        return [int(word) for word in text.replace(",", " ").split()]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"token ids must be whole numbers separated by commas, such as 1,2,3, not {text!r}"
        ) from None


def _bias(text: str) -> tuple[int, float]:
    try:
        token_id, bias = text.split("=")
        if int(token_id) < 0:
            raise ValueError
        return int(token_id), float(bias)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"a bias must be a token id and a number, such as 7=-100, not {text!r}"
        ) from None
