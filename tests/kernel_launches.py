"""Compiles for one kind of GPU, without one, every Triton kernel that engines launch there: `python -m
tests.kernel_launches sm_90` starts engines of real models' shapes on a GPU that is not there, and prints as JSON which
kernels nobody launched, and what each program takes of the device, or why it does not compile. With `once` behind the
device it compiles each kernel as it is launched first, attention of several tokens a row apart, and no other program of
it.
"""

from __future__ import annotations

import ast
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.fake_gpu import DEVICES, Device, FakeGpu, Launch, name_of

import numpy as np  # isort: skip  # torch is imported as the GPU needs it
import torch  # isort: skip

from sgl.grammar.automaton.finished import Configuration, finish
from sgl.grammar.compiler import compile as compile_grammar
from sgl.kernels.attention.merge_triton import merge_
from sgl.kernels.keys_triton import largest, spread
from sgl.kernels.layers.embedding import embedding_part
from sgl.kernels.layers.fused_triton import quantize_rows
from sgl.kernels.layers.grouped import GroupedMatrix
from sgl.kernels.layers.linear import linear, linear_add
from sgl.kernels.layers.single_triton import project, project_add_, project_gated
from sgl.kernels.mask.ops import apply_token_mask_
from sgl.kernels.pages import gather, scatter
from sgl.kernels.peer_sums_triton import sum_rows
from sgl.kernels.sampling.triton import draw_keys
from sgl.kernels.staging import Uploader
from sgl.runtime import startup
from sgl.runtime.batch import Batch, RowSetup
from sgl.runtime.config import EngineConfig
from sgl.runtime.model import part
from sgl.runtime.runner.ahead import PassInputs, Shift
from sgl.runtime.runner.runner import ModelRunner
from sgl.runtime.sampling_params import SamplingParams
from tests.grammar_oracles import piece_vocabulary

VOCABULARY = piece_vocabulary()
ROOT = Path(__file__).resolve().parent.parent
DENSE: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 2,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
SMALL = {**DENSE, "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16}
MIXTURE = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True}
DEEPSEEK = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
DEEPSEEK |= {"first_k_dense_replace": 1, "num_key_value_heads": 128, "moe_layer_freq": 1}


def model(architecture: str, kind: str, like: dict[str, Any] = DENSE, **fields: Any) -> dict[str, Any]:
    return {**like, "architectures": [architecture], "model_type": kind, **fields}


LLAMA = model("LlamaForCausalLM", "llama")
QWEN3 = model("Qwen3ForCausalLM", "qwen3", SMALL, head_dim=128)
QWEN3_MOE = model("Qwen3MoeForCausalLM", "qwen3_moe", SMALL, hidden_size=2048, head_dim=128, **MIXTURE)
QWEN2_MOE = model(
    "Qwen2MoeForCausalLM", "qwen2_moe", SMALL, hidden_size=2048, shared_expert_intermediate_size=5632,
    num_experts=60, num_experts_per_tok=4, moe_intermediate_size=1408,
)  # fmt: skip
GEMMA2 = model(
    "Gemma2ForCausalLM", "gemma2", SMALL, hidden_size=2304, head_dim=256, query_pre_attn_scalar=256,
    sliding_window=1024, attn_logit_softcapping=50.0, final_logit_softcapping=30.0,
)  # fmt: skip
GPT_OSS = model(
    "GptOssForCausalLM", "gpt_oss", hidden_size=2880, intermediate_size=2880, head_dim=64, num_attention_heads=64,
    num_local_experts=32, num_experts_per_tok=4, sliding_window=128, swiglu_limit=7.0,
    rope_parameters={"rope_type": "yarn", "rope_theta": 150000, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
                     "original_max_position_embeddings": 4096, "truncate": False},
)  # fmt: skip
OLMO2 = model("Olmo2ForCausalLM", "olmo2", SMALL)
DEEPSEEK_LITE = model(
    "DeepseekV2ForCausalLM", "deepseek_v2", SMALL, **{**DEEPSEEK, "num_key_value_heads": 16}, hidden_size=2048,
    q_lora_rank=None, n_shared_experts=2, n_routed_experts=64, num_experts_per_tok=6, moe_intermediate_size=1408,
    topk_method="greedy", n_group=1, topk_group=1, routed_scaling_factor=1.0, norm_topk_prob=False,
)  # fmt: skip
DEEPSEEK_V3 = model(
    "DeepseekV3ForCausalLM", "deepseek_v3", **DEEPSEEK, q_lora_rank=1536, n_shared_experts=1, n_routed_experts=256,
    num_experts_per_tok=8, moe_intermediate_size=2048, n_group=8, topk_group=4, routed_scaling_factor=2.5,
    norm_topk_prob=True, scoring_func="sigmoid", topk_method="noaux_tc",
) | {"num_attention_heads": 128}  # fmt: skip
QWEN3_NEXT = model(
    "Qwen3NextForCausalLM", "qwen3_next", SMALL, hidden_size=2048, head_dim=256, num_key_value_heads=2,
    num_hidden_layers=4, shared_expert_intermediate_size=512,
    **MIXTURE | {"num_experts": 512, "num_experts_per_tok": 10},
)  # fmt: skip

