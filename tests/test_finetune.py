"""What fine-tuning from the command line measures, and what Ctrl-C leaves behind."""

import pytest
import torch
from peft import PeftModel
from transformers import TrainerCallback

import fastlm
from fastlm.console import Interrupted
from fastlm.finetune import answer, make_trainer, padding_share, save_adapter, train
from tests.tiny import tiny_model, tiny_tokenizer

ROWS = [{"prompt": f"say {i}: ", "completion": "x" * (i % 5 + 1)} for i in range(8)]
PROBE = torch.tensor([[5, 80, 33, 120, 9]])


@pytest.fixture
def tiny(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path / "tiny")
    tiny_tokenizer().save_pretrained(tmp_path / "tiny")
    model, tokenizer = fastlm.FastLanguageModel.from_pretrained(
        str(tmp_path / "tiny"), max_seq_length=64, load_in_4bit=False
    )
    return fastlm.FastLanguageModel.get_peft_model(model, r=4, use_gradient_checkpointing=False), tokenizer


def trainer_of(tiny, tmp_path, **more):
    given = {"max_length": 64, "batch_size": 2, "learning_rate": 1e-2, "logging_steps": 1, **more}
    return make_trainer(*tiny, ROWS, None, output_dir=str(tmp_path / "out"), **given)


def logits(model):
    with torch.no_grad():
        return model(input_ids=PROBE).logits


def test_padding_share_counts_what_the_longest_sample_of_a_batch_costs():
    assert padding_share([[2, 4], [3, 3]]) == pytest.approx(1 - 12 / 14)
    assert padding_share([[5]]) == 0 == padding_share([])
    assert padding_share([[1, 1, 1, 10]]) == pytest.approx(1 - 13 / 40)


def test_training_is_measured(tiny, tmp_path):
    trainer = trainer_of(tiny, tmp_path, max_steps=6)
    collator = trainer.data_collator
    measured = train(trainer, tmp_path / "adapter", tiny[1])
    assert (measured.steps, len(measured.losses)) == (6, 6)
    assert measured.losses[-1] < measured.losses[0]
    assert measured.tokens_per_second > 0
    lengths = [len(row["prompt"]) + len(row["completion"]) + 1 for row in ROWS]  # bytes and eos
    assert 0 < measured.padding_avoided < 1 - min(lengths) / max(lengths)
    assert trainer.data_collator is collator
    assert not (tmp_path / "adapter").exists()


def test_packed_rows_are_measured_by_their_samples(tiny, tmp_path):
    measured = train(trainer_of(tiny, tmp_path, max_steps=2, packing=True, batch_size=1), tmp_path / "adapter", tiny[1])
    assert measured.steps == 2
    assert 0 < measured.padding_avoided < 0.4


class _Interrupt(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 2:
            raise KeyboardInterrupt


def test_ctrl_c_leaves_an_adapter_that_loads(tiny, tmp_path):
    trainer = trainer_of(tiny, tmp_path, max_steps=6)
    trainer.add_callback(_Interrupt())
    before = logits(tiny[0])
    with pytest.raises(Interrupted, match=r"after 2 of 6 steps.*adapter"):
        train(trainer, tmp_path / "out" / "adapter", tiny[1])
    again = PeftModel.from_pretrained(tiny_model("llama"), tmp_path / "out" / "adapter")
    live = logits(tiny[0].eval())
    torch.testing.assert_close(logits(again), live, rtol=1e-5, atol=1e-5)
    assert (live - before).abs().max() > 1e-3
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["adapter"]


def test_a_failed_save_keeps_the_older_adapter(tiny, tmp_path):
    model, tokenizer = tiny
    folder = tmp_path / "out" / "adapter"
    folder.parent.mkdir()
    save_adapter(model, tokenizer, folder)
    (folder / "note").touch()

    class FullDisk:
        def save_pretrained(self, path):
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        save_adapter(model, FullDisk(), folder)
    assert (folder / "note").exists() and (folder / "adapter_model.safetensors").exists()
    save_adapter(model, tokenizer, folder)  # a whole save takes the older one's place
    assert not (folder / "note").exists() and (folder / "adapter_model.safetensors").exists()
    assert [path.name for path in folder.parent.iterdir()] == ["adapter"]


def test_an_answer_leaves_the_model_ready_to_train(tiny):
    model, tokenizer = tiny
    model.train()
    messages = [{"role": "user", "content": "hello"}]
    text = answer(model, tokenizer, messages, max_new_tokens=5)
    assert text == answer(model, tokenizer, messages, max_new_tokens=5)
    assert isinstance(answer(model, tokenizer, "hello", max_new_tokens=5), str)
    assert model.training
