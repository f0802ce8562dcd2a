"""The dashboard: its files, and the stream of snapshots that it shows."""
