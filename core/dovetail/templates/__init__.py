"""Render chat templates, in this process or in a worker process that bounds them. Imports little, because that process
imports this package."""
