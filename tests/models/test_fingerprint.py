"""Known code is recognised with the functions that it names; a change anywhere in them is unknown code."""

import pytest
import torch
from torch import nn
from transformers.models.ernie4_5.modeling_ernie4_5 import Ernie4_5Attention
from transformers.models.glm.modeling_glm import GlmAttention
from transformers.models.llama import modeling_llama

from fastlm.models import forms
from fastlm.models.fingerprint import fingerprint


def test_same_forward_with_another_rotation_is_another_fingerprint():
    """glm and ernie4_5 share llama's attention forward to the letter, and rotate interleaved pairs."""
    llama = fingerprint(modeling_llama.LlamaAttention)
    assert llama in forms.ATTENTION
    for other in (GlmAttention, Ernie4_5Attention):
        assert fingerprint(other, False) == fingerprint(modeling_llama.LlamaAttention, False)
        assert fingerprint(other) not in forms.ATTENTION


def test_annotations_docstrings_and_decorators_do_not_count():
    class Plain(nn.Module):
        def forward(self, x):
            return x * 2

    class Dressed(nn.Module):
        @torch.no_grad()
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """Twice x."""
            return x * 2

    class Other(nn.Module):
        def forward(self, x):
            return x * 3

    assert fingerprint(Plain) == fingerprint(Dressed) != fingerprint(Other)


def test_code_without_source_has_no_fingerprint():
    namespace = {}
    exec("def forward(self, x):\n    return x", namespace)
    assert fingerprint(type("Generated", (nn.Module,), {"forward": namespace["forward"]})) is None


@pytest.mark.parametrize("module_class", [nn.Identity, nn.RMSNorm])
def test_unknown_code_is_in_no_table(module_class):
    hashed = fingerprint(module_class)
    assert all(hashed not in table for table in (forms.NORM, forms.MLP, forms.ATTENTION, forms.HEAD))