Start = Callable[..., ModelRunner]


def engines(device: Device) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """config.json and options of every engine to start, the most telling first."""
    attention, is_amd = {"attention_backend": "triton"}, device.is_amd
    drafts = {"speculative_algorithm": "NGRAM"}
    yield {**LLAMA, "vocab_size": VOCABULARY.size}, {"enable_lora": True, **drafts, **(attention if is_amd else {})}
    yield QWEN3, {**attention, "dtype": "float32"}
    yield GEMMA2, {**attention, **drafts}
    yield GPT_OSS, {**attention, **drafts}
    yield QWEN3_MOE, attention
    yield LLAMA, {"deterministic": True}
    yield LLAMA, {**attention, "quantization": "int4"}
    yield QWEN3_MOE, {**attention, "quantization": "int4"}
    yield DEEPSEEK_V3, attention
    yield QWEN3_NEXT, attention
    yield QWEN3_NEXT, {**attention, "dtype": "float32"}
    yield OLMO2, attention
    if not is_amd and device.capability >= (8, 9):
        yield LLAMA, {"quantization": "fp8", "kv_cache_dtype": "fp8_e4m3"}
    if device.target.arch not in (90, "gfx942"):
        return
    yield LLAMA, {**attention, "dtype": "float16"}
    yield QWEN2_MOE, {**attention, "dtype": "float16"}
    yield DEEPSEEK_LITE, attention
    yield QWEN3_MOE, {"deterministic": True}
    yield GEMMA2, {"deterministic": True}
    if not is_amd:
        yield GEMMA2, {}
        yield GPT_OSS, {}
        yield DEEPSEEK_LITE, {}


def start(gpu: FakeGpu, config: dict[str, Any], options: dict[str, Any]) -> ModelRunner:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        part._EACH, part._STEP = 4, 512  # other numbers of tokens launch nothing else
        sizes = {"max_running_requests": 64, "chunked_prefill_size": 1088, "skip_tokenizer_init": True}
        made = EngineConfig(model_path=folder, device="cuda", load_format="dummy", **sizes, **options)
        runner = startup.start(made).runner
    assert isinstance(runner, ModelRunner)
    return runner


def sample(runner: ModelRunner) -> None:
    """Rows of every way of sampling, constrained and not, and the logprobs of what they are given."""
    ways: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.05},
        {"temperature": 0.7, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "logit_bias": {"5": 2.0}},
    ]
    finished = compile_grammar(json_schema=True, vocabulary=VOCABULARY)
    assert finished.automaton is not None
    closed = finish(finished.automaton, 10_000)
    assert closed is not None
    runner.enable_device_masks(VOCABULARY, Configuration(closed, closed.start))
    nothing = np.empty(0, np.int32)
    rows = np.arange(len(ways), dtype=np.int32)
    batch = Batch(
        rows=rows,
        q_lens=np.full(len(ways), 8, np.int32),
        kv_lens=np.full(len(ways), 8, np.int32),
        token_ids=np.zeros(8 * len(ways), np.int32),
        page_writes=np.empty((0, 3), np.int32),
        samples=np.ones(len(ways), np.bool_),
        score_from=np.full(len(ways), -1, np.int32),
        top_logprobs=np.full(len(ways), -1, np.int32),
        setups=[RowSetup(row, SamplingParams(**way), 0, nothing, nothing) for row, way in enumerate(ways)],
    )
    runner.launch(batch, [np.zeros(VOCABULARY.words, np.int32), None, None]).wait()


