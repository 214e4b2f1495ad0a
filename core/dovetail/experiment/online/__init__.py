"""Run an experiment inside one server: several engines (arms), the routing of requests among them, shadow traffic, the routes
of the experiment and the running comparison. ``serving.prepare_experiment`` is what ``dovetail serve`` hands to the server."""
