"""Pure functions over frozen views that choose the next step of a lane, choose a lane for a
request, and predict times."""
