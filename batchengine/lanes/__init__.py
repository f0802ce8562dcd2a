"""Lanes: one worker process per processor, and the engine's end of each.

`worker_process` is the engine's end; `worker` is the process; `device` is the interface of the
device that computes: `cpu`, with its pages in `host_memory`. `step_input` checks a step.
"""
