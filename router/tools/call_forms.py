"""The form in which each family of models writes calls, as parts of a grammar. formats.py reads the same forms.

Sources: the templates that tagged.py, marked.py and harmony.py name.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.errors import InvalidGrammar
from router.tools.lark import Lark
from router.tools.tagged_arguments import TagValue, tagged_arguments

_NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class CallableTool:
    """A tool that an answer may call. `is_strict`: its arguments follow its schema wherever it is called."""

    name: str
    parameters: Mapping[str, Any]
    is_strict: bool = False

    @property
    def schema(self) -> Mapping[str, Any]:
        """The schema of the arguments, which are an object."""
        schema = self.parameters or _NO_PARAMETERS
        return schema if "type" in schema or "$ref" in schema else {"type": "object", **schema}

    def arguments(self, lark: Lark) -> str:
        return lark.json(self.schema, is_lenient=not self.is_strict)

    @property
    def plain_name(self) -> str:
        """The name, where a format writes it without quotes. Raises InvalidGrammar."""
        if self.name.split() != [self.name] or set(self.name) & set("<>[]{}"):
            raise InvalidGrammar(f"this model's format of tool calls cannot express the name {self.name!r}")
        return self.name


@dataclass(frozen=True, slots=True)
class CallForm:
    """The calls of an answer: `trigger opening call (separator call)* closing`."""

    call: Callable[[Lark, CallableTool], str]
    trigger: str = ""  # no other text of an answer holds it; empty: calls begin without a marker
    opening: str = ""
    separator: str = ""
    closing: str = ""
    calls_too: tuple[str, ...] = ()  # other words by which the format's parser finds a call

    def after_trigger(self, lark: Lark, tools: Sequence[CallableTool], max_calls: int) -> str:
        """Return the expression for 1 to `max_calls` calls of these tools, without the trigger of the first one.

        Raises InvalidGrammar."""
        call = lark.rule(" | ".join(lark.rule(self.call(lark, tool)) for tool in tools))
        expression = f"{lark.literal(self.opening)} {call}"
        if max_calls > 1:
            expression += f" ({lark.literal(self.separator)} {call}){{0,{max_calls - 1}}}"
        return f"{expression} {lark.literal(self.closing)}"


def _json_call(key: str, before: str = "", after: str = "") -> Callable[[Lark, CallableTool], str]:
    """Return an expression for an object with the name and, as `key`, the arguments."""

    def call(lark: Lark, tool: CallableTool) -> str:
        head = f'{before}{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "{key}": '
        return f"{lark.literal(head)} {tool.arguments(lark)} {lark.literal('}' + after)}"

    return call


def _named_call(before: str, between: str, after: str = "") -> Callable[[Lark, CallableTool], str]:
    """Return an expression for the name without quotes and the arguments."""

    def call(lark: Lark, tool: CallableTool) -> str:
        head = lark.literal(before + tool.plain_name + between)
        return f"{head} {tool.arguments(lark)} {lark.literal(after)}"

    return call


def _tagged_call(before: str, after_name: str, value: TagValue, after: str) -> Callable[[Lark, CallableTool], str]:
    """Return an expression for the name and each argument between tags of its own."""

    def call(lark: Lark, tool: CallableTool) -> str:
        arguments = tagged_arguments(lark, tool.schema, value, is_strict=tool.is_strict)
        return f"{lark.literal(before + tool.plain_name + after_name)} {arguments} {lark.literal(after)}"

    return call


_TAG, _TAG_END = "<tool_call>", "</tool_call>"
_DEEPSEEK, _DEEPSEEK_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _CALL_END, _SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
_CODER_VALUE = TagValue("<parameter=", ">\n", "\n</parameter>\n", ("</parameter>", "<parameter=", "</function>"))

HERMES = CallForm(_json_call("arguments", "\n", f"\n{_TAG_END}"), _TAG, separator=f"\n{_TAG}")
QWEN3_CODER = CallForm(
    _tagged_call("\n<function=", ">\n", _CODER_VALUE, f"</function>\n{_TAG_END}"),
    _TAG,
    separator=f"\n{_TAG}",
    calls_too=("<function=",),
)
GLM45 = CallForm(
    _tagged_call("", "\n", TagValue("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"), _TAG_END),
    _TAG,
    separator=f"\n{_TAG}",
)
GLM47 = CallForm(
    _tagged_call("", "", TagValue("<arg_key>", "</arg_key><arg_value>", "</arg_value>"), _TAG_END), _TAG, separator=_TAG
)
LLAMA3 = CallForm(_json_call("parameters"), separator="; ")
MISTRAL_LIST = CallForm(_json_call("arguments"), "[TOOL_CALLS]", "[", ", ", "]")
MISTRAL_NAMED = CallForm(_named_call("", "[ARGS]"), "[TOOL_CALLS]", separator="[TOOL_CALLS]")
DEEPSEEK_V3 = CallForm(
    _named_call(f"{_CALL}function{_SEPARATOR}", "\n```json\n", f"\n```{_CALL_END}"),
    _DEEPSEEK,
    separator="\n",
    closing=_DEEPSEEK_END,
)
DEEPSEEK_V31 = CallForm(_named_call(_CALL, _SEPARATOR, _CALL_END), _DEEPSEEK, closing=_DEEPSEEK_END)
