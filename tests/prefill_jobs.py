"""Makes the prefill jobs of tests: greedy, alone, with a deadline of a minute; a test gives only the fields that matter
to it."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from cluster.messages import PrefillJob, Sampling, TokenStops


def prefill_job(token_ids: Sequence[int], *, max_tokens: int = 1, **fields: Any) -> PrefillJob:
    """Return a PrefillJob. `fields` replace the usual values."""
    job = PrefillJob(
        request_id="request",
        attempt=0,
        token_ids=tuple(token_ids),
        sampling=Sampling(),
        stops=TokenStops(max_tokens),
        seeds=(0,),
        num_committed=0,
        importer=None,
        timeout_s=60.0,
    )
    return replace(job, **fields)
