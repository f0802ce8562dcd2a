"""One turn: its stream of events, its parameters, its durable record."""
