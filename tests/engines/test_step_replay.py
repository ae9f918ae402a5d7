"""The replayed step: used if only gradients and numbers have changed, with the same bits as a planned step.

The tests that run kernels are in step_replay_cases.py, which runs in a separate process.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cadam.engines.base import UnavailableError
from cadam.engines.cuda import launch, step_replay
from tests.engines.triton_interpreter import needs_triton, run_cases

CASES = Path(__file__).parent / "step_replay_cases.py"


@pytest.mark.slow
@needs_triton
def test_a_replayed_step_equals_a_planned_one_after_any_change() -> None:
    run_cases(CASES, ["changes"])


@pytest.mark.slow
@needs_triton
def test_a_replayed_step_with_tables_is_the_usual_one() -> None:
    run_cases(CASES, ["changes_with_tables"])


@needs_triton
def test_replayed_exact_sparse_updates_are_the_usual_ones() -> None:
    run_cases(CASES, ["exact_updates_of_tables"])


@pytest.mark.slow
@needs_triton
def test_replayed_updates_of_tables_whose_rows_count_are_the_usual_ones() -> None:
    run_cases(CASES, ["tables_whose_rows_count_their_updates"])


@needs_triton
def test_gradients_that_come_and_go_are_noticed() -> None:
    run_cases(CASES, ["gradients_come_and_go"])


@needs_triton
def test_the_device_has_to_be_ready_for_a_replayed_step() -> None:
    run_cases(CASES, ["the_device_is_ready"])


@pytest.mark.slow
@needs_triton
def test_gradients_of_rows_that_are_not_as_before_are_noticed() -> None:
    run_cases(CASES, ["rows_that_are_odd"])


@pytest.mark.slow
@needs_triton
def test_a_replayed_update_of_rows_is_the_usual_one() -> None:
    cases = ["updates_of_rows", "an_option_of_rows_at_the_address_of_the_one_before", "no_room_for_rows"]
    run_cases(CASES, [*cases, "updates_of_rows_in_records"])


QUICK = [
    "weight_decay_sets_in_at_the_address_of_the_one_before",
    "a_list_of_the_same_parameters_of_which_one_is_replaced_later",
    "a_step_that_is_interrupted",
    "a_gradient_that_kernels_cannot_read_and_that_stays",
    "a_group_without_gradients_that_is_gone",
]
LONGER = [
    "an_option_at_the_address_of_the_one_before",
    "an_option_that_changes_and_stays_the_same_object",
    "a_gradient_that_is_a_view_with_an_offset",
    "a_group_without_gradients_that_gets_one",
    "another_list_of_groups",
    "unseen_where_there_are_tables",
]


@needs_triton
@pytest.mark.parametrize("cases", [QUICK, pytest.param(LONGER, marks=pytest.mark.slow)])
def test_changes_that_could_go_unseen_are_seen(cases: list[str]) -> None:
    run_cases(CASES, cases)


@needs_triton
def test_batches_of_odd_size_begin_at_multiples_of_16_bytes() -> None:
    run_cases(CASES, ["batches_of_odd_size"])


@needs_triton
def test_a_step_that_cannot_be_replayed_is_taken_all_the_same() -> None:
    run_cases(CASES, ["steps_that_cannot_be_replayed", "whatever_the_users_defaults_are"])


@needs_triton
def test_replay_can_be_turned_off() -> None:
    run_cases(CASES, ["turned_off"])


@needs_triton
def test_without_an_optional_symbol_of_torch_steps_are_not_replayed() -> None:
    run_cases(CASES, ["a_symbol_is_missing"])


@needs_triton
def test_other_threads_run_while_the_driver_waits() -> None:
    run_cases(CASES, ["other_threads_run_while_the_driver_waits"])


def test_the_optimizer_and_row_updates_do_not_import_it() -> None:
    step = (
        "p = torch.nn.Parameter(torch.ones(3)); p.grad = torch.ones(3); o = cadam.CAdam([p]); [o.step() for _ in '123']"
    )
    rows = "t = torch.ones(3, 2); update.update_(t, update.new_state(t), torch.tensor([1]), t[:1], step=1)"
    imports = "import sys, torch, cadam; from cadam.optim import sparse_update as update"
    source = f"{imports}; {step}; {rows}; print('cadam.engines.cuda.step_replay' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def triton_s(packed: tuple[int, ...] = (4, 1, 128), kinds: str = "*fp32 i32 i64 constexpr", **changed: Any) -> Any:
    """Return a compiled kernel with the metadata of Triton; a value of None leaves an entry out."""
    about = {"global_scratch_size": 0, "profile_scratch_size": 0, "launch_cooperative_grid": False, "launch_pdl": False}
    metadata = SimpleNamespace(**{name: value for name, value in (about | changed).items() if value is not None})
    src = SimpleNamespace(signature=dict(zip("abcd", kinds.split(), strict=False)))
    return SimpleNamespace(name="k", function=7, packed_metadata=packed, metadata=metadata, src=src)


def test_a_kernel_is_launched_as_it_is_only_if_all_is_known_of_it() -> None:
    assert step_replay.BoundKernel.of_compiled(triton_s()) == step_replay.BoundKernel(7, 128, 128, ("a", "b", "c"))
    for name in ("global_scratch_size", "profile_scratch_size", "launch_cooperative_grid", "launch_pdl"):
        more: dict[str, Any] = {name: 1}
        unknown: dict[str, Any] = {name: None}
        with pytest.raises(UnavailableError, match=f"needs .*'{name}'"):
            step_replay.BoundKernel.of_compiled(triton_s(**more))
        with pytest.raises(UnavailableError, match=f"without .'{name}'"):
            step_replay.BoundKernel.of_compiled(triton_s(**unknown))
    with pytest.raises(UnavailableError, match="2 blocks"):
        step_replay.BoundKernel.of_compiled(triton_s((4, 2, 128)))
    with pytest.raises(UnavailableError, match="describes the kernel k"):
        step_replay.BoundKernel.of_compiled(triton_s((4, 1, 128, 0)))
    with pytest.raises(UnavailableError, match="b: fp32"):
        step_replay.BoundKernel.of_compiled(triton_s(kinds="*fp32 fp32"))


@needs_triton
@pytest.mark.parametrize(("version", "known"), [("3.5.1", False), ("3.6.0", True), ("3.7.1", True), ("3.8.0", False)])
def test_versions_of_triton_whose_launches_are_known(
    version: str, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import triton

    monkeypatch.setattr(triton, "__version__", version)
    assert launch._has_known_launcher.__wrapped__() == known
