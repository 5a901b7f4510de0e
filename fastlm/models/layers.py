"""The forwards that replace stock ones: norm, gated MLP, attention.

Each is bound to one module instance, holds no state of its own and reads everything from the module at every call, so
that PEFT wrapping and merging, FSDP2's swapped parameters, deepcopy and pickle see the module they know. A call that
the fused form does not cover runs the class's own forward.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels.attention import attention
from ..kernels.glu import glu, glu_packed
from ..kernels.layer_norm import layer_norm
from ..kernels.lora import TILE, Rotation, lora_linear, lora_mlp
from ..kernels.norm_rope import norm_rope
from ..kernels.rms_norm import add_rms_norm, rms_norm, rms_norm_add, rms_norm_beside
from ..kernels.rope import rope
from ..packing.boundaries import SequenceBoundaries
from .adapters import fusable, global_hooks, has_hooks
from .checkpointing import CALL_CHECKPOINTS
from .fingerprint import stock_function
from .forms import AttentionForm, LayerForm, MLPForm, NormForm
from .remaking import NormAgain

__all__ = [
    "LayerPatch",
    "Switch",
    "activation_name",
    "attention_features",
    "forward_for",
    "layer_patch",
    "mlp_obstacle",
    "projection_groups",
]


class Switch:
    """On or off for all layers of one patched model; every layer holds the same object.

    A pickled model comes back with its class's forwards, so a pickled switch comes back off.
    """

    def __init__(self, on: bool = True) -> None:
        self.on = on

    def __deepcopy__(self, memo: dict[int, Any]) -> Switch:
        return Switch(self.on)

    def __reduce__(self) -> tuple[Any, ...]:
        return Switch, (False,)


@dataclass(eq=False)
class LayerPatch:
    """What patching left on one module, as ``module._fastlm``.

    kind: "norm", "mlp", "attention", "layer" or "head". form: how the stock code is written (forms.py).
    previous: the instance's own forward that ours replaced, put back by unpatch; None where there was none.
    backend: of attention over sample boundaries, where the user chose one.
    above_hook: whether that one lay over accelerate's hook, inside of which ours is.
    recomputing: whether a decoder layer runs for its graph alone, in backward (checkpointing.py).
    products: bytes of an MLP's gate and up products in its last call, where its own backward can make them again.
    products_kept: whether they wait for backward instead.
    unmade: bytes of those that its last call left to backward alone, as a recomputed layer does in tiles.
    norms_kept: whether the outputs of a decoder layer's norms wait for backward, or are made again there (remaking.py).
    kept: bytes that a decoder layer would keep for backward if it were not recomputed; 0: to be counted at the next
        recomputation, with its MLP's products and, in ``norms``, its norms' outputs; None: nobody asked.
    reading: the address of the norm's output that is read now, in a run for its graph alone.
    """

    kind: str
    form: Any
    switch: Switch
    backend: str | None = None
    previous: Any = field(default=None, repr=False)
    above_hook: bool = field(default=False, repr=False)
    recomputing: bool = field(default=False, repr=False)
    norms_kept: bool = field(default=True, repr=False)
    kept: int | None = field(default=None, repr=False)
    norms: int = field(default=0, repr=False)
    reading: int = field(default=0, repr=False)
    products: int = field(default=0, repr=False)
    products_kept: bool = field(default=True, repr=False)
    unmade: int = field(default=0, repr=False)


def layer_patch(module: nn.Module) -> LayerPatch | None:
    """The patch of this module if it is there and switched on."""
    patch = module.__dict__.get("_fastlm")
    return patch if patch is not None and patch.switch.on else None


_ACTIVATIONS = {
    "SiLU": "silu", "SiLUActivation": "silu",
    "PytorchGELUTanh": "gelu_tanh", "GELUTanh": "gelu_tanh", "NewGELUActivation": "gelu_tanh",
    "GELUActivation": "gelu",
}  # fmt: skip


def activation_name(module: nn.Module) -> str | None:
    """The kernel's name for what an activation module really computes, by its class; None if it is not one of ours."""
    if isinstance(module, nn.GELU):
        return "gelu_tanh" if module.approximate == "tanh" else "gelu"
    return _ACTIVATIONS.get(type(module).__name__)


