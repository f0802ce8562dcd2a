"""The step loop of one lane: plan, frame, answer, commit."""
