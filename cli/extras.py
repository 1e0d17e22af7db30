"""Which extra of the package a command needs, and the one line that an installation without it gets."""

import platform
import sys
from importlib.util import find_spec

from cluster.errors import ConfigError

# An extra -> modules that its packages bring. pyproject.toml has the packages.
_ROUTER = ("fastapi", "uvicorn", "httptools", "uvloop", "jinja2", "tokenizers", "llguidance")
_WORKER = ("torch", "transformers", "tokenizers", "llguidance")
_MODULES = {"router": _ROUTER, "worker": _WORKER, "local": (*_ROUTER, "torch", "transformers"), "ray": ("ray",)}


def require(extra: str, command: str) -> None:
    """Raise ConfigError if this machine or this installation cannot run `command`, which starts members."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise ConfigError(
            f"`{command}` needs Linux on x86-64; this is {platform.system()} {platform.machine()}, where only "
            "the client library and the commands that talk to a running cluster work"
        )
    if missing := [name for name in _MODULES[extra] if find_spec(name) is None]:
        raise ConfigError(f"`{command}` needs {', '.join(missing)}; {_install(extra)}")


def missing_module(error: ModuleNotFoundError) -> str:
    """Return the line for an import that failed in a command, or an empty string if no extra brings the module."""
    root = (error.name or "").partition(".")[0]
    extra = next((extra for extra, names in _MODULES.items() if root in names), "")
    return f"this command needs {root}; {_install(extra)}" if extra else ""


def _install(extra: str) -> str:
    return f"run: pip install 'tandem-serving[{extra}]'"
