"""What the launcher refuses, and what it hands to HIP."""

import contextlib
import json
import struct
from types import SimpleNamespace

import pytest
import torch

from rocm_msa import aot, hip, kernel_manifest, kernel_sources, launcher
from rocm_msa.hip import Hip, HipError
from rocm_msa.kernel_manifest import ManifestError
from rocm_msa.launcher import Launcher
from tests.launcher import toy
from tests.launcher.emulated import CPU, FakeHip, library

ONE = toy.Build(16)


@pytest.fixture
def folder(tmp_path):
    aot.compile_builds([ONE, toy.Build(16, twice=True)], tmp_path, processes=1)
    return tmp_path


def edit(folder, change):
    """Let `change` have the manifest's JSON."""
    path = folder / "manifest.json"
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def load(folder, fake=None, **options):
    return Launcher(folder, CPU, hip=(fake or FakeHip()).runtime(), **options)


# What HIP gets


def test_the_launch_is_the_manifests(folder):
    fake = FakeHip(run_kernels=False)
    x, y = torch.zeros(300), torch.zeros(300)
    load(folder, fake).launch(ONE, (2,), [x, None, 1.5, -7, 2**40])
    (call,) = fake.calls
    assert (call.kernel, call.grid, call.block) == ("toy_add16", (2, 1, 1), (256, 1, 1))
    assert call.lds == 4 * toy.LANES and call.stream == 0
    assert call.kernarg == struct.pack("<QQfiq", x.data_ptr(), 0, 1.5, -7, 2**40)
    entry = kernel_manifest.read(folder).kernels["toy_add16"]
    assert [(a.name, a.offset, a.type) for a in entry.arguments] == [
        ("x", 0, "ptr"), ("y", 8, "ptr"), ("a", 16, "f32"), ("count", 20, "i32"),
        ("wide", 24, "i64"),
    ]  # fmt: skip
    assert y.eq(0).all()


class OnGpu:
    """A tensor as far as the launcher looks at one."""

    device = torch.device("cuda", 1)

    def data_ptr(self):
        return 4096


def test_a_gpu_launch_takes_its_device_and_torchs_current_stream(folder, monkeypatch):
    fake, device, entered = FakeHip(run_kernels=False), torch.device("cuda", 1), []

    @contextlib.contextmanager
    def guard(which):
        entered.append(which)
        yield

    streams = {device: SimpleNamespace(cuda_stream=0x7700)}
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", guard)
    monkeypatch.setattr(torch.cuda, "current_stream", streams.__getitem__)
    loaded = Launcher(folder, device, hip=fake.runtime())
    assert entered == [device]
    loaded.launch(ONE, (1,), [OnGpu(), OnGpu(), 1.0, 4, 5])
    assert entered == [device, device]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    loaded.launch(ONE, (1,), [OnGpu(), OnGpu(), 1.0, 4, 5])
    assert entered == [device, device]
    assert [call.stream for call in fake.calls] == [0x7700, 0x7700]
    with pytest.raises(ValueError, match="argument x: expected on cuda:1, got cpu"):
        loaded.launch(ONE, (1,), GOOD)


def test_gaps_between_arguments_are_zero_bytes():
    arguments = [("a", 4, 4, "i32"), ("p", 16, 8, "ptr"), ("h", 24, 2, "i16")]
    entry = toy_entry(arguments, kernarg_bytes=32)
    packed = launcher._packer(entry).pack(-1, 2, 3)
    assert packed == bytes(4) + b"\xff" * 4 + bytes(8) + b"\2" + bytes(7) + b"\3" + bytes(7)


@pytest.mark.parametrize(
    ("arguments", "kernarg_bytes"),
    [
        ([("t", 0, 16, "struct<(i64, i64)>")], 16),
        ([("a", 0, 8, "i32")], 8),
        ([("a", 0, 4, "i32"), ("b", 2, 4, "i32")], 8),
        ([("a", 0, 4, "i32")], 2),
        ([("a", 0, 4, "i32", "hidden_block_count_x")], 4),
    ],
)
def test_argument_blocks_that_make_no_sense(arguments, kernarg_bytes):
    with pytest.raises(ManifestError, match=r"kernel toy"):
        launcher._packer(toy_entry(arguments, kernarg_bytes))


