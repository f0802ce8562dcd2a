"""Pipeline prefill in a worker: it computes some layers of a timeline for the daemon that owns it.

`stage` has one stage and its memory, `gather` the tiles that come to an owner; `stages` connects
both with the data links. A pipeline produces KV of full pages and nothing else.
"""
