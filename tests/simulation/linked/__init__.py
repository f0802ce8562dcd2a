"""Seeds of several daemons, linked by a simulated network."""
