"""Fast attention against the truth: log-probs and gradients, on random geometries."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rondo.attention import split
from rondo.attention.flex import flex_plan
from rondo.attention.hf import DENSE, SPLIT, adopt, hidden_states
from rondo.attention.layout import Layout, auto_layout, separate_layout, shared_prompt_layout
from rondo.attention.reference import dense_attention, visible
from rondo.attention.split import split_attention, split_plan
from rondo.attention.varlen import varlen_plan
from rondo.errors import ModelError
from tests.models import ARCHITECTURES, VOCABULARY, tiny_model

tokens = st.integers(min_value=0, max_value=VOCABULARY - 1)
sequence = st.lists(tokens, min_size=1, max_size=9)
segment = st.tuples(sequence, st.lists(sequence, min_size=1, max_size=4))
segments = st.lists(segment, min_size=1, max_size=4)


def logps(model, layout: Layout) -> torch.Tensor:
    logits = model.get_output_embeddings()(hidden_states(model, layout))
    return logits.log_softmax(-1).gather(-1, layout.target_N[:, None])[:, 0]


@given(segments=segments, heads=st.sampled_from([(4, 4), (4, 2), (4, 1)]), small=st.sampled_from([0, 1 << 14]))
@settings(max_examples=60, deadline=None)
def test_split_attention_equals_the_dense_truth_in_value_and_gradient(segments, heads, small):
    layout = shared_prompt_layout(segments)
    total = layout.tokens_T.numel()
    generator = torch.Generator().manual_seed(total)
    shapes = [(1, heads[0], total, 8), (1, heads[1], total, 8), (1, heads[1], total, 8)]
    made = [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]
    direction = torch.randn(1, total, heads[0], 8, dtype=torch.float64, generator=generator)
    results = []
    before, split.SMALL = split.SMALL, small  # 0: as many buckets as the waste limit asks for
    try:
        for compute in (
            lambda q, k, v: dense_attention(q, k, v, plan=layout, scaling=0.3),
            lambda q, k, v: split_attention(q, k, v, plan=split_plan(layout, q.dtype), scaling=0.3),
        ):
            inputs = [tensor.clone().requires_grad_() for tensor in made]
            output = compute(*inputs)
            output.backward(direction)
            results.append([output.detach(), *(tensor.grad for tensor in inputs)])
    finally:
        split.SMALL = before
    for truth, fast in zip(*results, strict=True):
        torch.testing.assert_close(fast, truth, rtol=0, atol=1e-9)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_packed_row_gives_the_log_probs_and_gradients_of_separate_native_rows(architecture):
    segments = [([1, 2, 3], [[4, 5, 6, 0], [7], [8, 9]]), ([5], [[2, 2, 0]]), ([3, 1, 4, 1, 5, 9], [[2], [6, 5, 3]])]
    model = tiny_model(architecture, dtype=torch.float64)
    expected = []
    for prompt, responses in segments:
        for response in responses:
            ids = torch.tensor([prompt + response])
            scores = model(input_ids=ids, use_cache=False).logits[0].log_softmax(-1)
            expected.append(scores[len(prompt) - 1 : -1].gather(-1, ids[0, len(prompt) :, None])[:, 0])
    truth = torch.cat(expected)
    truth.sum().backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    for implementation in (SPLIT, DENSE):
        model.zero_grad()
        model.set_attn_implementation(implementation)
        found = logps(model, shared_prompt_layout(segments))
        torch.testing.assert_close(found, truth, rtol=0, atol=1e-9)
        found.sum().backward()
        for name, parameter in model.named_parameters():
            error = (parameter.grad - gradients[name]).norm() / gradients[name].norm().clamp_min(1e-12)
            assert error < 1e-6, (implementation, name, error)


def test_separate_rows_are_the_same_geometry_with_every_prompt_repeated():
    model = tiny_model(dtype=torch.float64)
    adopt(model)
    segments = [([1, 2, 3], [[4, 5], [6]]), ([7, 8], [[9, 9, 9]])]
    shared, separate = shared_prompt_layout(segments), separate_layout(segments)
    assert separate.tokens_T.numel() == shared.tokens_T.numel() + 3
    torch.testing.assert_close(logps(model, shared), logps(model, separate), rtol=0, atol=1e-9)


@given(segments=segments, build=st.sampled_from([shared_prompt_layout, separate_layout, auto_layout]))
@settings(max_examples=20, deadline=None)
def test_padding_changes_no_log_prob_and_no_gradient(segments, build):
    results = []
    for multiple in (1, 16):
        layout = build(segments, multiple=multiple)
        for implementation in (SPLIT, DENSE):
            model = tiny_model(dtype=torch.float64)
            model.set_attn_implementation(implementation)
            found = logps(model, layout)
            found.sum().backward()
            results.append([found.detach(), *(parameter.grad for parameter in model.parameters())])
    assert layout.tokens_T.numel() % 16 == 0
    for other in results[1:]:
        for one, two in zip(results[0], other, strict=True):
            assert (one - two).norm() <= 1e-6 * one.norm() + 1e-9


def test_padding_is_a_prompt_without_responses_in_every_plan():
    layout = shared_prompt_layout([([1, 2, 3], [[4, 5], [6]]), ([7], [[8]])], multiple=16)
    assert layout.padding == range(4, 12)
    plan = varlen_plan(layout)
    assert (plan.prompt_tokens, plan.prompts.starts.tolist()) == (12, [0, 3, 4, 12])
    assert plan.groups.starts.tolist() == [0, 3, 4, 4]  # flash takes as many runs of queries as of keys
    separate = separate_layout([([1, 2], [[3]])], multiple=4)
    assert separate.rows == (range(3), range(3, 4))
    assert varlen_plan(separate).rows.starts.tolist() == [0, 3, 4]


def test_the_mask_is_the_designs_rule():
    layout = shared_prompt_layout([([1, 2], [[3, 4], [5]]), ([6], [[7]])])
    rows = ["".join("x" if seen else "." for seen in row) for row in visible(layout).tolist()]
    assert rows == [
        "x......",  # prompt 1 2
        "xx.....",
        "..x....",  # prompt 6
        "xx.x...",  # response 3 4
        "xx.xx..",
        "xx...x.",  # response 5
        "..x...x",  # response 7
    ]
    assert layout.positions_T.tolist() == [0, 1, 0, 2, 3, 2, 1]
    assert layout.source_N.tolist() == [1, 3, 1, 2]


def test_the_picture_in_the_docs_is_drawn_from_the_rule():
    docs = Path(__file__).parents[2] / "docs"
    assert runpy.run_path(str(docs / "mask.py"))["draw"]() == (docs / "mask.svg").read_text()


@given(segments=segments)
@settings(max_examples=30, deadline=None)
def test_the_flex_mask_is_the_truths_mask_and_padding_sees_itself_only(segments):
    layout = shared_prompt_layout(segments)
    plan = flex_plan(layout, multiple=128)
    total = layout.tokens_T.numel()
    padded = total + plan.padding
    tokens = torch.arange(padded)
    found = plan.mask.mask_mod(0, 0, tokens[:, None], tokens[None, :])
    assert torch.equal(found[:total, :total], visible(layout))
    assert torch.equal(found[total:], torch.eye(padded, dtype=torch.bool)[total:])
    assert not found[:total, total:].any()


def test_variable_lengths_are_those_of_prompts_groups_and_responses():
    plan = varlen_plan(shared_prompt_layout([([1, 2, 3], [[4, 5], [6]]), ([7], [[8, 9, 9, 9]])]))
    assert plan.rows is None
    assert plan.prompt_tokens == 4
    assert [lengths.starts.tolist() for lengths in (plan.prompts, plan.groups, plan.responses)] == [
        [0, 3, 4],
        [0, 3, 7],
        [0, 2, 3, 7],
    ]
    assert [lengths.longest for lengths in (plan.prompts, plan.groups, plan.responses)] == [3, 4, 4]
    rows = varlen_plan(separate_layout([([1, 2, 3], [[4, 5], [6]])])).rows
    assert rows is not None
    assert rows.starts.tolist() == [0, 5, 9]


def test_ragged_pieces_are_bucketed_within_the_waste_limit():
    segments = [([1] * prompt, [[2] * 3, [2] * 300]) for prompt in (5, 400, 6)]
    plan = split_plan(shared_prompt_layout(segments), torch.float32)
    padded = sum(bucket.queries_BQ.numel() * bucket.keys_BK.shape[1] for bucket in plan.buckets)
    useful = sum(prompt**2 + 3 * (prompt + 3) + 300 * (prompt + 300) for prompt in (5, 400, 6))
    assert padded < split.WASTE * useful + split.SMALL * len(plan.buckets)


def test_a_model_with_sliding_windows_is_refused_with_a_sentence():
    import transformers

    config = transformers.Gemma2Config(
        vocab_size=32, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, sliding_window=4,
    )  # fmt: skip
    with pytest.raises(ModelError, match="sliding_attention"):
        adopt(transformers.Gemma2ForCausalLM(config).eval())


def test_a_window_longer_than_any_trial_is_refused_too():
    """The layers' types do not tell, and a short row fits into it: a long one would be computed wrongly."""
    with pytest.raises(ModelError, match="sliding window of 4096"):
        adopt(tiny_model("Mistral", sliding_window=4096))


def test_a_model_whose_head_does_more_is_found_out_by_trying():
    import transformers

    config = transformers.CohereConfig(
        vocab_size=32, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, logit_scale=0.1
    )
    torch.manual_seed(0)
    model = transformers.CohereForCausalLM(config).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(30)
    with pytest.raises(ModelError, match="packed rows"):
        adopt(model)
