"""Where a thread of this process stands, for the log of one that does not go on."""

import sys
import traceback


def stack_of(thread_id: int | None) -> str:
    """Its Python frames, the innermost last; empty for a thread that has ended or never began."""
    frame = sys._current_frames().get(thread_id) if thread_id is not None else None
    return "".join(traceback.format_stack(frame)) if frame is not None else ""
