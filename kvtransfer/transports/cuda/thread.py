"""A GPU for a thread whose library calls the driver. CUDA's runtime gives every thread the device's context when it
needs one; UCX and others that call the driver themselves fail on a thread that has none."""

import torch


def use_device(index: int) -> None:
    """The device's own context is this thread's from here on. Waits for no step: it is a side stream that it looks at.
    Raises RuntimeError."""
    torch.cuda.set_device(index)
    torch.cuda.Stream(index).synchronize()  # type: ignore[no-untyped-call]  # set_device alone may not call the runtime
