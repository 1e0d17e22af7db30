"""The formats by the names of vLLM's flags, and the parser of one answer."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from cluster.errors import ConfigError
from router.tools.call_forms import (
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    GLM45,
    GLM47,
    HERMES,
    LLAMA3,
    MISTRAL_LIST,
    QWEN3_CODER,
    CallForm,
)
from router.tools.marked import (
    DEEPSEEK_MARKERS,
    HARMONY_MARKERS,
    MISTRAL_MARKERS,
    PYTHON_TAG,
    deepseek,
    harmony,
    llama3_json,
    mistral,
)
from router.tools.source import NoSuchForm, Piece, Source, TextEnded, Waiting
from router.tools.tagged import (
    BRACKET_THINK,
    THINK,
    Tags,
    Tools,
    coder_beginnings,
    glm45,
    glm_beginnings,
    hermes,
    qwen3_coder,
    thinking,
)

_TAG_MARKERS = ("<tool_call>", "</tool_call>")
_GLM_MARKERS = (*_TAG_MARKERS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """The form in which a family of models writes calls. `markers` are tokens that must appear in the text."""

    read: Callable[[Source, Tools], Waiting[None]]
    form: CallForm | None  # None: harmony, whose messages are the form
    markers: tuple[str, ...] = ()
    id_characters: int = 24  # of a call's id after its prefix; Mistral's templates take 9 characters alone
    beginnings: Callable[[Tools], Sequence[str]] | None = None  # of calls that end reasoning without its end tag


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The form in which a family writes its reasoning. Without `tags` the format is harmony, which holds calls too."""

    tags: Tags | None

    @property
    def markers(self) -> tuple[str, ...]:
        return HARMONY_MARKERS if self.tags is None else (self.tags.opening, self.tags.closing)


_HARMONY = ToolFormat(harmony, None, HARMONY_MARKERS)
TOOL_FORMATS: Mapping[str, ToolFormat] = {
    "hermes": ToolFormat(hermes, HERMES, _TAG_MARKERS),
    "qwen3_coder": ToolFormat(qwen3_coder, QWEN3_CODER, _TAG_MARKERS, beginnings=coder_beginnings),
    "llama3_json": ToolFormat(llama3_json, LLAMA3, (PYTHON_TAG,)),
    "mistral": ToolFormat(mistral, MISTRAL_LIST, MISTRAL_MARKERS, id_characters=9),
    "deepseek_v3": ToolFormat(deepseek, DEEPSEEK_V3, DEEPSEEK_MARKERS),
    "deepseek_v31": ToolFormat(deepseek, DEEPSEEK_V31, DEEPSEEK_MARKERS),
    "glm45": ToolFormat(glm45, GLM45, _GLM_MARKERS, beginnings=glm_beginnings),
    "glm47": ToolFormat(glm45, GLM47, _GLM_MARKERS, beginnings=glm_beginnings),
    "openai": _HARMONY,
}
REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    "deepseek_r1": ReasoningFormat(THINK),
    "deepseek_v3": ReasoningFormat(THINK),
    "qwen3": ReasoningFormat(THINK),
    "glm45": ReasoningFormat(THINK),
    "mistral": ReasoningFormat(BRACKET_THINK),
    "openai_gptoss": ReasoningFormat(None),
}


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """The parts of the served model's answers. None: no parser was chosen for them."""

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None

    @staticmethod
    def named(tool_call_parser: str, reasoning_parser: str) -> "AnswerFormat":
        """Return the format of these flags; an empty name chooses none. Raises ConfigError."""
        for flag, name, names in (
            ("--tool-call-parser", tool_call_parser, TOOL_FORMATS),
            ("--reasoning-parser", reasoning_parser, REASONING_FORMATS),
        ):
            if name and name not in names:
                raise ConfigError(f"{flag} {name} is not known; choose one of {', '.join(names)}")
        return AnswerFormat(TOOL_FORMATS.get(tool_call_parser), REASONING_FORMATS.get(reasoning_parser))

    @property
    def markers(self) -> tuple[str, ...]:
        """Return the tokens that must appear in the text even if the tokenizer counts them as special."""
        found = [*(self.tools.markers if self.tools else ()), *(self.reasoning.markers if self.reasoning else ())]
        return tuple(dict.fromkeys(found))

    def parser(self, tools: Tools | None, prompt_end: str) -> "AnswerParser":
        """Return the parser of one answer. `tools`: those of the request that the model may call. None: it may call
        none. `prompt_end`: what the prompt ends with."""
        return AnswerParser(self._reader(tools, prompt_end))

    def _reader(self, tools: Tools | None, prompt_end: str) -> Callable[[Source], Waiting[None]]:
        reasoning, calls = self.reasoning, self.tools if tools is not None else None

        def read(source: Source) -> Waiting[None]:
            if reasoning is not None and reasoning.tags is not None:
                tags = reasoning.tags
                begin = calls.beginnings if calls is not None else None
                beginnings = begin(tools or {}) if begin is not None else ()
                yield from thinking(source, tags, beginnings, is_open=tags.are_open_in(prompt_end))
            elif reasoning is not None:
                yield from harmony(source, tools or {})
                return
            if calls is not None:
                yield from calls.read(source, tools or {})
            yield from source.until((), source.content)

        return read


class AnswerParser:
    """Divides the text of one answer. The joined pieces do not depend on the parts in which the text comes."""

    def __init__(self, read: Callable[[Source], Waiting[None]]) -> None:
        self._source = Source()
        self._reading = self._guarded(read)
        next(self._reading, None)

    def push(self, text: str) -> list[Piece]:
        self._source.feed(text)
        next(self._reading, None)
        return self._source.drain()

    def end(self) -> list[Piece]:
        """Return the pieces of the text that was held back. The text is complete."""
        self._source.close()
        next(self._reading, None)
        return self._source.drain()

    def _guarded(self, read: Callable[[Source], Waiting[None]]) -> Waiting[None]:
        """Run a parser. A call whose form breaks ends there, and the rest is content."""
        try:
            yield from read(self._source)
        except (NoSuchForm, TextEnded):
            yield from self._source.until((), self._source.content)
