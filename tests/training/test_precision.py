"""The model's dtype decides the autocast; flags that contradict it are corrected, or refused."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import fastlm
from fastlm.training.precision import hold_float32_masters, restore_float32_masters, settle_precision

from . import runs

fastlm.patch  # noqa: B018 (first use installs the wrappers)

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
CASES: list[tuple[str, Any, dict[str, bool], str, int]] = [
    # device, model, flags given by the user (TRL's default is bf16), mixed precision, lines said
    ("cpu", F32, {}, "no", 1),
    ("cpu", F32, {"bf16": True}, "bf16", 0),
    ("cpu", BF16, {}, "bf16", 0),
    ("cpu", BF16, {"fp16": True}, "bf16", 1),
    ("cpu", BF16, {"bf16": False}, "no", 0),
    ("cpu", F16, {}, "no", 1),
    ("cuda", F32, {}, "bf16", 0),
    ("cuda", F32, {"fp16": True}, "fp16", 0),
    ("cuda", BF16, {}, "bf16", 0),
    ("cuda", BF16, {"fp16": True}, "bf16", 1),
    ("cuda", F16, {}, "fp16", 1),
    ("cuda", F16, {"bf16": True}, "fp16", 1),
    ("cuda", F16, {"fp16": True}, "fp16", 0),
    ("cuda", F16, {"bf16": False}, "no", 0),
]


@pytest.mark.parametrize("device, dtype, flags, expected, lines", CASES)
def test_k_no_bf16(device: str, dtype: Any, flags: dict[str, bool], expected: str, lines: int) -> None:
    fp16 = flags.get("fp16", False)
    bf16 = flags.get("bf16", not fp16)
    config = SimpleNamespace(bf16=bf16, fp16=fp16, mixed_precision="bf16" if bf16 else "fp16" if fp16 else "no")
    said: list[str] = []
    settle_precision(config, dtype, frozenset(flags), said.append, device_type=device)
    assert (config.mixed_precision, config.bf16, config.fp16) == (
        expected,
        expected == "bf16",
        expected == "fp16",
    )
    assert len(said) == lines


def test_k_no_bf16_refused_by_the_machine() -> None:
    """TRL's default was refused, so bf16 is off already: float16 goes on in fp16, float32 stays float32."""
    for dtype, expected in ((F16, "fp16"), (F32, "no")):
        config = SimpleNamespace(bf16=False, fp16=False, mixed_precision="no")
        said: list[str] = []
        settle_precision(config, dtype, frozenset(), said.append, device_type="cuda", bf16_refused=True)
        assert config.mixed_precision == expected and len(said) == 1


@pytest.mark.parametrize("dtype", [F32, F16])
def test_k_no_bf16_fp16_autocast_on_a_cpu_is_refused(dtype: Any, tmp_path: Any) -> None:
    with pytest.raises(ValueError, match="fp16=True needs a GPU"):
        runs.trainer(runs.model(dtype=dtype), runs.rows(), runs.config(tmp_path, fp16=True))


@pytest.mark.parametrize(
    "dtype, given, expected", [(F32, {}, "no"), (BF16, {}, "bf16"), (BF16, {"fp16": True}, "bf16")]
)
def test_k_no_bf16_reaches_the_accelerator(dtype: Any, given: Any, expected: str, tmp_path: Any, capsys: Any) -> None:
    """The trainer's flags, its accelerator and its autocast agree; forward, backward and generate run."""
    model = runs.model(dtype=dtype)
    capsys.readouterr()
    trainer, gradients = runs.train(model, runs.rows(), runs.config(tmp_path, max_steps=2, **given))
    assert trainer.accelerator.mixed_precision == trainer.args.mixed_precision == expected
    assert (trainer.args.bf16, trainer.args.fp16) == (expected == "bf16", False)
    assert capsys.readouterr().out.count("so training runs with") == (expected == "no" or bool(given))
    assert all(bool(tensor.isfinite().all()) for step in gradients for tensor in step.values())
    assert trainer.model.generate(torch.tensor([[5, 6]]), max_new_tokens=2, min_new_tokens=2).shape == (1, 4)


def test_masters_of_float16_are_the_values_from_before_trl_rounded_them() -> None:
    module = nn.Linear(3, 2)
    module.bias.requires_grad_(False)
    exact = module.weight.data.clone()
    held = hold_float32_masters(module)
    assert held.keys() == {"weight"}
    module.weight.data = module.weight.data.to(torch.bfloat16)
    parameter = module.weight
    restore_float32_masters(module, held)
    assert module.weight is parameter and torch.equal(module.weight.data, exact)
