// The order of work in a combine, on the host: every item of a part once, step by step, and division by
// multiplication.
#include "kernels/ll/work_iterator.cuh"

#include <cstdint>
#include <cstdio>
#include <vector>

namespace {

int failures;

void expect(bool ok, const char *what, long long a, long long b, long long c) {
  if (ok) return;
  if (failures++ < 10) printf("FAILED: %s (%lld, %lld, %lld)\n", what, a, b, c);
}

// Items [begin, end) of rows of `steps`.
void workOfShare(int begin, int end, int steps) {
  const WorkIterator w = WorkIterator::of(begin, end, Divisor::of((unsigned)steps));
  std::vector<char> seen(end - begin, 0);
  int last = -1;
  expect(w.count == end - begin, "count", begin, end, steps);
  for (int i = 0; i < w.count; i++) {
    const WorkIterator::Item u = w.at(i);
    const long long item = (long long)(w.first + u.row) * steps + u.step - begin;
    const bool inside = u.row >= 0 && u.row < w.rows && u.step >= 0 && u.step < steps &&
                        item >= 0 && item < w.count;
    expect(inside, "item outside its part", begin, end, steps);
    if (!inside) return;
    expect(!seen[item], "item twice", begin, end, steps);
    seen[item] = 1;
    expect(u.step >= last, "steps go back", begin, end, steps);
    last = u.step;
    // `before` splits the order at every step.
    expect((i < w.before(u.step + 1)) && i >= w.before(u.step), "before", begin, end, steps);
  }
}

void divide(unsigned x, unsigned n) {
  const Divisor d = Divisor::of(n);
  expect(d.quotient(x) == x / n, "quotient", x, n, d.quotient(x));
  if ((uint64_t)x * n >> 31 == 0) {
    expect(d.smallQuotient(x) == x / n, "smallQuotient", x, n, d.smallQuotient(x));
  }
}

} // namespace

int main() {
  for (int steps = 1; steps <= 7; steps++) {
    for (int begin = 0; begin <= 3 * steps; begin++) {
      for (int end = begin + 1; end <= begin + 5 * steps + 1; end++) workOfShare(begin, end, steps);
    }
  }
  workOfShare(29 * 6 + 3, 29 * 12 + 20, 29);
  const unsigned edges[] = {0, 1, 2, 3, 131, 132, 46340, 46341, 0x7ffffffe, 0x7fffffff};
  uint64_t s = 7;
  for (int i = 0; i < 200000; i++) {
    s = s * 6364136223846793005ull + 1442695040888963407ull;
    const unsigned n = (unsigned)(s >> 34) >> (s >> 28 & 31), x = (unsigned)(s >> 20) >> 1;
    divide(x, n ? n : 1);
    divide(edges[i % 10], n ? n : 1);
    divide(x, edges[1 + i % 9]);
    divide((n & 0xffffff) * 127u, 127u);
    divide((n & 0xffffff) * 127u + 126u, 127u);
    divide(x & 0xffff, (n & 0x7fff) + 1);
  }
  printf("%d failures\n", failures);
  return failures != 0;
}
