"""Measurements that users run: ``dovetail bench``."""
