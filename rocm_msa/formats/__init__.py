"""Number formats of the caches and of the MoE path, in plain PyTorch.

nvfp4      E2M1 values, one E4M3 scale for 16 values, one fp32 scale for a tensor
nvfp4_lut  the 2048-byte table that turns NVFP4 into FP8 inside a kernel
mxfp       MXFP8 and MXFP4: one E8M0 scale for 32 values
fp8        E4M3 (OCP, "fn") with a saturating cast that never makes a NaN
e2m1       the 4-bit value code that nvfp4 and mxfp share

These functions are the definition: a kernel is right when it gives the same bytes.
docs/formats.md shows the bytes. Import the module that you need; nothing is loaded here.
"""
