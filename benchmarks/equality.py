"""One batch through stock transformers and PEFT, and through fastlm: the loss and every trained tensor's gradient.

    python -m benchmarks.equality [SHAPE ...] [--mode MODE ...] [--tokens N] [--graphs] [--save FOLDER]

Three ways: the truth is the stock model in fp32 (fp64 where the working dtype is fp32), each sample alone; stock is the
same in the working dtype; fastlm's is patched, in the working dtype, all samples packed in one row, once under each
policy for activations. Adapters A and B are random, so that no gradient is zero by construction. A tensor passes where
fastlm's error against the truth is at most 1.25 times stock's plus 1e-3 (1e-5 in fp32). Loss and gradient norm alone
would be blind: without rotary embedding they hardly move.
"""

import argparse
import copy
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import fastlm
from benchmarks.step import quantise
from benchmarks.timing import DEVICE, record, save
from fastlm.models.graphs import LayerGraphs, size_of
from fastlm.models.patch import decoder_layers, patched_core
from fastlm.training.memory import set_policy

_EIGHT_B = dict(hidden_size=4096, num_attention_heads=32, num_key_value_heads=8)
_QWEN3 = dict(vocab_size=151_936, num_key_value_heads=8, head_dim=128)
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama8b": ("llama", _EIGHT_B | dict(vocab_size=128_256, intermediate_size=14_336)),
    "qwen3_8b": ("qwen3", _EIGHT_B | _QWEN3 | dict(intermediate_size=12_288)),
    "qwen3_4b": ("qwen3", _QWEN3 | dict(hidden_size=2560, intermediate_size=9728, num_attention_heads=32,
                                        tie_word_embeddings=True)),
    "qwen3_1b7": ("qwen3", _QWEN3 | dict(hidden_size=2048, intermediate_size=6144, num_attention_heads=16,
                                         tie_word_embeddings=True)),
    "qwen2_7b": ("qwen2", dict(vocab_size=152_064, hidden_size=3584, intermediate_size=18_944, num_attention_heads=28,
                               num_key_value_heads=4)),
    "gemma2_9b": ("gemma2", dict(vocab_size=256_000, hidden_size=3584, intermediate_size=14_336, head_dim=256,
                                 num_attention_heads=16, num_key_value_heads=8, query_pre_attn_scalar=256,
                                 sliding_window=256)),
    "mistral_7b": ("mistral", _EIGHT_B | dict(vocab_size=32_768, intermediate_size=14_336, sliding_window=256)),
    "phi3": ("phi3", dict(vocab_size=32_064, hidden_size=3072, intermediate_size=8192, num_attention_heads=32,
                          num_key_value_heads=32)),
}  # fmt: skip
_TINY = dict(vocab_size=300, hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2)
_MIXED = ("keep", "light", "lean", "recompute")


@dataclass(frozen=True)
class Mode:
    """What is trained, and how it is computed."""

    dtype: torch.dtype = torch.bfloat16
    autocast: bool = False
    nf4: bool = False
    full: bool = False


MODES = {
    "lora": Mode(),
    "autocast": Mode(autocast=True),
    "nf4": Mode(nf4=True),
    "nf4_autocast": Mode(nf4=True, autocast=True),
    "full": Mode(full=True),
    "fp32": Mode(dtype=torch.float32),
}

Step = tuple[float, dict[str, Tensor]]  # loss, gradients in fp32


