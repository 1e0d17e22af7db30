"""Let the model call a function, and give it the result. The router runs with --tool-call-parser. The call is forced:
it follows the schema of the function, and cannot fail.

    python examples/clients/tools.py 127.0.0.1:50051
"""

import json
import sys
from typing import Any

from tandem import Client

WEATHER: dict[str, Any] = {
    "name": "weather",
    "description": "The weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


def weather(city: str) -> str:
    return {"Paris": "rain", "Rome": "sun"}[city]


def main(address: str) -> None:
    tools = [{"type": "function", "function": WEATHER}]
    messages: list[dict[str, Any]] = [{"role": "user", "content": "How is the weather?"}]
    with Client(address) as client:
        asked = client.generate(
            messages=messages,
            tools=tools,
            tool_choice=["weather"],
            template_arguments={"enable_thinking": False},
            max_tokens=200,
        )
        (call,) = asked.result().choices[0].tool_calls
        result = weather(**json.loads(call.arguments))
        print(f"{call.name}({call.arguments}) is {result}")
        messages.append({"role": "assistant", "content": "", "tool_calls": [call.message()]})
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        told = client.generate(messages=messages, tools=tools, max_tokens=32)
        print(told.result().choices[0].content)


if __name__ == "__main__":
    main(sys.argv[1])
