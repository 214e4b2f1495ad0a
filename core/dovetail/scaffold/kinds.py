"""Describe the package that ``dovetail plugins new`` writes for each kind. Its code is in ``templates/<kind>``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from dovetail.interfaces.features import Feature

FOLDER = Path(__file__).parent / "templates"


@dataclass(frozen=True, slots=True)
class KindTemplate:
    """Describe the generated package of one kind. A third party's kind names its template in
    ``KindDescriptor.scaffold``.

    ``folder`` holds the templates: ``PACKAGE/config.py.jinja``, ``PACKAGE/<module>.py.jinja`` and
    ``tests/test_NAME.py.jinja``, in whose paths PACKAGE and NAME stand for the names of the package and the component.
    ``module`` is the module of the class that is generated, and ``suffix`` is the end of the class's name. ``summary``
    describes the component in its spec, and ``about`` is the first paragraph of the README. ``setting`` is shown as an
    example. ``command`` is the command that uses the component, with further ``options``. ``rival`` is a built-in component to measure it
    against.
    """

    folder: Path
    module: str
    suffix: str
    summary: str
    about: str
    offers: tuple[Feature, ...] = ()
    needs: tuple[Feature, ...] = ()
    setting: Mapping[str, Any] = field(default_factory=dict)
    rival: str | None = None
    command: Literal["generate", "serve"] = "generate"
    options: str = ""


ATTENTION = KindTemplate(
    FOLDER / "attention",
    "attention",
    "Attention",
    "Attention in plain torch, one row at a time.",
    "An attention backend for Dovetail in plain torch, with every feature, written to be easy to read.",
    (
        Feature.ATTN_EXTEND,
        Feature.ATTN_DECODE,
        Feature.ATTN_VERIFY,
        Feature.ATTN_MIXED,
        Feature.ATTN_TREE_MASK,
        Feature.ATTN_SLIDING_WINDOW,
        Feature.ATTN_SOFT_CAP,
        Feature.ATTN_SINKS,
        Feature.ATTN_BATCH_INVARIANT,
        Feature.ATTN_INVARIANT_WINDOW,
    ),
    setting={"query_block": 64},
    rival="torch_native",
)
CACHE = KindTemplate(
    FOLDER / "cache",
    "cache",
    "Cache",
    "A tree of pages, one dictionary look-up per page.",
    "A prefix cache for Dovetail: a tree of pages whose leaves are evicted by use.",
    (Feature.CACHE_REUSE, Feature.CACHE_NAMESPACES, Feature.CACHE_EVICT),
    setting={"eviction": "lfu"},
    rival="radix",
)
GRAMMAR = KindTemplate(
    FOLDER / "grammar",
    "grammar",
    "Backend",
    "Choices: the output is one of a few texts.",
    "A grammar backend for Dovetail that supports choices, and refuses every other constraint with a message that names an alternative.",
    (
        Feature.GRAMMAR_CHOICE,
        Feature.GRAMMAR_ROLLBACK,
        Feature.GRAMMAR_JUMP_FORWARD,
        Feature.GRAMMAR_PORTABLE,
    ),
    setting={"max_choices": 50},
)
DRAFTER = KindTemplate(
    FOLDER / "speculative",
    "drafter",
    "Drafter",
    "Prompt lookup: drafts what followed the last tokens when they occurred before.",
    "A drafter for Dovetail: prompt lookup, which expects the text to continue as it did before.",
    (Feature.DRAFT_CHAIN,),
    needs=(Feature.ATTN_VERIFY, Feature.KV_ROLLBACK),
    setting={"longest_match": 5},
    rival="ngram",
)
POLICY = KindTemplate(
    FOLDER / "policy",
    "policy",
    "Policy",
    "Shortest prompt first; waiting makes a prompt count as shorter.",
    "A schedule policy for Dovetail: the shortest prompt goes first, and no request starves.",
    setting={"tokens_per_second": 50.0},
    rival="fcfs",
)
EXECUTOR = KindTemplate(
    FOLDER / "executor",
    "executor",
    "Executor",
    "One rank, on a thread of its own, with a deadline.",
    "An executor for Dovetail: the engine of one rank runs on a thread, and every call has a deadline.",
    setting={"step_seconds": 60.0},
    rival="local",
)
LOGITS_PROCESSOR = KindTemplate(
    FOLDER / "logits_processor",
    "processor",
    "Processor",
    "No token occurs more often than a request allows.",
    "A logits processor for Dovetail: no token occurs more often than a request allows. Requests name it in "
    "`logits_processors`, with their parameters.",
    (Feature.LOGITS_DRAFTS, Feature.LOGITS_BATCH_INVARIANT),
    setting={"spare_eos": False},
)
MODEL = KindTemplate(
    FOLDER / "model",
    "model",
    "Model",
    "A decoder of Llama's shape, built from dovetail.layers.",
    "A model architecture for Dovetail: a dense decoder, built from `dovetail.layers`, whose test compares it with a second "
    "implementation of the mathematics.",
    setting={"path": "tiny"},
)
TOOL_PARSER = KindTemplate(
    FOLDER / "tool_parser",
    "parser",
    "ToolParser",
    "A line CALL name {...} is a call.",
    "A parser of tool calls for Dovetail: a line `CALL name {...}` is a call.",
    setting={"word": "DO"},
    command="serve",
)
REASONING_PARSER = KindTemplate(
    FOLDER / "reasoning_parser",
    "parser",
    "ReasoningParser",
    "Lines that begin with # are reasoning.",
    "A parser of reasoning for Dovetail: lines that begin with `#` are reasoning.",
    setting={"mark": "//"},
    command="serve",
)
API = KindTemplate(
    FOLDER / "api",
    "protocol",
    "Api",
    "One route that continues a text, whole or line by line.",
    "An API for Dovetail's server: one route that continues a text, whole or line by line. Every API that is "
    "installed is served, unless the config names some.",
    setting={"tokens": 16},
    command="serve",
)
QUANTIZATION = KindTemplate(
    FOLDER / "quantization",
    "quantization",
    "Quantization",
    "8-bit integers with a scale for each group of a row.",
    "A quantization of weights for Dovetail in plain torch: 8-bit integers with a scale for each group of a row, from "
    "checkpoints or while loading.",
    setting={"group_size": 16},
    offers=(Feature.QUANTIZATION_BATCH_INVARIANT,),
)
EXPERTS = KindTemplate(
    FOLDER / "experts",
    "experts",
    "Experts",
    "Experts in plain torch, one after the other.",
    "A backend of experts for Dovetail in plain torch: it multiplies the tokens of one expert after the other, for every "
    "variant of a layer. It is used by models that have experts.",
    (
        Feature.EXPERTS_PLAIN,
        Feature.EXPERTS_FP8_ROWS,
        Feature.EXPERTS_FP8_BLOCKS,
        Feature.EXPERTS_MXFP4,
        Feature.EXPERTS_INT4,
        Feature.EXPERTS_INT8,
        Feature.EXPERTS_GGUF,
        Feature.EXPERTS_BIAS,
        Feature.EXPERTS_SWIGLU,
        Feature.EXPERTS_SCALED_INPUT,
        Feature.EXPERTS_BATCH_INVARIANT,
    ),
    setting={"block_rows": 64},
    rival="torch_native",
    options=" --model path/to/a/model-with-experts",
)

MIXER = KindTemplate(
    FOLDER / "mixer",
    "mixer",
    "Mixer",
    "Short convolutions and Mamba-2 in plain torch, one token after the other.",
    "A backend of layers with a state for Dovetail in plain torch: it computes short convolutions and the recurrence of Mamba-2, "
    "one token after the other, and leaves out rejected drafts. It is used by models that have such layers.",
    (Feature.MIXER_SHORT_CONV, Feature.MIXER_SSD, Feature.MIXER_DRAFTS),
    setting={"sums": "float64"},
    rival="torch_native",
    options=" --model path/to/a/model-with-states",
)
STORE = KindTemplate(
    FOLDER / "store",
    "store",
    "Stores",
    "Keys and values in one tensor for each layer, limited in size, and states as they are.",
    "A KV store for Dovetail in plain torch: the keys and values of each layer are in one tensor, and numbers that are too "
    "large become the largest that a setting allows. States are kept as they are.",
    (Feature.STORE_FULL, Feature.STORE_SLIDING, Feature.STORE_STATE),
    setting={"largest": 1000.0},
    rival="paged",
)
