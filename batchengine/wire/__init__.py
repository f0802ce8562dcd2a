"""The wire: framing (`frames`), the end of a link in an event loop (`connection`), and the messages
of each kind of link in a module of its own.

`lane` is the link between engine and worker, `text` the one between engine and text process.
"""
