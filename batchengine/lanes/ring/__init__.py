"""Attention over data links: a worker attends to pages that it holds for peers, and peers
attend to pages that they hold for it.

`data_links` owns sockets; `spans` attends to spans of super-pages; `server` answers queries, and
`routed` sends those of a step; `ring` connects them.
"""
