"""Share the memory of GPUs between processes of one host with CUDA's IPC handles."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch.distributed import Store

_HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * _HANDLE_BYTES),)


class _DeviceMemory:
    """Describe memory to torch, which keeps this object with the tensor."""

    def __init__(self, address: int, words: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (words,),
            "typestr": "<i4",
            "data": (address, False),
            "version": 3,
            "strides": None,
        }


def ipc_memory(
    store: Store, rank: int, size: int, device: torch.device
) -> Callable[[int], tuple[torch.Tensor, list[int]]]:
    """Return a function that allocates memory of ``device``, as ``symmetric_memory`` does. ``store`` is for this
    function alone, on every rank. The memory is released when the process ends. Raises ``RuntimeError`` or ``OSError``
    if CUDA's runtime cannot be called."""
    runtime = _runtime()
    numbers = itertools.count()

    def share(space: int) -> tuple[torch.Tensor, list[int]]:
        words, number = -(-space // 4), next(numbers)
        own, handle = ctypes.c_void_p(), _Handle()
        with torch.cuda.device(device):
            _check(runtime, runtime.cudaMalloc(ctypes.byref(own), ctypes.c_size_t(4 * words)))
            _check(runtime, runtime.cudaIpcGetMemHandle(ctypes.byref(handle), own))
            store.set(f"{number}.{rank}", bytes(handle).hex())
            addresses = []
            for other in range(size):
                found = own
                if other != rank:
                    text = bytes(store.get(f"{number}.{other}")).decode()
                    found, theirs = ctypes.c_void_p(), _Handle.from_buffer_copy(bytes.fromhex(text))
                    flags = ctypes.c_uint(_LAZY_PEER_ACCESS)
                    _check(runtime, runtime.cudaIpcOpenMemHandle(ctypes.byref(found), theirs, flags))
                addresses.append(found.value or 0)
            memory = torch.as_tensor(_DeviceMemory(addresses[rank], words), device=device)
        return memory, addresses

    return share


def _runtime() -> Any:
    """Return CUDA's runtime library, the one that torch has loaded."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = sorted({line.split(maxsplit=5)[-1] for line in lines if "libcudart.so" in line})
    if not paths:
        raise RuntimeError("torch has not loaded libcudart.so")
    return ctypes.CDLL(paths[0])


def _check(runtime: Any, code: int) -> None:
    if code:
        runtime.cudaGetErrorString.restype = ctypes.c_char_p
        raise RuntimeError(f"CUDA error {code}: {runtime.cudaGetErrorString(code).decode()}")
