/* SIGINT and SIGTERM while a verb has children: it ends them, says what it has so far, and then dies of the
 * signal, as shells and launchers expect. */
#include "cli/cli.h"

#include <stdio.h>
#include <stdlib.h>

static volatile sig_atomic_t came;

static void onSignal(int number) {
  came = number;
}

const volatile sig_atomic_t *cliInterrupts(void) {
  /* the second one ends it at once */
  struct sigaction action = {.sa_handler = onSignal, .sa_flags = (int)SA_RESETHAND};
  sigemptyset(&action.sa_mask);
  sigaction(SIGINT, &action, NULL);
  sigaction(SIGTERM, &action, NULL);
  return &came;
}

void cliEndInterrupted(void) {
  if (!came) return;
  fflush(NULL);
  signal(came, SIG_DFL);
  raise(came);
}
