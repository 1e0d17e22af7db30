"""Ask for answers that follow a JSON schema, a regular expression and a choice of texts.

python examples/clients/structured_output.py 127.0.0.1:50051
"""

import json
import sys

from tandem import Client

CITY = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 12},
        "people": {"type": "integer", "minimum": 0, "maximum": 9999},
    },
    "required": ["name", "people"],
    "additionalProperties": False,
}


def main(address: str) -> None:
    with Client(address) as client:
        city = json.loads(client.generate("A city:\n", json_schema=CITY, max_tokens=200, seed=1).result().text)
        print(f"{city['name']}: {city['people']}")
        print(client.generate("The date:\n", regex="[0-9]{4}-[0-9]{2}-[0-9]{2}", max_tokens=40).result().text)
        print(client.generate("Is it late?\n", choice=["yes", "no"], max_tokens=10).result().text)


if __name__ == "__main__":
    main(sys.argv[1])
