"""Reasoning before the answer, between tags: DeepSeek R1, Qwen3, GLM, Mistral.

The chat template may already have opened the reasoning, at the end of the prompt; then the text begins inside of it.

Compared with, in vllm-project/vllm: vllm/reasoning/{qwen3,deepseek_r1,glm4_moe,mistral}_reasoning_parser.py; in
sgl-project/sglang: python/sglang/srt/parser/reasoning_parser.py; in ggml-org/llama.cpp: models/templates/glm_4_5.jinja
and deepseek-ai-DeepSeek-V3.1.jinja.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from router.tools.source import HeldSpace, Source, Waiting
from router.tools.tagged import CALL


@dataclass(frozen=True, slots=True)
class Tags:
    opening: str
    closing: str

    def are_open_in(self, prompt_end: str) -> bool:
        """Return whether the prompt ends inside of reasoning."""
        return prompt_end.rfind(self.opening) > prompt_end.rfind(self.closing)


THINK = Tags("<think>", "</think>")
BRACKET_THINK = Tags("[THINK]", "[/THINK]")


def thinking(source: Source, tags: Tags, beginnings: Sequence[str] = (), *, is_open: bool) -> Waiting[None]:
    """Read the reasoning with which the text begins, if it does. `is_open`: the prompt has opened it.

    `beginnings`: what follows a call's tag where a call ends the reasoning without its end tag. Empty: no call does.
    """
    source.mark()
    yield from source.skip_space()
    has_opening = yield from source.starts_with(tags.opening)
    if not (has_opening or is_open):
        source.back_to_mark()
        return
    source.unmark()
    yield from source.skip_space()
    reasoning = HeldSpace(source.reasoning)
    markers = (tags.closing, CALL) if beginnings else (tags.closing,)
    while (marker := (yield from source.until(markers, reasoning))) == CALL:
        source.unread(CALL)
        source.mark()
        yield from source.expect(CALL)
        yield from source.skip_space()
        is_call = bool((yield from source.one_of(beginnings)))
        source.back_to_mark()
        if is_call:
            return
        yield from source.expect(CALL)
        reasoning(CALL)
    if not marker:
        reasoning.release()
    yield from source.skip_space()
