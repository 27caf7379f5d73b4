"""Capacity arithmetic: the contract's figures, and the command that prints them."""

import json
import random

import pytest
from typer.testing import CliRunner

from mono_kernel import reading
from mono_kernel.checkpoint_formats import formats_of_config, mono_layers
from mono_kernel.shapes import Shape
from rocm_msa.cache.dtype import CacheDType
from rocm_msa.capacity import (
    MINIMAX_M3,
    WEIGHT_DTYPES,
    CacheDTypes,
    KVCache,
    Memory,
    all_reduce_bytes,
    decode_reads,
    explain,
    sequence_parallel_bytes,
    weight_terms,
)
from rocm_msa.checkpoint.make import make_checkpoint
from rocm_msa.checkpoint.read import open_checkpoint
from rocm_msa.cli import app
from rocm_msa.config import ModelConfig
from rocm_msa.errors import ConfigError

NVFP4, FP8, BF16 = CacheDType.NVFP4, CacheDType.FP8, CacheDType.BF16


def cache(main="nvfp4", index=None, tp=4, dense=None):
    dtypes = CacheDTypes.parse(main, index)
    return KVCache.of(MINIMAX_M3, CacheDTypes(dtypes.main, dtypes.index, dense), tp)


def test_bytes_a_token_of_the_whole_model():
    assert cache("nvfp4").once_main_token_bytes == 34_560
    assert cache("fp8").once_main_token_bytes == 61_440
    assert 1 - 34_560 / 61_440 == 0.4375
    for tp in (1, 2, 4, 8):
        assert cache("nvfp4", tp=tp).once_main_token_bytes == 34_560


def test_outer_block_row_at_tp4():
    row = cache("nvfp4").row
    assert cache("nvfp4").block_bytes == row.nbytes == 1_631_232
    assert row.nbytes == 60 * 128 * 144 + 57 * 128 * 72
    assert (row["layer 0 main"].offset, row["layer 0 main"].nbytes) == (0, 18_432)
    assert (row["layer 3 index"].offset, row["layer 3 index"].nbytes) == (60 * 18_432, 9_216)
    assert row["layer 59 index"].end == row.nbytes
    assert "layer 2 index" not in row
    assert len(row.regions) == 117


def test_public_case_c29_counts_each_layer_once():
    # One KV head a rank (TP 4) and an FP8 index cache give both published sums.
    mixed = cache("nvfp4", "fp8", dense=FP8)
    assert mixed.block_bytes == 2_082_816
    assert mixed.block_bytes == 128 * (3 * 256 + 57 * 144 + 57 * 128)
    assert cache("fp8").block_bytes == 2_899_968
    # Tokens reported times bytes a token: the allocated bytes within one block.
    for bytes_allocated in (10 * 2**30, 2_082_816, 2_082_815):
        fit = mixed.fit(bytes_allocated, 1)
        assert 0 <= bytes_allocated - fit.blocks * 128 * mixed.token_bytes < mixed.block_bytes


