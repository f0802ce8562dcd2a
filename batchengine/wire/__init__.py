"""The wire: framing (`frames`), and the messages of each kind of link in a module of its own.

`lane` is the link between engine and worker, `text` the one between engine and text process.
"""
