"""The one thing that pyproject.toml leaves out: the allocator's compiled loops, which are optional.

Where there is no compiler, or it fails, the installation succeeds without them.
"""

from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext


class BuildOptional(build_ext):
    """Forgets what could not be built: an editable installation looks for its file (setuptools 84)."""

    def run(self) -> None:
        super().run()
        self.extensions = [ext for ext in self.extensions if Path(self.get_ext_fullpath(ext.name)).exists()]


PARTS = [str(path) for path in sorted(Path("allocator").glob("_loops_*.h"))]

setup(
    cmdclass={"build_ext": BuildOptional},
    ext_modules=[Extension("kvproof.allocator._loops", ["allocator/_loops.c"], depends=PARTS, optional=True)],
)
