# What tests need besides the code under test; included by TrefoilComponents.

# The kernels on the CPU (tests/emulator): fibers of Boost.Context. ThreadSanitizer does not follow them.
if(TREFOIL_SANITIZE MATCHES "thread" AND TREFOIL_WITH_EMULATOR STREQUAL "AUTO")
  set(TREFOIL_WITH_EMULATOR OFF)
endif()
if(NOT TREFOIL_WITH_EMULATOR STREQUAL "OFF")
  find_package(Boost 1.70 QUIET COMPONENTS context)
  if(TARGET Boost::context)
    trefoil_links(BOOST_CONTEXT_WORKS CXX Boost::context "#include <boost/context/fiber.hpp>
#include <utility>
int main() {
  boost::context::fiber f([](boost::context::fiber &&back) { return std::move(back); });
  f = std::move(f).resume();
}")
  endif()
endif()
trefoil_decide(EMULATOR "${BOOST_CONTEXT_WORKS}" "libboost-context-dev")

# Ranks as processes under mpirun. MPI's own leaks and races are not ours, so not under sanitizers.
if(TREFOIL_SANITIZE AND TREFOIL_WITH_MPI_TESTS STREQUAL "AUTO")
  set(TREFOIL_WITH_MPI_TESTS OFF)
endif()
if(NOT TREFOIL_WITH_MPI_TESTS STREQUAL "OFF")
  find_package(MPI QUIET COMPONENTS C)
  if(MPI_C_FOUND AND MPIEXEC_EXECUTABLE)
    set(mpi_works ON)
  endif()
endif()
trefoil_decide(MPI_TESTS "${mpi_works}" "libopenmpi-dev and openmpi-bin")

# The explorations of protocols: xxHash.
trefoil_module(XXHASH libxxhash "#include <xxhash.h>
int main(void) { return XXH3_64bits(0, 0) == 0; }")
trefoil_decide(PROTOCOL_TESTS "${XXHASH_WORKS}" "libxxhash-dev")

# The oracle, the Python package, the checks of the tree.
find_package(Python3 3.10 QUIET COMPONENTS Interpreter)
trefoil_decide(PYTHON_TESTS "${Python3_FOUND}" "Python 3.10 or newer")
