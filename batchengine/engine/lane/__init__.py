"""The step loop of one lane: plan, send a frame to the worker, commit the worker's answer."""
