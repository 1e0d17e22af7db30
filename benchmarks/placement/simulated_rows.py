"""The measured points of simulated placement. Each is kept in a file as soon as it is complete, so a run that was
interrupted measures only what is left."""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from statistics import fmean

_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Row:
    """One point: the shares of requests within the SLO by arm, one for each seed, and the errors of `auto`'s
    predictions."""

    name: str
    attainment: dict[str, list[float]]
    ttft_errors: list[float]
    itl_errors: list[float]

    def mean(self, arm: str) -> float:
        return fmean(self.attainment[arm])


class KeptRows:
    """The complete points. Owns its file, to which it appends one line for each."""

    def __init__(self, path: Path | None, code: str) -> None:
        """`path`: the file, which need not exist; None: nothing is kept. Lines of other code are ignored. Raises
        ValueError or KeyError for a line that is none of these."""
        self._path, self._code = path, code
        self._rows = dict[str, Row]()
        if path is not None and path.exists():
            lines = map(json.loads, path.read_text().splitlines())
            self._rows = {line["point"]: Row(**line["row"]) for line in lines if line["code"] == code}

    def measured(self, point: str, measure: Callable[[], Row]) -> Row:
        """Return the row of this point, and measure it if it is not there. `point` names all on which it depends beside
        the code."""
        if point not in self._rows:
            row = self._rows[point] = measure()
            if self._path is not None:
                with self._path.open("a") as file:
                    file.write(json.dumps({"code": self._code, "point": point, "row": asdict(row)}) + "\n")
        return self._rows[point]


def loaded_code() -> str:
    """Return the digest of the project's modules that this process has loaded: simulated figures depend on nothing
    else."""
    files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    paths = sorted(Path(file) for file in files if file is not None)
    own = [path for path in paths if path.suffix == ".py" and path.is_relative_to(_ROOT)]
    sources = [path.read_bytes() for path in own if ".venv" not in path.parts]
    return sha256(b"\0".join(sources)).hexdigest()[:12]
