"""gfx950 code objects on CPU tensors: the emulator as the launcher's runtime and as peer memory.

    loaded = emulated.start(builds)           # compiles what the cache lacks; slow, functional
    ops.sparse_decode(..., backend="emulated")
    emulated.tally.launches                   # by kernel

The only package of the product that imports gfx950_emu. It is imported where somebody asks for it:
backend "emulated" of the plugin, and tests.
"""

from rocm_msa.emulated.counts import Tally, tally
from rocm_msa.emulated.gpu import EmulatedGpu, EmulatedLauncher, EmulationError
from rocm_msa.emulated.peers import EmulatedPeers
from rocm_msa.emulated.serving import faults, start

__all__ = [
    "EmulatedGpu",
    "EmulatedLauncher",
    "EmulatedPeers",
    "EmulationError",
    "Tally",
    "faults",
    "start",
    "tally",
]
