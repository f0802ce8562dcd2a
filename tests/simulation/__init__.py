"""Deterministic simulation: the real engine, store and worker code in one thread and virtual time.

    clock     an event loop whose time jumps to the next timer
    seams     what is replaced: clocks, threads, disk faults, text
    lanes     worker processes as objects: real worker code, deaths and delays drawn from the seed
    people    clients that ask, edit, cancel, move, park and fork, and check every answer
    wrong     a scene for any seed: one lane computes wrong bits until an audit drains it
    faults    what may go wrong, and how often
    world     one daemon of a seed: configuration, runs of the engine, invariants
    seed      what all daemons of a seed have in common, and how a seed is run
    far       data links between workers, over which pages are fetched
    linked/   seeds of several daemons: their network, its faults, and defects to find

`python -m tests.simulation --seeds 1000 --start 0` runs many; a seed that fails prints how to run
it alone. Nothing here reads a clock or draws a number that does not follow from the seed.
"""
