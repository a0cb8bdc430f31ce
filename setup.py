"""The optional extension: the kernels for CPUs. All else is in pyproject.toml."""

import os
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

SOURCE = Path("flax_attn/native/source")
OPTIONS = [
    "-std=c++17",
    "-O3",
    "-g0",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
    "-Wno-psabi",
]

jaxlib = find_spec("jaxlib")
assert jaxlib is not None, "pyproject.toml requires jaxlib for the build"


class ParallelBuild(build_ext):
    """Compile the sources of an extension at the same time, one on each processor."""

    def build_extension(self, ext):
        compile_in_turn = self.compiler.compile

        def compile_at_once(sources, **options):
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                each = pool.map(lambda source: compile_in_turn([source], **options), sources)
                return [built for objects in each for built in objects]

        self.compiler.compile = compile_at_once
        super().build_extension(ext)


setup(
    cmdclass={"build_ext": ParallelBuild},
    ext_modules=[
        Extension(
            "flax_attn.native.library",
            sources=sorted(map(str, SOURCE.glob("*.cc"))),
            depends=sorted(map(str, SOURCE.glob("*.h"))),
            extra_compile_args=[
                *OPTIONS,
                "-isystem",
                str(Path(str(jaxlib.origin)).parent / "include"),
            ],
            language="c++",
            optional=True,  # without a compiler the other backends run
            py_limited_api=True,
        )
    ],
)
