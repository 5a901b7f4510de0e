"""The public names, and that resolving them is all that `import fastlm` leaves to do."""

import pytest

import fastlm

NAMES = {
    "FastLanguageModel", "FastModel", "PackingCollator", "PaddingFreeCollator", "SequenceBoundaries",
    "is_bfloat16_supported", "pack", "patch", "plan", "report", "unpatch", "__version__",
}  # fmt: skip


def test_public_names_are_pinned():
    assert set(fastlm.__all__) == NAMES == set(dir(fastlm))
    assert all(getattr(fastlm, name) is not None for name in NAMES)
    assert fastlm.FastModel is fastlm.FastLanguageModel


def test_unknown_name_says_what_there_is():
    with pytest.raises(AttributeError, match="FastLanguageModel"):
        _ = fastlm.FastLanguageModl
