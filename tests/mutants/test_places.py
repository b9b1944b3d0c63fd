"""Where tools/mutate finds a mutant's text: in its function, whether a file's or a struct's."""

from __future__ import annotations

import sys
import unittest
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

TOOLS = Path(__file__).resolve().parents[2] / "tools"
sys.path.insert(0, str(TOOLS))
loader = SourceFileLoader("mutate", str(TOOLS / "mutate"))
spec = spec_from_loader("mutate", loader)
assert spec
mutate = module_from_spec(spec)
sys.modules["mutate"] = mutate
loader.exec_module(mutate)

SOURCE = """static const int sizes[] = {
    1,
};
struct Sender {
  void first(int n) {
    if (n > 1) {
      put(n);
    }
    put(n  +  1);
  }
private:
  int one() const { return 1; }
  int later() const {
    return 1;
  }
};
struct Receiver {
  int one() const { return 1 + total; }
};
static void put(int n) {
  total += n;
}
"""


def lines(function: str, old: str) -> list[int]:
    """The lines of SOURCE, from 1, on which `old` stands in that function."""
    m = mutate.Mutant("m", "f", "r", "w", old, "", [], function)
    return [SOURCE[:begin].count("\n") + 1 for begin, _ in m.places(SOURCE)]


class Places(unittest.TestCase):
    def test_function_of_the_file(self) -> None:
        self.assertEqual(lines("put", "total += n"), [21])
        self.assertEqual(lines("sizes", "1"), [2])

    def test_function_of_a_struct(self) -> None:
        self.assertEqual(lines("first", "put(n)"), [7])
        self.assertEqual(lines("later", "return 1;"), [14])

    def test_functions_of_one_name(self) -> None:
        self.assertEqual(lines("one", "return 1;"), [12])
        self.assertEqual(lines("one", "return 1"), [12, 18])

    def test_white_space_does_not_count_and_words_are_whole(self) -> None:
        self.assertEqual(lines("first", "put( n+1 )"), [9])
        self.assertEqual(lines("", "otal"), [])

    def test_no_such_function(self) -> None:
        self.assertEqual(lines("gone", "1"), [])
        self.assertEqual(lines("if", "put(n)"), [])


if __name__ == "__main__":
    unittest.main()
