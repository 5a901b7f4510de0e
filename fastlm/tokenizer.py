"""The tokenizer of a model, with a pad token of its own that has a row in the embedding table."""

from __future__ import annotations

import re
from typing import Any

import torch
from transformers import AutoTokenizer

__all__ = ["ensure_pad_token", "load_tokenizer"]

NEW_PAD_TOKEN = "<|pad|>"
_ROW_MULTIPLE = 64  # rows of a grown table: products with a head of an odd number of rows are slow on a GPU
_PAD_LIKE = re.compile(r"^[<\[]\|?_?(finetune_right_pad_id|right_pad|pad|padding|vision_pad)_?\|?[>\]]$", re.IGNORECASE)
_SPARE = re.compile(r"^[<\[]\|?_?(reserved|unused|dummy|placeholder|extra).*[>\]]$", re.IGNORECASE)


def load_tokenizer(name: str, **hub_keywords: Any) -> Any:
    """transformers' tokenizer for a folder or hub name; FileNotFoundError where there is none."""
    try:
        return AutoTokenizer.from_pretrained(name, **hub_keywords)
    except (OSError, ValueError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise FileNotFoundError(
            f"no tokenizer could be loaded from {name} ({reason}). Expected tokenizer.json or the files of a "
            "tokenizer that transformers knows; save one there with tokenizer.save_pretrained"
        ) from error


def ensure_pad_token(model: Any, tokenizer: Any) -> None:
    """Give tokenizer, model and generation configuration one pad token that has a row in the embedding table.

    One that is not the end of sequence and has a row is kept. Otherwise a spare token of the vocabulary is
    taken: one made for padding, a reserved one, or the unknown token. Where there is none, ``<|pad|>`` is
    added, and the embedding table grown if it is full: new rows are the mean of the others. One line says so.
    """
    rows = model.get_input_embeddings().weight.shape[0]
    pad = tokenizer.pad_token_id
    if pad is None or pad in _eos_ids(model, tokenizer) or pad >= rows:
        spare = _spare_token(model, tokenizer, rows)
        if spare is not None:
            print(f"fastlm: pad token {spare!r} (was {tokenizer.pad_token!r})")
            tokenizer.pad_token = spare
        else:
            _add_pad_token(model, tokenizer, rows)
    _agree(model, tokenizer.pad_token_id)


def _eos_ids(model: Any, tokenizer: Any) -> set[int]:
    """Every id that ends a text: the tokenizer's, the model's and the generation configuration's."""
    ids = {tokenizer.eos_token_id}
    for config in (model.config, model.config.get_text_config(), getattr(model, "generation_config", None)):
        declared = getattr(config, "eos_token_id", None)
        ids.update(declared if isinstance(declared, list | tuple) else [declared])
    return {number for number in ids if number is not None}


def _spare_token(model: Any, tokenizer: Any, rows: int) -> str | None:
    taken = _eos_ids(model, tokenizer) | {tokenizer.bos_token_id}
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    free = [token for token, number in vocabulary if number < rows and number not in taken]
    for pattern in (_PAD_LIKE, _SPARE):
        for token in free:
            if pattern.match(token):
                return token
    return tokenizer.unk_token if tokenizer.unk_token in free else None


def _add_pad_token(model: Any, tokenizer: Any, rows: int) -> None:
    before = tokenizer.pad_token
    tokenizer.add_special_tokens({"pad_token": NEW_PAD_TOKEN})
    if tokenizer.pad_token_id < rows:
        print(f"fastlm: new pad token {NEW_PAD_TOKEN!r}, id {tokenizer.pad_token_id} (was {before!r})")
        return
    needed = max(len(tokenizer), tokenizer.pad_token_id + 1)
    with torch.no_grad():
        model.resize_token_embeddings(needed, pad_to_multiple_of=_ROW_MULTIPLE, mean_resizing=False)
        for module in (model.get_input_embeddings(), model.get_output_embeddings()):
            if module is not None:
                table = module.weight
                table[rows:] = table[:rows].mean(0, dtype=torch.float32).to(table.dtype)
    grown = model.get_input_embeddings().weight.shape[0]
    print(
        f"fastlm: new pad token {NEW_PAD_TOKEN!r}, id {tokenizer.pad_token_id} (was {before!r}); embedding "
        f"table grown from {rows} to {grown} rows"
    )


def _agree(model: Any, pad: int) -> None:
    for config in (model.config, model.config.get_text_config(), getattr(model, "generation_config", None)):
        if config is not None:
            config.pad_token_id = pad
    embedding = model.get_input_embeddings()
    if getattr(embedding, "padding_idx", None) is not None:  # the row without a gradient
        embedding.padding_idx = pad
