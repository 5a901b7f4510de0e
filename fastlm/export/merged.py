"""Saves a model with its adapters merged in as one plain checkpoint, the live model untouched.

``weights.py`` says what each weight is, and what becomes of a quantised base. What is in memory beside the
model is one shard of the result; a family whose checkpoints are laid out otherwise (experts) needs all of it.
"""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from .atomic import atomic_directory
from .weights import MergedWeight, Pair, base_model, form_tensors, merged_weights

__all__ = ["save_merged", "save_pretrained_merged"]

SHARD_BYTES = 5_000_000_000
_SIDE_FILE_BYTES = 32 << 20  # configuration and tokenizer files, generously
_PAIR_PARAMETER = re.compile(r"^(?P<module>.+)\.lora_(?:embedding_)?A\.(?P<adapter>[^.]+)(?:\.weight)?$")


def save_pretrained_merged(
    model: nn.Module, path: str | os.PathLike[str], tokenizer: Any = None, save_method: str = "merged_16bit"
) -> None:
    """Save the model with its adapters merged in, in its 16-bit (or 32-bit) dtype. See ``save_merged``.

    save_method: "merged_16bit"; "lora" saves the adapter and the tokenizer instead. "merged_4bit" is refused:
    rounding merged weights to 4 bits again loses what the adapter learned.
    """
    if save_method == "lora":
        model.save_pretrained(path)  # type: ignore[operator]
        if tokenizer is not None:
            tokenizer.save_pretrained(path)
    elif save_method == "merged_16bit":
        save_merged(model, tokenizer, path)
    else:
        raise ValueError(
            f"save_method={save_method!r} is not supported: pass 'merged_16bit' or 'lora' (merging into 4 "
            "bits would round the adapter's effect away)"
        )


def save_merged(model: nn.Module, tokenizer: Any, path: str | os.PathLike[str]) -> None:
    """Write ``model`` with its active adapters merged in as a plain transformers checkpoint.

    model: a transformers causal LM, bare or with PEFT LoRA (rsLoRA and DoRA too), ``modules_to_save`` and
    trained token rows included. It is not changed. Every tensor keeps the dtype that the base has; a
    quantised one takes ``model.config.dtype``, and the saved configuration no longer speaks of quantisation.
    tokenizer: saved beside the weights; None leaves its files out and says so.

    The folder appears when it is complete; ``atomic_directory`` says what is replaced and what it raises.

    Raises:
        ValueError: adapters are off, or weights offloaded or quantised by something else than bitsandbytes.
        TypeError: an adapter that is not LoRA.
        RuntimeError: an adapter pair was not merged exactly once.
    """
    core = base_model(model)
    config = _plain_config(core)
    weights = merged_weights(core)
    _drop_tied(core, config, weights)
    ignored = [re.compile(pattern) for pattern in getattr(core, "_keys_to_ignore_on_save", None) or ()]
    for weight in weights:
        for name in [name for name in weight.tensors if any(pattern.search(name) for pattern in ignored)]:
            del weight.tensors[name]
    if torch.distributed.is_initialized() and torch.distributed.get_rank() != 0:
        return
    with atomic_directory(path, sum(weight.nbytes for weight in weights) + _SIDE_FILE_BYTES) as folder:
        config.save_pretrained(folder)
        if core.can_generate():
            _save_generation_config(core, folder)
        _save_tokenizer(tokenizer, folder)
        _save_code(core, config, folder)
        merged = _write(folder, _on_disk_layout(core, config, weights))
        _check_pairs(core, merged)
    dtype = str(config.dtype).removeprefix("torch.")
    print(f"fastlm: saved {path}: {dtype}, {merged.total()} adapter pairs merged")


def _plain_config(core: PreTrainedModel) -> Any:
    """A copy of the configuration as a model that was never quantised has it."""
    config = copy.deepcopy(core.config)
    quantisation = getattr(config, "quantization_config", None)
    if quantisation is not None:
        facts = quantisation if isinstance(quantisation, dict) else quantisation.to_dict()
        method = str(getattr(facts.get("quant_method"), "value", facts.get("quant_method")))
        if method != "bitsandbytes":
            raise ValueError(f"a base quantised with {method} cannot be merged; bitsandbytes 4-bit and 8-bit can")
        del config.quantization_config
    config.dtype = core.config.dtype if isinstance(core.config.dtype, torch.dtype) else core.dtype
    config.architectures = [type(core).__name__.removeprefix("FSDP")]
    if getattr(config, "use_cache", None) is False:
        config.use_cache = True  # training switches it off, and a checkpoint for inference wants it
    return config


