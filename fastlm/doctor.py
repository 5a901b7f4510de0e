"""``fastlm doctor``: what is installed, what this machine can do, and whether that meets the requirements."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from packaging.requirements import Requirement

from .console import table

__all__ = ["Checked", "check_requirements", "device_facts", "run"]


@dataclass(frozen=True)
class Checked:
    """One line per requirement of fastlm that applies to this platform."""

    name: str
    installed: str | None
    needed: str
    ok: bool


def check_requirements(required: list[str] | None = None) -> list[Checked]:
    """Compare installed versions with the requirements of fastlm's own package metadata, extras left out."""
    lines = (metadata.requires("fastlm") or []) if required is None else required
    checked = []
    for requirement in map(Requirement, lines):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            installed: str | None = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            installed = None
        ok = installed is not None and requirement.specifier.contains(installed, prereleases=True)
        checked.append(Checked(requirement.name, installed, str(requirement.specifier) or "any", ok))
    return checked


def device_facts() -> dict[str, Any]:
    """GPU (None without one), its capability, bf16, and what may compute attention over packed samples.

    "attention" maps every backend to None, or to why it cannot serve a head size of 128 here.
    """
    import torch

    from .kernels.attention import BACKENDS, backend_refusal

    on_gpu = torch.cuda.is_available()
    device = "cuda" if on_gpu else "cpu"
    capability = torch.cuda.get_device_capability() if on_gpu else None
    bf16 = on_gpu and torch.cuda.is_bf16_supported(including_emulation=False)
    dtype = torch.bfloat16 if bf16 else torch.float16 if on_gpu else torch.float32
    return {
        "gpu": torch.cuda.get_device_name() if on_gpu else None,
        "capability": ".".join(map(str, capability)) if capability else None,
        "bf16": bf16,
        "attention": {name: backend_refusal(name, device, capability, dtype, 128) for name in BACKENDS},
    }


def run() -> dict[str, Any]:
    """Print one table; returns the object that ``--json`` prints last, whose "ok" decides the exit code."""
    requirements = check_requirements()
    torch_fits = all(line.ok for line in requirements if line.name == "torch")
    devices = device_facts() if torch_fits else {}
    rows = [("what", "here", "needed"), ("python", platform.python_version(), "")]
    for line in requirements:
        needed = line.needed if line.ok else f"{line.needed}  <- out of range"
        rows.append((line.name, line.installed or "missing", needed))
    for name, value in devices.items():
        if name != "attention":
            rows.append((name, {None: "none", True: "yes", False: "no"}.get(value, value), ""))
    for name, refusal in devices.get("attention", {}).items():
        rows.append((f"attention: {name}", "yes" if refusal is None else f"no: {refusal}", ""))
    print(table(rows))
    return {
        "ok": all(line.ok for line in requirements),
        "python": platform.python_version(),
        "requirements": {
            line.name: {"installed": line.installed, "needed": line.needed, "ok": line.ok} for line in requirements
        },
        **devices,
    }
