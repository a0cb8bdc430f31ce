"""The optional extension: the kernels for CPUs. All else is in pyproject.toml."""

from importlib.util import find_spec
from pathlib import Path

from setuptools import Extension, setup

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

setup(
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
    ]
)
