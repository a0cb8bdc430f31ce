"""What training or generation takes on chips that are not at hand: compiled for them ahead of time, not run.

`job` says what is planned, `topology` and `chips` for which devices, `placement` puts a model of
shapes on them, `phases` compiles its programs, `hlo` and what rests on it read them, `estimate`
says what would fit, and `report` shows it.
"""
