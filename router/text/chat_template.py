"""A conversation as the prompt its model was trained on: the model's own Jinja template, rendered in a sandbox.

Templates come with a model's files and are not trusted: immutable sandbox, plain values only, no loader. A resumed
request is rendered again, perhaps on another day and in another time zone, and must give the same prompt: so the
present is an argument, the time zone is UTC, and nothing in a template is random.
"""

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from cluster.errors import ConfigError, InvalidRequest
from router.requests import ChatMessage

_EPOCH = datetime(1970, 1, 1)  # of UTC, without a zone: `%z` is empty as in the library that templates are made for
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class ChatTemplate:
    """One compiled template. Safe to use from several threads."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Raises ConfigError where the template is not Jinja."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        del environment.filters["random"], environment.globals["lipsum"]
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigError(f"the model's chat template is not valid Jinja: {error}") from error
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[ChatMessage], rendered_at_us: int) -> str:
        """The prompt, ready for the assistant's turn; a function of its arguments alone. `rendered_at_us`: the present,
        in microseconds since 1970. Raises InvalidRequest where the template refuses the messages."""
        try:
            return self._template.render(
                messages=[{"role": message.role, "content": message.content} for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=True,
                strftime_now=partial(_strftime, rendered_at_us),
                **self._special_tokens,
            )
        except jinja2.TemplateError as error:
            raise InvalidRequest(f"the model's chat template refuses these messages: {error.message}") from error
        except (TypeError, ValueError, LookupError, ArithmeticError) as error:
            raise InvalidRequest(f"the model's chat template fails on these messages: {error}") from error


def read_chat_template(folder: Path, tokenizer_config: Mapping[str, object]) -> ChatTemplate | None:
    """From chat_template.jinja, else tokenizer_config.json's `chat_template`: one, or a list with one named default."""
    source: object = tokenizer_config.get("chat_template")
    if isinstance(source, list):
        named = {item.get("name"): item.get("template") for item in source if isinstance(item, dict)}
        source = named.get("default")
    template_file = folder / "chat_template.jinja"
    if template_file.is_file():
        source = template_file.read_text(encoding="utf-8")
    if source is None:
        return None
    if not isinstance(source, str):
        raise ConfigError(f"{folder}/tokenizer_config.json: chat_template must be text")
    return ChatTemplate(source, _special_tokens(tokenizer_config))


def _special_tokens(tokenizer_config: Mapping[str, object]) -> dict[str, str]:
    tokens: dict[str, str] = {}
    for name in _NAMED_TOKENS:
        token = tokenizer_config.get(name)
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            tokens[name] = token
    return tokens


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's own tokens for training; here it is only a bracket."""

    tags = {"generation"}  # noqa: RUF012  # as jinja declares it

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime(at_us: int, text_format: str) -> str:
    """In UTC. `%s` is replaced here: the C library takes it in the process's own time zone."""
    seconds = str(at_us // 1_000_000)
    text_format = re.sub("%(.)", lambda found: seconds if found[1] == "s" else found[0], text_format)
    return (_EPOCH + timedelta(microseconds=at_us)).strftime(text_format)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML; a prompt must not."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
