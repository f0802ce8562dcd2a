"""Links to other daemons: who they are, their certificates, and one control link to each.

Use `peers.Peers`. Knows no session and no lane: what the engine says over a link is its own.
"""