def mlp_obstacle(mlp: Any, form: MLPForm) -> str | None:
    """Why this MLP runs its class's forward, or None where it runs ours."""
    activation = getattr(mlp, form.activation)
    if activation_name(activation) is None:
        return f"activation {type(activation).__name__} has no kernel"
    return "a hook on its activation would be skipped" if has_hooks(activation) or global_hooks() else None


def projection_groups(form: AttentionForm | MLPForm) -> tuple[tuple[str, ...], ...]:
    """Names of the projections that read the same input, in the order in which they run."""
    if isinstance(form, AttentionForm):
        return (("qkv_proj",) if form.packed else ("q_proj", "k_proj", "v_proj")), ("o_proj",)
    return (("gate_up_proj",) if form.packed else ("gate_proj", "up_proj")), ("down_proj",)


def _norm_forward(self: Any, hidden_states: Tensor) -> Tensor:
    patch = layer_patch(self)
    if patch is None:
        return type(self).forward(self, hidden_states)
    if patch.form.centred:
        return layer_norm(hidden_states, self.weight, getattr(self, patch.form.epsilon))
    return rms_norm(hidden_states, self.weight, **_norm_options(self, patch.form))


def _norm_options(norm: Any, form: NormForm) -> dict[str, Any]:
    epsilon = getattr(norm, form.epsilon)
    return {"eps": epsilon, "offset": form.offset, "cast_before_scale": form.cast_before_scale}


def _open_norms(x: Tensor, *norms: Any) -> list[dict[str, Any]] | None:
    """The options of norms that may be computed as part of something larger; None if one is not ours, has hooks, is a
    LayerNorm or not where x is.
    """
    patches = [layer_patch(norm) for norm in norms]
    options = [
        _norm_options(n, p.form)
        for n, p in zip(norms, patches, strict=True)
        if p is not None and not (p.form.centred or has_hooks(n)) and n.weight.device == x.device
    ]
    return options if len(options) == len(norms) and not global_hooks() else None


