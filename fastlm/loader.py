"""FastLanguageModel: load a model and its tokenizer, add LoRA, switch between training and inference."""

from __future__ import annotations

import functools
import inspect
import json
import os
from collections.abc import Sequence
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils.hub import has_file
from transformers.utils.peft_utils import find_adapter_config_file

from . import keywords as kw
from .gguf_weights import GGUFCheckpoint, find_gguf
from .models.patch import patch, unwrap_peft
from .options import (
    bits_of,
    check_bits,
    check_room,
    choose_dtype,
    fit_length,
    is_bfloat16_supported,
    keep_quantisation,
    place,
    quantisation_keywords,
)
from .tokenizer import ensure_pad_token, load_tokenizer

__all__ = ["FastLanguageModel", "base_of_adapter", "existing", "is_bfloat16_supported", "load_config"]


class _DefaultText(str):
    """A default value that an explicit argument of the same text can be told from."""


class _DefaultNumber(int):
    """A default value that an explicit argument of the same size can be told from."""


_CHECKPOINTING = _DefaultText("fastlm")
_LENGTH = _DefaultNumber(2048)


class FastLanguageModel:
    """Entry points. Models are transformers' and PEFT's own, patched; ``fastlm.report(model)`` says where."""

    @staticmethod
    def from_pretrained(
        model_name: str | os.PathLike[str],
        max_seq_length: int = _LENGTH,
        dtype: torch.dtype | str | None = None,
        load_in_4bit: bool | None = None,
        load_in_8bit: bool = False,
        full_finetuning: bool = False,
        token: str | None = None,
        device_map: Any = None,
        rope_scaling: dict[str, Any] | None = None,
        trust_remote_code: bool = False,
        revision: str | None = None,
        use_gradient_checkpointing: bool | str = _CHECKPOINTING,
        random_state: int = 3407,
        cuda_graphs: bool = True,
        attention_backend: str | None = None,
        **transformers_kwargs: Any,
    ) -> tuple[Any, Any]:
        """Load a causal LM and its tokenizer, ready for training.

        model_name: a folder, a hub name, a folder or hub name of a PEFT adapter (its base is loaded, then the
            adapter, trainable), a .gguf file or a folder that holds one.
        max_seq_length: tokens of the longest sample; kept as ``model.max_seq_length``. Past the model's own
            limit, pass ``rope_scaling`` as well, e.g. {"rope_type": "yarn", "factor": 4.0}. Left out, it is
            2048 or that limit, whichever is less.
        dtype: of the weights that are not quantised, and of all computing. None: bfloat16 where the GPU has
            it, else float16 (float32 for full fine-tuning, which float16 cannot do); float32 on a CPU.
        load_in_4bit: NF4 with double quantisation. None: on a GPU, unless load_in_8bit, full_finetuning or a
            quantised checkpoint says otherwise. A checkpoint that is quantised already stays as it is.
        full_finetuning: no quantisation; every weight is trainable, in ``dtype``.
        device_map: None is the current GPU, or that of LOCAL_RANK; the CPU without one.
        use_gradient_checkpointing: see ``get_peft_model``.
        random_state: accepted for older scripts; nothing is random in loading.
        cuda_graphs: run SFTTrainer's LoRA steps as CUDA graphs where they have so few tokens that the GPU waits
            for the host; they say so when they begin.
        attention_backend: what computes attention over packed and padding-free batches, see ``fastlm.patch``. None:
            the fastest that can. ``attn_implementation`` is transformers' own, for padded batches and generation.
        transformers_kwargs: to transformers' ``from_pretrained``, or attributes of the model's configuration.

        Returns (model, tokenizer). The tokenizer has a pad token that is not its end of sequence.

        Raises:
            ValueError: options that contradict each other or that the machine cannot run; a wrong length.
            TypeError: a keyword that nobody knows.
            FileNotFoundError: no model or no tokenizer there.
        """
        checkpointing = kw.check_checkpointing(use_gradient_checkpointing)
        in_16bit = transformers_kwargs.pop("load_in_16bit", False)
        loader_keywords, config_keywords = kw.model_keywords(transformers_kwargs)
        if dtype is None:
            dtype = loader_keywords.pop("torch_dtype", None)
        if not isinstance(max_seq_length, int) or isinstance(max_seq_length, bool) or max_seq_length <= 0:
            raise ValueError(f"max_seq_length is {max_seq_length!r}; it must be a number of tokens above 0")
        check_bits(
            load_in_4bit=load_in_4bit, load_in_8bit=load_in_8bit, load_in_16bit=in_16bit,
            full_finetuning=full_finetuning, quantization_config="quantization_config" in loader_keywords,
        )  # fmt: skip
        device_map, on_gpu = place(device_map)
        dtype = choose_dtype(dtype, on_gpu, full_finetuning)
        if load_in_8bit and not on_gpu:
            raise ValueError("load_in_8bit needs a GPU; on a CPU pass load_in_4bit=True or load unquantised")

        name = existing(model_name)
        hub = {key: loader_keywords.pop(key) for key in kw.HUB_KEYWORDS if key in loader_keywords}
        hub |= {key: value for key, value in (("token", token), ("revision", revision)) if value is not None}
        base, base_hub = name, hub
        adapter_base = base_of_adapter(name, hub)
        if adapter_base is not None:
            if full_finetuning:
                raise ValueError(f"{name} is an adapter; full_finetuning trains a whole model without one")
            base = existing(adapter_base, f", the base of the adapter {name}")
            base_hub = {key: value for key, value in hub.items() if key not in ("revision", "subfolder")}

        gguf_file = find_gguf(base)
        gguf = GGUFCheckpoint(gguf_file) if gguf_file is not None else None
        config = loader_keywords.pop("config", None)
        if gguf is not None:
            config = gguf.config
        elif not isinstance(config, PreTrainedConfig):
            config = load_config(base if config is None else config, trust_remote_code, base_hub)
        own = inspect.signature(FastLanguageModel.from_pretrained).parameters
        kw.set_config_keywords(config, config_keywords, own)
        length = fit_length(config, max_seq_length, rope_scaling, isinstance(max_seq_length, _DefaultNumber))
        if getattr(config, "quantization_config", None) is not None:
            keep_quantisation(config, dtype, load_in_4bit, load_in_8bit, full_finetuning)
        elif "quantization_config" not in loader_keywords and not (full_finetuning or in_16bit):
            in_4bit = on_gpu if load_in_4bit is None else load_in_4bit
            loader_keywords |= quantisation_keywords(in_4bit, load_in_8bit, dtype)
        if on_gpu and not trust_remote_code:
            check_room(str(model_name), config, dtype, device_map, loader_keywords.get("quantization_config"))
        if attention_backend is not None:
            kw.check_attention_backend(attention_backend, config.get_text_config(), dtype, on_gpu)
        if getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None:
            loader_keywords.setdefault("attn_implementation", "eager")  # stock SDPA leaves the cap out

        if adapter_base is not None and _has_tokenizer(name, hub):
            tokenizer = load_tokenizer(name, trust_remote_code=trust_remote_code, **hub)
        elif gguf is not None:
            tokenizer = gguf.tokenizer()
        else:
            tokenizer = load_tokenizer(base, trust_remote_code=trust_remote_code, **base_hub)

        model: Any
        loader_keywords |= {"dtype": dtype, "device_map": device_map}
        if gguf is not None:
            model = gguf.model(**loader_keywords)
        else:
            loader_keywords |= {"config": config, "trust_remote_code": trust_remote_code, **base_hub}
            try:
                model = AutoModelForCausalLM.from_pretrained(base, **loader_keywords)
            except SafetensorError as error:
                raise ValueError(f"weights of {base} cannot be read ({error}): fetch or save them again") from error

        if full_finetuning:
            model.requires_grad_(True)
        if not on_gpu:
            _keep_4bit_layout(model)
        if adapter_base is not None:
            _grow_for_adapter(model, os.path.join(name, hub.get("subfolder", ""), "adapter_model.safetensors"))
        ensure_pad_token(model, tokenizer)
        model.max_seq_length = length
        model._fastlm_checkpointing = checkpointing
        model._fastlm_full_finetuning = full_finetuning
        model._fastlm_cuda_graphs = cuda_graphs
        _offer_merging(model)
        patch(model, attention_backend=attention_backend)
        if adapter_base is not None:
            from peft import PeftModel

            adapter_hub = {key: value for key, value in hub.items() if key != "code_revision"}
            model = PeftModel.from_pretrained(model, name, is_trainable=True, **adapter_hub)
            _offer_merging(model)
            patch(model)
        spelled = str(dtype).removeprefix("torch.")
        print(f"fastlm: {name}: {spelled}, {bits_of(unwrap_peft(model))}, {model.device}")
        return model, tokenizer

    @staticmethod
    def get_peft_model(
        model: Any,
        r: int = 16,
        target_modules: Sequence[str] | str | None = kw.PROJECTIONS,
        lora_alpha: float = 16,
        lora_dropout: float = 0,
        bias: str = "none",
        layers_to_transform: Any = None,
        layers_pattern: Any = None,
        use_gradient_checkpointing: bool | str = _CHECKPOINTING,
        random_state: int | None = 3407,
        use_rslora: bool = False,
        use_dora: bool = False,
        modules_to_save: Sequence[str] | None = None,
        init_lora_weights: bool | str = True,
        loftq_config: Any = None,
        **lora_config_kwargs: Any,
    ) -> Any:
        """Add LoRA adapters (float32) to a model that ``from_pretrained`` loaded; the base is frozen.

        r: rank, above 0.
        target_modules: the seven projections, as far as the model has them; module names, a regular
            expression, or "all-linear".
        use_gradient_checkpointing: True or "fastlm" (the cheapest policy that fits), False, "recompute" or
            "offload"; left out, what was given to ``from_pretrained`` holds.
        modules_to_save: modules to train whole. A table that embedding and head share stays one.
        random_state: seed of the adapters alone; the global generators are left as they are.
        lora_config_kwargs: fields of PEFT's LoraConfig.

        Returns PEFT's model, patched. A model loaded for full fine-tuning is returned as it is.

        Raises:
            ValueError: r, a module name or the checkpointing value is wrong; another adapter is there.
            TypeError: a keyword that PEFT does not know.
        """
        from peft import LoraConfig, PeftModel, get_peft_model
        from peft.tuners.tuners_utils import BaseTunerLayer

        own = inspect.signature(FastLanguageModel.get_peft_model).parameters
        extra = kw.lora_keywords(lora_config_kwargs, own)
        if not isinstance(r, int) or isinstance(r, bool) or r <= 0:
            raise ValueError(f"r is {r!r}; the rank of LoRA must be a whole number above 0, e.g. 16")
        checkpointing = kw.check_checkpointing(use_gradient_checkpointing)
        core = unwrap_peft(model)
        if not isinstance(core, PreTrainedModel):
            raise TypeError(f"get_peft_model takes a transformers model, not {type(model).__name__}")
        explicit = not isinstance(use_gradient_checkpointing, _DefaultText)
        if explicit or not hasattr(core, "_fastlm_checkpointing"):
            core._fastlm_checkpointing = checkpointing  # type: ignore[assignment]
            patch(core)  # which takes the policy from there
        if getattr(core, "_fastlm_full_finetuning", False):
            print("fastlm: full_finetuning trains every weight; no LoRA is added")
            return model
        if isinstance(model, PeftModel):
            kw.check_same_adapter(model, r, lora_alpha, target_modules)
            return model
        if any(isinstance(module, BaseTunerLayer) for module in core.modules()):
            raise ValueError(
                "adapters are in this model already, from an earlier call: go on with what that call returned, "
                "or load the model again"
            )

        saved = kw.resolve_saved_modules(core, modules_to_save)
        targets = kw.resolve_targets(core, target_modules)
        if kw.shares_a_table(core, saved):
            extra.setdefault("ensure_weight_tying", True)  # one table stays one
            if not isinstance(targets, str) and kw.shares_a_table(core, targets):
                raise ValueError(
                    f"embedding and head of this model are one table, and modules_to_save={saved} trains it "
                    f"whole; take it out of target_modules={targets}"
                )
        fields: dict[str, Any] = dict(
            r=r, target_modules=targets, lora_alpha=lora_alpha, lora_dropout=lora_dropout, bias=bias,
            layers_to_transform=layers_to_transform, layers_pattern=layers_pattern, use_rslora=use_rslora,
            use_dora=use_dora, modules_to_save=saved, init_lora_weights=init_lora_weights,
            loftq_config=loftq_config or {}, task_type="CAUSAL_LM",
        )  # fmt: skip
        config = LoraConfig(**fields, **extra)
        devices = [core.device] if core.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices, enabled=random_state is not None):
            if random_state is not None:
                torch.manual_seed(random_state)
            wrapped = get_peft_model(core, config)
        kw.check_adapted(wrapped, targets)
        _offer_merging(wrapped)
        patch(wrapped)
        return wrapped

    @staticmethod
    def for_inference(model: Any) -> Any:
        """Switch to evaluation with the key-value cache on and checkpointing off; returns the model."""
        core = unwrap_peft(model)
        if not hasattr(core, "_fastlm_training_state"):
            names = [name for name, m in core.named_modules() if getattr(m, "gradient_checkpointing", False)]
            core._fastlm_training_state = (names, core.config.use_cache)
            for name in names:
                core.get_submodule(name).gradient_checkpointing = False
        core.config.use_cache = True
        model.eval()
        return model

    @staticmethod
    def for_training(model: Any) -> Any:
        """Undo ``for_inference``: training mode, checkpointing and cache as they were; returns the model."""
        core = unwrap_peft(model)
        names, core.config.use_cache = core.__dict__.pop("_fastlm_training_state", ((), False))
        for name in names:
            core.get_submodule(name).gradient_checkpointing = True
        model.train()
        return model