@dataclass(frozen=True, eq=False)
class Batch:
    """Samples of token ids and labels, a third of each without; targets in all."""

    samples: list[tuple[Tensor, Tensor]]
    count: int

    @classmethod
    def random(cls, tokens: int, longest: int, vocabulary: int) -> "Batch":
        random, generator, lengths = np.random.default_rng(0), torch.Generator().manual_seed(0), []
        while sum(lengths) < tokens:
            lengths.append(int(np.clip(random.lognormal(np.log(longest / 5), 0.8), 1, longest)))
        lengths[-1] -= sum(lengths) - tokens
        samples = []
        for length in [*filter(None, lengths), 1]:  # one token alone is a sample too
            ids = torch.randint(3, vocabulary, (length,), generator=generator)
            labels = ids.clone()
            labels[: max(length // 3, 1)] = -100
            samples.append((ids, labels))
        return cls(samples, sum(int((labels[1:] != -100).sum()) for _, labels in samples))

    def packed(self) -> dict[str, Any]:
        lengths = [len(ids) for ids, _ in self.samples]
        cu_seqlens = torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32, device=DEVICE)
        return dict(
            input_ids=torch.cat([ids for ids, _ in self.samples])[None].to(DEVICE),
            labels=torch.cat([labels for _, labels in self.samples])[None].to(DEVICE),
            position_ids=torch.cat([torch.arange(n) for n in lengths])[None].to(DEVICE),
            cu_seq_lens_q=cu_seqlens, cu_seq_lens_k=cu_seqlens, max_length_q=max(lengths), max_length_k=max(lengths),
        )  # fmt: skip

    def alone(self) -> Iterator[dict[str, Any]]:
        for ids, labels in self.samples:
            if (labels[1:] != -100).any():
                yield dict(input_ids=ids[None].to(DEVICE), labels=labels[None].to(DEVICE))


def step(model: Any, calls: list[dict[str, Any]] | Iterator[dict[str, Any]], count: int, autocast: bool) -> Step:
    """Loss and gradients of the calls together."""
    model.zero_grad()
    total, targets = 0.0, torch.tensor(count, device=DEVICE)
    for call in calls:
        with torch.autocast(DEVICE.type, dtype=torch.bfloat16, enabled=autocast):
            loss = model(**call, num_items_in_batch=targets, use_cache=False).loss
        loss.backward()
        total += loss.item()
    return total, {n: p.grad.detach().float().clone() for n, p in model.named_parameters() if p.grad is not None}


def stock_model(shape: str, mode: Mode, layers: int, longest: int, tiny: bool = False) -> Any:
    """Random weights of the shape, norms near one, and random adapters, unless all is trained."""
    from transformers import AutoConfig, AutoModelForCausalLM

    family, sizes = SHAPES[shape]
    if tiny:
        smaller = {"head_dim": 16, "sliding_window": 8}
        sizes = sizes | _TINY | {name: size for name, size in smaller.items() if name in sizes}
    config = AutoConfig.for_model(
        family, **sizes, num_hidden_layers=layers, max_position_embeddings=max(8192, longest), pad_token_id=0,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    attention = "eager" if family == "gemma2" else "sdpa"  # which ignores the softcap
    with DEVICE:
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=mode.dtype)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.add_(torch.randn_like(parameter) * 0.1)
    if mode.nf4:
        quantise(model)
    return (model if mode.full else _adapted(model, mode)).train()


def _adapted(model: Any, mode: Mode) -> Any:
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(r=16, lora_alpha=16, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    model = get_peft_model(model, lora, autocast_adapter_dtype=False)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            values = torch.randn(parameter.shape, generator=generator) * (0.02 if "lora_A" in name else 0.01)
            parameter.data = values.to(DEVICE, torch.float32 if mode.autocast else mode.dtype)
    return model


def _dense(quantised: Any) -> nn.Module:
    from bitsandbytes.functional import dequantize_4bit

    weight = quantised.weight
    new = nn.Linear(quantised.in_features, quantised.out_features, quantised.bias is not None, device=DEVICE)
    new.weight.data = dequantize_4bit(weight.data, weight.quant_state).float()
    if quantised.bias is not None:
        new.bias.data = quantised.bias.data.float()
    return new.requires_grad_(False)


def _exact(model: Any, mode: Mode) -> Any:
    if mode.nf4:
        from bitsandbytes.nn import Linear4bit

        for name, module in list(model.named_modules()):
            if type(module) is Linear4bit:
                model.set_submodule(name, _dense(module))
    return model.double() if mode.dtype == torch.float32 else model.float()


def fast_steps(model: Any, batch: Batch, autocast: bool, graphs: bool) -> Iterator[tuple[str, Step]]:
    """The packed step under each policy; then as CUDA graphs, twice and under some of these."""
    fastlm.patch(model)
    core: Any = patched_core(model)
    core.gradient_checkpointing_enable()
    fastlm.patch(model)  # now that transformers' function is there, ours goes in its place
    layers = decoder_layers(core)

    def under(policy: str) -> Step:
        core._fastlm_model.offload.on = policy == "offload"
        own = [_MIXED[i % 4] for i in range(len(layers))] if policy == "mixed" else [policy] * len(layers)
        set_policy(layers, own)
        return step(model, [batch.packed()], batch.count, autocast)

    for policy in (*_MIXED, "offload", "mixed"):
        yield policy, under(policy)
    lengths = [len(ids) for ids, _ in batch.samples]
    for policy in ("keep", "recompute", "offload", "mixed") if graphs else ():
        made = LayerGraphs(core.base_model, sum(lengths) * 2, print)
        made.bind(core.base_model)
        made.plan([size_of(sum(lengths), len(lengths), max(lengths))])  # type: ignore[list-item]
        yield f"graphs, {policy}", under(policy)
        yield f"graphs, {policy} again", under(policy)
        assert made.replays == 2, f"{made.replays} of 2 steps ran as graphs"
        LayerGraphs.unbind(core.base_model)


def compare(
    shape: str, mode_name: str, *, layers: int = 4, tokens: int = 4096, longest: int = 1024, graphs: bool = False,
    tiny: bool = False,
) -> list[dict[str, Any]]:  # fmt: skip
    """A row for each policy: tensors, how many of them fail, errors of loss and worst tensor, ours and stock's."""
    mode = MODES[mode_name]
    model = stock_model(shape, mode, layers, longest, tiny)
    batch = Batch.random(tokens, longest, model.get_input_embeddings().weight.shape[0])
    true_loss, truth = step(_exact(copy.deepcopy(model), mode), batch.alone(), batch.count, False)
    allowed = 1e-5 if mode.dtype == torch.float32 else 1e-3

    def errors(found: Step) -> tuple[float, dict[str, float]]:
        worst = {n: float((g - truth[n]).norm() / (truth[n].norm() + 1e-20)) for n, g in found[1].items()}
        return abs(found[0] - true_loss) / abs(true_loss), worst

    stock_loss, stock = errors(step(model, batch.alone(), batch.count, mode.autocast))
    rows, kept = [], dict[str, Tensor]()
    for policy, found in fast_steps(model, batch, mode.autocast, graphs):
        kept = kept or found[1]
        loss, ours = errors(found)
        failing = [n for n in truth if n not in ours or not ours[n] <= 1.25 * stock[n] + allowed]
        rows.append({
            "case": f"{shape}, {mode_name}, {policy}", "layers": layers, "samples": len(batch.samples),
            "tokens": tokens + 1, "longest": max(len(ids) for ids, _ in batch.samples), "tensors": len(truth),
            "failing": len(failing) + (not loss <= 1.25 * stock_loss + allowed),
            "other_bits_than_keep": sum(not torch.equal(g, kept[n]) for n, g in found[1].items()),
            "loss_error": loss, "stock_loss_error": stock_loss,
            "worst_error": max(ours.values()), "stock_worst_error": max(stock.values()),
            "worst_tensor": max(ours, key=ours.__getitem__),
        })  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.equality", description="Compare fastlm with stock, three ways.")
    parser.add_argument("shapes", nargs="*", default=["llama8b"], metavar="SHAPE", help=", ".join(SHAPES))
    parser.add_argument("--mode", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--longest", type=int, default=1024, help="tokens of the longest sample")
    parser.add_argument("--graphs", action="store_true", help="as CUDA graphs too")
    parser.add_argument("--tiny", action="store_true", help="widths of 64, for a CPU")
    parser.add_argument("--save", metavar="FOLDER", help="keep the record there, as in benchmarks/results")
    parser.add_argument("--commit", help="what is running, where git cannot say it")
    given = parser.parse_args()
    if given.longest < 2 or given.tokens < given.longest:
        parser.error(
            f"--longest {given.longest} of --tokens {given.tokens}: a sample needs two tokens to have a target"
        )
    if unknown := set(given.shapes) - SHAPES.keys():
        parser.error(f"unknown shape {', '.join(sorted(unknown))}; there are {', '.join(SHAPES)}")
    torch.backends.cuda.matmul.allow_tf32 = False
    rows = []
    for shape in given.shapes:
        for mode in given.mode:
            new = compare(shape, mode, layers=given.layers, tokens=given.tokens, longest=given.longest,
                          graphs=given.graphs, tiny=given.tiny)  # fmt: skip
            rows += new
            for row in new:
                errors = f"worst {row['worst_error']:.2e}, stock {row['stock_worst_error']:.2e}"
                bits = f"other bits than keep: {row['other_bits_than_keep']}"
                print(
                    f"{row['case']:<36} {row['tensors']} tensors, {row['failing']} fail; {errors}; {bits}", flush=True
                )
    made = record(
        rows, script="equality", work="random weights of the named shapes; relative errors against the truth",
        notes=str(__doc__).split("\n\n")[2].replace("\n", " "), floor={}, commit=given.commit,
    )  # fmt: skip
    if given.save:
        save(made, given.save)
    print(json.dumps(made))
    if any(row["failing"] for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
