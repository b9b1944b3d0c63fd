"""A rank of test_deep_ep.test_over_mpi, started by mpirun: all methods over mpi4py."""

from mpi4py import MPI

from test_deep_ep import Buffer, everything

comm = MPI.COMM_WORLD
buffer = Buffer(None, low_latency_mode=True, comm=comm)
everything(comm.rank, comm.size, buffer)
buffer.destroy()
comm.Barrier()
if comm.rank == 0:
    print(f"{comm.size} ranks agree")
