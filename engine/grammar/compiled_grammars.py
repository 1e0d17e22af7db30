"""The compiled grammars of a worker, by digest and within bounds. Any thread may use them.

The tokens of the model are loaded with the first grammar, and a grammar is compiled before its sequence is admitted, so
neither stops a step. Routers have compiled each grammar within their bounds before they send it.
"""

import asyncio
import threading
from collections import OrderedDict
from pathlib import Path

from cluster.errors import NoGrammarWorker
from cluster.grammar.engine import GrammarEngine, Matcher, grammar_engine_id
from cluster.messages import Grammar

_MAX_KEPT = 256


class CompiledGrammars:
    def __init__(self, folder: Path | None) -> None:
        """`folder`: of the model's small files; None: this worker applies no grammars. Raises ConfigError."""
        self._folder = folder
        self.engine_id = grammar_engine_id(folder) if folder is not None else ""
        self._lock = threading.Lock()
        self._engine: GrammarEngine | None = None
        self._compiled: OrderedDict[bytes, Matcher] = OrderedDict()  # before the first token, by digest

    @property
    def engine(self) -> GrammarEngine:
        """The engine, loaded at the first call. Raises ConfigError, NoGrammarWorker."""
        if self._engine is None:
            if self._folder is None or not self.engine_id:
                raise NoGrammarWorker("this worker applies no grammars: llguidance or the model's tokenizer is missing")
            self._engine = GrammarEngine.load(self._folder)
        return self._engine

    async def prepare(self, grammar: Grammar | None) -> None:
        """Compile the grammar of a job that will be admitted, on another thread. Raises ConfigError, InvalidGrammar,
        NoGrammarWorker."""
        if grammar is not None and grammar.digest not in self._compiled:
            await asyncio.to_thread(self.matcher, grammar)

    def matcher(self, grammar: Grammar) -> Matcher:
        """Return a new state before the first token. Raises ConfigError, InvalidGrammar, NoGrammarWorker."""
        with self._lock:
            digest = grammar.digest
            if digest not in self._compiled:
                self._compiled[digest] = self.engine.matcher(grammar)
            self._compiled.move_to_end(digest)
            while len(self._compiled) > _MAX_KEPT:
                self._compiled.popitem(last=False)
            return self._compiled[digest].copy()