def existing(model_name: str | os.PathLike[str], whose: str = "") -> str:
    """The name, with ~ expanded; FileNotFoundError at once for a path where nothing is."""
    name = os.path.expanduser(os.fspath(model_name))
    if os.path.exists(name):
        return name
    looks_like_a_path = name.startswith((".", "/")) or name.count("/") > 1 or "\\" in name
    if looks_like_a_path or name.endswith(".gguf"):
        raise FileNotFoundError(f"no model at {os.path.abspath(name)}{whose}: no such file or folder")
    return name


def base_of_adapter(name: str, hub: dict[str, Any]) -> str | None:
    """Name of the model that the PEFT adapter ``name`` belongs to; None if it is no adapter."""
    if os.path.isfile(name):
        return None
    if os.path.isdir(name):
        path: str | None = os.path.join(name, hub.get("subfolder", ""), "adapter_config.json")
        if not os.path.isfile(str(path)):
            return None
        folder = os.path.dirname(str(path))
        if not any(os.path.isfile(os.path.join(folder, f"adapter_model.{kind}")) for kind in ("safetensors", "bin")):
            raise FileNotFoundError(f"the adapter {folder} has no weights (adapter_model.safetensors); save it again")
        if os.path.isfile(os.path.join(name, "config.json")):
            raise ValueError(f"{name} holds a model and an adapter; move one of them to a folder of its own")
    else:
        path = find_adapter_config_file(name, **{k: v for k, v in hub.items() if k != "code_revision"})
    if path is None:
        return None
    with open(path, encoding="utf-8") as file:
        base = json.load(file).get("base_model_name_or_path")
    if not base:
        raise ValueError(f"{path} does not name its base model (base_model_name_or_path); add it there")
    return base


