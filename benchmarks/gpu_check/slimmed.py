"""`python3 -m benchmarks.gpu_check.slimmed FOLDER`: remove from the wheels in a folder what no check uses.

The size of what may be transferred to a machine without a network is often limited. Standard library only.
"""

import sys
import zipfile
from pathlib import Path

# By the wheel's name: communication of experts, built for torch 2.12 to 2.14, half of the wheel.
_UNUSED = {"nixl_cu13": ("nixl_ep_cu13/",)}


def main() -> None:
    for wheel in sorted(Path(sys.argv[1]).glob("*.whl")):
        unused = _UNUSED.get(wheel.name.partition("-")[0], ())
        if unused and slim(wheel, unused):
            print(f"{wheel.name}: {wheel.stat().st_size >> 20} MiB without {', '.join(unused)}")


def slim(wheel: Path, unused: tuple[str, ...]) -> bool:
    """Remove unused files from a wheel and from its record, because pip installs only what both name. Return whether
    any was removed."""
    slimmer = wheel.with_suffix(".slim")
    with zipfile.ZipFile(wheel) as whole, zipfile.ZipFile(slimmer, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as kept:
        names = [name for name in whole.namelist() if not name.startswith(unused)]
        has_less = len(names) < len(whole.namelist())
        for name in names if has_less else ():
            content = whole.read(name)
            if name.endswith(".dist-info/RECORD"):
                content = b"".join(line for line in content.splitlines(True) if not line.decode().startswith(unused))
            kept.writestr(whole.getinfo(name), content)
    if has_less:
        slimmer.replace(wheel)
    else:
        slimmer.unlink()
    return has_less


if __name__ == "__main__":
    main()