def toy_entry(arguments, kernarg_bytes):
    rows = tuple(
        kernel_manifest.Argument(a[0], a[1], a[2], a[4] if len(a) > 4 else "by_value", a[3])
        for a in arguments
    )
    return kernel_manifest.Entry(
        "toy", "", {}, "toy", "toy.hsaco", 0, "", "", (64, 1, 1), "", 0, 0, kernarg_bytes, rows, {}
    )


GOOD = [torch.zeros(4), torch.zeros(4), 1.0, 4, 5]


@pytest.mark.parametrize(
    ("position", "value", "error", "words"),
    [
        (0, 3, TypeError, "argument x: expected a tensor or None, got int 3"),
        (1, torch.zeros(4, device="meta"), ValueError, "argument y: expected on cpu, got meta"),
        (2, torch.zeros(1), TypeError, "argument a: expected a number"),
        (2, None, TypeError, "argument a: expected a number"),
        (2, "1.0", TypeError, "argument a: expected a number"),
        (3, 2.0, TypeError, "argument count: expected an int"),
        (3, None, TypeError, "argument count: expected an int"),
        (3, 2**31, ValueError, "argument count: expected an int of i32, got int 2147483648"),
        (4, torch.zeros(1), TypeError, "argument wide: expected an int"),
    ],
)
def test_arguments_that_do_not_fit_are_named(folder, position, value, error, words):
    fake = FakeHip(run_kernels=False)
    args = [*GOOD[:position], value, *GOOD[position + 1 :]]
    with pytest.raises(error, match=words):
        load(folder, fake).launch(ONE, (1,), args)
    with pytest.raises(TypeError, match=r"kernel toy_add16: arguments: expected 5, got 4"):
        load(folder, fake).launch(ONE, (1,), GOOD[:4])
    assert fake.calls == []


# HIP's errors


@pytest.mark.parametrize(
    ("call", "code", "name"),
    [
        ("hipModuleLoadData", 200, "hipErrorInvalidImage"),
        ("hipModuleGetFunction", 500, "hipErrorNotFound"),
        ("hipModuleLaunchKernel", 2, "hipErrorOutOfMemory"),
        ("hipModuleLaunchKernel", 7777, "unknown error"),
    ],
)
def test_a_failing_call_is_raised_with_its_name_and_the_kernel(folder, call, code, name):
    fake = FakeHip()
    with fake.failing(call, code), pytest.raises(HipError) as caught:
        load(folder, fake).launch(ONE, (1,), GOOD)
    assert str(caught.value) == f"{call} for kernel toy_add16 failed: {name} ({code})"
    assert (caught.value.call, caught.value.code) == (call, code)
    load(folder, fake).launch(ONE, (1,), GOOD)


def test_a_symbol_that_is_not_in_the_code_object(folder):
    edit(folder, lambda data: data["kernels"][0].update(symbol="other"))
    with pytest.raises(HipError, match=r"hipModuleGetFunction for kernel toy_add16 .*NotFound"):
        load(folder)


def test_no_hip_runtime(monkeypatch, tmp_path):
    monkeypatch.setattr(hip, "NAMES", ("libnothing.so.1",))
    monkeypatch.setattr(hip, "_MAPS", tmp_path / "none")
    with pytest.raises(RuntimeError, match=r"HIP runtime was not found \(libnothing\.so\.1\)"):
        Hip()
    wrong = tmp_path / "libamdhip64.so"
    wrong.write_bytes(b"not a library")
    with pytest.raises(RuntimeError, match="cannot be used"):
        Hip(str(wrong))


