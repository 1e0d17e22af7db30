"""Whether a worker applies grammars, and by what."""

import logging

from cluster.errors import ConfigError
from cluster.grammar.tokenizer_files import locate
from engine.grammar.compiled_grammars import CompiledGrammars

_LOG = logging.getLogger("tandem.worker")


def worker_grammars(model: str, revision: str = "") -> CompiledGrammars:
    """Return the grammars of a worker that serves this model. It serves requests without grammars in any case."""
    try:
        grammars = CompiledGrammars(locate(model, revision))
    except ConfigError as error:
        _LOG.info("grammars: off (%s)", error.message)
        return CompiledGrammars(None)
    reason = "llguidance is not installed, or the model has no tokenizer.json or no end-of-sequence token"
    _LOG.info("grammars: %s", grammars.engine_id or f"off ({reason})")
    return grammars
