"""Reading: damaged checkpoints are refused by name; dequantisation gives the plain weights."""

from __future__ import annotations

import json
import random
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from rocm_msa.checkpoint import dequantised_weights, expected_tensors, open_checkpoint
from rocm_msa.checkpoint.make import make_checkpoint
from rocm_msa.checkpoint.quantisation import quantisation_of
from rocm_msa.formats import mxfp, nvfp4

SHARD = "model-00001-of-00002.safetensors"
LAST = "model-00002-of-00002.safetensors"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("checkpoints")
    for layout in ("bf16", "mxfp8", "nvfp4", "mxfp4"):
        for arch in ("text", "vl"):
            make_checkpoint(root / f"{layout}-{arch}", layout=layout, arch=arch)
    return root


@pytest.fixture
def copy(made, tmp_path):
    return shutil.copytree(made / "bf16-text", tmp_path / "copy")


def edit(directory, file, change):
    tensors = load_file(directory / file)
    change(tensors)
    save_file(tensors, directory / file)


@pytest.mark.parametrize("arch", ["text", "vl"])
@pytest.mark.parametrize("layout", ["bf16", "mxfp8", "nvfp4", "mxfp4"])
def test_dequantised_is_quantise_then_dequantise_of_the_bf16_weights(made, layout, arch):
    plain = dict(open_checkpoint(made / f"bf16-{arch}"))
    quantised = open_checkpoint(made / f"{layout}-{arch}")
    algorithm = quantisation_of(quantised.config).algorithm
    got = dict(quantised.dequantised())
    assert set(got) == set(plain)
    kinds = set()
    for name, weight in plain.items():
        assert got[name].dtype == weight.dtype, name
        module = name.rpartition(".")[0]
        kind = "bf16"
        if (
            name.endswith("weight")
            and weight.ndim == 2
            and not name.startswith(("vision_tower.", "multi_modal_projector.", "patch_merge_mlp."))
        ):
            kind = algorithm(module)
        kinds.add(kind)
        if kind == "mxfp8":
            weight = mxfp.mxfp8_dequantize(*mxfp.mxfp8_quantize(weight), dtype=torch.bfloat16)
        elif kind == "mxfp4":
            weight = mxfp.mxfp4_dequantize(*mxfp.mxfp4_quantize(weight), dtype=torch.bfloat16)
        elif kind == "nvfp4":
            amax = weight.abs().max()
            other = {"w1": "w3", "w3": "w1"}.get(module.rpartition(".")[2])
            if other:
                peer = plain[f"{module[:-2]}{other}.weight"]
                amax = max(amax, peer.abs().max())
            scale = nvfp4.global_scale_from_amax(amax)
            weight = nvfp4.dequantize(*nvfp4.quantize(weight, scale), scale, dtype=torch.bfloat16)
        assert torch.equal(got[name], weight), name
    assert (
        kinds
        == {
            "bf16": {"bf16"},
            "mxfp8": {"bf16", "mxfp8"},
            "mxfp4": {"bf16", "mxfp4"},
            "nvfp4": {"bf16", "mxfp8", "nvfp4"},
        }[layout]
    )


def test_dequantised_weights_are_near_the_originals(made):
    plain = dict(open_checkpoint(made / "bf16-text"))
    for layout, limit in (("mxfp8", 0.04), ("nvfp4", 0.12), ("mxfp4", 0.18)):
        for name, weight in open_checkpoint(made / f"{layout}-text").dequantised():
            error = (weight.float() - plain[name].float()).norm() / plain[name].float().norm()
            assert error < limit, (layout, name, float(error))


def test_the_stream_may_come_in_any_order(made):
    checkpoint = open_checkpoint(made / "nvfp4-vl")
    items = list(checkpoint)
    expected = dict(checkpoint.dequantised())
    random.Random(0).shuffle(items)
    stripped = [(name.removeprefix("language_model."), tensor) for name, tensor in items]
    got = dict(dequantised_weights(stripped, checkpoint.config))
    assert set(got) == {name.removeprefix("language_model.") for name in expected}
    for name, tensor in expected.items():
        assert torch.equal(got[name.removeprefix("language_model.")], tensor), name


def test_the_other_spelling_and_dtype_of_mxfp8_scales(made):
    checkpoint = open_checkpoint(made / "mxfp8-text")
    renamed = [
        (
            name.replace("weight_scale_inv", "weight_scale"),
            tensor.view(torch.float8_e8m0fnu) if name.endswith("_inv") else tensor,
        )
        for name, tensor in checkpoint
    ]
    got = dict(dequantised_weights(renamed, checkpoint.config))
    for name, tensor in checkpoint.dequantised():
        assert torch.equal(got[name], tensor), name


def test_dtype_of_the_dequantised_weights(made):
    checkpoint = open_checkpoint(made / "nvfp4-text")
    name = "model.layers.1.block_sparse_moe.experts.0.w1.weight"
    exact = dict(checkpoint.dequantised(torch.float32))[name]
    assert exact.dtype == torch.float32
    assert torch.equal(exact.to(torch.bfloat16), dict(checkpoint.dequantised())[name])


