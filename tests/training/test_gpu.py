"""On a GPU: a training step of the real trainer, packed, in bf16, that never makes the GPU wait."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import SFTConfig, SFTTrainer

import fastlm
from tests.tiny import tiny_model, tiny_tokenizer

WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cuStreamSynchronize")


@pytest.mark.gpu
@pytest.mark.parametrize("packing", [False, True], ids=["padding_free", "packed"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3"])
def test_a_step_makes_the_gpu_wait_for_nothing(family, packing, tmp_path):
    """No synchronising call among the runtime's, and none that torch's own check would refuse, outside logging."""
    from peft import LoraConfig, get_peft_model

    model = tiny_model(family, dtype=torch.bfloat16, hidden_size=128, head_dim=32, sliding_window=None).cuda()
    fastlm.patch(model)
    model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(3, 260, (8 + i % 23,), generator=generator).tolist() for i in range(160)]
    config = SFTConfig(
        output_dir=str(tmp_path), per_device_train_batch_size=4, max_steps=8, max_length=64, packing=packing, bf16=True,
        gradient_checkpointing=False, logging_steps=100, report_to="none", save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = SFTTrainer(
        model=model,
        processing_class=tiny_tokenizer(),
        train_dataset=Dataset.from_dict({"input_ids": rows}),
        args=config,
    )
    step, seen, count = trainer.training_step, [], [0]

    def watched(*args, **kwargs):
        count[0] += 1
        if count[0] != 5:
            return step(*args, **kwargs)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                loss = step(*args, **kwargs)
                torch.cuda.set_sync_debug_mode("default")
        finally:
            torch.cuda.set_sync_debug_mode("default")
        seen.extend(event.name for event in profile.events() if event.name in WAITS)
        return loss

    trainer.training_step = watched
    trainer.train()
    assert count[0] == 8
    assert seen.count("cudaDeviceSynchronize") <= 1  # the profiler's own, when it stops
    assert [name for name in seen if name != "cudaDeviceSynchronize"] == []


class Watch(TrainerCallback):
    """From the beginning of the fifth optimiser step to that of the sixth: nothing may wait."""

    def __init__(self) -> None:
        self.profile: Any = None
        self.seen: list[str] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 4:
            torch.cuda.synchronize()
            self.profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            self.profile.__enter__()
            torch.cuda.set_sync_debug_mode("error")
        elif state.global_step == 5:
            torch.cuda.set_sync_debug_mode("default")
            self.profile.__exit__(None, None, None)
            self.seen = [event.name for event in self.profile.events() if event.name in WAITS]


@pytest.mark.gpu
@pytest.mark.parametrize("optim", ["adamw_8bit", "paged_adamw_8bit", "adamw_torch_fused"])
@pytest.mark.parametrize("graphs", [False, True])
def test_a_whole_optimiser_step_waits_for_nothing(graphs, optim, tmp_path):
    """Batch, loss, the choice of activations, backward, clipping, bitsandbytes' update, schedule, zero_grad."""
    model, tokenizer = saved_and_loaded(tmp_path / "model", cuda_graphs=graphs)
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(3, 260, (8 + i % 23,), generator=generator).tolist() for i in range(160)]
    watch = Watch()
    config = SFTConfig(
        output_dir=str(tmp_path), per_device_train_batch_size=4, max_steps=8, max_length=64, bf16=True, optim=optim,
        gradient_accumulation_steps=2, max_grad_norm=1.0, logging_steps=100, report_to="none", save_strategy="no",
        disable_tqdm=True,
    )  # fmt: skip
    data = Dataset.from_dict({"input_ids": rows})
    trainer = SFTTrainer(
        model=model, processing_class=tokenizer, train_dataset=data, args=config, callbacks=[watch]
    )  # fmt: skip
    try:
        trainer.train()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    # the profiler's own, when it stops, and the one that paged states need
    assert watch.seen.count("cudaDeviceSynchronize") <= 1 + optim.startswith("paged")
    assert [name for name in watch.seen if name != "cudaDeviceSynchronize"] == []


def saved_and_loaded(folder: Path, **options: Any) -> tuple[Any, Any]:
    """A tiny model with adapters from the loader, so that "fastlm" decides what its steps keep."""
    tiny_model("llama", dtype=torch.bfloat16, hidden_size=128, head_dim=32).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    model, tokenizer = fastlm.FastLanguageModel.from_pretrained(str(folder), max_seq_length=64, **options)
    return fastlm.FastLanguageModel.get_peft_model(model, r=4, lora_alpha=4), tokenizer
