"""Lanes: one worker process per processor, and the engine's end of each.

`lane` supervises from the engine; `worker` is the process; `memory` is what a worker maps;
`steps` turns one Step frame into kernel calls.
"""
