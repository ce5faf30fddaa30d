"""Does the check check? Each invariant is broken on purpose in a copy of the source; its guards must turn red.

A guard is a test of the suite (green on the source as it is), among them `verify` itself and whole runs, where the
ledger stops what is off-policy.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

import rondo

SOURCE = Path(rondo.__file__).parent
ROOT = Path(__file__).parent.parent.parent

RUNS = "tests/invariants/test_one_version.py::test_every_trained_response_has_its_periods_version_and_log_probs"
VERIFY = "tests/invariants/test_verify.py::test_what_each_mode_promises_holds[arrival]"


@dataclass(frozen=True, kw_only=True)
class Mutation:
    file: str
    old: str
    new: str
    guards: tuple[str, ...]


MUTATIONS = {
    "a response of another version is let in": Mutation(
        file="engines/pool.py",
        old="    if answer.version != (version, version):",
        new="    if False:",
        guards=("tests/unit/test_pool.py::test_an_answer_of_another_version_is_refused",),
    ),
    "the ledger lets another version in": Mutation(
        file="observe/ledger.py",
        old="        if group.answer.version != (group.period, group.period):",
        new="        if False:",
        guards=("tests/unit/test_ledger.py::test_a_group_of_another_version_is_not_entered",),
    ),
    "engines keep their old weights and say that they have the new ones": Mutation(
        file="weights/publisher.py",
        old="        weights = self._weights()\n",
        new="        kept = self.__dict__.setdefault('_kept', [(name, w.clone()) for name, w in self._weights()])\n"
        "        weights = iter(kept)\n",
        guards=(RUNS,),
    ),
    "a mean of every micro-batch instead of a sum": Mutation(
        file="trainer/trainer.py",
        old="        loss = self._objective(batch, tally)\n",
        new="        loss = self._objective(batch, tally) / len(responses)\n",
        guards=(VERIFY, "tests/unit/test_trainer.py::test_the_step_applies_the_papers_gradient_whatever_the_packing"),
    ),
    "a group is trained twice": Mutation(
        file="stream/loader.py",
        old="            yield MicroBatch(parts=pack, skipped=skipped)\n",
        new="            yield MicroBatch(parts=(*pack, *pack[:1]), skipped=skipped)\n",
        guards=(RUNS, VERIFY, "tests/unit/test_stream.py::test_every_sample_is_handed_out_exactly_once_in_every_mode"),
    ),
    "a group is lost": Mutation(
        file="stream/loader.py",
        old="            yield MicroBatch(parts=pack, skipped=skipped)\n",
        new="            yield MicroBatch(parts=pack[1:], skipped=skipped)\n",
        guards=(RUNS, VERIFY, "tests/unit/test_stream.py::test_every_sample_is_handed_out_exactly_once_in_every_mode"),
    ),
    "responses do not restart at the prompt's end": Mutation(
        file="attention/layout.py",
        old="range(prompt_length, prompt_length + length)",
        new="range(prompt_length + 1, prompt_length + 1 + length)",
        guards=(
            "tests/unit/test_attention.py::test_a_packed_row_gives_the_log_probs_and_gradients_of_separate_native_rows",
        ),
    ),
    "a response sees another one": Mutation(
        file="attention/split.py",
        old="            prefix=range(span.prompt, span.prompt + span.prompt_length),",
        new="            prefix=range(span.prompt, span.start),",
        guards=("tests/unit/test_attention.py::test_split_attention_equals_the_dense_truth_in_value_and_gradient",),
    ),
    "the old policy is refreshed by every step": Mutation(
        file="trainer/trainer.py",
        old="            self.steps += 1\n",
        new="            self.steps += 1\n            self.model.begin_period()\n",
        guards=("tests/unit/test_trainer.py::test_the_old_policy_is_refreshed_at_the_periods_start_and_only_there",),
    ),
    "prefix caches outlive a publication": Mutation(
        file="weights/publisher.py",
        old="        await round_.all(lambda receiver, _: receiver.reset_prefix_cache())\n",
        new="",
        guards=(
            "tests/unit/test_publisher.py::test_no_engine_passes_a_stage_before_all_have_reached_it",
            "tests/invariants/test_one_version.py::test_every_publication_resets_the_prefix_cache",
        ),
    ),
    "the filter keeps the first to arrive": Mutation(
        file="rollout/filters.py",
        old="            if kept + unresolved >= self.wanted or",
        new="            if kept >= self.wanted or",
        guards=(
            "tests/unit/test_filters.py::test_the_first_that_qualify_in_prompt_order_are_kept_whatever_the_order_of_arrival",
        ),
    ),
    "a micro-batch is trained before its groups are written down": Mutation(
        file="rollout/journal.py",
        old="            self._write_pending(flush=False)\n            self._write(kind,",
        new="            self._write(kind,",
        guards=("tests/unit/test_journal.py::test_what_is_about_to_be_trained_is_on_disk_before_it_is",),
    ),
    "a second kill costs the groups that the first one left": Mutation(
        file="rollout/journal.py",
        old="        for group, kept in carried:\n",
        new="        for group, kept in ():\n",
        guards=("tests/unit/test_journal.py::test_a_resumed_period_begins_with_the_groups_it_had",),
    ),
    "a group of another seed is taken from the journal": Mutation(
        file="rollout/recall.py",
        old="            and group.seed == group_seed(run_seed, interrupted.period, prompt.ordinal)\n",
        new="",
        guards=("tests/unit/test_recall.py::test_only_what_would_be_asked_for_again_is_reused",),
    ),
    "a sample is answered twice": Mutation(
        file="observe/samples.py",
        old="        if index not in self._asked or index in self._answered:\n",
        new="        if index not in self._asked:\n",
        guards=("tests/unit/test_ledger.py::test_a_sample_that_is_asked_answered_or_invented_twice_stops_the_run",),
    ),
    "the gradient is divided by its own rank's count": Mutation(
        file="trainer/trainer.py",
        old="            self._sequences, self._tokens, loss = map(sum, zip(*counts, strict=True))\n",
        new="            loss = sum(count[2] for count in counts)\n",
        guards=("tests/unit/test_ranks.py::test_any_number_of_ranks_gives_the_same_gradient_and_counts",),
    ),
    "the synchronous schedule does not wait": Mutation(
        file="stream/loader.py",
        old="        if self._settings.synchronous or self._finish is not None:",
        new="        if self._finish is not None:",
        guards=("tests/unit/test_stream.py::test_the_synchronous_loader_yields_nothing_before_the_last_group",),
    ),
    "a hash that forgets where a number stood": Mutation(
        file="trainer/fingerprint.py",
        old="    weights = torch.arange(min(_CHUNK, words.numel()), device=tensor.device) * 2 + 1\n",
        new="    weights = torch.ones(min(_CHUNK, words.numel()), dtype=torch.int64, device=tensor.device)\n",
        guards=("tests/unit/test_fingerprint.py::test_swapped_numbers_names_shapes_and_types_change_it",),
    ),
}


def red_tests(name: str, folder: Path) -> tuple[list[str], str]:
    """The guards of a mutation that fail on a copy of the source that has it, and what pytest printed."""
    mutation, source = MUTATIONS[name], folder / hashlib.sha256(name.encode()).hexdigest()[:12]
    shutil.copytree(SOURCE, source / "rondo", ignore=shutil.ignore_patterns("__pycache__"))
    victim = source / "rondo" / mutation.file
    victim.write_text(victim.read_text().replace(mutation.old, mutation.new))
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "no:cacheprovider",
            "--show-capture=no",
            "--tb=no",
            "-rfE",
            *mutation.guards,
        ],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(source)},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,  # a guard that hangs where it should fail
    )
    lines = done.stdout.splitlines()
    return [line.split()[1] for line in lines if line.startswith(("FAILED ", "ERROR "))], done.stdout


@pytest.fixture(scope="module")
def outcomes(request, tmp_path_factory) -> Iterator[dict[str, Future[tuple[list[str], str]]]]:
    """All mutations that were asked for, two at a time."""
    names = [
        item.callspec.params["name"]
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec")
    ]
    with ThreadPoolExecutor(2) as pool:
        yield {name: pool.submit(red_tests, name, tmp_path_factory.mktemp("source")) for name in names}


@pytest.mark.heavy
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_broken_invariant_turns_its_guards_red(name, outcomes):
    """On the source as it is they are green: they are tests of this suite."""
    red, printed = outcomes[name].result()
    for guard in MUTATIONS[name].guards:
        assert any(test.startswith(guard) for test in red), f"{guard} did not see it:\n{printed[-3000:]}"


def test_every_mutation_still_finds_what_it_replaces():
    for name, mutation in MUTATIONS.items():
        assert (SOURCE / mutation.file).read_text().count(mutation.old) == 1, name
