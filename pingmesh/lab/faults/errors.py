"""What can be wrong with a fault that a user asks for."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class FaultError(ValueError):
    """A fault that cannot be injected or cleared; the message is one sentence for the user."""


class UnknownNameError(FaultError):
    """A name that the lab's topology does not have, with what comes near it."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        self.kind = kind
        self.name = name
        names = sorted(known)
        self.near = difflib.get_close_matches(name, names, 3, 0.5)
        if self.near:
            hint = f"did you mean {' or '.join(self.near)}?"
        elif names:
            hint = f"there is {', '.join(names[:8])}{' ...' if len(names) > 8 else ''}."
        else:
            hint = "there is none."
        super().__init__(f"The lab has no {kind} {name!r}; {hint}")
