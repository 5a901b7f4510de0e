"""The forms of stock code that fastlm replaces, by fingerprint, and what each form computes.

A row is one way of writing a layer; several families share it. Hashes are those of ``fingerprint.py``; the first column
of each table is transformers 5.17, the second 5.24 (where past_key_values is named cache). Adding a family is adding
the hashes that ``python -m fastlm.models.fingerprint NAME`` prints, once its form is known to be one of these.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = [
    "ATTENTION",
    "BACKBONE",
    "DECODER_LAYER",
    "HEAD",
    "MLP",
    "NORM",
    "AttentionForm",
    "LayerForm",
    "MLPForm",
    "NormForm",
]


@dataclass(frozen=True)
class NormForm:
    """RMS norm: where its epsilon lives, what is added to the weight, and when the result is rounded.

    centred: a LayerNorm, which takes the mean off first; [hidden], or a weight for each head.
    """

    epsilon: Literal["variance_epsilon", "eps"]
    offset: float
    cast_before_scale: bool
    centred: bool = False


@dataclass(frozen=True)
class MLPForm:
    """Gated MLP: two projections or one that holds both halves (gate first), and the activation's attribute."""

    packed: bool
    activation: Literal["act_fn", "activation_fn"]


@dataclass(frozen=True)
class AttentionForm:
    """Causal self-attention with rotary embeddings over half of each head, or over its first rotated part.

    packed: one qkv_proj instead of three projections.
    head_norm: q_norm and k_norm before the rotation, over "each" head or over all of them "together", where the module
        has them.
    window: where the sliding window's length lives (the config, the module, or nowhere).
    softcap: whether the scores are capped by ``attn_logit_softcapping``.
    layout: which dimensions of a head the rotation pairs; see kernels/rope.py.
    turns: "always", or only where the layer has a window ("windowed").
    """

    packed: bool = False
    head_norm: Literal["each", "together"] | None = None
    window: Literal["config", "module"] | None = None
    softcap: bool = False
    layout: Literal["half", "interleaved"] = "half"
    turns: Literal["always", "windowed"] = "always"


@dataclass(frozen=True)
class LayerForm:
    """Decoder layer: residual + attention(norm), then residual + mlp(norm).

    norm_in: attention and MLP read the residual stream through a norm.
    norm_out: their outputs go through a norm before they are added.
    drops: dropout modules on both outputs.
    parallel: residual + attention(norm) + mlp(norm), of one norm.
    """

    norm_in: bool = True
    norm_out: bool = False
    drops: bool = False
    parallel: bool = False


_LLAMA_NORM = NormForm("variance_epsilon", 0.0, True)
_GEMMA_NORM = NormForm("eps", 1.0, False)
_OLMO2_NORM = NormForm("variance_epsilon", 0.0, False)
_COHERE_NORM = NormForm("variance_epsilon", 0.0, False, centred=True)

NORM: dict[str, NormForm] = {
    "8fd5cbf7d7397bd9": _LLAMA_NORM,  # llama, mistral, qwen2, qwen3, phi3
    "c10ea6f887e2fb97": _GEMMA_NORM,  # gemma, gemma2, gemma3
    "3bed64023fdd3178": _OLMO2_NORM,  # olmo2, olmo3
    "c2d1283e3bdd8139": _COHERE_NORM,  # cohere, cohere2
}

MLP: dict[str, MLPForm] = {
    # llama, mistral, qwen2, qwen3, gemma, gemma2, gemma3, olmo2, olmo3, cohere, cohere2
    "72b5cca9a7e33877": MLPForm(False, "act_fn"),
    "21f4cd772e77991a": MLPForm(True, "activation_fn"),  # phi3
}


def _both(form: AttentionForm, *hashes: str) -> dict[str, AttentionForm]:
    return dict.fromkeys(hashes, form)


