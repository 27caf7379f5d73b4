"""vLLM's ROCm platform on a machine without a GPU: what it asks of amdsmi, torch and the device.

`install()` before vLLM is imported; vLLM 0.33's own platform code then runs as on eight MI355X.
What the fakes answer is what vllm/platforms/rocm.py of 0.33.0 reads.
"""

from __future__ import annotations

import enum
import sys
import types

import torch

GPUS = 8
ARCH = "gfx950"
MEMORY = 288 * 10**9


OPERATORS = (
    "silu_and_mul_with_clamp(Tensor! out, Tensor x, float limit, float alpha, float beta) -> ()",
)
"""Of vLLM's compiled library, which layers look up when they are made; nothing calls them here."""


class Properties:
    """Of `torch.cuda.get_device_properties`, on MI355X."""

    name = "AMD Instinct MI355X"
    gcnArchName = f"{ARCH}:sramecc+:xnack-"
    total_memory = MEMORY
    multi_processor_count = 256
    major, minor = 9, 5
    warp_size = 64


class Stream:
    """Of torch.cuda: an object to hold; nothing runs on it."""

    cuda_stream = 0

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass


class MemoryType(enum.Enum):
    VRAM = 0


def amdsmi() -> types.ModuleType:
    module = types.ModuleType("amdsmi")
    module.AmdSmiException = type("AmdSmiException", (Exception,), {})
    module.AmdSmiMemoryType = MemoryType
    module.amdsmi_init = module.amdsmi_shut_down = lambda: None
    module.amdsmi_get_processor_handles = lambda: list(range(GPUS))
    module.amdsmi_get_gpu_asic_info = lambda handle: {
        "market_name": Properties.name,
        "device_id": "0x75a3",
        "target_graphics_version": ARCH,
    }
    module.amdsmi_get_gpu_device_uuid = lambda handle: f"uuid-{handle}"
    module.amdsmi_get_gpu_memory_total = lambda handle, kind: MEMORY
    module.amdsmi_topo_get_link_type = lambda a, b: {"hops": 1, "type": 2}
    module.amdsmi_topo_get_numa_node_number = lambda handle: 0
    return module


def install() -> None:
    """Put the fakes in place, in this process for good."""
    import torch._inductor.utils  # what it imports depends on whether torch has a GPU
    import torch.distributed
    import torch.utils.cpp_extension

    sys.modules["amdsmi"] = amdsmi()
    torch.version.hip = "7.2.0"
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: GPUS
    torch.cuda.current_device = lambda: 0
    torch.cuda._is_compiled = lambda: True
    torch.cuda._device_count_amdsmi = lambda: GPUS
    torch.cuda.get_device_properties = lambda device=None: Properties()
    torch.cuda.get_device_name = lambda device=None: Properties.name
    torch.cuda.get_device_capability = lambda device=None: (9, 5)
    torch.cuda.Stream = torch.cuda.Event = Stream
    torch.cuda.current_stream = lambda device=None: Stream()
    torch.cuda.set_device = lambda device: None
    torch.cuda.is_current_stream_capturing = lambda: False
    library = torch.library.Library("_C", "DEF")
    for schema in OPERATORS:
        library.define(schema)
    LIBRARIES.append(library)


LIBRARIES: list[torch.library.Library] = []
