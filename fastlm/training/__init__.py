"""One training step, seen whole: how fastlm meets transformers' Trainer and TRL's SFTTrainer."""

__all__: list[str] = []
