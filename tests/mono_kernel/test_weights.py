"""Weights of the mono kernel: tiles against the description, ranks against the whole, faults."""

import pytest
import torch

from mono_kernel import reading, weights
from mono_kernel.shapes import Formats
from mono_kernel.weights import Stored, pack_linear
from rocm_msa.errors import ConfigError
from rocm_msa.formats import mxfp, nvfp4, nvfp4_lut
from tests.mono_kernel.cases import small_shape
from tests.mono_kernel.layers import LAYOUTS, PREFIX, checkpoint, layer_weights, shape_of

OUTPUTS, INPUTS = 32, 256
MXFP8 = {f"{name}_format": "mxfp8" for name in ("attention", "routed", "shared")}


def stored(kind: str, outputs: int = OUTPUTS, inputs: int = INPUTS, seed: int = 0) -> Stored:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(outputs, inputs, generator=generator)
    if kind == "bf16":
        return Stored(kind, x.to(torch.bfloat16), None)
    if kind == "mxfp8":
        return Stored(kind, *mxfp.mxfp8_quantize(x))
    if kind == "mxfp4":
        return Stored(kind, *mxfp.mxfp4_quantize(x))
    data, scales = nvfp4.quantize(x, 0.01)
    return Stored(kind, data, scales.view(torch.uint8), 0.01)


