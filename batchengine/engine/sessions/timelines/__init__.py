"""The timelines of a session that requests go on with, chosen before they are admitted."""
