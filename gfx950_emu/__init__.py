"""A functional emulator of gfx950 (CDNA 4) that runs compiled code objects on the CPU."""

from gfx950_emu.code_object import CodeObject, CodeObjectError
from gfx950_emu.machine import Machine, launch
from gfx950_emu.report import Arch, Report
from gfx950_emu.settings import Checks, DeviceModel, Fault, Schedule

__all__ = [
    "Arch",
    "Checks",
    "CodeObject",
    "CodeObjectError",
    "DeviceModel",
    "Fault",
    "Machine",
    "Report",
    "Schedule",
    "launch",
]
