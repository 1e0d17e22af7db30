"""Finds and reads the files of a model that define its tokens: the same for routers and workers.

Never reads weights, and does not need the library that runs the model.
"""

import hashlib
import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer

from cluster.errors import ConfigError
from cluster.process import full_disk

_HUB_FILES = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
]


def locate(model: str, revision: str = "") -> Path:
    """Return the folder with the model's small files. Those of a hub name are downloaded, of this commit, branch or tag
    (empty: the main branch). Raises ConfigError."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    if folder.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1:
        raise ConfigError(f"--model {model}: there is no such folder; name one that this process sees")
    from huggingface_hub import snapshot_download  # only here: a local folder needs no network code
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(model, revision=revision or None, allow_patterns=_HUB_FILES))
    except (HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError, OSError) as error:
        if isinstance(error, OSError) and full_disk(error):
            raise  # the name is right
        first_line = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"--model {model}: no such folder here, and the hub gave none ({first_line}); correct the name"
        ) from error


def read_json(path: Path) -> dict[str, object]:
    """Return the object in a file; empty if there is no such file. Raises ConfigError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold a JSON object")
    return content


def tokenizer_digest(folder: Path) -> str:
    """Return a digest that is equal on members that convert tokens to the same text, regardless of the version of the
    library they run; empty without a tokenizer. Raises ConfigError."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return ""
    added = json.dumps(read_json(folder / "tokenizer_config.json").get("added_tokens_decoder"), sort_keys=True)
    return hashlib.sha256(path.read_bytes() + added.encode()).hexdigest()


def read_tokenizer(folder: Path) -> Tokenizer | None:
    """Read `tokenizer.json`, and add the tokens that only `tokenizer_config.json` has. None: the model has no
    tokenizer. Raises ConfigError."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for any error in the file
        raise ConfigError(f"cannot read {path}: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    added = read_json(folder / "tokenizer_config.json").get("added_tokens_decoder")
    for token_id, token in sorted(added.items(), key=lambda item: int(item[0])) if isinstance(added, dict) else ():
        content = token["content"]
        if tokenizer.token_to_id(content) is None:
            tokenizer.add_tokens([AddedToken(**token)])
        if tokenizer.token_to_id(content) != int(token_id):
            raise ConfigError(f"{folder}: tokenizer.json and tokenizer_config.json disagree on the id of {content!r}")
    return tokenizer


def read_vocabulary(folder: Path) -> tuple[int, frozenset[int]]:
    """Return the number of token ids of the model, and its end-of-sequence tokens: those of config.json and
    generation_config.json together. Raises ConfigError."""
    whole = read_json(folder / "config.json")
    inner = whole.get("text_config")
    config = {**whole, **inner} if isinstance(inner, dict) else whole
    size = config.get("vocab_size")
    if not isinstance(size, int) or size < 1:
        raise ConfigError(f"--model {folder}: config.json has no vocab_size")
    generation = read_json(folder / "generation_config.json")
    return size, _token_ids(config.get("eos_token_id")) | _token_ids(generation.get("eos_token_id"))


def _token_ids(value: object) -> frozenset[int]:
    ids = value if isinstance(value, list) else [value]
    return frozenset(i for i in ids if isinstance(i, int))
