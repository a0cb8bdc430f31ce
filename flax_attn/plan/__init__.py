"""The cost of training or generation on absent chips: programs are compiled for them, not run.

`job` says what is planned, `topology` and `chips` for which devices, `placement` puts a model of
shapes on them, `phases` compiles its programs, `hlo` and what rests on it read them, `estimate`
says what would fit, and `report` shows it.
"""