def products(dtype: torch.dtype) -> None:
    """With matrices as quantised checkpoints have them: bits, groups, zeros and orders."""
    for width, bits, group, has_zeros, has_order in (
        (4096, 4, 128, True, True),
        (4096, 4, 32, False, False),
        (4096, 8, 128, True, False),
        (14336, 4, 64, True, False),
    ):
        out = 4096
        values = torch.empty(out, width // 8, dtype=torch.int32, device="cuda")
        if bits == 8:
            values = torch.empty(out, width, dtype=torch.uint8, device="cuda")
        scales = torch.empty(out, width // group, dtype=dtype, device="cuda")
        zeros = torch.empty(scales.shape, dtype=torch.uint8, device="cuda") if has_zeros else None
        order = torch.empty(width, dtype=torch.int32, device="cuda") if has_order else None
        matrix = GroupedMatrix(values, scales, zeros, order)
        bias, norm = (torch.empty(size, dtype=dtype, device="cuda") for size in (out, width))
        for tokens in (1, 2, 33, 300, 1100):
            linear(torch.empty(tokens, width, dtype=dtype, device="cuda"), matrix, bias)
        x, residual = (torch.empty(1, size, dtype=dtype, device="cuda") for size in (width, out))
        project(x, norm, 1e-5, matrix, bias)
        project_add_(x, matrix, None, residual)
        project_gated(x, norm, 1e-5, matrix, None)
        linear_add(x.expand(40, -1).contiguous(), matrix, None, residual.expand(40, -1).contiguous(), captured=True)


def ranks() -> None:
    """What only several ranks launch."""
    tokens = torch.empty(9, dtype=torch.int64, device="cuda")
    embedding_part(tokens, torch.empty(8000, 4096, dtype=torch.bfloat16, device="cuda"), 8000)
    floats = torch.empty(9, 3, device="cuda")
    logits = torch.empty(9, 8000, device="cuda")
    seeds = torch.empty(9, dtype=torch.int64, device="cuda")
    masks, rows = (torch.empty(size, dtype=torch.int32, device="cuda") for size in ((12, 250), (9,)))
    for chosen in ((None, None), (masks, rows)):
        keys = draw_keys(logits, floats[:, 0], seeds, tokens, tokens, 8000, *chosen)
    for size in (2, 8):
        places = spread(keys, 1, size, torch.bfloat16)
        largest(places, size, keys)
    apply_token_mask_(logits, masks, rows)
    residual = torch.empty(9, 4096, dtype=torch.bfloat16, device="cuda")
    places = {"rank": 1, "num_blocks": 264}
    for size in (2, 4):
        addresses = torch.empty(size, dtype=torch.int64, device="cuda")
        for added in ((None, None), (residual, residual[0])):
            for is_of_owners in (False, True):
                of = (addresses, addresses, 4096, 7, *added, residual, (0, 9, 9), 1e-5)
                sum_rows(*of, is_of_owners=is_of_owners, **places)


def others() -> None:
    """What is launched with libraries that a device lacks here, and by tiers of the cache."""
    heads, sums = torch.empty(40, 32, 128, dtype=torch.bfloat16, device="cuda"), torch.empty(40, 32, device="cuda")
    merge_(heads, sums, heads, sums, heads[0, :, 0])
    quantize_rows(torch.empty(40, 4096, dtype=torch.bfloat16, device="cuda"))
    cache, pages = torch.empty(64, 20, 32_768, dtype=torch.uint8, device="cuda"), torch.arange(9, device="cuda")
    buffer = torch.empty(9, 64, 32_768, dtype=torch.uint8, device="cuda")
    shift, tokens = Shift(2, 8, torch.device("cuda")), torch.zeros(1, dtype=torch.int64, device="cuda")
    later = (tokens.view(1, 1),) * 4
    shift.warm_up(PassInputs((tokens, 1, tokens), later), Uploader(torch.device("cuda")))
    for rows in (None, pages):
        gather(cache, pages, buffer, rows)
        scatter(cache, pages, buffer, rows)


def kernels() -> set[str]:
    """Every Triton kernel of ours that can be launched: what no other kernel calls."""
    made, called = set(), set()
    for path in sorted((ROOT / "sgl").rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            is_kernel = isinstance(function, ast.FunctionDef) and any(
                ast.unparse(each).startswith("triton.jit") for each in function.decorator_list
            )
            if is_kernel and isinstance(function, ast.FunctionDef):
                made.add((module, function.name))
                calls = (node for node in ast.walk(function) if isinstance(node, ast.Call))
                names = (node.func.id for node in calls if isinstance(node.func, ast.Name))
                called |= {(module, name) for name in names} | {(None, name) for name in names}
    imported = {name for module, name in called}
    return {f"{module}.{name}" for module, name in made if name not in imported}


def collect(gpu: FakeGpu) -> None:
    """Launch everything that engines launch."""
    with gpu.present():
        first = True
        for config, options in engines(gpu.device):
            runner = start(gpu, config, options)
            if first:
                sample(runner)
            first = False
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            products(dtype)
        ranks()
        others()


def _is_masked(launch: Launch) -> bool:
    """Whether it is attention of several tokens a row."""
    names = launch.kernel.arg_names
    return any(names[path[0]] == "is_masked" and value for path, value in launch.constants.items())


def report(gpu: FakeGpu, launches: list[Launch], num_threads: int = 1) -> dict[str, Any]:
    def compiled(launch: Launch) -> dict[str, Any]:
        try:
            found = gpu.compile(launch)
        except Exception as error:
            return {"kernel": str(launch), "error": f"{type(error).__name__}: {str(error)[-600:]}"}
        return {"kernel": str(launch), "shared": found.shared_memory, "spilled": found.spilled}

    reached = {name_of(launch.kernel) for launch in launches}
    with ThreadPoolExecutor(num_threads) as threads:
        programs = list(threads.map(compiled, launches))
    return {"unreached": sorted(kernels() - reached), "programs": programs}


if __name__ == "__main__":
    fake = FakeGpu(DEVICES[sys.argv[1]])
    for found in sorted((ROOT / "sgl" / "kernels").rglob("*triton.py")):
        import_module(".".join(found.relative_to(ROOT).with_suffix("").parts))
    collect(fake)
    launches = list(fake.launches.values())
    if sys.argv[2:] == ["once"]:
        launches = list({(each.kernel, _is_masked(each)): each for each in reversed(launches)}.values())
    print(json.dumps(report(fake, launches)))
