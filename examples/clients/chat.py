"""Hold a conversation over gRPC and print each answer while it is generated. If a router of the cluster dies meanwhile,
the answer goes on at another one.

    python examples/clients/chat.py 127.0.0.1:50051
"""

import sys
from typing import Any

from tandem import Client

QUESTIONS = ("Write a function that reads a file.", "Now one that writes it.")


def main(address: str) -> None:
    messages: list[dict[str, Any]] = []
    with Client(address) as client:
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question})
            answer = ""
            for delta in client.generate(messages=messages, max_tokens=48, temperature=0):
                answer += delta.text
                print(delta.text, end="", flush=True)
            print()
            messages.append({"role": "assistant", "content": answer})


if __name__ == "__main__":
    main(sys.argv[1])
