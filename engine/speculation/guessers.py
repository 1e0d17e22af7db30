"""From settings to what a scheduler keeps with each sequence. Pure."""

from collections.abc import Callable

from cluster.settings.engine_settings import EngineSettings
from engine.speculation.acceptance import Acceptance
from engine.speculation.drafter import DraftedGuesser, Guesser, TextGuesser
from engine.speculation.prompt_lookup import PromptLookup


def new_guesser(settings: EngineSettings, measure: Callable[[], float]) -> Callable[[], Guesser] | None:
    """Makes the guesser of one more sequence. None: speculation is off. `measure`: what Acceptance calls `fixed_rows`,
    asked for once where it is needed."""
    if settings.speculation == "off":
        return None
    num_guesses, fixed_rows = settings.num_guesses, measure()
    if settings.speculation == "draft":
        return lambda: DraftedGuesser(Acceptance(num_guesses, fixed_rows))
    return lambda: TextGuesser(PromptLookup(), Acceptance(num_guesses, fixed_rows))
