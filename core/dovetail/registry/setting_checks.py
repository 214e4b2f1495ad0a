"""Check settings that concern the model and the device, before components are chosen."""

from __future__ import annotations

from dovetail.config import Config
from dovetail.errors import ConfigError
from dovetail.registry.kv_dtype import check_kv_dtype
from dovetail.registry.machine import Machine
from dovetail.registry.model_choice import ModelChoice

INVARIANT = ((9, 0),)
"""The compute capabilities of the CUDA devices on which ``batch_invariant`` has been shown to hold."""
INVARIANT_DTYPES = ("bfloat16", "float16")


def check_settings(config: Config, machine: Machine, model: ModelChoice) -> None:
    """Refuse settings that no choice of components makes right. Raises ``ConfigError``."""
    check_kv_dtype(model.kv_dtype, machine)
    _check_adapters(config)
    _check_data_attention(config)
    _check_batch_invariant(config, machine, model.dtype)
    _check_expert_load(config, model)
    _check_devices(config, machine)


def _check_expert_load(config: Config, model: ModelChoice) -> None:
    """Refuse ``metrics.expert_load`` for a model without experts. Raises ``ConfigError``."""
    if config.metrics.expert_load is not None and model.info.expert_sizes is None:
        raise ConfigError(
            f"metrics.expert_load is {config.metrics.expert_load}, and {model.info.architecture} has no experts; leave it out"
        )


def _check_adapters(config: Config) -> None:
    """Refuse adapters with ``batch_invariant``, and those that have a name of the model. Raises ``ConfigError``."""
    if not config.adapters.enabled:
        return
    if config.batch_invariant:
        raise ConfigError(
            "batch_invariant is true and adapters.enabled is true; the products of adapters depend on the other rows of a step. "
            "Set one of them to false"
        )
    taken = next((name for name in config.adapters.load if config.model.is_served(name)), None)
    if taken is not None:
        raise ConfigError(f"adapters.load has {taken!r:.80}, which is also a name of the model; choose another one")


def _check_batch_invariant(config: Config, machine: Machine, dtype: str) -> None:
    """Refuse ``batch_invariant`` on devices on which the results of its kernels were not compared bit by bit, and for
    other dtypes. Raises ``ConfigError``."""
    have = machine.compute_capability
    if config.batch_invariant and have not in INVARIANT:
        allowed = ", ".join(".".join(map(str, capability)) for capability in INVARIANT)
        got = f"{machine.device_name} has {'.'.join(map(str, have))}" if have else f"device is {machine.device}"
        raise ConfigError(
            f"batch_invariant is true, which needs CUDA of compute capability {allowed}, where it has been shown to hold; "
            f"{got}. Set batch_invariant: false"
        )
    if config.batch_invariant and dtype not in INVARIANT_DTYPES:
        raise ConfigError(
            f"batch_invariant is true and model.dtype is {dtype}; allowed: {', '.join(INVARIANT_DTYPES)}. Set model.dtype: bfloat16, or "
            "batch_invariant: false"
        )


def _check_devices(config: Config, machine: Machine) -> None:
    """Check that there is a CUDA device for each rank. Raises ``ConfigError``."""
    tp, count = config.parallel.tp, machine.num_devices
    first = int(machine.device.partition(":")[2] or 0)
    if tp > 1 and count is not None and first + tp > count:
        raise ConfigError(
            f"parallel.tp is {tp} and device is {machine.device}; the ranks need {tp} consecutive CUDA devices from there on, and "
            f"torch sees {count} in all. Set parallel.tp to at most {max(1, count - first)}, or device: cpu"
        )


def _check_data_attention(config: Config) -> None:
    """Refuse with ``parallel.attention: data`` what runs the rows of all requests in the layers of attention. Raises
    ``ConfigError``."""
    if config.parallel.attention != "data":
        return
    if config.graphs.piecewise_tokens:
        raise ConfigError(
            f"parallel.attention is data and graphs.piecewise_tokens is {config.graphs.piecewise_tokens}; a step then has another number of "
            "tokens on each rank, for which no pieces are captured. Leave graphs.piecewise_tokens out or set it to 0, or set "
            "parallel.attention: heads"
        )
