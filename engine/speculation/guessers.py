"""From settings to what a scheduler keeps with each sequence. Pure."""

from collections.abc import Callable

from cluster.engine_settings import EngineSettings
from engine.speculation.drafter import DraftedGuesser, Guesser, TextGuesser
from engine.speculation.prompt_lookup import PromptLookup


def new_guesser(settings: EngineSettings) -> Callable[[], Guesser] | None:
    """Makes the guesser of one more sequence. None: speculation is off."""
    match settings.speculation:
        case "prompt":
            return lambda: TextGuesser(PromptLookup(), settings.num_guesses)
        case "draft":
            return lambda: DraftedGuesser(settings.num_guesses)
        case _:
            return None
