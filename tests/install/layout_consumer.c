/* Ten lines over libtrefoil: how many slots does rank 1 of two receive? */
#include <stdio.h>
#include <trefoil/ref.h>

int main(void) {
  int32_t first[] = {0, 3},
          second[] = {2, 3, 1, -1}; /* rank 0: one token, rank 1: two; top-2 of 4 */
  const int32_t *idx[] = {first, second};
  int64_t tokens[] = {1, 2};
  trefoil_case_t c = {
      {{.numRanks = 2, .ranksPerNode = 2, .numExperts = 4, .topk = 2, .maxTokens = 2}, tokens, idx},
      TREFOIL_HT_FLAT,
      .width = 16,
      .dtype = TREFOIL_BF16};
  if (trefoilCaseCheck(&c) != TREFOIL_OK) return puts(trefoilLastError()), 1;
  printf("slots %lld\n", (long long)trefoilRefNumSlots(&c, 1));
  return trefoilRefNumSlots(&c, 1) != 2; /* token 0 of each rank has expert 2 or 3; both once */
}
