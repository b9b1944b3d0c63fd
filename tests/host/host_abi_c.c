/* The facts hold in C. */
#include "abi_facts.h"
