// A library written in C++ that lets an exception out.
#include <stdexcept>

extern "C" void faultThrow(void);

extern "C" void faultThrow(void) {
  throw std::runtime_error("nobody catches this");
}