@pytest.mark.parametrize("main", ["nvfp4", "fp8", "bf16"])
@pytest.mark.parametrize("index", ["nvfp4", "fp8", "bf16"])
@pytest.mark.parametrize("tp", [1, 2, 4, 8, 16])
def test_terms_add_up_to_the_pages(main, index, tp):
    one = cache(main, index, tp)
    heads = max(1, 4 // tp)
    vector = {"nvfp4": 72, "fp8": 128, "bf16": 256}
    by_hand = 60 * heads * 2 * vector[main] + 57 * vector[index]
    assert sum(term.nbytes for term in one.terms()) == one.token_bytes == by_hand
    assert one.block_bytes == 128 * by_hand
    assert one.total_token_bytes == tp * by_hand
    for term in one.terms():
        numbers = [int(word) for word in term.formula.replace(" B", "").split() if word.isdigit()]
        product = 1
        for number in numbers:
            product *= number
        assert product == term.nbytes, term


def test_the_index_page_is_on_every_rank():
    whole, quarter = cache(tp=1), cache(tp=4)
    assert quarter.total_token_bytes - whole.total_token_bytes == 3 * 57 * 72
    # Past the KV head count the heads are copies: the row no longer shrinks.
    assert cache(tp=8).block_bytes == quarter.block_bytes


def test_decode_reads():
    def reads(index):
        return [term.nbytes for term in decode_reads(MINIMAX_M3, CacheDTypes.parse("nvfp4", index))]

    assert reads("fp8")[:2] == [128, 1024]
    assert reads("nvfp4") == [72, 1024, 2048 * 4 * 2 * 72]


def test_sequence_parallel_bytes_at_tp4():
    plain = [term.nbytes for term in all_reduce_bytes(MINIMAX_M3, 4)]
    shared = [term.nbytes for term in sequence_parallel_bytes(MINIMAX_M3, 4)]
    assert plain == [18_432, 18_432]
    assert sum(plain) == 36_864
    assert shared == [4_752, 1_584, 4_752, 9_216]
    assert sum(shared) == 20_304


def test_explain_has_every_figure():
    sections = explain(cache("nvfp4"))
    values = {term.nbytes for section in sections for term in section.terms}
    assert {34_560, 61_440, 1_631_232, 72, 1024} <= values
    assert {36_864, 20_304, 12_744} <= {section.nbytes for section in sections if section.total}
    assert len(explain(cache("nvfp4", tp=1))) == 3


def test_fit_is_whole_blocks_and_one_is_reserved():
    one = cache("nvfp4")
    row = one.block_bytes
    for kv_bytes, context, sequences in (
        (17 * row, 2048, 1),
        (17 * row - 1, 2048, 0),
        (17 * row, 2049, 0),
        (33 * row, 2048, 2),
        (2 * row, 1, 1),
        (row, 1, 0),
        (0, 1, 0),
        (-5, 1, 0),
    ):
        assert one.fit(kv_bytes, context).sequences == sequences
    randoms = random.Random(0)
    for _ in range(200):
        kv_bytes, context = randoms.randrange(10**12), randoms.randrange(1, 2**20)
        fit = one.fit(kv_bytes, context)
        need = fit.sequences * -(-context // 128)
        assert need <= fit.usable_blocks < need + -(-context // 128)
        assert fit.blocks * row <= kv_bytes < (fit.blocks + 1) * row


@pytest.mark.parametrize("context", [0, -1, 2**20 + 1])
def test_context_beyond_the_rope_table(context):
    with pytest.raises(ValueError, match=r"context: expected 1\.\.1048576"):
        cache().fit(2**40, context)


def test_memory_reports_every_reason():
    with pytest.raises(ConfigError) as caught:
        Memory(total=0, utilization=1.5, weights=-1, reserve=-1)
    assert len(caught.value.reasons) == 4
    with pytest.raises(ConfigError, match="no memory is left"):
        Memory(total=2**30, utilization=0.5, weights=2**30)


def test_weight_estimate_against_a_real_checkpoint(tmp_path):
    """At TP 1 the estimate misses only the norms and biases of what the maker writes."""
    for layout in WEIGHT_DTYPES:
        summary = make_checkpoint(tmp_path / layout, size="tiny", layout=layout)
        model = ModelConfig.from_json(summary.directory)
        estimate = sum(t.nbytes for t in weight_terms(model, model.shard(1), layout))
        assert 0 <= summary.weight_bytes - estimate < 0.01 * summary.weight_bytes, layout


def run(*arguments):
    return CliRunner().invoke(app, ["capacity", *arguments])


def test_command_table():
    result = run("--context", "8K,131072", "--context", "1M")
    assert result.exit_code == 0, result.output
    assert all(len(line) <= 80 for line in result.output.splitlines())
    for text in ("1,631,232", "2,899,968", "computed", "estimate, nvfp4", "1,048,576"):
        assert text in result.output


def test_command_json_agrees_with_the_library():
    result = run("--json", "--memory-gib", "100", "--weights-gib", "50", "--reserve-gib", "0")
    data = json.loads(result.stdout)
    kv_bytes = int(100 * 2**30 * 0.9) - 50 * 2**30
    assert data["weights"] == "given"
    assert [c["main"] for c in data["caches"]] == ["bf16", "fp8", "nvfp4"]
    fit = cache("nvfp4").fit(kv_bytes, 131072)
    assert data["caches"][2]["blocks"] == fit.blocks
    assert data["caches"][2]["fits"][0]["sequences"] == fit.sequences
    assert data["caches"][2]["main_token_bytes_whole_model"] == 34_560
    assert data["caches"][1]["main_token_bytes_whole_model"] == 61_440


def test_command_mixed_dtypes_get_their_own_line():
    data = json.loads(run("--json", "--indexer-kv-dtype", "fp8").stdout)
    assert [(c["main"], c["index"]) for c in data["caches"]][-1] == ("nvfp4", "fp8")
    assert len(data["caches"]) == 4


def test_command_explains_and_dumps_the_row():
    result = run("--explain", "--row")
    assert result.exit_code == 0
    for text in ("34,560", "36,864", "20,304", "layer 59 index", "1,631,232", "routed experts"):
        assert text in result.output
    data = json.loads(run("--explain", "--row", "--json").stdout)
    assert data["row"][-1]["offset"] + data["row"][-1]["nbytes"] == 1_631_232
    assert data["explain"]


def test_command_plots(tmp_path):
    result = run("--plot", str(tmp_path / "fit.png"))
    assert result.exit_code == 0, result.output
    assert (tmp_path / "fit.png").read_bytes().startswith(b"\x89PNG")


def test_command_reads_a_checkpoint(tmp_path):
    make_checkpoint(tmp_path / "tiny")
    data = json.loads(
        run("--model", str(tmp_path / "tiny"), "--tp", "1", "--json", "--context", "16K").stdout
    )
    assert data["caches"][2]["row_bytes"] == 128 * (4 * 2 * 2 * 72 + 3 * 72)
    result = run("--model", str(tmp_path / "tiny"), "--tp", "1", "--context", "16385")
    assert result.exit_code == 2
    assert "1..16384" in result.stderr


def mono_bytes(*arguments) -> int:
    data = json.loads(run("--json", "--mono", *arguments).stdout)
    (term,) = [term for term in data["memory"] if term["name"] == "mono weights"]
    assert term["nbytes"] == -data["mono_weight_bytes"]
    plain = json.loads(run("--json", *arguments).stdout)
    assert plain["mono_weight_bytes"] == 0 and len(data["memory"]) == len(plain["memory"]) + 1
    left = [{t["name"]: t["nbytes"] for t in d["memory"]}["KV cache"] for d in (plain, data)]
    assert left[0] - left[1] == data["mono_weight_bytes"]
    return data["mono_weight_bytes"]


@pytest.mark.parametrize(("layout", "gb"), [("mxfp8", 109.2), ("mxfp4", 58.7), ("nvfp4", 60.8)])
def test_the_mono_kernels_copy_of_the_weights(layout, gb, repo_root):
    """In gigabytes, as docs/mono.md says."""
    found = mono_bytes("--weight-dtype", layout)
    assert f"{found / 1e9:.1f}" == str(gb)
    assert f"| {layout} | {gb} GB |" in (repo_root / "docs" / "mono.md").read_text()


@pytest.mark.parametrize(("layout", "tp"), [("mxfp8", 1), ("mxfp4", 2), ("nvfp4", 2)])
def test_the_mono_copy_is_what_a_rank_packs(layout, tp, tmp_path):
    make_checkpoint(tmp_path / "small", "tiny", layout, intermediate_size=256)
    model = ModelConfig.from_json(tmp_path / "small")
    opened = open_checkpoint(tmp_path / "small")
    formats = formats_of_config(opened.config, model)
    shape, tensors = Shape.of(model, tp, formats), dict(opened)
    packed = [
        reading.read_layer(shape, tp - 1, tensors, f"model.layers.{n}").packed().numel()
        for n in mono_layers(model)
    ]
    assert len(packed) == 3
    # Of another layout than the config's: the config counts.
    arguments = ("--model", str(tmp_path / "small"), "--tp", str(tp), "--context", "8K")
    assert mono_bytes(*arguments, "--weight-dtype", "bf16") == sum(packed)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mono", "--weight-dtype", "bf16"], "--mono: --weight-dtype: expected one of ['mxfp4'"),
        (["--mono", "--tp", "16"], "tp: expected one of (1, 2, 4, 8), got 16"),
        (["--mono", "--weight-dtype", "mxfp8", "--tp", "2"], "mono weights: -203."),
        (["--kv-cache-dtype", "int8"], "--kv-cache-dtype: cache dtype: expected one of"),
        (["--indexer-kv-dtype", "fp8_e5m2"], "--indexer-kv-dtype: cache dtype"),
        (["--tp", "3"], "num_attention_heads: expected a multiple of 3, got 64"),
        (["--tp", "0"], "tensor_parallel_size: expected >= 1"),
        (["--model", "/nowhere"], "no file /nowhere"),
        (["--plot", "/nowhere/fit.png"], "--plot /nowhere/fit.png: cannot be written"),
        (["--plot", "fit.tiff-of-no-kind"], "--plot fit.tiff-of-no-kind"),
        (["--context", "2M"], "context: expected 1..1048576"),
        (["--context", "many"], "--context: expected tokens"),
        (["--gpu", "b200"], "--gpu: expected one of ['mi355x']"),
        (["--gpu", "mi355x", "--memory-gib", "9"], "give one of the two"),
        (["--memory-gib", "10"], "no memory is left for the KV cache"),
        (["--memory-gib", "nan"], "--memory-gib"),
        (["--gpu-memory-utilization", "1.1"], "gpu_memory_utilization: expected in (0, 1]"),
        (["--weight-dtype", "int4"], "weight dtype: expected one of"),
    ],
)
def test_bad_input_is_one_message_and_code_2(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.stderr.split())
    assert "Traceback" not in result.output


def test_broken_config_names_the_file(tmp_path):
    (tmp_path / "config.json").write_text("{")
    result = run("--model", str(tmp_path))
    assert result.exit_code == 2
    assert "config.json" in result.stderr


def test_the_document_shows_what_the_command_prints(repo_root):
    text = (repo_root / "docs" / "capacity.md").read_text()
    for arguments in (["--context", "8K,128K,1M"], ["--explain"], ["--mono"]):
        printed = [line.rstrip() for line in run(*arguments).output.splitlines()]
        command = "rocm-msa capacity " + " ".join(arguments)
        shown = text.split(f"$ {command}\n", 1)[1].split("```", 1)[0].splitlines()
        assert [line for line in shown if line.strip()] == [
            line for line in printed if line.strip()
        ]