def _layer_forward(
    self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """hidden_states [B, T, hidden]; each sum of the residual stream and the norm beside it in one launch."""
    patch = layer_patch(self)
    form: LayerForm | None = None if patch is None else patch.form
    norms = [] if form is None or form.parallel else [self.post_attention_layernorm]
    if form and form.norm_out:
        norms.append(self.post_feedforward_layernorm)
    options = _open_norms(hidden_states, *norms)
    if form is None or options is None or args:
        return type(self).forward(self, hidden_states, *args, **kwargs)
    if not CALL_CHECKPOINTS and self.gradient_checkpointing and self.training and torch.is_grad_enabled():
        kwargs = {name: value for name, value in kwargs.items() if name not in ("use_cache", "cache")}
        run = functools.partial(_layer_body, self, form, options, **kwargs)
        return self._gradient_checkpointing_func(run, hidden_states)
    return _layer_body(self, form, options, hidden_states, **kwargs)


def _layer_body(
    self: Any, form: LayerForm, options: list[dict[str, Any]], hidden_states: Tensor, **kwargs: Any
) -> Tensor | tuple[Tensor, Tensor]:
    """The layer's output; of a run for its graph alone the two summands, where nobody would read the sum."""
    residual = normed = hidden_states
    after_attention: Any = None if form.parallel else self.post_attention_layernorm
    before = None
    if form.norm_in and (before := _open_norms(hidden_states, self.input_layernorm)):
        normed, residual = rms_norm_beside(hidden_states, self.input_layernorm.weight, **before[0])
    elif form.norm_in:
        normed = self.input_layernorm(hidden_states)
    with _reading(self, normed, residual, self.input_layernorm, before) if before else nullcontext():
        attended, _ = self.self_attn(hidden_states=normed, **kwargs)
    if form.norm_out:  # a norm reads the MLP's output, so that is needed in any case
        residual = normed = rms_norm_add(attended, residual, after_attention.weight, **options[0])
        if form.norm_in:
            before_mlp = self.pre_feedforward_layernorm
            normed, before = before_mlp(residual), _open_norms(residual, before_mlp)
        with _reading(self, normed, residual, self.pre_feedforward_layernorm, before) if before else nullcontext():
            out = self.mlp(normed)
        return rms_norm_add(out, residual, self.post_feedforward_layernorm.weight, **options[1])
    if form.parallel:
        residual = residual + attended
    else:
        normed, residual = add_rms_norm(attended, residual, after_attention.weight, **options[0])
    with nullcontext() if form.parallel else _reading(self, normed, residual, after_attention, options):
        if not self._fastlm.recomputing or has_hooks(self.mlp) or layer_patch(self.mlp) is None:
            return residual + self.mlp(normed)
        return residual, _mlp_forward(self.mlp, normed, output_needed=False)


def _reading(layer: Any, y: Tensor, x: Tensor, norm: Any, options: list[dict[str, Any]]) -> AbstractContextManager[Any]:
    """What a layer reads y in, which the norm, with the first of the options, made of x."""
    patch: LayerPatch = layer._fastlm
    if patch.recomputing:
        return _read(patch, y)
    if patch.norms_kept or not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return nullcontext()
    return NormAgain(y, x, norm.weight, options[0])


@contextmanager
def _read(patch: LayerPatch, y: Tensor) -> Iterator[None]:
    """Tells whoever counts what a layer keeps which of it is a norm's output."""
    patch.reading = y.data_ptr()
    try:
        yield
    finally:
        patch.reading = 0


def _mlp_forward(self: Any, hidden_states: Tensor, output_needed: bool = True) -> Tensor:
    patch = layer_patch(self)
    if patch is None or mlp_obstacle(self, patch.form) is not None:
        return type(self).forward(self, hidden_states)
    form: MLPForm = patch.form
    activation = activation_name(getattr(self, form.activation))
    assert activation is not None  # else an obstacle
    if form.packed:
        (gate_up,) = _outputs(hidden_states, self.gate_up_proj)
        return _outputs(glu_packed(gate_up, activation), self.down_proj)[0]
    projections = fusable(hidden_states, (self.gate_proj, self.up_proj, self.down_proj))
    if projections is not None:
        inner, size = self.gate_proj.out_features, hidden_states.element_size()
        tokens = hidden_states.shape[:-1].numel()
        patch.products = 2 * tokens * inner * size
        patch.unmade = 0 if output_needed or tokens <= TILE else patch.products
        gate_projection, up_projection, down_projection = projections
        return lora_mlp(
            hidden_states, gate_projection, up_projection, down_projection, activation, output_needed=output_needed,
            products_kept=patch.products_kept,
        )  # fmt: skip
    patch.products = patch.unmade = 0
    gate, up = _outputs(hidden_states, self.gate_proj, self.up_proj)
    return _outputs(glu(gate, up, activation), self.down_proj)[0]


def _outputs(x: Tensor, *modules: nn.Module) -> tuple[Tensor, ...]:
    """What each projection makes of x: in one function where their adapters can be fused, else one by one."""
    projections = fusable(x, modules)
    return tuple(module(x) for module in modules) if projections is None else lora_linear(x, projections)


def _attention_forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """hidden_states [B, T, hidden]; with boundaries B is 1 and the samples lie one after the other."""
    patch = layer_patch(self)
    cached = kwargs.get("past_key_values") is not None or kwargs.get("cache") is not None
    if patch is None or args or cached or kwargs.get("position_embeddings") is None:
        return type(self).forward(self, hidden_states, *args, **kwargs)
    if kwargs.get("output_attentions", getattr(self.config, "output_attentions", False)):
        return type(self).forward(self, hidden_states, **kwargs)

    form: AttentionForm = patch.form
    cos, sin = kwargs.pop("position_embeddings")
    query, key, value, rotated = _project(self, form, hidden_states, cos, sin)
    head_norm = form.head_norm if hasattr(self, "q_norm") else None
    norms = _open_norms(query, self.q_norm, self.k_norm) if head_norm else None
    if norms is not None and norms[0] == norms[1]:
        query, key = norm_rope(query, key, self.q_norm.weight, self.k_norm.weight, cos, sin, **norms[0])
    else:
        if head_norm == "each":
            query, key = self.q_norm(query), self.k_norm(key)
        elif head_norm:
            query, key = (norm(x.flatten(2)).view(x.shape) for norm, x in ((self.q_norm, query), (self.k_norm, key)))
        if not rotated:
            query, key = rope(query, key, cos, sin, layout=form.layout)

    features = attention_features(self, form)
    mask = kwargs.pop("attention_mask", None)
    boundaries: SequenceBoundaries | None = kwargs.pop("boundaries", None)
    weights = None
    if boundaries is not None:
        query, key, value = (x.squeeze(0) for x in (query, key, value))  # indexing would fill and copy in backward
        output = attention(
            query, key, value, boundaries.cu_seqlens, boundaries.max_length, lengths=boundaries.lengths,
            scale=self.scaling, backend=patch.backend, **features,
        )[None]  # fmt: skip
    else:  # padded rows: the stock kernel with the stock mask
        output, weights = _stock_attention(self, query, key, value, mask, features, kwargs)
    output = output.reshape(*hidden_states.shape[:-1], -1)
    return _outputs(output, self.o_proj)[0], weights


def _project(
    self: Any, form: AttentionForm, hidden_states: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor, bool]:
    """Queries, keys and values [B, T, heads, head_dim], and whether the first two are rotated already, or never."""
    shape = (*hidden_states.shape[:-1], -1, self.head_dim)
    rotated = form.turns == "windowed" and self.sliding_window is None
    modules = [getattr(self, name) for name in projection_groups(form)[0]]
    projections = fusable(hidden_states, modules)
    if projections is None:
        outputs = tuple(module(hidden_states) for module in modules)
    else:
        later = rotated or form.packed or form.head_norm or form.layout != "half"
        in_place = not (later or cos.requires_grad or sin.requires_grad)
        outputs = lora_linear(hidden_states, projections, Rotation(cos, sin, self.head_dim) if in_place else None)
        rotated = rotated or in_place
    if form.packed:
        queries = self.config.num_attention_heads * self.head_dim
        keys = self.config.num_key_value_heads * self.head_dim
        outputs = outputs[0].split([queries, keys, keys], dim=-1)
    query, key, value = (output.view(shape) for output in outputs)
    return query, key, value, rotated


def attention_features(self: Any, form: AttentionForm) -> dict[str, Any]:
    """What this layer asks of an attention backend: {"window": int | None, "softcap": float | None}."""
    window = None
    if form.window is not None:
        owner = self.config if form.window == "config" else self
        window = getattr(owner, "sliding_window", None)
    return {"window": window, "softcap": self.attn_logit_softcapping if form.softcap else None}


def _stock_attention(
    self: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, features: dict[str, Any],
    kwargs: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    function = stock_function(type(self))
    assert function is not None  # it was fingerprinted
    eager: Any = function.__globals__["eager_attention_forward"]
    interface: Any = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager)
    form: AttentionForm = self._fastlm.form
    kwargs = {name: value for name, value in kwargs.items() if name not in ("past_key_values", "cache")}
    extra: dict[str, Any] = {}
    if form.window is not None:
        extra["sliding_window"] = features["window"]
    if form.softcap:
        extra["softcap"] = features["softcap"]
    dropout = self.attention_dropout if self.training else 0.0
    return interface(
        self, query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), mask,
        dropout=dropout, scaling=self.scaling, **extra, **kwargs,
    )  # fmt: skip


@functools.cache
def forward_for(kind: str, module_class: type) -> Any:
    """The forward of this kind, with the name and signature of the class's own.

    The name makes pickle restore the class's forward; the signature is what Trainer and generate read.
    """
    source: Any = {
        "norm": _norm_forward, "mlp": _mlp_forward, "attention": _attention_forward, "layer": _layer_forward,
    }[kind]  # fmt: skip

    @functools.wraps(module_class.forward)  # type: ignore[attr-defined]
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return source(self, *args, **kwargs)

    return forward