def test_parts_that_never_come_are_named(made):
    checkpoint = open_checkpoint(made / "nvfp4-text")
    lost = "model.layers.1.block_sparse_moe.experts.3.w2"
    stream = [(n, t) for n, t in checkpoint if n != f"{lost}.weight_scale_2"]
    with pytest.raises(ValueError, match=rf"missing parts \(1\):\s+{lost}: weight_scale_2"):
        list(dequantised_weights(stream, checkpoint.config))
    weight = f"{lost}.weight"
    stream = [(n, t.view(torch.int8) if n == weight else t) for n, t in checkpoint]
    with pytest.raises(ValueError, match=f"{weight}: expected torch.uint8 for nvfp4"):
        list(dequantised_weights(stream, checkpoint.config))
    twice = [(n, t) for n, t in checkpoint if n == weight] * 2
    with pytest.raises(ValueError, match=f"{weight}: came twice"):
        list(dequantised_weights(twice, checkpoint.config))


@pytest.mark.parametrize("cut", [1, 4000, 10**9])
def test_a_truncated_file_is_named_with_its_bytes(copy, cut):
    path = copy / SHARD
    whole = path.stat().st_size
    left = max(whole - cut, 100)
    with path.open("r+b") as file:
        file.truncate(left)
    with pytest.raises(ValueError, match=rf"{SHARD}: truncated: expected .* bytes.*, got {left}"):
        open_checkpoint(copy)
    if left > 10_000:
        with pytest.raises(ValueError, match=f"expected {whole} bytes, got {left}"):
            open_checkpoint(copy)


@pytest.mark.parametrize("data", [b"", b"abc", b"\xff" * 64, b"\x04" + b"\0" * 7 + b"{]}!"])
def test_a_file_that_is_not_safetensors_is_named(copy, data):
    (copy / SHARD).write_bytes(data)
    with pytest.raises(ValueError, match=f"{SHARD}: (not a safetensors file|malformed)"):
        open_checkpoint(copy)


def test_trailing_bytes_are_refused(copy):
    with (copy / LAST).open("ab") as file:
        file.write(b"\0" * 8)
    with pytest.raises(ValueError, match=f"{LAST}: too long"):
        open_checkpoint(copy)


def test_a_missing_shard_is_named(copy):
    (copy / LAST).unlink()
    with pytest.raises(FileNotFoundError, match=LAST):
        open_checkpoint(copy)


def test_missing_directory_config_and_weights(copy, tmp_path):
    with pytest.raises(FileNotFoundError, match="no directory"):
        open_checkpoint(tmp_path / "nowhere")
    (copy / "model.safetensors.index.json").unlink()
    for file in (SHARD, LAST):
        (copy / file).unlink()
    with pytest.raises(FileNotFoundError, match=r"no \*.safetensors"):
        open_checkpoint(copy)
    (copy / "config.json").write_text("{ not json")
    with pytest.raises(ValueError, match=r"config\.json: not JSON"):
        open_checkpoint(copy)
    (copy / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        open_checkpoint(copy)


def test_an_index_that_disagrees_with_the_files(copy):
    path = copy / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    name = "model.norm.weight"
    index["weight_map"][name] = SHARD
    index["weight_map"]["ghost.weight"] = SHARD
    del index["weight_map"]["lm_head.weight"]
    path.write_text(json.dumps(index))
    with pytest.raises(ValueError) as caught:
        open_checkpoint(copy)
    message = str(caught.value)
    assert f"{name}: the index says {SHARD}, found {LAST}" in message
    assert f"ghost.weight: the index says {SHARD}, found nowhere" in message
    assert "lm_head.weight: in " in message and "not in the index" in message


def test_a_tensor_in_two_files(copy):
    name = "model.norm.weight"
    edit(copy, SHARD, lambda tensors: tensors.update({name: torch.zeros(256)}))
    with pytest.raises(ValueError, match=f"{name} is in {SHARD} and in {LAST}"):
        open_checkpoint(copy)


def test_missing_and_extra_tensors_are_named(copy):
    (copy / "model.safetensors.index.json").unlink()
    lost = "model.layers.3.block_sparse_moe.experts.7.w2.weight"

    def change(tensors):
        del tensors[lost]
        tensors["model.layers.9.stray.weight"] = torch.zeros(1)
        tensors["model.norm.weight"] = torch.zeros(255, dtype=torch.bfloat16)

    edit(copy, LAST, change)
    with pytest.raises(ValueError) as caught:
        open_checkpoint(copy).check()
    message = str(caught.value)
    assert f"missing (1):\n    {lost}" in message
    assert "extra (1):\n    model.layers.9.stray.weight" in message
    assert "model.norm.weight (expected [256] bfloat16, got [255] bfloat16)" in message


def test_one_tensor_by_name(made):
    checkpoint = open_checkpoint(made / "bf16-text")
    assert checkpoint.tensor("model.norm.weight").shape == (256,)
    with pytest.raises(KeyError, match=r"nothing\.weight"):
        checkpoint.tensor("nothing.weight")
    assert set(checkpoint.specs) == set(expected_tensors(checkpoint.config))
