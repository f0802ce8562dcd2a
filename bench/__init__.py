"""Benches: each compares with a peer or a measured roof in the same run; see `python -m bench`."""
