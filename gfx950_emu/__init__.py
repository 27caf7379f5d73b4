"""A functional emulator of gfx950 (CDNA 4) that runs compiled code objects on the CPU."""
