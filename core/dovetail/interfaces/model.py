"""Define what a model plugin provides: a description of the model from its config.json, and its forward pass."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

    from dovetail.interfaces.cache import CacheGroup
    from dovetail.interfaces.features import Feature
    from dovetail.interfaces.mesh import Mesh
    from dovetail.types import Batch


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Describe a model by its config.json alone, without torch and without weights.

    Returned by the ``describe`` function that a model's ComponentSpec names. ``config`` is the architecture's own typed
    config, which its constructor receives within this object. ``context_len`` is the largest number of tokens of a request;
    the model is built with the number of ``model.context_len`` if that is lower. ``needs`` are the features that the model requires of the
    other components, ``offers`` those that it provides. ``cache_groups`` has one entry for each KV pool that the model
    uses. ``split_sizes`` are names and values of further numbers of config.json that the ranks of tensor parallelism
    must divide evenly, in models that offer ``model.tensor_parallel``; heads are always among them. ``expert_sizes``, in
    mixtures of experts, are names and values of the number of experts and of the intermediate values of one expert: the
    ranks must divide one of the two (``parallel.experts``). ``quantization`` is the ``quantization_config`` of
    config.json, or None; Dovetail sets it, and components of kind ``quantization`` read it. ``notes`` are sentences about
    how the model is computed, which ``dovetail explain``, the log and /server_info show. ``launch_factor`` is the time in which
    the host launches a layer of the model kernel by kernel, divided by that of a layer made of ``dovetail.layers``: a higher number
    lets the engine capture longer steps with prompts.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_len: int
    cache_groups: tuple[CacheGroup, ...]
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "bfloat16"  # dtype of the checkpoint
    needs: frozenset[Feature] = frozenset()
    offers: frozenset[Feature] = frozenset()
    split_sizes: tuple[tuple[str, int], ...] = ()
    expert_sizes: tuple[tuple[str, int], tuple[str, int]] | None = None
    config: Any = field(default=None, repr=False)
    quantization: Mapping[str, Any] | None = field(default=None, repr=False)
    notes: tuple[str, ...] = ()
    launch_factor: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.launch_factor < math.inf:
            raise ValueError(
                f"launch_factor of {self.architecture} is {self.launch_factor}; allowed: a number greater than 0"
            )


class TensorShare(NamedTuple):
    """Describe a part of a checkpoint tensor: of dimension ``dim``, which has ``whole`` entries, the entries
    ``[start, start + size)``."""

    dim: int
    start: int
    size: int
    whole: int


class WeightTransform(ABC):
    """Change what is read of a checkpoint tensor before it fills a parameter. ``dovetail.layers.transforms`` has the
    usual ones. Instances are immutable."""

    @property
    def reorders(self) -> bool:
        """Return False if the elements keep their order, and only the shape changes. The loader then copies them into
        the parameter as they are read, without a second copy of the tensor."""
        return True

    @property
    def orders_rows(self) -> bool:
        """Return True if only the order of dimension 0 changes, whatever the other dimensions are. Such a transform also
        applies to what a quantization stores for each row."""
        return False

    @property
    def keeps_dtype(self) -> bool:
        """Return True if the elements stay as they are. The loader then checks their dtype as if there were no
        transform."""
        return False

    @property
    def reads(self) -> tuple[torch.dtype, ...]:
        """Return the dtypes of the tensors that ``apply`` accepts. The loader refuses others; if there are none, it accepts
        floating-point numbers, or the parameter's dtype."""
        return ()

    @property
    def any_shape(self) -> bool:
        """Return True if the shape of the tensor cannot be known before it is read, such as that of a text. The loader then does not check
        it, and ``apply`` refuses tensors that do not fit. The target has no shares."""
        return False

    @abstractmethod
    def source_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the tensor of which ``apply`` makes one of ``shape``."""

    @abstractmethod
    def apply(self, tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """Return ``tensor``, which has the shape ``source_shape(shape)``, transformed to ``shape``. The result may be a
        view, and of another dtype. Does not change ``tensor``."""


WeightCheck = Callable[["torch.Tensor"], str | None]


class WeightTarget(NamedTuple):
    """Name a destination of a checkpoint tensor: rows ``[start, start + size)`` of dimension 0 of a parameter, or the
    whole parameter if both are None.

    Only the part of the tensor that ``shares`` describe is read, at most one share for each dimension. ``transform``
    changes what is read; without it, it must have the shape of the rows that it fills. ``check`` receives these rows once they
    are filled from a checkpoint, and returns what is wrong with them ("has scales that are NaN"), which is then refused, or
    None. Checkpoints may lack a tensor whose targets all have a ``default``: it fills their rows instead. Layers return their
    targets (``Linear.target``), so that models need not compute shares.
    """

    parameter: str
    start: int | None = None
    size: int | None = None
    shares: tuple[TensorShare, ...] = ()
    transform: WeightTransform | None = None
    check: WeightCheck | None = None
    default: float | None = None


class ModelArchitecture(ABC):
    """Compute the forward pass of a model built from ``dovetail.layers``. Concrete classes are also
    ``torch.nn.Module``.

    The engine calls ``cls(info, mesh)`` with the target device and dtype as torch's defaults. The weight loader then
    fills the parameters by ``weights_map``.

    A model that offers ``model.tensor_parallel`` builds its layers with ``mesh``, so that they hold this rank's share.
    The hidden states and the logits that it returns are then the same on all ranks; queries, keys and values are those
    of the rank's heads. For other models ``mesh`` is always ``SINGLE``. ``info`` describes the whole model.
    """

    info: ModelInfo
    body: str = "model."
    """The prefix of the names in ``weights_map`` that checkpoints lack which were saved without the head."""

    def __init__(self, info: ModelInfo, mesh: Mesh) -> None:
        """Build the layers of ``info``, divided among the ranks of ``mesh``. Their parameters are not filled yet."""
        super().__init__()

    @abstractmethod
    def forward(self, batch: Batch) -> torch.Tensor:
        """Return the hidden states ``[tokens, hidden_size]`` after the final norm, of ``batch.input_ids`` at
        ``batch.positions``. Write K and V of the step through ``batch.kv`` and attend through ``batch.attn``.

        If ``batch.last`` is set, only the tokens ``batch.logit_rows`` are needed, and the method returns the hidden
        states of these tokens only, ``[rows of batch.last, hidden_size]``. The last layer writes K and V of all tokens.
        It then continues with these tokens as queries and attends through ``batch.last.attn``, unless there are none.
        The engine sets ``batch.last`` only for models that offer ``model.last_rows``.

        If ``batch.watch`` names layers, the method sets ``batch.hidden`` to the hidden states of these layers side by
        side, ``[tokens, len(watch) * hidden_size]``. The number i below ``num_layers`` stands for the residual stream
        that enters layer i, ``num_layers`` for what this method returns, and ``num_layers + 1`` for the same before the
        final norm. The engine sets ``batch.watch`` only for models that offer ``model.hidden_states``. ``batch.last``
        is None if ``watch`` contains one of the last two numbers.
        """

    @abstractmethod
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits ``[n, vocab_size]`` of hidden states ``[n, hidden_size]``, in the model's dtype. The engine
        calls this after ``forward``, for the tokens that need logits."""

    def embed_tokens(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return the embeddings ``[tokens, hidden_size]`` of ``input_ids`` (int64 ``[tokens]``) in a new tensor. Needs
        ``model.hidden_states``."""
        raise NotImplementedError(f"{type(self).__name__} does not offer model.hidden_states")

    @abstractmethod
    def weights_map(self) -> Mapping[str, WeightTarget | list[WeightTarget]]:
        """Return the target of every tensor name in the checkpoint, or a list of targets: one for each parameter or
        part of a parameter that the tensor fills. The list is empty if this rank needs nothing of the tensor, such as
        the weight of another rank's expert.

        The loader refuses a checkpoint that contains a name which is neither here nor matched by ``ignored_weights``,
        and a checkpoint that leaves a parameter unfilled.
        """

    def ignored_weights(self) -> Iterable[str]:
        """Return regular expressions of checkpoint names that this model does not need (buffers, tied copies)."""
        return ()

    def tied_weights(self) -> Mapping[str, str]:
        """Return the checkpoint names that this model ignores because it uses the tensors with other names in their
        place, which have the same values, and these names: ``{"lm_head.weight": "model.embed_tokens.weight"}``. The
        loader compares them in a checkpoint that has both."""
        return {}

    def untie(self, name: str) -> None:
        """Give the parameter of one of the ``tied_weights`` memory of its own, which ``weights_map`` fills from then on,
        because the values differ. The loader calls it before weights are loaded."""
        raise NotImplementedError(f"{type(self).__name__} has tied_weights and does not implement untie")
