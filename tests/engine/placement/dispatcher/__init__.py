"""The dispatcher on plain data: fake lanes, a clock that tests set."""
