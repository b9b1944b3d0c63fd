"""Command lines that are wrong get one sentence, as those of the verbs in C do."""

from __future__ import annotations

import argparse
from typing import NoReturn


class SentenceParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")
