"""Settings that change while a process runs: on SIGHUP, and when the files that hold them change.

Owns the settings that are read again and the log lines about them. A setting that cannot change is named in one line of
the log, and files that do not work change nothing.
"""

import asyncio
import dataclasses
import logging
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from cluster.errors import ConfigError
from cluster.settings.config import SECRETS, RouterConfig, WorkerConfig
from cluster.settings.config_sources import config_path, parse_arguments
from cluster.settings.worker_settings import flag_of

_LOG = logging.getLogger("tandem.settings")
_LOOK_EVERY_S = 1.0

Config = TypeVar("Config", bound=WorkerConfig | RouterConfig)


class TlsReload(Protocol):
    """The part of ClusterTls that reloading uses. Pure modules do not import that class."""

    def reload(self, *, is_forced: bool = False) -> bool: ...


@dataclass(frozen=True, slots=True)
class SettingsSource(Generic[Config]):
    """Reads the settings of a process again, and reports when their files have changed."""

    read: Callable[[], Config]  # raises ConfigError
    version: Callable[[], object]  # differs when the file of the settings does
    asked: asyncio.Event  # set by SIGHUP


def settings_source(
    config_type: type[Config], prog: str, arguments: Sequence[str], asked: asyncio.Event
) -> SettingsSource[Config]:
    """Return the source of the settings of a process that was started as `python -m prog ...`."""
    path = config_path(arguments)
    version = partial(file_version, path) if path else lambda: None
    return SettingsSource(partial(parse_arguments, config_type, prog, arguments), version, asked)


def file_version(path: str | Path) -> tuple[int, int, int] | None:
    """Return a value that differs when the file was written or replaced; None if it cannot be found."""
    try:
        found = Path(path).stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


class SettingsReload(Generic[Config]):
    """Applies changed settings. Owns the present values of the settings that can change."""

    def __init__(
        self,
        config: Config,
        source: SettingsSource[Config],
        *,
        setters: Mapping[str, Callable[[Any], None]],
        tls: TlsReload | None,
    ) -> None:
        """`setters`: by the name of each setting that can change, the function that applies its new value."""
        self._config, self._source, self._setters, self._tls = config, source, setters, tls
        self._version: object = None  # of the files read at the start, which may have changed since
        self._unused: dict[str, object] = {}  # changed values that need a restart, by name

    async def run(self) -> None:
        """Follow the files until cancelled."""
        while True:
            try:
                async with asyncio.timeout(_LOOK_EVERY_S):
                    await self._source.asked.wait()
            except TimeoutError:
                pass
            self.look()

    def look(self) -> None:
        """Read changed files again; all files if SIGHUP came since the last look."""
        is_asked = self._source.asked.is_set()
        self._source.asked.clear()
        self._look_at_tls(is_asked)
        version = self._source.version()
        if version != self._version or is_asked:
            self._version = version
            self._read_settings()

    def _look_at_tls(self, is_asked: bool) -> None:
        if self._tls is None:
            return
        try:
            if self._tls.reload(is_forced=is_asked):
                _LOG.info("new connections use the new TLS files")
        except ConfigError as error:
            _LOG.warning("the present TLS files stay in use: %s", error.message)
        except Exception:  # noqa: BLE001 - logged, and followed further
            _LOG.exception("the present TLS files stay in use: the new ones could not be read")

    def _read_settings(self) -> None:
        try:
            config = self._source.read()
        except ConfigError as error:
            _LOG.warning("the present settings stay in use: %s", error.message)
            return
        except Exception:  # noqa: BLE001 - logged, and followed further
            _LOG.exception("the present settings stay in use: the new ones could not be read")
            return
        for item in dataclasses.fields(config):
            value = getattr(config, item.name)
            if value != getattr(self._config, item.name):
                self._change(item.name, value)
            else:
                self._unused.pop(item.name, None)

    def _change(self, name: str, value: object) -> None:
        shown = "***" if name in SECRETS else value
        if (change := self._setters.get(name)) is not None:
            try:
                change(value)
            except Exception:  # noqa: BLE001 - the other settings change, and the files are followed further
                retry = "the next change of the file tries it again"
                _LOG.exception("%s could not be changed to %s; %s", flag_of(name), shown, retry)
                return
            self._config = dataclasses.replace(self._config, **typing.cast("dict[str, Any]", {name: value}))
            _LOG.info("%s is now %s", flag_of(name), shown)
        elif self._unused.get(name, self) != value:
            self._unused[name] = value
            _LOG.warning("%s cannot change while the process runs: restart it to use %s", flag_of(name), shown)
