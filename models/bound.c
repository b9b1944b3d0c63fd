#include "trefoil/shape.h"
