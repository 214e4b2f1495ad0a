"""Make workloads from a spec and a seed; the calls are the same on every machine."""

from dovetail.bench.workloads.make import lasting, make_workload, repeated
from dovetail.bench.workloads.vocabulary import PromptVocabulary

__all__ = ["PromptVocabulary", "lasting", "make_workload", "repeated"]
