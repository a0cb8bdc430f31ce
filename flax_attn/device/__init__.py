"""The accelerator at hand: is every backend right there, how fast is it, and which tiles are best.

`calls` has small calls for every part of the contract and draws numbers, `conformance` judges each
backend on them, `times` measures the calls of models beside other libraries, `tiles` tries tiles of
`fused`, `clock` keeps the time, `check` runs all of it, and `report` holds and shows what was
found. `kernels` and `torch_kernels` are what other libraries have.
"""
