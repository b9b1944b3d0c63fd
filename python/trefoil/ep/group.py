"""Groups and handles: dispatch and combine, with the names and signatures of nccl.ep."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from trefoil.ep._load import c
from trefoil.ep.comm import GROUP, HANDLE, Communicator, Scoped
from trefoil.ep.configs import (
    CombineConfig,
    CombineInputs,
    CombineOutputs,
    DispatchConfig,
    DispatchInputs,
    DispatchOutputs,
    GroupConfig,
    HandleConfig,
    LayoutInfo,
    Preflight,
)
from trefoil.ep.enums import DataType, Layout
from trefoil.ep.tensor import Tensor

_dispatch, _combine, _complete, _update = c.dispatch, c.combine, c.complete, c.update


class Group(Scoped, c.Object):
    """Ranks, limits and buffers. create, destroy and the making of handles may be collective.

    Not for two threads at once. As a context manager it is destroyed at the end, unless an
    exception is on its way: other ranks may then not come to destroy it.
    """

    __slots__ = ("__weakref__", "_comm", "_like")
    _comm: Communicator | None
    _like: tuple[Layout, int, HandleConfig | None] | None  # of a handle whose buffers are there

    def __new__(cls, ptr: int) -> Group:
        self = super().__new__(cls, GROUP, ptr)
        self._comm = self._like = None
        return self

    @classmethod
    def create(cls, comm: Any, config: GroupConfig) -> Group:
        """Collective over comm: a Communicator, or one of nccl4py's, or an ncclComm_t as int."""
        if not isinstance(comm, Communicator):
            comm = Communicator(comm if isinstance(comm, int) else comm.ptr)
        self = cls(c.group_create(comm, config))
        self._comm = comm
        comm._groups.add(self)
        return self

    def create_handle(
        self,
        layout: Layout,
        topk_idx: Tensor,
        *,
        layout_info: LayoutInfo | None = None,
        config: HandleConfig | None = None,
        stream: Any = None,
    ) -> Handle:
        """init_handle with K of topk_idx [B, K], and update."""
        ptr = c.create_handle(self, self._comm, layout, topk_idx, layout_info, config, stream)
        self._like = layout, topk_idx.sizes[1], config
        return Handle._of(ptr, self._comm, topk_idx, layout_info)

    def init_handle(
        self,
        layout: Layout,
        num_topk: int,
        *,
        config: HandleConfig | None = None,
        handle_mem: Tensor | None = None,
    ) -> Handle:
        """A handle without routing. num_topk: K; HT also -1, taken from each update.

        handle_mem: None, or uint8 of at least handle_mem_size bytes, 16-byte aligned.
        """
        ptr = c.init_handle(self, self._comm, layout, config, num_topk, handle_mem)
        self._like = layout, num_topk, config
        return Handle._of(ptr, self._comm, handle_mem)

    def handle_mem_size(
        self, layout: Layout, num_topk: int, *, config: HandleConfig | None = None
    ) -> int:
        """Bytes that a handle needs."""
        return c.handle_mem_size(self, layout, config, num_topk)

    def query_mask(self, out: Tensor, *, stream: Any = None) -> None:
        """Writes int32 [R] in stream order: 1 = active, 0 = masked, by this rank's view."""
        ranks = self._num_ranks()
        if out.datatype != DataType.INT32 or out.ndim != 1 or out.sizes[0] < ranks:
            raise c.InvalidArgumentError(f"out: int32 [{ranks}] expected")
        c.mask_query(self, out, stream)

    def update_mask(self, mask: Sequence[int], *, stream: Any = None) -> None:
        """Sets the mask, [R], in stream order."""
        values = array("i", mask)
        if len(values) != (ranks := self._num_ranks()):
            raise c.InvalidArgumentError(f"mask: {len(values)} entries, expected {ranks}")
        c.mask_update(self, values.tobytes(), stream)

    def clean_mask(self, *, stream: Any = None) -> None:
        """Collective over the unmasked ranks: all are active again. One that missed operations
        makes up for them before, with the others masked."""
        c.mask_clean(self, self._comm, stream)

    def _num_ranks(self) -> int:
        if self._comm is None:
            raise c.InvalidUsageError("a group made from an address does not know its ranks")
        return self._comm.num_ranks

    def check(self) -> None:
        """Raises what failed in the operations that have run, so after synchronize(): a lost rank
        (RemoteError), bad ids (InvalidArgumentError). This rank's own view; no other takes part.

        Any call on the group raises the same. Low latency without masks has no other way to ask: of
        bad ids it tells once, then the group goes on, with those ids unused; a group that lost a
        rank can only be destroyed. With masks a lost rank raises nothing: async_error is set, and
        query_mask has it. It makes a handle like the last one, which takes microseconds on the CPU
        and waits for the device on a GPU.
        """
        if self._like is not None:
            layout, num_topk, config = self._like
            self.init_handle(layout, num_topk, config=config).destroy()

    @property
    def async_error(self) -> bool:
        """Whether a queued operation failed since clear_error, or a rank was masked. Of low latency
        only with masks (InvalidUsageError): see check."""
        return c.async_error(self)

    def clear_error(self) -> None:
        """Takes the error and its sentence back, but for a lost rank's. As async_error."""
        c.error_clear(self)

    def destroy(self) -> None:
        """Collective; handles come first. A second time: nothing happens."""
        if self.live:
            c.group_destroy(self, self._comm)
            self._forget()


