"""Attention compiled for absent devices: memory, refusals and collectives. Nothing is run.

`compiled` compiles one function, `rows` compiles calls with
several kernels, `report` shows them, and `tpu` and `gpu` say what is compiled for which devices.
"""
