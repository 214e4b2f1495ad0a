"""Run an experiment inside one server: several engines (arms), the routing of requests among them, shadow traffic, the routes
of the experiment and the running comparison. ``dovetail serve`` passes ``serving.prepare_experiment`` to the server."""