def _grow_for_adapter(model: Any, file: str) -> None:
    """Give the base the rows of the embedding table that was saved with an adapter, where those are more."""
    if not os.path.isfile(file):
        return
    embedding = model.get_input_embeddings()
    path = next(name for name, module in model.named_modules() if module is embedding)
    with safe_open(file, "pt") as adapter:
        names = (f"base_model.model.{path}.weight", f"base_model.model.{path}.base_layer.weight")
        rows = [adapter.get_slice(name).get_shape()[0] for name in names if name in adapter.keys()]  # noqa: SIM118
    if rows and rows[0] > embedding.weight.shape[0]:
        model.resize_token_embeddings(rows[0], mean_resizing=False)


def _has_tokenizer(name: str, hub: dict[str, Any]) -> bool:
    known = ("revision", "proxies", "token", "local_files_only", "cache_dir")
    return has_file(name, "tokenizer_config.json", **{key: hub[key] for key in known if key in hub})


def load_config(name: Any, trust_remote_code: bool, hub: dict[str, Any]) -> Any:
    try:
        file = os.path.join(name, hub.get("subfolder", ""), "config.json")
        if os.path.isdir(name) and not os.path.isfile(file):
            raise FileNotFoundError("there is no config.json")
        return AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code, **hub)
    except OSError as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise FileNotFoundError(
            f"no model could be loaded from {name} ({reason}). Give a folder with config.json and weights, a "
            "GGUF file, an adapter, or the name of a model on the hub, which needs the network the first time"
        ) from error


def _keep_4bit_layout(model: Any) -> None:
    """Keep bitsandbytes from repacking 4-bit weights at the first inference on an AVX512 CPU.

    It would round their scales to bfloat16 for good, and fail for widths that are no multiple of 64.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def _save_pretrained_merged(model: Any, path: Any, tokenizer: Any = None, save_method: str = "merged_16bit") -> None:
    from .export.merged import save_pretrained_merged

    save_pretrained_merged(model, path, tokenizer, save_method)


def _offer_merging(model: Any) -> None:
    """``model.save_pretrained_merged(path, tokenizer=None)``; a partial copies and pickles with the model."""
    model.save_pretrained_merged = functools.partial(_save_pretrained_merged, model)
