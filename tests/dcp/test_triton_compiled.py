"""What the Triton exchange takes of a compute unit, compiled for gfx950 and sm_90 with no GPU."""

import subprocess

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dcp import exchange_triton
from dcp.exchange_triton_kernel import exchange_kernel
from dcp.mailbox_layout import Geometry
from dcp.plan import Batch, Results
from dcp.shard import Shard
from rocm_msa.cache import IndexCache
from rocm_msa.code_object import kernel_metadata
from tests.ops.emulated_triton import emulated

pytestmark = pytest.mark.slow

LDS_BYTES = 160 * 1024
SHARED_BYTES = 228 * 1024
RESERVED_BYTES = 1024  # of shared memory, by the driver, a program
CASES = [(kind, form) for kind in ("nvfp4", "fp8", "bf16") for form in Results]
RANKS, HEADS, REQUESTS, ROWS = 4, 4, 45, 4


def arguments(kind: str, form: Results) -> tuple:
    """Of exchange_triton.run, on tensors without memory."""
    blocks = 1641
    geometry = Geometry(RANKS, HEADS, 512, 2048, 16, 64, 2048)
    memory = (
        torch.zeros(RANKS + 1, dtype=torch.int64, device="meta"),
        torch.zeros(geometry.state.nbytes, dtype=torch.uint8, device="meta"),
    )
    index_q = torch.zeros(REQUESTS * ROWS, 1, 128, dtype=torch.bfloat16, device="meta")
    cache = IndexCache.allocate(2**20, kind, "meta")
    table = torch.zeros(REQUESTS, blocks, dtype=torch.int32, device="meta")
    num_blocks = torch.zeros(REQUESTS * ROWS, dtype=torch.int32, device="meta")
    out = torch.zeros(1, REQUESTS * ROWS, 16, dtype=torch.int32, device="meta")
    batch = Batch(REQUESTS, ROWS, blocks)
    shard = Shard(1, RANKS, HEADS)
    return shard, geometry, memory, index_q, cache, table, num_blocks, batch, 16, 0, 1, out


@pytest.mark.parametrize(("kind", "form"), CASES)
def test_gfx950_no_scratch_no_spills_and_all_programs_resident(kind, form):
    with emulated(run=False, large=frozenset(("pages", "state"))) as launches:
        exchange_triton.run(*arguments(kind, form), results=form, grid=1024)
    (launch,) = launches
    facts = kernel_metadata(launch.compiled.code_object, launch.compiled.kernel)
    assert facts[".private_segment_fixed_size"] == 0, facts
    assert facts[".vgpr_spill_count"] == 0, facts
    assert launch.compiled.block == (64, 1, 1)
    a_unit = exchange_triton.PROGRAMS_A_UNIT["hip"]
    assert a_unit * launch.compiled.lds_bytes <= LDS_BYTES
    assert a_unit <= 4  # one wave a SIMD, whatever its registers


@pytest.mark.parametrize(("kind", "form"), CASES)
def test_sm_90_no_spills_in_the_scan_and_all_programs_resident(kind, form, monkeypatch):
    """Triton's own assembler says what it spilled."""
    captured = {}

    def run(fn, *args, grid, warmup, **kwargs):
        names = [p.name for p in fn.params]
        captured.update(dict(zip(names, args)) | kwargs)  # noqa: B905

    monkeypatch.setattr(triton.runtime.jit.JITFunction, "run", run)
    monkeypatch.setattr(exchange_triton, "platform", lambda: "cuda")
    monkeypatch.setattr(exchange_triton, "converts_e4m3", lambda tensor: True)
    monkeypatch.setattr(exchange_triton, "on_hopper", lambda *args: kind == "nvfp4")
    exchange_triton.run(*arguments(kind, form), results=form, grid=924)
    text, shared = _ptx(captured)
    assert "st.relaxed.sys.global.b64" in text and "ld.volatile.global" in text
    assert "%globaltimer" in text
    assert ("fence.acq_rel.gpu" in text) == (form is Results.CANDIDATES)
    said = _assembled(text)
    spilled = int(said.split(" bytes spill stores")[0].split()[-1])
    held = "maxnreg" in captured  # then a word or two, outside of the scan
    assert spilled <= (8 if held else 0), said
    registers = int(said.split("Used ")[1].split(" registers")[0])
    hopper = kind == "nvfp4"
    a_unit = exchange_triton.HOPPER_PROGRAMS if hopper else exchange_triton.PROGRAMS_A_UNIT["cuda"]
    assert a_unit * (shared + RESERVED_BYTES) <= SHARED_BYTES
    assert a_unit * 32 * (-(-registers // 8) * 8) <= 65536


def _ptx(captured: dict) -> tuple[str, int]:
    """(PTX for sm_90, bytes of shared memory) of what was to be launched."""
    types, constants, aligned = {}, {}, []
    for at, parameter in enumerate(exchange_kernel.params):
        value, name = captured[parameter.name], parameter.name
        one = type(value) is int and value == 1 and not parameter.do_not_specialize
        if isinstance(value, torch.Tensor):
            words = {torch.uint8: "u8", torch.int32: "i32", torch.int64: "i64"}
            types[name] = f"*{words[value.dtype]}"
            aligned.append(at)
        elif parameter.is_constexpr or one or value is None:
            types[name], constants[name] = "constexpr", value
        elif isinstance(value, float):
            types[name] = "fp32"
        else:
            types[name] = "i32" if abs(value) < 2**31 else "i64"
            aligned += [at] if value % 16 == 0 and not parameter.do_not_specialize else []
    attrs = {(at,): [["tt.divisibility", 16]] for at in aligned}
    source = ASTSource(exchange_kernel, signature=types, constexprs=constants, attrs=attrs)
    made = triton.compile(
        source, target=GPUTarget("cuda", 90, 32),
        options={"num_warps": 1, "num_stages": 1, "enable_fp_fusion": True}
        | {name: captured[name] for name in ("maxnreg",) if name in captured},
    )  # fmt: skip
    assert isinstance(constants["Q"], tl.dtype)
    return made.asm["ptx"], made.metadata.shared


def _assembled(text: str) -> str:
    from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability

    command = [get_ptxas(90).path, "-v", f"--gpu-name={sm_arch_from_capability(90)}", "-o",
               "/dev/null", "/dev/stdin"]  # fmt: skip
    done = subprocess.run(
        command, input=text, capture_output=True, text=True, timeout=300, check=True
    )
    return done.stderr + done.stdout
