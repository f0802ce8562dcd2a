"""Steps of a lane: what a plan becomes, what is in flight, what an answer changes."""