def unpacked(kind: str, data: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    """Values [outputs, inputs] from packed bytes, a lane at a time, by the words of weights.py."""
    tiles, chunks = data.shape[:2]
    out = torch.zeros(16 * tiles, 128 * chunks)
    lut = nvfp4_lut.build(weights.LUT_FOLD)
    for tile in range(tiles):
        for chunk in range(chunks):
            for lane in range(64):
                g, row = lane // 16, 16 * tile + lane % 16
                raw = data[tile, chunk, :, lane].reshape(-1)
                if kind == "bf16":
                    for piece in range(4):
                        k = 128 * chunk + 32 * piece + 8 * g
                        part = data[tile, chunk, piece, lane].contiguous()
                        out[row, k : k + 8] = part.view(torch.bfloat16).float()
                    continue
                codes = scales[tile, chunk, lane]
                if kind == "mxfp8":
                    values = raw.contiguous().view(torch.float8_e4m3fn).float()
                    places = [16 * g + i for i in range(16)] + [64 + 16 * g + i for i in range(16)]
                    # The scale in lane group g is that of k = 32 g .., whoever holds the values.
                    both = scales[tile, chunk].reshape(4, 16)[:, lane % 16]
                    steps = torch.tensor([2.0 ** (int(both[k // 32]) - 127) for k in places])
                    values = values * steps
                elif kind == "mxfp4":
                    nibbles = torch.stack([raw & 15, raw >> 4], -1).reshape(-1)
                    places = [32 * g + i for i in range(32)]
                    values = value_of(nibbles) * 2.0 ** (int(codes[0]) - 127)
                else:
                    places = [16 * g + i for i in range(16)] + [64 + 16 * g + i for i in range(16)]
                    found = []
                    for word in range(4):
                        part = raw[4 * word : 4 * word + 4]
                        nibbles = torch.cat([part & 15, part >> 4])
                        table = lut[int(codes[word // 2])].view(torch.float8_e4m3fn).float()
                        sign = 1.0 - 2.0 * (nibbles >> 3).float()
                        found.append(table[(nibbles & 7).long()] * sign)
                    values = torch.cat(found)
                for k, value in zip(places, values, strict=True):
                    out[row, 128 * chunk + k] = value
    return out


def value_of(codes: torch.Tensor) -> torch.Tensor:
    sizes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    return sizes[(codes & 7).long()] * (1.0 - 2.0 * (codes >> 3).float())


@pytest.mark.parametrize("kind", weights.PIECES)
def test_each_lane_finds_its_operand(kind):
    x = stored(kind)
    data, scales = pack_linear(x)
    assert data.numel() == weights.data_bytes(kind, OUTPUTS, INPUTS)
    assert (0 if scales is None else scales.numel()) == weights.scale_bytes(kind, OUTPUTS, INPUTS)
    undo = x.factor * 2.0**-weights.LUT_FOLD if kind == "nvfp4" else 1.0
    assert torch.equal(unpacked(kind, data, scales) * undo, x.dense())


@pytest.mark.parametrize("kind", weights.PIECES)
def test_parts_are_parts_of_the_whole(kind):
    x = stored(kind)
    assert torch.equal(x.rows(16, 16).dense(), x.dense()[16:])
    assert torch.equal(x.columns(128, 128).dense(), x.dense()[:, 128:])
    both = weights.stack([x.rows(0, 16), x.rows(16, 16)])
    assert torch.equal(both.dense(), x.dense())
    with pytest.raises(ValueError, match="parts: expected one format"):
        weights.stack([x, stored("bf16" if kind != "bf16" else "mxfp8")])


def test_the_table_rounds_nvfp4_weights_by_half_a_unit_at_most():
    x = stored("nvfp4", seed=3)
    exact, table = x.dense(as_stored=True), x.dense()
    assert torch.equal(exact, nvfp4.dequantize(x.data, x.scales.view(torch.float8_e4m3fn), 0.01))
    assert ((table - exact).abs() <= exact.abs() * 2**-4 + 2**-7 * 8 * 0.01).all()
    assert not torch.equal(table, exact)


# Reading


@pytest.mark.parametrize("layout", LAYOUTS)
def test_formats_are_recognised(layout):
    wanted = {
        "mxfp8": Formats("mxfp8", "mxfp8", "mxfp8"),
        "mxfp4": Formats("bf16", "mxfp4", "mxfp4"),
        "nvfp4": Formats("mxfp8", "nvfp4", "mxfp8"),
    }
    assert reading.formats_of(checkpoint(layout)[1], PREFIX) == wanted[layout]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tp", [2, 4])
def test_ranks_hold_the_whole_between_them(layout, tp):
    whole = layer_weights(layout)
    ranks = [layer_weights(layout, tp, rank) for rank in range(tp)]
    dim, s = 128, ranks[0].shape
    q = torch.cat([r.qkv.dense()[: s.attended] for r in ranks])
    assert torch.equal(q, whole.qkv.dense()[: tp * s.attended])
    assert torch.equal(torch.cat([r.output.dense() for r in ranks], 1), whole.output.dense())
    kv = [r.qkv.dense()[s.attended : s.attended + s.kv_heads * dim] for r in ranks]
    first = whole.shape.attended
    assert torch.equal(torch.cat(kv), whole.qkv.dense()[first : first + 4 * dim])
    for rank in ranks:  # the index key is everywhere, and last
        assert torch.equal(rank.qkv.dense()[-dim:], whole.qkv.dense()[-dim:])
    for pick, axis in ((0, 0), (1, 0), (2, 1)):
        for expert in (0, 7):
            parts = [r.experts[expert][pick].dense() for r in ranks]
            assert torch.equal(torch.cat(parts, axis), whole.experts[expert][pick].dense())
        parts = [r.shared[pick].dense() for r in ranks]
        assert torch.equal(torch.cat(parts, axis), whole.shared[pick].dense())


def test_replicated_heads_lie_on_neighbouring_ranks():
    _, tensors = checkpoint("mxfp8")
    shape = small_shape(8, intermediate=128, shared=128, **MXFP8)
    wide = dict(tensors)
    for name in tensors:  # 1024 activations, so that 8 ranks have 128 each
        if ".experts." in name or "shared_experts" in name:
            wide[name] = torch.cat([tensors[name]] * 2, int(".w2." in name or "down" in name))
    ranks = [reading.read_layer(shape, rank, wide, PREFIX) for rank in range(8)]
    keys = [r.qkv.dense()[128:256] for r in ranks]
    for rank in range(8):
        assert torch.equal(
            keys[rank], layer_weights("mxfp8").qkv.dense()[1024:][rank // 2 * 128 :][:128]
        )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_packed_bytes_fill_the_layout(layout):
    one = layer_weights(layout, 2, 1)
    packed, layout_ = one.packed(), weights.weight_layout(one.shape)
    assert packed.numel() == layout_.nbytes
    region = layout_["post_norm"]
    found = packed[region.offset : region.end].view(torch.bfloat16)
    assert torch.equal(found, checkpoint(layout)[1][f"{PREFIX}.post_attention_layernorm.weight"])
    region = layout_["factors"]
    factors = packed[region.offset : region.end].view(torch.float32).view(-1, 3)
    assert factors.tolist() == [[linear.factor for linear in e] for e in one.experts]
    # Expert 3's up projection: its gate tile 1 is the third tile.
    gate, up, _ = one.experts[3]
    region, each = layout_["up"], weights.data_bytes(gate.format, 2 * gate.outputs, gate.inputs)
    third = packed[region.offset + 3 * each : region.offset + 4 * each]
    third = third.view(2 * gate.outputs // 16, -1)
    for tile, linear in ((2, gate), (3, up)):
        assert torch.equal(third[tile], pack_linear(linear.rows(16, 16))[0].reshape(-1))


def test_faults_are_named_all_at_once():
    shape, tensors = shape_of("nvfp4"), dict(checkpoint("nvfp4")[1])
    experts = f"{PREFIX}.block_sparse_moe.experts"
    del tensors[f"{PREFIX}.self_attn.k_proj.weight"]
    tensors[f"{experts}.1.w2.weight"] = tensors[f"{experts}.1.w2.weight"][:, :-8]
    tensors[f"{experts}.2.w1.weight_scale_2"] = torch.tensor(float("inf"))
    tensors[f"{experts}.3.w3.weight"] = torch.zeros(512, 512, dtype=torch.bfloat16)
    scales = tensors[f"{PREFIX}.self_attn.q_proj.weight_scale_inv"].clone()
    scales[5, 2] = 255
    tensors[f"{PREFIX}.self_attn.q_proj.weight_scale_inv"] = scales
    tensors[f"{PREFIX}.self_attn.q_norm.weight"] = torch.ones(64)
    tensors[f"{PREFIX}.block_sparse_moe.gate.weight"] = torch.full((8, 512), float("nan"))
    with pytest.raises(ConfigError) as error:
        reading.read_layer(shape, 0, tensors, PREFIX)
    text = str(error.value)
    for part in (
        "self_attn.k_proj.weight: expected mxfp8 [512, 512], got nothing",
        "experts.1.w2.weight: expected [512, 256], got [512, 248]",
        "experts.2.w1.weight_scale_2: expected one number > 0",
        "experts.3.w3.weight: expected nvfp4 [512, 512], got torch.bfloat16 with scales",
        "self_attn.q_proj scales: expected E8M0 codes below 255, got 255",
        "self_attn.q_norm.weight: expected a floating-point tensor [128], got torch.float32 [64]",
        "block_sparse_moe.gate.weight: expected finite values",
    ):
        assert part in text, part
    assert len(error.value.reasons) == 7


def test_converting_nvfp4_to_mxfp4_would_add_an_error():
    """Heavy-tailed weights (Student t, 4 degrees): what the direct path saves, docs have figures.

    Relative RMS to the original weights; the bounds are loose around what was found.
    """
    errors = weights.format_errors(seed=0)
    assert errors["nvfp4"] < errors["nvfp4, table"] < errors["nvfp4 to mxfp4"]
    assert errors["nvfp4, table"] < 1.05 * errors["nvfp4"]
    assert errors["nvfp4 to mxfp4"] > 1.2 * errors["nvfp4"]
