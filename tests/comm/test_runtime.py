"""The memory calls: names and arguments of both runtimes, errors by name."""

import ctypes
import ctypes.util

import pytest

from rocm_msa import hip
from rocm_msa.comm import runtime as module
from rocm_msa.comm.runtime import CudaError, PeerRuntime
from rocm_msa.hip import HipError
from tests.comm import fake_peers

PLATFORMS = ["hip", "cuda"]


@pytest.mark.parametrize("platform", PLATFORMS)
def test_memory_is_allocated_cleared_and_freed(platform):
    calls, before = fake_peers.runtime(platform), fake_peers.live()
    address = calls.allocate(4096)
    assert ctypes.string_at(address, 4096) == b"\xa5" * 4096
    calls.clear(address, 4096)
    assert ctypes.string_at(address, 4096) == bytes(4096)
    handle = calls.export(address)
    assert len(handle) == module.HANDLE_BYTES
    assert fake_peers.live() == (before[0] + 1, before[1])
    calls.free(address)
    assert fake_peers.live() == before


@pytest.mark.parametrize("platform", PLATFORMS)
def test_failures_name_the_call_and_the_subject(platform):
    calls = fake_peers.runtime(platform)
    address = calls.allocate(4096)
    handle = calls.export(address)
    try:
        for planted, name, act, subject in [
            ("ExtMallocWithFlags" if platform == "hip" else "Malloc", None,
             lambda: calls.allocate(512), "512 bytes of peer memory"),
            ("IpcGetMemHandle", None, lambda: calls.export(address), hex(address)),
            ("Memset", None, lambda: calls.clear(address, 1), hex(address)),
            ("DeviceSynchronize", None, lambda: calls.clear(address, 1), hex(address)),
            ("IpcOpenMemHandle", None, lambda: calls.open(handle, "rank 3"), "rank 3"),
        ]:  # fmt: skip
            error = HipError if platform == "hip" else CudaError
            with fake_peers.failing(planted), pytest.raises(error) as caught:
                act()
            assert type(caught.value) is error and subject in str(caught.value)
            name = platform + planted
            assert str(caught.value).startswith(f"{name} for ")
            assert str(caught.value).endswith("failed: out of memory (2)")
    finally:
        calls.free(address)


def test_misuse_is_an_error_of_the_runtime():
    calls = fake_peers.runtime()
    address = calls.allocate(4096)
    with pytest.raises(HipError, match="IpcOpenMemHandle"):  # a handle of this process
        calls.open(calls.export(address), "own memory")
    with pytest.raises(HipError, match="hipIpcCloseMemHandle for mapped"):
        calls.close(address)
    calls.free(address)
    with pytest.raises(HipError, match="hipFree"):
        calls.free(address)
    with pytest.raises(ValueError, match="handle: expected 64 bytes, got 3"):
        calls.open(b"abc", "rank 1")


def test_platform_and_library(monkeypatch, tmp_path):
    with pytest.raises(ValueError, match="platform: expected hip or cuda, got 'metal'"):
        PeerRuntime("metal")
    maps = tmp_path / "maps"
    maps.write_text("")
    monkeypatch.setattr(hip, "_MAPS", maps)
    monkeypatch.setitem(module.LIBRARIES, "cuda", ("libnothing.so.1",))
    with pytest.raises(RuntimeError, match=r"CUDA runtime was not found \(libnothing\.so\.1\)"):
        PeerRuntime("cuda")
    path = "/opt/some place/libnothing.so.1.4"
    maps.write_text(f"7f02-7f03 r 0 0 1  {path}\n")
    with pytest.raises(RuntimeError, match=f"{path} cannot be used"):
        PeerRuntime("cuda")
    with pytest.raises(RuntimeError, match=r"HIP runtime .* cannot be used.*ExtMalloc|hipIpc"):
        PeerRuntime("hip", ctypes.util.find_library("c"))
