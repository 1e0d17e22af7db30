"""The one answer of everything that would compute a model otherwise than by its own modules, and cannot."""


class NotCompiled(Exception):
    """Why there is no other forward for this processor, device or model, in a few words; they end in a report."""
