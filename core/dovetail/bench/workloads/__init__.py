"""Workloads: what is asked, made from a spec and a seed; the same calls on any machine."""

from dovetail.bench.workloads.make import lasting, make_workload, repeated
from dovetail.bench.workloads.vocabulary import PromptVocabulary

__all__ = ["PromptVocabulary", "lasting", "make_workload", "repeated"]
