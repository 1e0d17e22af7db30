"""Every failure reason is reached by a test, and every row of docs/failover.md by a schedule or a named test.

A reason is reached by the simulated schedules whose coverage is kept in benchmarks/results, or by the test that
`REACHED_BY` names for it.
"""

import ast
import json
import re
from pathlib import Path

from tests.chaos.simulated.results.coverage import error_kinds
from tests.chaos.simulated.results.failover_rows import ELSEWHERE, EVIDENCE, rows
from tests.chaos.simulated.results.reasons import every_reason, is_reached
from tests.chaos.simulated.results.record import RESULTS

_ROOT = Path(__file__).parents[4]
_BASES = frozenset({"resume_refused"})  # of a class that only its subclasses are raised of
REACHED_BY = {
    "all_workers_silent": (
        "tests/system/failures/test_silent_workers.py::test_losing_all_workers_by_silence_uses_up_no_attempt"
    ),
    "began_again": (
        "tests/unit/decode_worker/test_decode_exports.py::"
        "test_a_router_that_reconnects_without_sequences_ends_its_old_sequences"
    ),
    "limit_reached": (
        "tests/system/scheduling/test_tenants.py::test_a_limit_reached_is_refused_by_name_and_no_other_tenant_is"
    ),
    "permission_denied": (
        "tests/system/security/test_api_keys.py::test_a_recorded_key_has_its_rights_at_every_router_until_it_is_revoked"
    ),
    "pair_breakers_open": (
        "tests/system/failures/test_pair_breakers.py::test_with_every_pair_open_decode_prefills_by_name"
    ),
    "predicted": (
        "tests/system/placement/test_auto_placement.py::"
        "test_a_decode_worker_computes_the_prompt_while_the_prefill_worker_is_busy"
    ),
    "step_failed": (
        "tests/unit/engine/scheduling/prefill/test_prefill_scheduler.py::"
        "test_a_failing_step_ends_its_prompts_only_and_keeps_their_leases"
    ),
    "wrong_tokens": (
        "tests/system/failures/test_wrong_messages.py::"
        "test_wrong_tokens_in_the_last_attempt_end_the_request_by_that_name"
    ),
    "stream_ended": (
        "tests/unit/decode_worker/test_decode_exports.py::"
        "test_sequences_end_when_the_stream_of_their_router_does_not_come_back"
    ),
    "deferred": ("tests/system/migration/test_migration.py::test_a_freeze_refused_for_its_limit_is_retried"),
    "first_token_count": (
        "tests/system/failures/test_wrong_messages.py::test_a_start_message_without_every_first_token_ends_the_attempt"
    ),
    "handshake": ("tests/unit/router/http/test_silent_connections.py::test_every_wait_for_a_clients_bytes_times_out"),
    "replaced": (
        "tests/unit/router/http/test_silent_connections.py::"
        "test_silent_connections_are_bounded_while_other_clients_are_served"
    ),
    "too_many_frozen": (
        "tests/unit/decode_worker/test_decode_exports.py::test_a_worker_freezes_at_most_four_at_a_time_for_all_routers"
    ),
    "unverified_provenance": (
        "tests/contract/handoff/test_handoff_verify.py::test_a_verifying_importer_refuses_unverified_provenance"
    ),
    "acceptance_invalid": (
        "tests/unit/router/request/test_request_acceptance.py::test_an_acceptance_with_any_changed_byte_is_refused"
    ),
    "acceptance_missing": (
        "tests/system/failover/test_takeover.py::test_a_request_id_alone_does_not_take_over_a_live_stream"
    ),
    "acceptance_of_another_client": (
        "tests/system/failover/test_acceptance.py::test_an_acceptance_belongs_to_the_api_key_of_its_request"
    ),
    "colocated": (
        "tests/system/handoff/test_pipeline.py::test_a_colocated_cluster_prefills_on_decode_and_counts_no_fallback"
    ),
    "deadline_exceeded": (
        "tests/system/handoff/test_pipeline.py::test_a_request_without_a_worker_until_its_deadline_names_the_reason"
    ),
    "grammar_rejected": (
        "tests/unit/engine/steps/test_step_masks.py::"
        "test_tokens_that_the_grammar_rejects_end_their_request_alone_with_a_named_error"
    ),
    "invalid_grammar": (
        "tests/system/api/test_structured_output.py::test_refused_grammars_name_their_field_and_cost_no_other_request"
    ),
    "no_grammar_worker": (
        "tests/system/api/test_grammar_workers.py::"
        "test_without_such_a_worker_a_request_with_a_grammar_is_refused_at_once"
    ),
    "invalid_request": ("tests/system/operations/test_scale_target.py::test_an_impossible_target_is_refused"),
    "malformed_handoff_message": (
        "tests/contract/handoff/test_handoff_malformed.py::test_any_malformed_message_of_an_exporter_ends_that_hand_off_only"
    ),
    "internal": (
        "tests/unit/cluster/serving/test_serving.py::test_no_stack_trace_reaches_a_client_and_one_reaches_the_log"
    ),
    "malformed_message": (
        "tests/contract/handoff/test_handoff_versions.py::test_versions_that_are_no_range_are_refused"
    ),
    "open_failed": (
        "tests/unit/kvtransfer/protocol/test_import_machine.py::"
        "test_channel_that_does_not_open_leaves_no_block_to_quarantine"
    ),
    "member_refused": (
        "tests/unit/cluster/auth/test_member_channel.py::test_a_caller_without_the_key_receives_a_named_refusal"
    ),
    "overloaded": ("tests/contract/link_check/test_link_check.py::test_one_link_check_runs_at_a_time"),
    "prompt_changed": (
        "tests/unit/router/request/test_request_acceptance.py::test_a_changed_prompt_is_refused_with_prompt_changed"
    ),
    "request_changed": (
        "tests/unit/router/request/test_request_acceptance.py::test_changed_parameters_are_refused_by_name"
    ),
    "request_too_large": (
        "tests/system/failover/test_acceptance.py::test_every_admitted_request_can_be_resumed_with_all_its_tokens"
    ),
    "stale_incarnation": (
        "tests/contract/handoff/test_handoff_refusals.py::test_a_ticket_of_an_earlier_incarnation_is_refused"
    ),
    "unreachable": (
        "tests/unit/kvtransfer/importer/test_prefix_pulls.py::test_a_source_without_enough_blocks_costs_one_call"
    ),
    "unwritable": ("tests/unit/prefill_worker/test_tiers.py::test_a_full_disk_is_counted_and_its_files_are_still_read"),
    "bad_signature": "tests/unit/cluster/auth/test_tickets.py::test_another_key_is_a_bad_signature",
    "buffers_full": "tests/system/api/test_full_buffers.py::test_whole_answers_that_do_not_fit_are_refused_by_name",
    "canary": ("tests/unit/worker/test_canary.py::test_a_late_canary_makes_the_worker_unhealthy_and_leaves_no_block"),
    "config": "tests/system/api/test_bad_input.py::test_wrong_settings_end_a_start_in_one_line",
    "context_length_exceeded": (
        "tests/unit/router/text/test_validation.py::test_a_prompt_that_is_too_long_is_refused_with_both_numbers"
    ),
    "count_mismatch": (
        "tests/contract/handoff/test_handoff_refusals.py::test_a_request_with_another_prompt_than_the_tickets_is_refused"
    ),
    "damaged": "tests/unit/prefill_worker/test_tiers.py::test_changed_host_memory_is_a_miss",
    "differs": (
        "tests/unit/worker/test_canary.py::test_a_single_wrong_canary_is_repeated_before_the_worker_is_unhealthy"
    ),
    "disturbed": "tests/unit/worker/test_canary.py::test_a_canary_computed_beside_other_work_is_not_judged",
    "duplicate_request": (
        "tests/unit/router/request/test_live_table.py::test_a_live_id_is_refused_until_its_request_has_been_served"
    ),
    "first_token_mismatch": (
        "tests/system/migration/test_migration_failures.py::test_a_target_that_starts_from_another_token_ends_the_move"
    ),
    "foreign_ticket": (
        "tests/unit/cluster/auth/test_tickets.py::test_another_importer_or_another_incarnation_is_foreign"
    ),
    "layout_mismatch": (
        "tests/contract/handoff/test_handoff_refusals.py::test_another_layout_is_refused_with_both_values_by_name"
    ),
    "model_refused": "tests/unit/engine/model/test_build_engine.py::test_a_folder_without_a_model_is_named",
    "no_chat_template": "tests/unit/router/text/test_tokenization.py::test_without_a_template_chats_are_a_named_error",
    "no_common_protocol": (
        "tests/contract/handoff/test_handoff_versions.py"
        "::test_an_importer_without_a_version_is_refused_by_an_exporter_that_dropped_the_first"
    ),
    "no_common_transport": (
        "tests/contract/handoff/test_handoff_refusals.py::test_workers_without_a_common_transport_are_refused"
    ),
    "no_large_enough_pair": (
        "tests/system/handoff/test_unequal_pools.py"
        "::test_a_prompt_that_no_prefill_worker_can_hold_is_prefilled_by_a_decode_worker"
    ),
    "no_tokenizer": "tests/unit/router/text/test_validation.py::test_stop_strings_need_a_tokenizer",
    "prompt_mismatch": (
        "tests/contract/handoff/test_handoff_refusals.py::test_a_request_with_another_prompt_than_the_tickets_is_refused"
    ),
    "queue_full": "tests/system/failover/test_failover.py::test_a_full_or_leaving_prefill_worker_is_excluded",
    "replayed_ticket": "tests/unit/kvtransfer/protocol/test_leases.py::test_an_attempt_can_attach_only_once",
    "resume_superseded": (
        "tests/unit/cluster/accounts/test_live_requests.py::test_only_a_call_of_a_higher_number_takes_a_stream_over"
    ),
    "slo_unattainable": (
        "tests/system/placement/test_auto_placement.py::"
        "test_a_target_of_the_client_that_cannot_be_kept_refuses_under_every_policy"
    ),
    "slow_client": "tests/unit/router/request/test_outbox.py::test_above_the_bound_only_the_slowest_client_is_ended",
    "timeout": (
        "tests/system/migration/test_migration_failures.py::"
        "test_a_target_that_does_not_start_in_time_is_abandoned_and_its_job_cancelled"
    ),
    "unauthenticated": (
        "tests/unit/cluster/serving/test_serving.py::test_an_interceptor_may_refuse_a_call_with_a_named_error"
    ),
    "unknown_model": "tests/unit/router/openai_api/test_refusals.py::test_an_unknown_model_is_not_found",
    "unreadable": "tests/unit/prefill_worker/test_tiers.py::test_a_deleted_folder_is_a_miss_and_prompts_are_computed",
    "unsupported_field": (
        "tests/unit/router/openai_api/test_refusals.py::test_an_unsupported_field_is_refused_by_name"
    ),
    "unverifiable": (
        "tests/contract/handoff/test_handoff_verify.py::test_a_verifying_importer_refuses_blocks_without_digests"
    ),
    "no_worker_large_enough": (
        "tests/system/handoff/test_unequal_pools.py"
        "::test_a_request_too_large_for_every_worker_is_refused_at_once_as_the_clusters_fault"
    ),
    "worker_too_small": (
        "tests/system/handoff/test_unequal_pools.py"
        "::test_a_refusal_for_size_uses_up_no_attempt_and_the_worker_is_not_asked_again"
    ),
}


