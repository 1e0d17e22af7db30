"""Reasoning before the answer, between tags: DeepSeek R1, Qwen3, GLM, Mistral.

The chat template may already have opened the reasoning, at the end of the prompt; then the text begins inside of it.
"""

from dataclasses import dataclass

from router.tools.source import Source, Waiting


@dataclass(frozen=True, slots=True)
class Tags:
    opening: str
    closing: str

    def are_open_in(self, prompt_end: str) -> bool:
        """Return whether the prompt ends inside of reasoning."""
        return prompt_end.rfind(self.opening) > prompt_end.rfind(self.closing)


THINK = Tags("<think>", "</think>")
BRACKET_THINK = Tags("[THINK]", "[/THINK]")


def thinking(source: Source, tags: Tags, *, is_open: bool) -> Waiting[None]:
    """Read the reasoning with which the text begins, if it does. `is_open`: the prompt has opened it."""
    source.mark()
    yield from source.skip_space()
    has_opening = yield from source.starts_with(tags.opening)
    if not (has_opening or is_open):
        source.back_to_mark()
        return
    source.unmark()
    yield from source.skip_space()
    yield from source.until((tags.closing,), source.reasoning, trims=True)
    yield from source.skip_space()
