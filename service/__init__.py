"""The interfaces of the daemon: HTTP, command line, admin socket, notifications."""
