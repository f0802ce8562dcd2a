"""Request bodies and answers of each HTTP protocol, and what they have in common."""
