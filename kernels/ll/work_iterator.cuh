// The order of work in a combine. Items are (row, step); a block has a contiguous part of them, so
// all blocks have the same load, and goes through it step by step: first step 0 of all its rows,
// then step 1 ...
//
//     steps     0  1  2  3  4  5  6        items 4 to 16 of rows of 7 steps, in this order:
//     row 0                 x  x  x           (1,0) (2,0) (1,1) (2,1) (1,2) (2,2) (1,3)
//     row 1     x  x  x  x  x  x  x           (0,4) (1,4) (0,5) (1,5) (0,6) (1,6)
//     row 2     x  x  x
//
// All ranks move through the steps at the same pace, so what a receiving warp waits for comes
// spread over the whole time, and the last to come is the last step alone.
#ifndef TREFOIL_KERNELS_LL_WORK_ITERATOR_CUH
#define TREFOIL_KERNELS_LL_WORK_ITERATOR_CUH

#include "kernels/common/divide.cuh"

struct WorkIterator {
  int first; // row of the first item
  int rows;  // rows that the part touches
  int from;  // the first row begins at this step
  int to;    // the last row ends before this step
  int count; // items

  struct Item {
    int row, step; // row counted from `first`
  };

  // Items [begin, end), not none, of rows of steps.n steps.
  static EP_BOTH WorkIterator of(int begin, int end, const Divisor &steps) {
    WorkIterator w;
    w.count = end - begin;
    w.first = (int)steps.quotient(begin);
    w.from = begin - w.first * (int)steps.n;
    const int last = (int)steps.quotient(end - 1);
    w.rows = last - w.first + 1;
    w.to = end - last * (int)steps.n;
    return w;
  }

  // The i-th item. Three stretches of steps, each with the same number of rows in all its steps.
  EP_BOTH Item at(int i) const {
    const int lo = min(from, to), hi = max(from, to), outer = rows - 1,
              inner = from < to ? rows : rows - 2;
    const int a = lo * outer, b = a + (hi - lo) * inner;
    const bool before = i < a, within = !before && i < b;
    const unsigned rest = before ? i : within ? i - a : i - b, n = within ? inner : outer;
    const unsigned q = n == 1 ? rest : rest / n;
    const int s = (before ? 0 : within ? lo : hi) + (int)q;
    return Item{(int)(rest - q * n) + (s < from), s};
  }

  // Items before step s.
  EP_BOTH int before(int s) const { return rows * s - min(s, from) - max(0, s - to); }
};

#endif
