"""The step loop of one lane: plan, frame, commit of the worker's answer."""