def _drop_tied(core: PreTrainedModel, config: Any, weights: list[MergedWeight]) -> None:
    """Leave out what reloading ties again; where training took ties apart, the configuration says so."""
    holder = {name: weight for weight in weights for name in weight.tensors}
    for name, source in (getattr(core, "all_tied_weights_keys", None) or {}).items():
        if name not in holder or source not in holder:
            continue
        if holder[name].origin is not None and holder[name].origin == holder[source].origin:
            del holder[name].tensors[name]
        else:
            for part in (config, config.get_text_config()):
                part.tie_word_embeddings = False


def _on_disk_layout(core: PreTrainedModel, config: Any, weights: list[MergedWeight]) -> list[MergedWeight]:
    """The same weights under the names and shapes of the family's checkpoints (fused experts taken apart)."""
    with torch.device("meta"):
        empty: Any = type(core)(config)
    outline = {
        name: torch.empty(shape, dtype=dtype, device="meta")
        for weight in weights
        for name, (shape, dtype) in weight.tensors.items()
    }
    converted = revert_weight_conversion(empty, dict(outline))
    if set(converted) == set(outline):
        return weights

    # a conversion may take several tensors, so all of them are formed first
    def form() -> tuple[dict[str, Tensor], list[Pair]]:
        parts = [form_tensors(weight) for weight in weights]
        tensors = {name: tensor.cpu() for part, _ in parts for name, tensor in part.items()}
        return revert_weight_conversion(empty, tensors), [pair for _, pairs in parts for pair in pairs]

    return [MergedWeight({name: (tensor.shape, tensor.dtype) for name, tensor in converted.items()}, form)]


def _write(folder: Path, weights: list[MergedWeight]) -> Counter[Pair]:
    """Write model.safetensors, or shards and their index; returns how often each adapter pair went in."""
    shards: list[list[MergedWeight]] = [[]]
    filled = 0
    for weight in weights:
        if shards[-1] and filled + weight.nbytes > SHARD_BYTES:
            shards.append([])
            filled = 0
        shards[-1].append(weight)
        filled += weight.nbytes
    merged: Counter[Pair] = Counter()
    index: dict[str, str] = {}
    total = 0
    for number, shard in enumerate(shards, 1):
        tensors: dict[str, Tensor] = {}
        for weight in shard:
            formed, pairs = form_tensors(weight)
            tensors.update((name, tensor.cpu().contiguous()) for name, tensor in formed.items())
            merged.update(pairs)
        name = "model.safetensors" if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file(tensors, folder / name, metadata={"format": "pt"})
        index.update(dict.fromkeys(tensors, name))
        total += sum(tensor.nbytes for tensor in tensors.values())
    if len(shards) > 1:
        facts = {"metadata": {"total_size": total}, "weight_map": index}
        (folder / "model.safetensors.index.json").write_text(json.dumps(facts, indent=2) + "\n")
    return merged


def _check_pairs(core: PreTrainedModel, merged: Counter[Pair]) -> None:
    """Every adapter pair that the model answers with went in once, by the names of its parameters."""
    expected: Counter[Pair] = Counter()
    for name, _ in core.named_parameters(remove_duplicate=False):
        found = _PAIR_PARAMETER.match(name)
        if found is not None:
            layer: Any = core.get_submodule(found["module"])
            if found["adapter"] in (*layer.active_adapters, *layer.merged_adapters):
                expected[found["module"], found["adapter"]] += 1
    if expected != merged:
        wrong = sorted(key for key in expected | merged if expected[key] != merged[key])
        raise RuntimeError(
            f"{len(wrong)} adapter pairs were not merged exactly once, so nothing was saved: "
            + ", ".join(f"{module} ({adapter})" for module, adapter in wrong[:5])
        )


def _save_generation_config(core: PreTrainedModel, folder: Path) -> None:
    settings: Any = copy.deepcopy(core.generation_config)
    try:
        settings.save_pretrained(folder)
    except ValueError:  # some published models set a temperature and no sampling, which cannot be saved
        settings.do_sample = True
        settings.save_pretrained(folder)
        print("fastlm: the generation settings have sampling options, so do_sample=True is saved with them")


def _save_tokenizer(tokenizer: Any, folder: Path) -> None:
    if tokenizer is None:
        print("fastlm: no tokenizer was given, so the folder has no tokenizer files")
        return
    tokenizer.save_pretrained(folder)
    vocabulary = getattr(tokenizer, "vocab_file", None)  # a sentencepiece model, which converters read
    if vocabulary and os.path.isfile(vocabulary) and not (folder / os.path.basename(vocabulary)).exists():
        shutil.copyfile(vocabulary, folder / os.path.basename(vocabulary))


def _save_code(core: PreTrainedModel, config: Any, folder: Path) -> None:
    if core.is_remote_code():
        from transformers.dynamic_module_utils import custom_object_save

        custom_object_save(core, folder, config=config)
