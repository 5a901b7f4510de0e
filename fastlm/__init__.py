"""Fast fine-tuning of Hugging Face language models, with the numbers of the stock model.

Nothing happens on import: every public name is resolved on first use, so that ``import fastlm`` loads neither
torch nor transformers nor trl and changes nothing in any other module.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .loader import FastLanguageModel as FastLanguageModel
    from .models.patch import patch as patch
    from .models.patch import report as report
    from .models.patch import unpatch as unpatch
    from .packing.boundaries import SequenceBoundaries as SequenceBoundaries
    from .packing.collators import PackingCollator as PackingCollator
    from .packing.collators import PaddingFreeCollator as PaddingFreeCollator
    from .packing.packer import pack as pack
    from .planner import plan as plan

    FastModel = FastLanguageModel

__version__ = "0.1.0"

# public name -> (module, attribute there, whether its first use wraps the trainer classes)
_PUBLIC: dict[str, tuple[str, str, bool]] = {
    "FastLanguageModel": ("fastlm.loader", "FastLanguageModel", True),
    "FastModel": ("fastlm.loader", "FastLanguageModel", True),
    "PackingCollator": ("fastlm.packing.collators", "PackingCollator", False),
    "PaddingFreeCollator": ("fastlm.packing.collators", "PaddingFreeCollator", False),
    "SequenceBoundaries": ("fastlm.packing.boundaries", "SequenceBoundaries", False),
    "is_bfloat16_supported": ("fastlm.loader", "is_bfloat16_supported", False),
    "pack": ("fastlm.packing.packer", "pack", False),
    "patch": ("fastlm.models.patch", "patch", True),
    "plan": ("fastlm.planner", "plan", False),
    "report": ("fastlm.models.patch", "report", False),
    "unpatch": ("fastlm.models.patch", "unpatch", False),
}
__all__ = [*_PUBLIC, "__version__"]  # noqa: PLE0604 (names are literal keys above)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'fastlm' has no attribute {name!r}; it has {', '.join(sorted(_PUBLIC))}")
    module, attribute, wraps_trainers = _PUBLIC[name]
    value = getattr(import_module(module), attribute)
    if wraps_trainers:
        import_module("fastlm.training.sft").install()
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