def test_the_runtime_that_is_loaded_already_is_preferred(monkeypatch, tmp_path):
    maps = tmp_path / "maps"
    path = "/opt/some place/libamdhip64.so.7.0"
    maps.write_text(f"7f00-7f01 r-xp 0 00:00 1  /usr/lib/libc.so.6\n7f02-7f03 r 0 0 1  {path}\n")
    monkeypatch.setattr(hip, "_MAPS", maps)
    assert hip.find_library() == path
    maps.write_text("")
    monkeypatch.setattr(hip, "NAMES", ("libnothing.so.1", str(library())))
    assert hip.find_library() == str(library())


# What is refused when loading


def flip_a_byte(folder):
    path = folder / "toy_add16.hsaco"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut_short(folder):
    path = folder / "toy_add16.hsaco"
    path.write_bytes(path.read_bytes()[:-100])


def first(folder, **fields):
    edit(folder, lambda data: data["kernels"][0].update(fields))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda f: (f / "manifest.json").unlink(), r"no compiled kernels: .*\.json does no"),
        (lambda f: (f / "manifest.json").write_text("{"), r"manifest\.json: cannot be read"),
        (lambda f: (f / "manifest.json").write_text("[]"), "not a manifest of rocm-msa"),
        (lambda f: edit(f, lambda d: d.update(version=2)), "version: expected 1, got 2"),
        (lambda f: edit(f, lambda d: d.update(arch="gfx942")), "arch: .*gfx950, .*got gfx942"),
        (lambda f: edit(f, lambda d: d.update(extra=1)), r"unknown keys \['extra'\]"),
        (lambda f: edit(f, lambda d: d.pop("arch")), r"missing keys \['arch'\]"),
        (lambda f: first(f, extra=1), r"kernel toy_add16: unknown keys \['extra'\]"),
        (lambda f: edit(f, lambda d: d["kernels"][0].pop("grid")), r"toy_add16: .*\['grid'\]"),
        (
            lambda f: edit(f, lambda d: d["kernels"][0]["arguments"][0].pop("kind")),
            r"kernel toy_add16, arguments: .*missing keys \['kind'\]",
        ),
        (lambda f: first(f, name="toy_add16_twice"), "two kernels are called toy_add16_twice"),
        (lambda f: first(f, file="../toy_add16.hsaco"), "file: expected NAME.hsaco beside it"),
        (lambda f: first(f, block=[64, 1]), "block: expected three positive ints"),
        (lambda f: first(f, bytes=-1), "bytes: expected an int >= 0, got -1"),
        (lambda f: (f / "toy_add16.hsaco").unlink(), r"kernel toy_add16: .*No such file"),
        (cut_short, r"kernel toy_add16: .*bytes: expected \d+, got \d+ \(cut short"),
        (flip_a_byte, r"kernel toy_add16: .*SHA-256: expected"),
        (lambda f: first(f, source_digest="0" * 64), r"kernel toy_add16 .*other sources .*compile"),
        (lambda f: first(f, build={"offset": 17, "twice": False}), "other sources or parameters"),
        (lambda f: first(f, module="tests.launcher.gone"), "kernel toy_add16"),
    ],
)  # fmt: skip
def test_refused(folder, change, words):
    load(folder)
    change(folder)
    with pytest.raises(ManifestError, match=words):
        load(folder)


def test_kernels_of_other_sources_are_refused(folder, monkeypatch):
    monkeypatch.setattr(kernel_sources, "_sources", lambda module: ("changed",))
    with pytest.raises(ManifestError, match="compiled from other sources"):
        load(folder)


def test_the_devices_arch_counts(folder):
    with pytest.raises(ManifestError, match=r"arch: expected gfx1250, the device's, got gfx950"):
        load(folder, arch="gfx1250")


def test_two_builds_with_one_symbol(folder):
    class Other(toy.Build):
        symbol = "toy_add16"

    with pytest.raises(ManifestError, match=r"kernel toy_add16 in .*build: expected"):
        load(folder).launch(Other(3), (1,), GOOD)


def test_a_device_without_kernels_says_so():
    with pytest.raises(RuntimeError, match=r"cpu: CPU tensors \(compiled kernels run on gfx950\)"):
        launcher.start(None, CPU)
