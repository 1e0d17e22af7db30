"""Use litellm with a router as an OpenAI-compatible server. Arguments: the URL of a router."""

import asyncio
import sys

import litellm
import pytest

MODEL = {"api_base": sys.argv[1] + "/v1", "api_key": "-"}
CHAT = [{"role": "user", "content": "Write a function that reads a file."}]
GREEDY = {"messages": CHAT, "max_tokens": 12, "temperature": 0}


async def asynchronous() -> str:
    stream = await litellm.acompletion("openai/demo_model", stream=True, **GREEDY, **MODEL)
    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])


whole = litellm.completion("openai/demo_model", **GREEDY, **MODEL)
assert whole.usage.completion_tokens > 0
assert asyncio.run(asynchronous()) == whole.choices[0].message.content
hosted = litellm.completion("hosted_vllm/demo_model", user="me", seed=1, top_p=0.9, n=2, **GREEDY, **MODEL)
assert len(hosted.choices) == 2
options = {"include_usage": True}
chunks = list(litellm.completion("hosted_vllm/demo_model", stream=True, stream_options=options, **GREEDY, **MODEL))
assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
text = litellm.text_completion(model="text-completion-openai/demo_model", prompt="def f(x):", max_tokens=12, **MODEL)
assert text.usage.completion_tokens > 0
with pytest.raises(litellm.ContextWindowExceededError):
    litellm.completion("openai/demo_model", messages=[{"role": "user", "content": "import os\n" * 1_100}], **MODEL)