class Handle(Scoped, c.Object):
    """A layout and its current routing. Calls queue work on the stream and return.

    stream: a Stream, a cudaStream_t as int, an object with __cuda_stream__, or None for the
    default stream. Tensors of the last update, dispatch and combine live as long as the handle.
    """

    __slots__ = ("_comm", "_kept_combine", "_kept_dispatch", "_kept_update")
    _comm: Communicator | None
    _kept_combine: object
    _kept_dispatch: object
    _kept_update: object

    def __new__(cls, ptr: int) -> Handle:
        self = super().__new__(cls, HANDLE, ptr)
        self._comm = self._kept_update = self._kept_dispatch = self._kept_combine = None
        return self

    @classmethod
    def _of(cls, ptr: int, comm: Communicator | None, *kept: object) -> Handle:
        self = cls(ptr)
        self._comm, self._kept_update = comm, kept
        return self

    def update(
        self, topk_idx: Tensor, *, layout_info: LayoutInfo | None = None, stream: Any = None
    ) -> None:
        """Binds the routing: [B, K] int32 or int64, ids in [0, E) or -1. HT: collective in stream
        order, fills the counters. LL reads topk_idx when dispatch and combine run."""
        _update(self, topk_idx, layout_info, stream)
        self._kept_update = topk_idx, layout_info

    def dispatch(
        self,
        inputs: DispatchInputs,
        outputs: DispatchOutputs,
        *,
        layout_info: LayoutInfo | None = None,
        config: DispatchConfig | None = None,
        stream: Any = None,
    ) -> None:
        """Sends tokens to the ranks of their experts, receives into outputs.tokens."""
        _dispatch(self, inputs, outputs, layout_info, config, stream)
        self._kept_dispatch = inputs, outputs, layout_info

    def combine(
        self,
        inputs: CombineInputs,
        outputs: CombineOutputs,
        *,
        config: CombineConfig | None = None,
        stream: Any = None,
    ) -> None:
        """Brings every slot's row back to its source and sums."""
        _combine(self, inputs, outputs, config, stream)
        self._kept_combine = inputs, outputs

    def complete(self, *, config: int = 0, stream: Any = None) -> None:
        """Finishes a send_only operation; with nothing pending a no-op. config: 0."""
        if config:
            raise c.InvalidArgumentError(f"config: {config}, expected 0")
        _complete(self, stream)

    def drop_tensors(self, *, but_routing: bool = False) -> None:
        """Lets go of the last calls' tensors, whose work is done, or before what their memory is
        used for next in the order of a stream. but_routing: not of those of update."""
        self._kept_dispatch = self._kept_combine = None
        if not but_routing:
            self._kept_update = None

    def destroy(self) -> None:
        """Waits for the handle's work. A second time: nothing happens."""
        if self.live:
            c.handle_destroy(self, self._comm if self._comm and self._comm.live else None)
            self._forget()


def preflight(
    config: GroupConfig,
    layout: Layout,
    *,
    num_topk: int,
    num_ranks: int,
    ranks_per_node: int | None = None,
    handle_config: HandleConfig | None = None,
) -> Preflight:
    """What a group and a handle would need; no communicator, no allocation. ranks_per_node None:
    all on one node."""
    per_node = num_ranks if ranks_per_node is None else ranks_per_node
    return Preflight(*c.preflight(config, layout, handle_config, num_topk, num_ranks, per_node))
