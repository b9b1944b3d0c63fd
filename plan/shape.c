#include "trefoil/shape.h"

#include "plan/error.h"
