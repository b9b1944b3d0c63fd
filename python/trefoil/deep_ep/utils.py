"""Events. On the CPU every call has done its work when it returns: nothing is left to wait for."""

from __future__ import annotations

from typing import Any


class EventHandle:
    """What has happened when the call that made it returned."""

    def current_stream_wait(self) -> None:
        """Nothing to wait for."""


class EventOverlap:
    """An event and the tensors that live until somebody has waited for it."""

    def __init__(self, event: EventHandle | None = None, extra_tensors: Any = None) -> None:
        self.event = event
        self.extra_tensors = extra_tensors

    def current_stream_wait(self) -> None:
        """Nothing to wait for."""

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(self, *exception: object) -> None:
        self.current_stream_wait()


def event_of(async_finish: bool) -> EventOverlap:
    """With an event inside if the caller asked for one."""
    return EventOverlap(EventHandle() if async_finish else None)
