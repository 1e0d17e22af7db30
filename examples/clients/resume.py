"""Print an answer that goes on when the router that serves it dies. Give the addresses of two routers of one cluster,
and kill the first one while its answer is printed: no token is lost, repeated or different.

    python examples/clients/resume.py 127.0.0.1:50051,127.0.0.1:50052
"""

import sys

from tandem import Client


def main(addresses: str) -> None:
    with Client(addresses) as client:
        generation = client.generate("def read_lines(path):\n", max_tokens=64, temperature=0, ignore_eos=True)
        for delta in generation:
            print(delta.text, end="", flush=True)
        ledger = generation.result().ledger
        print("\n---\nresumed at another router" if "resumed" in ledger.reasons else "\n---\nserved by one router")


if __name__ == "__main__":
    main(sys.argv[1])
