"""Workloads: what is asked, made from a spec and a seed; the same calls on any machine."""

from dovetail.bench.workloads.make import make_workload
from dovetail.bench.workloads.vocabulary import Vocabulary

__all__ = ["Vocabulary", "make_workload"]
