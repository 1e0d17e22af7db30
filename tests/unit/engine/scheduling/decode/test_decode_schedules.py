"""Tests that under any schedule every sequence runs as if alone, no block is lost, and no sequence waits for ever."""

from hypothesis import settings

from tests.examples import num_examples
from tests.unit.engine.rigs.decode_schedules import AnySchedule

TestAnyScheduleGivesEverySequenceItsSerialTokensAndLeaksNoBlock = AnySchedule.TestCase
TestAnyScheduleGivesEverySequenceItsSerialTokensAndLeaksNoBlock.settings = settings(
    max_examples=num_examples(suite=33, search=250), stateful_step_count=40
)