def test_every_failure_reason_is_reached_by_a_simulated_schedule_or_by_a_named_test() -> None:
    names = {name for run in json.loads(RESULTS.read_text())["runs"] for name in run["reached"]}
    unreached = {reason for reason in every_reason() - _BASES if not is_reached(reason, names)}
    assert unreached <= REACHED_BY.keys(), (
        f"no kept schedule reached {sorted(unreached - REACHED_BY.keys())}: name a test for each in REACHED_BY"
    )


def test_reasons_are_found_where_they_are_counted() -> None:
    """The reasons are an error's name, a hand-off's reason, a literal, a constant, a constant of another module, and
    one of two values."""
    wanted = {"queue_full", "digest_mismatch", "late", "ticket_reissued", "token_out_of_order", "colocated"}
    assert wanted <= every_reason()


def test_each_named_test_exists_and_speaks_of_its_reason() -> None:
    classes = {kind.reason: kind.__name__ for kind in error_kinds()}
    reasons = every_reason()
    for reason, test in REACHED_BY.items():
        assert reason in reasons, f"{reason} does not exist any more"
        words = (reason, reason.upper(), classes.get(reason, reason))
        source = _source(test)
        assert any(re.search(rf"(?<![a-zA-Z]){word}(?![a-zA-Z])", source) for word in words), f"{test}: {reason}"


def test_every_row_of_the_failover_table_has_its_evidence() -> None:
    assert set(rows()) == EVIDENCE.keys(), "the second cells of docs/failover.md and the keys of EVIDENCE differ"
    assert {row for row, names in EVIDENCE.items() if not names} == ELSEWHERE.keys()
    for path in ELSEWHERE.values():
        assert (_ROOT / path).exists(), path


def _source(test: str) -> str:
    path, _, name = test.partition("::")
    text = (_ROOT / path).read_text()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            return ast.get_source_segment(text, node) or ""
    raise AssertionError(f"{test} does not exist")
