"""Define the data that travels through a step: requests, batches and outputs. These classes hold data and no behaviour.
``dovetail.sampling_params`` holds the parameters of a request.

Shapes: ``rows`` is the number of requests in a batch, ``tokens`` the number of tokens that enter the forward pass,
``k`` the width of a draft tree, ``V`` the vocabulary size. Host arrays are numpy, device tensors are torch.
"""

from dovetail.types.arrays import BoolArray, FloatArray, Int64Array, IntArray
from dovetail.types.batch import Attends, Batch, LogitRows, Phase, StoresKV
from dovetail.types.drafts import Committed, DraftTree
from dovetail.types.outputs import ForwardOutput, HostLogprobs, Logprobs, StepResult
from dovetail.types.plan import (
    AdmittedRequest,
    DepartedRequest,
    Masks,
    PageUpdates,
    SharedPrefixes,
    StateCopies,
    StateSaves,
    StepPlan,
)
from dovetail.types.request import FinishKind, FinishReason, Req, TokenLogprob

__all__ = [
    "AdmittedRequest",
    "Attends",
    "Batch",
    "BoolArray",
    "Committed",
    "DepartedRequest",
    "DraftTree",
    "FinishKind",
    "FinishReason",
    "FloatArray",
    "ForwardOutput",
    "HostLogprobs",
    "Int64Array",
    "IntArray",
    "LogitRows",
    "Logprobs",
    "Masks",
    "PageUpdates",
    "Phase",
    "Req",
    "SharedPrefixes",
    "StateCopies",
    "StateSaves",
    "StepPlan",
    "StepResult",
    "StoresKV",
    "TokenLogprob",
]
