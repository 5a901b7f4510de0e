"""The one place from which the trainer talks to the user."""

from dataclasses import dataclass, field

__all__ = ["Voice"]


@dataclass
class Voice:
    """Prints ``fastlm: ...`` lines on stdout, each line once, and only on the process that speaks."""

    speaks: bool = True
    said: set[str] = field(default_factory=set)

    def say(self, line: str) -> None:
        if self.speaks and line not in self.said:
            print(f"fastlm: {line}", flush=True)
        self.said.add(line)
