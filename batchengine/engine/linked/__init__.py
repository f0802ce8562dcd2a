"""Linked daemons: pages that this one holds for others, and where those of its sessions lie."""
