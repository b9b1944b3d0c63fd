#include "trefoil/ref.h"
