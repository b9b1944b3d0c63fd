"""Events. On the CPU every call has done its work when it returns: nothing is left to wait for. On
a GPU calls are queued on the current stream, and an event is of what was queued there."""

from __future__ import annotations

from typing import Any

import torch

from trefoil import ep


class EventHandle:
    """Of what the current stream had been given when this was made."""

    def __init__(self) -> None:
        self._event = None
        if torch.cuda.is_initialized():
            self._event = torch.cuda.Event()
            self._event.record()

    def current_stream_wait(self) -> None:
        """What the current stream is given from now on comes after the event."""
        if self._event is not None:
            self._event.wait()


class EventOverlap:
    """An event and the tensors that live until somebody has waited for it."""

    def __init__(self, event: EventHandle | None = None, extra_tensors: Any = None) -> None:
        self.event = event
        self.extra_tensors = extra_tensors

    def current_stream_wait(self) -> None:
        """As that of the event, if there is one."""
        if self.event is not None:
            self.event.current_stream_wait()

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(self, *exception: object) -> None:
        self.current_stream_wait()


def event_of(async_finish: bool) -> EventOverlap:
    """With an event inside if the caller asked for one."""
    return EventOverlap(EventHandle() if async_finish else None)


def after(event: EventOverlap | None) -> None:
    """What follows on the current stream comes after the event of the caller, if there is one."""
    if event is None:
        return
    if not hasattr(event, "current_stream_wait"):
        raise ep.InvalidArgumentError(
            f"previous_event is of type {type(event).__name__}; that of a call is needed"
        )
    event.current_stream_wait()
