"""python3 -m benchmarks.gpu_check.slimmed FOLDER: takes out of the wheels in there what no check of ours uses.

What may travel to a machine without a network is often bounded. Standard library only.
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
    """Whether anything was taken out. Its record no longer names it either: pip installs what both name."""
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
