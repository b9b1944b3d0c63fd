/* Top-K with error feedback: what is not sent is added to the next step's gradient. */
#include "ref/grad.h"

/* The key of the k-th largest element; *ties: how many elements with that key are among the k. */
static uint32_t smallestSent(const float *x, int64_t count, int64_t k, int64_t *ties) {
  uint64_t key = 0;
  for (int shift = 24; shift >= 0; shift -= 8) {
    int64_t numWith[256] = {0};
    for (int64_t i = 0; i < count; i++) {
      uint64_t other = epGradKey(x[i]);
      if (other >> (shift + 8) == key >> (shift + 8)) numWith[other >> shift & 255]++;
    }
    int digit = 255;
    for (; numWith[digit] < k; digit--) k -= numWith[digit];
    key |= (uint64_t)digit << shift;
  }
  *ties = k;
  return (uint32_t)key;
}

/* Adds the gradient to the error. */
static void accumulate(trefoil_dtype_t dtype, const ep_grad_group_t *g, const void *grad,
                       float *state) {
  for (int64_t i = g->first; i < g->first + g->count; i++)
    state[i] = epCanonical(epGradLoad(dtype, grad, i) + state[i]);
}

/* The element as it is sent, in the gradient's format; the rounding stays behind as error. */
static void sendOne(trefoil_dtype_t dtype, float *error, void *update, int64_t i) {
  epGradStore(dtype, update, i, error[i]);
  float sent = epGradLoad(dtype, update, i);
  error[i] = isfinite(sent) ? error[i] - sent : 0;
}

static void sendLargest(const trefoil_grad_config_t *c, const ep_grad_group_t *g, float *error,
                        void *update) {
  int64_t ties;
  uint32_t least = smallestSent(error + g->first, g->count, epGradNumSent(c, g->count), &ties);
  for (int64_t i = g->first; i < g->first + g->count; i++) {
    uint32_t key = epGradKey(error[i]);
    if (key > least || (key == least && ties-- > 0))
      sendOne(c->dtype, error, update, i);
    else
      epGradStore(c->dtype, update, i, 0);
  }
}

void epGradStepTopk(const trefoil_grad_config_t *c, const ep_grad_group_t *g,
                    const trefoil_grad_workers_t *w) {
  for (int r = 0; r < c->numWorkers; r++) {
    accumulate(c->dtype, g, w->grads[r], w->states[r]);
    sendLargest(c, g, w->states[r], w->updates[r]);
  }
  epGradMeanOf(c, g, (const void *const *)w->updates, w->updates);
}
