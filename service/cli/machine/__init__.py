"""Commands that look at this machine and start no daemon: check, doctor."""
