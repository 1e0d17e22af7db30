"""The logs of a process: one line per record to stderr, with the request id and the numbers as fields.

    logging.getLogger("tandem.router").info("admitted", extra={"request_id": "r1", "prompt_tokens": 12})
    2026-11-21T09:14:02.113Z INFO tandem.router request_id=r1 admitted prompt_tokens=12

Owns the format only. stdout is reserved for the `ready` line, which the parent process reads.
"""

import json
import logging
import sys
import time
import traceback
from typing import TextIO

# Attributes of every record; all others came through `extra`.
_OWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}


def configure_logs(level: str, log_format: str, stream: TextIO = sys.stderr) -> None:
    """Configure all loggers of this process. `level` and `log_format` as in ClusterSettings."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    logging.getLogger().handlers = [handler]
    set_log_level(level)


def set_log_level(level: str) -> None:
    """Change the least severe level that is logged. `level` as in ClusterSettings."""
    root = logging.getLogger()
    root.setLevel(level.upper())
    for chatty in ("httpx", "httpcore", "asyncio", "filelock", "urllib3", "uvicorn.access", "uvicorn.error"):
        logging.getLogger(chatty).setLevel(max(logging.WARNING, root.level))


def stack_of(thread_id: int | None) -> str:
    """The Python stack of a thread, innermost frame last. Empty for a thread that has ended or never started."""
    frame = sys._current_frames().get(thread_id) if thread_id is not None else None
    return "".join(traceback.format_stack(frame)) if frame is not None else ""


class TextFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = _fields(record)
        request_id = fields.pop("request_id", None)
        parts = [_time(record), record.levelname, record.name]
        if request_id is not None:
            parts.append(f"request_id={_quoted(request_id)}")
        parts.append(record.getMessage())
        parts += [f"{name}={_quoted(value)}" for name, value in fields.items()]
        line = " ".join(parts).replace("\n", "\\n")
        return line + (f"\n{self.formatException(record.exc_info)}" if record.exc_info else "")


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": _time(record),
            "level": record.levelname,
            "component": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def _fields(record: logging.LogRecord) -> dict[str, object]:
    """Return the extra fields of a record, except names that begin with an underscore: libraries such as Ray
    add them to every record."""
    return {name: value for name, value in vars(record).items() if name not in _OWN and not name.startswith("_")}


def _time(record: logging.LogRecord) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"


def _quoted(value: object) -> str:
    """Quote text that could break the line: a client chooses its request id and must not be able to forge a line."""
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if text and text.isprintable() and not set(text) & set(' "=') else json.dumps(text)
