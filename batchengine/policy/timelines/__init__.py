"""The rule by which a request goes on with a timeline of its session."""
