"""From settings to what a scheduler keeps with each sequence. Pure."""

from collections.abc import Callable

from cluster.engine_settings import EngineSettings
from engine.speculation.acceptance import Acceptance
from engine.speculation.drafter import DraftedGuesser, Guesser, TextGuesser
from engine.speculation.prompt_lookup import PromptLookup

# Rows that take as long as what a decode step does once, above all reading the weights: measured on one CPU core; on a
# GPU, where hundreds of rows hide behind the weights, reckoned (docs/speculation.md).
_FIXED_ROWS = {"cpu": 16.0, "cuda": 256.0}


def new_guesser(settings: EngineSettings, device_type: str) -> Callable[[], Guesser] | None:
    """Makes the guesser of one more sequence. None: speculation is off."""
    num_guesses, fixed_rows = settings.num_guesses, _FIXED_ROWS[device_type]
    match settings.speculation:
        case "prompt":
            return lambda: TextGuesser(PromptLookup(), Acceptance(num_guesses, fixed_rows))
        case "draft":
            return lambda: DraftedGuesser(Acceptance(num_guesses, fixed_rows))
        case _:
            return None