ATTENTION: dict[str, AttentionForm] = {
    **_both(AttentionForm(), "47a5284d30d59a18", "f4cf3f351f85e5f3"),  # llama, gemma
    **_both(AttentionForm(window="config"), "ee1387bbe25b7f66", "42d0cae3d1d2c77b"),  # mistral
    **_both(AttentionForm(window="module"), "6d0bb1e91bc85fe2", "1fa6890c860d4438"),  # qwen2
    **_both(AttentionForm(window="module", head_norm="each"), "5d987f99da212982", "8d853fb63b93a8ee"),  # qwen3
    **_both(AttentionForm(window="module", softcap=True), "5eb3b0d0de517e3c", "5f2303ecc959b831"),  # gemma2
    **_both(AttentionForm(window="module", head_norm="each"), "9b1176ea10daf589", "bebba2129f17266d"),  # gemma3
    **_both(AttentionForm(window="config", packed=True), "aadb91c18c288571", "c1852037f6c5c636"),  # phi3
    **_both(AttentionForm(head_norm="together"), "a83e82c5375c56f0", "cab1537164317cb8"),  # olmo2
    **_both(AttentionForm(window="module", head_norm="together"), "0583dcd811ece441", "9a61280240291757"),  # olmo3
    **_both(AttentionForm(head_norm="each", layout="interleaved"), "77a9b827ba8d3086", "bce6c1565c811076"),  # cohere
    **_both(
        AttentionForm(window="module", layout="interleaved", turns="windowed"), "70bf4c5b34e88f96", "e5ef7b359bb9a017"
    ),  # cohere2
}

DECODER_LAYER: dict[str, LayerForm] = {
    **dict.fromkeys(("99c0b40c10c5dee0", "657f8ad8ff0b8554"), LayerForm()),  # llama, mistral, qwen2, qwen3, gemma
    **dict.fromkeys(("4675a4f7ce2bac9e", "03ca7d936942132e"), LayerForm(norm_out=True)),  # gemma2, gemma3
    **dict.fromkeys(("620bca08bc12d52b", "c440089dc6a08987"), LayerForm(drops=True)),  # phi3
    **dict.fromkeys(("ef4729275ccecca1", "246f0b7a4bbe7932"), LayerForm(norm_in=False, norm_out=True)),  # olmo2, olmo3
    **dict.fromkeys(("a89b90a28e9b3208", "eda06672ac78a936"), LayerForm(parallel=True)),  # cohere
    **dict.fromkeys(("3122e5bd5f224626", "f9dcd05510025033"), LayerForm(parallel=True)),  # cohere2
}

# Recognised, not replaced: that every decoder layer and the backbone are known code is what proves that attention is
# the only place where one token sees another, and that it gets what the model's forward was given.
BACKBONE = frozenset({
    "dc43db77aaecd631", "8d7942a63fe01961",  # llama, olmo2, cohere
    "9caccf63c766d360", "b36c5f68c63a216a",  # mistral, phi3
    "418c5e92600c74c7", "3f83964719fc9919",  # qwen2, qwen3
    "b27ff59097dc33a5", "48d639bc30514d4b",  # gemma
    "c9d7ac36547a2189", "b186a85058db0e3e",  # gemma2
    "a5005a6aba53dcf6", "57e52c0c55ba6798",  # gemma3 (text)
    "86936ab043a8e9f9", "5caef64159cb3214",  # olmo3
    "6b2b218c5c0cedb5", "0ef67aa507577a35",  # cohere2
})  # fmt: skip

# Causal-LM forwards that are: backbone, lm_head, an optional logit_scale or final_logit_softcapping, loss_function.
HEAD = frozenset({
    "ecc52ba665599b10", "a6333d5e383abce3",  # llama, mistral, qwen2, qwen3, gemma, phi3, olmo2, olmo3
    "4c7e84ed765ad427", "ac18ed9467cfe8a1",  # gemma2, gemma3
    "1602072b7d74d977", "83773f7db730ec7e",  # cohere, cohere2
})  # fmt: skip
