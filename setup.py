"""Builds the wheel. It installs two names: `tandem`, the client library, and `tandem_serving`, which holds the rest.

The folders of a checkout have common names (`cli`, `engine`, `router`, ...). In the wheel they are folders of
`tandem_serving`, and the `tandem` command puts that on the path of its own processes (tandem_serving/__main__.py). An
editable install takes the folders as they are. Everything else about the package is in pyproject.toml.
"""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.egg_info import egg_info

INSTALLED = ("tandem", "tandem_serving")
DEMO_MODEL = Path("examples", "demo_model")


class BuildPy(build_py):
    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        built = Path(self.build_lib)
        parent = built / INSTALLED[1]
        for name in {package.partition(".")[0] for package in self.distribution.packages} - set(INSTALLED):
            shutil.rmtree(parent / name, ignore_errors=True)  # of an earlier build
            shutil.move(built / name, parent / name)
        shutil.copytree(DEMO_MODEL, parent / DEMO_MODEL, dirs_exist_ok=True)


class EggInfo(egg_info):
    def run(self) -> None:
        super().run()
        Path(self.egg_info, "top_level.txt").write_text("".join(f"{name}\n" for name in INSTALLED))


setup(cmdclass={"build_py": BuildPy, "egg_info": EggInfo})
