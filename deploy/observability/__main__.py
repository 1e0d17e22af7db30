"""Writes dashboard.json, rules.yaml and rules_test.yaml beside this file: `python -m deploy.observability`."""

from deploy.observability.files import FOLDER, files


def main() -> None:
    for name, text in files().items():
        (FOLDER / name).write_text(text)
        print(f"wrote deploy/observability/{name}")


if __name__ == "__main__":
    main()
