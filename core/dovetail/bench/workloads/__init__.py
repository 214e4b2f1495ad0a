"""Make workloads from a spec and a seed; the calls are the same on every machine."""

from dovetail.bench.workloads.make import make_workload, repeated, with_roots
from dovetail.bench.workloads.vocabulary import PromptVocabulary

__all__ = ["PromptVocabulary", "make_workload", "repeated", "with_roots"]
