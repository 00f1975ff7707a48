"""Tiny checkpoints in the layouts of AutoAWQ, GPTQModel, compressed-tensors and DeepSeek's FP8, written from what their
documents say and apart from the code that reads them, beside folders with the same numbers in float32."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file

from tests.tiny_models import edit_json, tiny_checkpoint

Array = npt.NDArray[Any]
Tensors = dict[str, torch.Tensor]

GROUP = 32
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column in each place of a word
E2M1 = [sign * number for sign in (1, -1) for number in (0, 0.5, 1, 1.5, 2, 3, 4, 6)]
PROJECTIONS = (
    "qkv_proj",
    "gate_up_proj",
    "w1",
    "w2",
    "w3",
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
)


def compressed(weights: dict[str, Any] | None, layout: str, **more: Any) -> dict[str, Any]:
    """The `quantization_config` of one group of compressed-tensors."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": {**group, **more}},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }


def weights_of(bits: int, strategy: str, **more: Any) -> dict[str, Any]:
    """The `weights` of a group of compressed-tensors."""
    return {"num_bits": bits, "type": "int", "strategy": strategy, "symmetric": True, "dynamic": False, **more}


AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True}
ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": GROUP, "data_type": "int"}
ROUND["extra_config"] = {"lm_head": {"bits": 16, "data_type": "float"}, "model.layers.0.mlp.up_proj": {"bits": 4}}
ASYMMETRIC = {"symmetric": False}
FLOAT = {"type": "float"}
BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False}
NF4 = (
    *(-1.0, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0),
    *(0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0),
)
FP4 = [sign * number for sign in (1, -1) for number in (0, 1 / 192, 2 / 3, 1, 1 / 3, 1 / 2, 1 / 6, 1 / 4)]
CONFIGS: dict[str, dict[str, Any]] = {
    "awq": AWQ,
    "awq-row": {**AWQ, "group_size": -1},
    "gptq": GPTQ,
    "gptq-8-bit": {**GPTQ, "bits": 8},
    "gptq-zeros": {**GPTQ, "sym": False},
    "gptq-zeros-v2": {**GPTQ, "sym": False, "checkpoint_format": "gptq_v2"},
    "gptq-order": {**GPTQ, "desc_act": True, "sym": False},
    "autoround": {**ROUND, "packing_format": "auto_round:auto_gptq", "sym": False},
    "autoround-awq": {**ROUND, "packing_format": "auto_round:auto_awq", "sym": False},
    "packed": compressed(weights_of(4, "group", group_size=GROUP), "pack-quantized"),
    "packed-zeros": compressed(weights_of(4, "group", group_size=GROUP, **ASYMMETRIC), "pack-quantized"),
    "packed-order": compressed(weights_of(4, "group", group_size=GROUP, actorder="group"), "pack-quantized"),
    "packed-row": compressed(weights_of(4, "channel"), "pack-quantized"),
    "packed-8-bit": compressed(weights_of(8, "channel", **ASYMMETRIC), "pack-quantized"),
    "int8": compressed(weights_of(8, "channel"), "int-quantized"),
    "int8-zeros": compressed(weights_of(8, "channel", **ASYMMETRIC), "int-quantized"),
    "float8": compressed(weights_of(8, "channel", **FLOAT), "float-quantized"),
    "float8-tensor": compressed(weights_of(8, "tensor", **FLOAT), "float-quantized"),
    "float8-block": compressed(weights_of(8, "block", block_structure=[48, 32], **FLOAT), "float-quantized"),
    "fp8-block": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [24, 40]},
    "mxfp4": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
    "fp8-tensor": {"quant_method": "fp8", "activation_scheme": "static"},
    "nvfp4": compressed(weights_of(4, "tensor_group", group_size=16, **FLOAT), "nvfp4-pack-quantized"),
    "nvfp4-modelopt": {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]},
    "packed-tensor": compressed(weights_of(8, "tensor"), "pack-quantized"),
    "packed-tensor-zeros": compressed(weights_of(4, "tensor", **ASYMMETRIC), "pack-quantized"),
    "int8-block": compressed(weights_of(8, "block", block_structure="48x32", **ASYMMETRIC), "int-quantized"),
    "naive-4-bit": compressed(weights_of(4, "tensor", **ASYMMETRIC), "naive-quantized"),
    "int8-4-bit": compressed(weights_of(4, "tensor"), "int-quantized"),
    "float8-group": compressed(weights_of(8, "group", group_size=32, **FLOAT), "naive-quantized"),
    "mxfp8": compressed(weights_of(8, "group", group_size=32, **FLOAT), "mxfp8-quantized"),
    "nf4": {**BNB, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "nf4-plain": {**BNB, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": False},
    "fp4": {**BNB, "bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": True},
    "llm-int8": {"quant_method": "bitsandbytes", "load_in_4bit": False, "load_in_8bit": True},
    "mxfp4-packed": compressed(weights_of(4, "group", group_size=32, **FLOAT), "mxfp4-pack-quantized"),
}


def tiny_quantized(
    path: Path,
    name: str,
    family: str = "llama",
    *,
    is_quantized: Callable[[str], bool] = lambda module: module != "lm_head",
    change: Callable[[Tensors], None] = lambda tensors: None,
    **overrides: Any,
) -> tuple[Path, Path]:
    """The quantised folder, and the dense one. is_quantized: of the layers' projections. change: of the quantised
    tensors. overrides: fields of config.json."""
    dense = tiny_checkpoint(path / "dense", family, **overrides)
    return quantize_folder(path / "quantized", dense, name, is_quantized=is_quantized, change=change), dense


def quantize_folder(
    folder: Path,
    dense: Path,
    name: str,
    *,
    is_quantized: Callable[[str], bool] = lambda module: module != "lm_head",
    change: Callable[[Tensors], None] = lambda tensors: None,
) -> Path:
    """Write a dense folder's checkpoint quantised to another, and to the dense one what that says."""
    shutil.copytree(dense, folder)
    source = load_file(dense / "model.safetensors")
    written: Tensors = {}
    for tensor_name, tensor in source.items():
        module = tensor_name.removesuffix(".weight")
        if module.endswith(PROJECTIONS) and tensor_name.endswith("weight") and is_quantized(module):
            parts, read = quantize(tensor.numpy(), CONFIGS[name])
            if f"{module}.bias" in source:
                parts.pop("bias", None)
            written |= {f"{module}.{part}": values.contiguous() for part, values in parts.items()}
            source[tensor_name] = torch.from_numpy(np.ascontiguousarray(read))
        elif name == "mxfp4" and tensor.dim() == 3:
            parts, source[tensor_name] = quantize_mxfp4(tensor)
            written |= {f"{tensor_name}_{part}": values for part, values in parts.items()}
        else:
            written[tensor_name] = tensor
    change(written)
    save_file(written, folder / "model.safetensors", metadata={"format": "pt"})
    save_file(source, dense / "model.safetensors", metadata={"format": "pt"})
    edit_json(folder / "config.json", quantization_config=CONFIGS[name])
    return folder


def quantize_mxfp4(experts: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Blocks and scales of experts [e, k, n], and what they say: each block's largest number is 4 to 8 by its scale."""
    numbers = experts.transpose(1, 2).unflatten(-1, (-1, 32))
    exponents = numbers.abs().amax(-1).log2().floor() - 2
    table = torch.tensor(E2M1)
    codes = (numbers[..., None] / exponents.exp2()[..., None, None] - table).abs().argmin(-1).to(torch.uint8)
    read = (table[codes.long()] * exponents.exp2()[..., None]).flatten(-2).transpose(1, 2).contiguous()
    blocks = codes[..., ::2] | codes[..., 1::2] << 4
    return {"blocks": blocks.contiguous(), "scales": (exponents + 127).to(torch.uint8)}, read


def quantize(matrix: Array, config: dict[str, Any]) -> tuple[Tensors, Array]:
    """The tensors of a matrix [n, k], and what they say in float32."""
    method = config["quant_method"]
    if method == "auto-round":
        method = "awq" if config["packing_format"].endswith("awq") else "gptq"
    if method == "bitsandbytes":
        return quantize_bitsandbytes(matrix, config)
    if method == "modelopt" or "fp4-pack" in config.get("format", ""):
        return quantize_e2m1(matrix, config.get("format", method))
    if method == "fp8":
        return quantize_floats(matrix, config.get("weight_block_size"), "tensor")
    if method == "compressed-tensors":
        (group,) = config["config_groups"].values()
        options = group["weights"]
        if options["type"] == "float":
            block = [1, options["group_size"]] if options["strategy"] == "group" else options.get("block_structure")
            return quantize_floats(matrix, block, options["strategy"], powers=config["format"] == "mxfp8-quantized")
        if options["strategy"] in ("tensor", "block"):
            return quantize_blocks(matrix, options, config["format"])
        bits, is_symmetric = options["num_bits"], options["symmetric"]
        size = options.get("group_size", -1)
        has_index = options.get("actorder") == "group"
    else:
        bits, size, has_index = config["bits"], config["group_size"], config.get("desc_act", False)
        is_symmetric = config["sym"] if method == "gptq" else False
    n, k = matrix.shape
    size = k if size == -1 else size
    groups = np.arange(k) // size
    if has_index:
        groups = np.random.default_rng(k).permutation(groups)  # it follows from the inputs, which q, k and v share
    codes, scales, zeros = round_to_codes(matrix, groups, bits, is_symmetric)
    read = (codes - zeros[:, groups]).astype(np.float32) * scales.astype(np.float32)[:, groups]
    middle = 1 << (bits - 1)
    if method == "awq":
        order = np.arange(n).reshape(-1, 8)[:, AWQ_ORDER].ravel()
        parts = {
            "qweight": packed(codes.T[:, order], bits),
            "qzeros": packed(zeros.T[:, order], bits),
            "scales": scales.T,
        }
    elif method == "gptq":
        offset = 0 if config.get("checkpoint_format") == "gptq_v2" else 1
        parts = {
            "qweight": packed(codes, bits).T,
            "qzeros": packed((zeros.T - offset) % (2 * middle), bits),
            "scales": scales.T,
            "g_idx": groups.astype(np.int32),
            "bias": np.zeros(n, np.float32),
        }
    elif config["format"] == "int-quantized":
        parts = {"weight": (codes - middle).astype(np.int8), "weight_scale": scales}
        if not is_symmetric:
            parts["weight_zero_point"] = (zeros - middle).astype(np.int8)
    else:
        parts = {
            "weight_packed": packed(codes, bits),
            "weight_scale": scales,
            "weight_shape": np.array([n, k], np.int64),
        }
        if not is_symmetric:
            parts["weight_zero_point"] = packed(zeros.T, bits).T
        if has_index:
            parts["weight_g_idx"] = groups.astype(np.int32)
    return {name: torch.from_numpy(np.ascontiguousarray(part)) for name, part in parts.items()}, read


def round_to_codes(matrix: Array, groups: Array, bits: int, is_symmetric: bool) -> tuple[Array, Array, Array]:
    """Codes [n, k], scales (float16) and zeros [n, groups], by the nearest of a group's numbers."""
    most, middle = (1 << bits) - 1, 1 << (bits - 1)
    num_groups = groups.max() + 1
    scales = np.empty((len(matrix), num_groups), np.float16)
    zeros = np.full((len(matrix), num_groups), middle, np.int64)
    for group in range(num_groups):
        values = matrix[:, groups == group]
        low, high = np.minimum(values.min(1), 0), np.maximum(values.max(1), 0)
        spread = np.maximum(high, -low) / (middle - 1) if is_symmetric else (high - low) / most
        scales[:, group] = spread
        if not is_symmetric:
            zeros[:, group] = np.clip(np.round(-low / spread), 1, most)  # v1 cannot say 0
    codes = np.round(matrix / scales[:, groups].astype(np.float32)) + zeros[:, groups]
    return np.clip(codes, 0, most).astype(np.int64), scales, zeros


def packed(codes: Array, bits: int) -> Array:
    """int32 [a, ceil(b * bits / 32)] of [a, b], the first in the lowest bits."""
    per_word = 32 // bits
    padded = np.pad(codes.astype(np.uint32), ((0, 0), (0, -codes.shape[1] % per_word)))
    words = padded.reshape(len(codes), -1, per_word) << (np.arange(per_word, dtype=np.uint32) * bits)
    return np.bitwise_or.reduce(words, -1).view(np.int32)


def quantize_blocks(matrix: Array, options: dict[str, Any], layout: str) -> tuple[Tensors, Array]:
    """In whole numbers, with a scale and a zero by block or matrix."""
    n, k = matrix.shape
    bits, strategy = options["num_bits"], options["strategy"]
    rows, columns = (48, 32) if strategy == "block" else (n, k)
    middle = 1 << (bits - 1)
    scales = np.empty((-(-n // rows), -(-k // columns)), np.float32)
    zeros = np.zeros(scales.shape, np.int8)
    codes = np.empty((n, k), np.int64)
    read = np.empty((n, k), np.float32)
    for i, j in np.ndindex(scales.shape):
        at = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
        low, high = matrix[at].min(), matrix[at].max()
        if options["symmetric"]:
            scales[i, j] = max(high, -low) / (middle - 1)
        else:
            scales[i, j] = (high - low) / (2 * middle - 1)
            zeros[i, j] = np.clip(np.round(-middle - low / scales[i, j]), -middle, middle - 1)
        codes[at] = np.clip(np.round(matrix[at] / scales[i, j]) + zeros[i, j], -middle, middle - 1)
        read[at] = (codes[at] - zeros[i, j]) * scales[i, j]
    shape = scales.shape if strategy == "block" else (1,)
    parts: dict[str, Array] = {"weight_scale": scales.reshape(shape)}
    if not options["symmetric"]:
        parts["weight_zero_point"] = zeros.reshape(shape)
    if layout == "pack-quantized":
        parts |= {"weight_packed": packed(codes + middle, bits), "weight_shape": np.array([n, k], np.int64)}
    else:
        parts["weight"] = codes.astype(np.int8)
    return {name: torch.from_numpy(part) for name, part in parts.items()}, read


def quantize_floats(
    matrix: Array, block: list[int] | None, strategy: str, *, powers: bool = False
) -> tuple[Tensors, Array]:
    """In e4m3, with a scale by block, row or matrix. powers: scales are exponents of two."""
    n, k = matrix.shape
    rows, columns = block or ((1, k) if strategy == "channel" else (n, k))
    values = torch.from_numpy(matrix)
    scales = torch.empty(-(-n // rows), -(-k // columns))
    stored = torch.empty(n, k, dtype=torch.float8_e4m3fn)
    read = torch.empty(n, k)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            at = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
            scales[i, j] = values[at].abs().max() / 448
            scales[i, j] = scales[i, j].log2().ceil().exp2() if powers else scales[i, j]
            stored[at] = (values[at] / scales[i, j]).to(torch.float8_e4m3fn)
            read[at] = stored[at].float() * scales[i, j]
    if powers:
        return {"weight": stored, "weight_scale": (scales.log2() + 127).to(torch.uint8)}, read.numpy()
    if block is not None:
        return {
            "weight": stored,
            "weight_scale_inv" if strategy == "tensor" else "weight_scale": scales,
        }, read.numpy()
    if strategy == "channel":
        return {"weight": stored, "weight_scale": scales}, read.numpy()
    return {"weight": stored, "weight_scale": scales[0, 0], "input_scale": torch.tensor(0.1)}, read.numpy()


def quantize_e2m1(matrix: Array, layout: str) -> tuple[Tensors, Array]:
    """In two numbers a byte: blocks of 32 with an exponent (MXFP4), or of 16 with a scale in e4m3 of one for all, with
    which ModelOpt multiplies, and by which compressed-tensors divides (NVFP4)."""
    size = 32 if layout.startswith("mxfp4") else 16
    n, k = matrix.shape
    blocks = torch.from_numpy(matrix).view(n, k // size, size)
    largest, of_all = blocks.abs().amax(-1), torch.tensor(1.0)
    if size == 32:
        stored = (largest.log2().floor() - 2 + 127).to(torch.uint8)
        scales = (stored.float() - 127).exp2()
    else:
        of_all = largest.max() / (6 * 448)
        if layout != "modelopt":
            of_all = 1 / of_all
        stored = (largest / 6 / (of_all if layout == "modelopt" else 1 / of_all)).to(torch.float8_e4m3fn)
        scales = stored.float() * of_all if layout == "modelopt" else stored.float() / of_all
    table = torch.tensor(E2M1)
    codes = (blocks[..., None] / scales[..., None, None] - table).abs().argmin(-1)
    read = (table[codes] * scales[..., None]).view(n, k).numpy()
    pairs = codes.view(n, k // 2, 2).to(torch.uint8)
    parts = {"weight_packed": pairs[..., 0] | pairs[..., 1] << 4, "weight_scale": stored}
    if layout == "modelopt":
        parts = {"weight": parts["weight_packed"], "weight_scale": stored, "weight_scale_2": of_all}
        parts["input_scale"] = torch.tensor(0.1)
    elif size == 16:
        parts |= {"weight_global_scale": of_all.view(1), "input_global_scale": torch.tensor([100.0])}
    return parts, read


def quantize_bitsandbytes(matrix: Array, config: dict[str, Any]) -> tuple[Tensors, Array]:
    """By row in 8 bits, or in blocks of 64 that run on from row to row, with scales in 8 bits by blocks of 16."""
    if config["load_in_8bit"]:
        largest = torch.from_numpy(np.abs(matrix).max(1))
        rows = torch.from_numpy(matrix) * 127 / largest[:, None]
        codes = rows.round().to(torch.int8)
        parts = {"weight": codes, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
        return parts, (codes.float() * (largest[:, None] / 127)).numpy()
    kind = config["bnb_4bit_quant_type"]
    table, block, nested = np.array(NF4 if kind == "nf4" else FP4, np.float32), 64, 16
    flat = matrix.reshape(-1)
    scales = np.array([np.abs(flat[at : at + block]).max() for at in range(0, len(flat), block)], np.float32)
    state: dict[str, Any] = {
        "quant_type": kind,
        "blocksize": block,
        "dtype": "float32",
        "shape": list(matrix.shape),
    }
    parts = {"weight.quant_map": torch.from_numpy(table), "weight.absmax": torch.from_numpy(scales)}
    if config["bnb_4bit_use_double_quant"]:
        offset = float(scales.mean())
        levels = np.linspace(-1, 1, 256, dtype=np.float32) ** 3
        largest = [np.abs(scales[at : at + nested] - offset).max() for at in range(0, len(scales), nested)]
        stored = [np.abs((its - offset) / largest[i // nested] - levels).argmin() for i, its in enumerate(scales)]
        scales = np.array(
            [levels[code] * largest[i // nested] + offset for i, code in enumerate(stored)], np.float32
        )
        parts |= {
            "weight.absmax": torch.tensor(stored, dtype=torch.uint8),
            "weight.nested_absmax": torch.tensor(largest),
            "weight.nested_quant_map": torch.from_numpy(levels),
        }
        state |= {"nested_blocksize": nested, "nested_dtype": "float32", "nested_offset": offset}
    each = scales.repeat(block)[: len(flat)]
    codes = np.abs(flat[:, None] / each[:, None] - table).argmin(1).astype(np.uint8)
    parts["weight"] = torch.from_numpy(codes[::2] << 4 | codes[1::2])[:, None]
    parts[f"weight.quant_state.bitsandbytes__{kind}"] = torch.tensor(
        [*json.dumps(state).encode()], dtype=torch.uint8
    )
    return parts, (table[codes] * each).reshape(matrix.shape)
