"""Answer a file of requests in OpenAI's batch format. Run again with the same files after an interruption, the command
asks only what is left.

    python examples/clients/batch.py 127.0.0.1:8000
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

PROMPTS = ("def read(path):\n", "def write(path):\n", "class Stack:\n")


def main(address: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        asked, answered = Path(folder, "in.jsonl"), Path(folder, "out.jsonl")
        asked.write_text("".join(json.dumps(request(number)) + "\n" for number in range(len(PROMPTS))))
        command = ("-m", "tandem_serving", "batch", str(asked), str(answered), "--http-address", address)
        subprocess.run([sys.executable, *command], check=True, stderr=subprocess.DEVNULL)
        answers = map(json.loads, answered.read_text().splitlines())  # in the order in which they came
        for answer in sorted(answers, key=lambda answer: answer["custom_id"]):
            print(answer["custom_id"], repr(answer["response"]["body"]["choices"][0]["text"]))


def request(number: int) -> dict[str, object]:
    """One line of the file, as https://platform.openai.com/docs/guides/batch has it."""
    body = {"model": "demo_model", "prompt": PROMPTS[number], "max_tokens": 16, "temperature": 0}
    return {"custom_id": f"request-{number}", "method": "POST", "url": "/v1/completions", "body": body}


if __name__ == "__main__":
    main(sys.argv[1])
