"""Requests that carry a planted text in every place where clients send texts: some are served, some are refused."""

from typing import Any


def planted_bodies(planted: str) -> list[tuple[str, dict[str, Any]]]:
    """Return the path and the body of each request, without the model."""
    said: dict[str, Any] = {"messages": [{"role": "user", "content": planted}], "max_tokens": 24}
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": f'{{"a": "{planted}"}}'}}
    history = [*said["messages"], {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": planted}]
    schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"pattern": f"({planted}"}}}
    return [
        ("/v1/completions", {"prompt": planted, "max_tokens": 24}),
        ("/v1/completions", {"prompt": planted, "max_tokens": planted}),
        ("/v1/chat/completions", said),
        ("/v1/chat/completions", said | {"messages": history}),
        ("/v1/chat/completions", said | {"response_format": schema}),
        ("/v1/chat/completions", said | {"chat_template": f"{{{{ raise_exception('{planted}') }}}}"}),
        ("/v1/responses", {"input": planted, "max_output_tokens": 24}),
        ("/v1/messages", said),
        ("/tokenize", {"prompt": planted, "nothing": planted}),
    ]
