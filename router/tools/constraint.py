"""The grammar of an answer that may or must call tools, and of one that has reasoning before what it must match.

A constraint is a function of the request and the router's settings. A router that resumes the request derives the same.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from cluster.errors import InvalidGrammar
from cluster.messages import Grammar, GrammarKind
from router.requests import ChatPrompt, GenerateRequest
from router.tools.call_forms import MISTRAL_LIST, MISTRAL_NAMED, CallableTool, CallForm
from router.tools.formats import AnswerFormat
from router.tools.lark import Lark
from router.tools.tagged import Tools

MAX_CALLS = 16  # of one answer that a grammar constrains
_SPACE_AFTER_REASONING = '("\\n" "\\n"?)?'
_THINKING_SWITCHES = ("enable_thinking", "thinking")  # of chat templates
_START = "<|start|>assistant"


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The use that an answer may make of the tools of its request."""

    tools: tuple[CallableTool, ...]
    must_call: bool = False
    is_parallel: bool = True  # not: one call at most
    is_named: bool = False  # the request names the tool, which is the only one here

    @property
    def schemas(self) -> Tools:
        return {tool.name: tool.parameters for tool in self.tools}

    @property
    def max_calls(self) -> int:
        return MAX_CALLS if self.is_parallel and not self.is_named else 1

    @property
    def is_constrained(self) -> bool:
        return self.must_call or any(tool.is_strict for tool in self.tools)


def constrained(
    request: GenerateRequest,
    use: ToolUse | None,
    answers: AnswerFormat,
    *,
    token_ids: Mapping[str, int],
    prompt_end: str,
) -> GenerateRequest:
    """Return a chat's request with the grammar of its whole answer. `use`: None if the answer may call no tool.
    `token_ids`: the format's markers that are tokens of their own. `prompt_end`: what the prompt ends with. Raises
    InvalidGrammar with the field's name."""
    calls = use if use is not None and _can_constrain(use, answers, request.grammar) else None
    if calls is None and (request.grammar is None or answers.reasoning is None):
        return request
    field = "tools" if calls is not None and calls.is_constrained else request.grammar_field
    assert isinstance(request.prompt, ChatPrompt)
    arguments = request.prompt.options.arguments
    may_think = all(arguments.get(name) is not False for name in _THINKING_SWITCHES)
    writer = _Writer(Lark(token_ids), answers, prompt_end, may_think=may_think)
    try:
        text = writer.source(calls, request.grammar)
    except InvalidGrammar as error:
        raise InvalidGrammar(f"{field}: {error.message}", param=field) from error
    return replace(request, grammar=Grammar(GrammarKind.GRAMMAR, text), grammar_field=field)


def _can_constrain(use: ToolUse, answers: AnswerFormat, grammar: Grammar | None) -> bool:
    """Return whether calls can be constrained. Calls that no marker announces cannot be distinguished from free text
    before their end: they are constrained only if there is no free text.
    """
    if use.must_call or grammar is not None:
        return True
    form = answers.tools.form if answers.tools is not None else None
    return use.is_constrained and (form is None or bool(form.trigger))


class _Writer:
    def __init__(self, lark: Lark, answers: AnswerFormat, prompt_end: str, *, may_think: bool) -> None:
        self._may_think = may_think
        self._lark = lark
        self._answers = answers
        self._prompt_end = prompt_end

    def source(self, use: ToolUse | None, grammar: Grammar | None) -> str:
        """Return the grammar's text. `use`: how calls are constrained; None if there are none to constrain. `grammar`:
        for an answer without calls.
        """
        tools, reasoning = self._answers.tools, self._answers.reasoning
        is_harmony = (reasoning is not None and reasoning.tags is None) or (tools is not None and tools.form is None)
        if is_harmony:
            return self._harmony(use, grammar)
        if use is None:
            assert grammar is not None
            body = self._lark.answer(grammar)
        else:
            assert tools is not None and tools.form is not None, "the router reads calls in this form"
            body = self._calls(use, self._present(tools.form), grammar)
        return self._lark.source(f"{self._thinking()} {body}")

    def _present(self, form: CallForm) -> CallForm:
        """Return the form with the markers that the tokenizer has: Mistral's newer tokenizers have a token for
        `[ARGS]`.
        """
        return MISTRAL_NAMED if form is MISTRAL_LIST and self._lark.is_token("[ARGS]") else form

    def _calls(self, use: ToolUse, form: CallForm, grammar: Grammar | None) -> str:
        lark = self._lark
        calls = lark.rule(form.after_trigger(lark, use.tools, use.max_calls))
        if use.must_call:
            return f"{lark.literal(form.trigger)} {calls}"
        if grammar is not None:
            return lark.rule(f"{lark.answer(grammar)} | {lark.literal(form.trigger)} {calls}")
        text = lark.text((form.trigger, *form.calls_too))
        return lark.rule(f"{text} | {lark.text_until(form.trigger, form.calls_too)} {calls}")

    def _thinking(self) -> str:
        """Return an expression for the reasoning with which the answer begins: up to its end if the prompt has opened
        it, none if the prompt has closed it or the request disables it.
        """
        reasoning = self._answers.reasoning
        if reasoning is None or reasoning.tags is None:
            return ""
        tags, lark = reasoning.tags, self._lark
        is_open = tags.are_open_in(self._prompt_end)
        if not is_open and (not self._may_think or self._prompt_end.rstrip().endswith(tags.closing)):
            return ""
        rest = f"{lark.text_until(tags.closing)} {_SPACE_AFTER_REASONING}"
        return rest if is_open else f"({lark.literal(tags.opening)} {rest})?"

    def _harmony(self, use: ToolUse | None, grammar: Grammar | None) -> str:
        """Return an expression for messages of reasoning and of introduction, then a call or the final message."""
        lark = self._lark
        begun = [f"<|channel|>{channel}<|message|>" for channel in ("analysis", "commentary")]
        before = lark.rule(" | ".join(map(lark.literal, begun)))
        message = f"{before} {lark.text_until('<|end|>')} {lark.literal(_START)}"
        ends = [self._harmony_call(use.tools)] if use is not None else []
        if use is None or not use.must_call:
            answer = lark.answer(grammar) if grammar is not None else lark.text(("<|channel|>", "<|end|>"))
            ends.append(f"{lark.literal('<|channel|>final<|message|>')} {answer}")
        return lark.source(f"({message})* ({' | '.join(ends)})")

    def _harmony_call(self, tools: Sequence[CallableTool]) -> str:
        """Return an expression for one call, which ends with the model's end of sequence."""
        lark = self._lark
        heads = [f"<|channel|>commentary to=functions.{tool.plain_name} <|constrain|>json<|message|>" for tool in tools]
        pairs = zip(heads, tools, strict=True)
        return lark.rule(" | ".join(f"{lark.literal(head)} {tool.arguments(lark)}" for head, tool in pairs))
