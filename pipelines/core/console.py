"""The console on stderr, for training and whatever else imports rich anyway."""

from __future__ import annotations

from rich.console import Console

console = Console(stderr=True, markup=False, highlight=False)
