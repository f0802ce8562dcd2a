"""Arena files: open pages of one worker incarnation, and those of dead engines."""
