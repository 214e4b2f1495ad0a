"""Test embeddings and label log-probabilities of the engine against transformers' hidden states and logits.

.venv/bin/python -m pytest -q -p no:xdist tests/e2e/test_embeddings_engine.py
"""

import functools
import json

import drafter_checkpoints as checkpoints
import engine_models as models
import numpy as np
import pytest
import torch
from engine_runs import TreeDrafter, check_idle, drafting, make_llm, prompts_of
from transformers import AutoModel, Qwen2Config, Qwen3Config

from dovetail import SamplingParams
from dovetail.errors import RequestError
from dovetail.messages import AbortMsg, GenerateMsg
from dovetail.sampling_params import Pooling, PoolingKind

LENGTHS = (1, 15, 16, 17, 40, 100)


class HiddenStates:
    """Compute transformers' last_hidden_state, in float32, one prompt at a time."""

    def __init__(self, directory):
        self.model = AutoModel.from_pretrained(directory, dtype=torch.float32).eval()

    @torch.inference_mode()
    def pooled(self, prompt, pooling):
        states = self.model(torch.tensor([prompt])).last_hidden_state[0]
        return (states[-1] if pooling == "last" else states.mean(0)).numpy()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return models.save_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def reference(checkpoint):
    return HiddenStates(checkpoint)


@pytest.fixture(scope="module")
def llm(checkpoint):
    return make_llm(checkpoint, scheduler={"chunk_size": 32})


def asking(kind, **more):
    return SamplingParams(max_new_tokens=0, pooling=Pooling(PoolingKind(kind), **more))


def close(found, wanted):
    np.testing.assert_allclose(found, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_hidden_states_are_those_of_transformers(llm, reference, pooling):
    prompts = prompts_of(LENGTHS, seed=1)
    found = llm.embed(prompts, pooling=pooling, normalize=False)
    for vector, prompt in zip(found, prompts, strict=True):
        assert vector.dtype == np.float32
        close(vector, reference.pooled(prompt, pooling))
    check_idle(llm)


@pytest.mark.parametrize("config", [Qwen2Config, Qwen3Config])
def test_other_architectures(tmp_path, config):
    models.save(tmp_path, config)
    reference, llm = HiddenStates(tmp_path), make_llm(tmp_path)
    for pooling in ("last", "mean"):
        (found,) = llm.embed([prompt := prompts_of([33])[0]], pooling=pooling, normalize=False)
        close(found, reference.pooled(prompt, pooling))


@pytest.mark.parametrize("architecture", ["Qwen3Model", "Qwen3ForCausalLM"])
def test_a_checkpoint_saved_without_its_head(tmp_path, architecture):
    models.save(tmp_path / "whole", Qwen3Config)
    bare = tmp_path / "bare"
    AutoModel.from_pretrained(tmp_path / "whole").save_pretrained(bare, max_shard_size="60KB")
    config = json.loads((bare / "config.json").read_text())
    (bare / "config.json").write_text(json.dumps(config | {"architectures": [architecture]}))
    (prompt,) = prompts_of([33])
    (found,) = make_llm(bare).embed(prompt, normalize=False)
    close(found, HiddenStates(bare).pooled(prompt, "last"))


def test_a_cached_prefix_is_used_for_the_last_token_and_read_again_for_the_mean(llm, reference):
    first, second = prompts_of([20, 50], seed=2, shared=64)
    llm.embed(first)
    for pooling, cached in (("last", 64), ("mean", 0), ("last", 112), ("mean", 0)):
        (output,) = llm.generate([second], asking(pooling))
        assert output.cached_tokens == cached
        assert output.finish.kind == "length"
        assert output.token_ids == []
        close(output.pooled, reference.pooled(second, pooling))
    check_idle(llm)


def beside(llm, prompts):
    """Run requests that generate and requests that pool in the same steps."""
    written = SamplingParams(max_new_tokens=12, temperature=0.0)
    params = [written, asking("mean"), asking("last"), written, asking("mean")]
    return llm.generate(prompts, params)


@pytest.mark.parametrize("overlap", [True, False])
def test_beside_requests_that_generate(checkpoint, reference, overlap):
    llm = make_llm(checkpoint, scheduler={"chunk_size": 48, "overlap": overlap})
    prompts, tokens = prompts_of([30, 70, 5, 60, 100], seed=3), models.Reference(checkpoint)
    for _ in range(2):
        outputs = beside(llm, prompts)
        for i, pooling in ((1, "mean"), (2, "last"), (4, "mean")):
            close(outputs[i].pooled, reference.pooled(prompts[i], pooling))
        for i in (0, 3):
            assert outputs[i].pooled is None
            assert outputs[i].token_ids == tokens.greedy(tuple(prompts[i]), 12)
    check_idle(llm)


def test_beside_requests_with_drafts(llm, checkpoint, reference):
    prompts, tokens = prompts_of([30, 70, 5, 60, 100], seed=4), models.Reference(checkpoint)
    plain = beside(llm, prompts)
    llm.loop.scheduler.ledger.flush()
    drafter = TreeDrafter()
    drafter.learn([plain[0], plain[3]])
    with drafting(llm, drafter):
        outputs = beside(llm, prompts)
    for i, pooling in ((1, "mean"), (2, "last"), (4, "mean")):
        close(outputs[i].pooled, reference.pooled(prompts[i], pooling))
    for i in (0, 3):
        assert outputs[i].token_ids == tokens.greedy(tuple(prompts[i]), 12)
    assert sum(output.accepted for output in outputs) > 0
    check_idle(llm)


@pytest.fixture(scope="module")
def drafted(tmp_path_factory):
    """Save a target and heads that read its hidden states; return them with the outputs of prompts without the heads."""
    directory = checkpoints.save_target(tmp_path_factory.mktemp("drafted"))
    checkpoints.save_eagle(directory / "eagle")
    checkpoints.save_eagle3(directory / "eagle3")
    prompts = prompts_of([30, 70, 5, 60, 100], seed=4)
    return directory, prompts, beside(make_llm(directory), prompts)


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_beside_drafters_that_watch_hidden_states(drafted, kind):
    directory, prompts, plain = drafted
    scheduler = {"draft": "always", "chunk_size": 48}
    llm = make_llm(directory, speculative={"kind": kind, "path": str(directory / kind)}, scheduler=scheduler)
    for _ in range(2):
        for found, wanted in zip(beside(llm, prompts), plain, strict=True):
            if wanted.pooled is None:
                assert found.token_ids == wanted.token_ids
            else:
                close(found.pooled, wanted.pooled)
    assert llm.loop.stats().draft_steps > 0
    assert llm.loop.drafter_errors == 0
    check_idle(llm)


@pytest.mark.parametrize(("overlap", "after"), [(True, 1), (True, 3), (False, 1)])
def test_a_request_that_was_retracted_between_its_chunks_begins_anew(checkpoint, reference, overlap, after):
    """It may also end in the meantime, if its last chunk was in flight."""
    llm = make_llm(checkpoint, scheduler={"chunk_size": 32, "overlap": overlap})
    (prompt,) = prompts_of([100], seed=5)
    loop, answers = llm.loop, []
    loop.handle(GenerateMsg("a", prompt, asking("mean"), 0))
    for step in range(20):
        answers += loop.step()
        if step == after:
            assert loop.scheduler.prefilling
            loop.scheduler._retract_one(loop.scheduler.running[0])
    (answer,) = answers
    close(np.frombuffer(answer.pooled, "<f4"), reference.pooled(prompt, "mean"))
    assert loop.stats().retractions == 1
    check_idle(llm)


def test_an_abort_returns_the_pages(llm):
    (prompt,) = prompts_of([100], seed=6)
    llm.loop.handle(GenerateMsg("a", prompt, asking("mean"), 0))
    llm.loop.step()
    llm.loop.handle(AbortMsg("a"))
    while llm.loop.has_work:
        llm.loop.step()
    check_idle(llm)


def test_label_logprobs_are_the_models_own(llm, checkpoint):
    reference, labels = models.Reference(checkpoint), (5, 198, 0, 5)
    prompts = prompts_of(LENGTHS, seed=7, shared=20)
    for _ in range(2):  # the second time from the cache
        for output in llm.generate(prompts, asking("labels", token_ids=labels)):
            close(output.pooled, reference.logprobs(output.prompt_ids)[-1][list(labels)])
    assert output.cached_tokens > 0
    check_idle(llm)


def test_dimensions_cut_and_the_rest_has_length_1(llm, reference):
    (prompt,) = prompts_of([30], seed=8)
    wanted = reference.pooled(prompt, "last")[:10]
    (found,) = llm.embed([prompt], dimensions=10)
    close(found, wanted / np.linalg.norm(wanted))
    (whole,) = llm.embed([prompt])
    assert whole.shape == (64,)
    assert abs(np.linalg.norm(whole) - 1) < 1e-6
    with pytest.raises(RequestError, match="dimensions is 65; allowed: 1 to 64"):
        llm.embed([prompt], dimensions=65)


def test_the_checkpoint_says_how_to_pool(tmp_path, checkpoint, reference):
    directory = models.save_llama(tmp_path / "llama")
    (directory / "1_Pooling").mkdir()
    file = directory / "1_Pooling" / "config.json"
    (prompt,) = prompts_of([20], seed=9)
    file.write_text(json.dumps({"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}))
    llm = make_llm(directory)
    close(llm.embed(prompt, normalize=False)[0], reference.pooled(prompt, "mean"))
    file.write_text(json.dumps({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}))
    with pytest.raises(RequestError, match="give pooling: last or mean"):
        llm.embed(prompt)
    close(llm.embed(prompt, pooling="last", normalize=False)[0], reference.pooled(prompt, "last"))


def test_what_cannot_be_is_refused(llm):
    with pytest.raises(RequestError, match="pooling is 'cls'; allowed: last, mean"):
        llm.embed([[1]], pooling="cls")
    with pytest.raises(RequestError, match="max_new_tokens is 3; allowed: 0, with pooling"):
        SamplingParams(max_new_tokens=3, pooling=Pooling(PoolingKind.LAST))
    with pytest.raises(RequestError, match="label_token_ids is '0 ids'"):
        Pooling(PoolingKind.LABELS)
    with pytest.raises(RequestError, match=r"outside of .* token ids must be in \[0, 199\)"):
        llm.generate([[1]], asking("labels", token_ids=(199,)))
    with pytest.raises(RequestError, match="the prompt has 513 tokens; the context holds 512"):
        llm.embed([[1] * 513])
    assert len(llm.embed([[1] * 512])) == 1  # nothing is generated, so that nothing is kept free for it
    check_idle(llm)


def test_a_model_that_does_not_declare_it_has_no_embeddings(checkpoint, monkeypatch):
    from dovetail.interfaces.features import Feature
    from dovetail_models import dense_describe

    offers = frozenset({Feature.MODEL_LAST_ROWS})
    monkeypatch.setattr(dense_describe, "make_info", functools.partial(dense_describe.make_info, offers=offers))
    llm = make_llm(checkpoint)
    assert llm.loop.info["embedding"] is None
    with pytest.raises(RequestError, match=r"does not offer model\.embed"):
        llm.embed([[1, 2]])
    with pytest.raises(RequestError, match=r"does not offer model\.embed"):
        llm.generate([[1, 2]], asking("last"))
    assert llm.generate([[1, 2]], asking("labels", token_ids=(3,)))[0].pooled is not None  # every model returns logits
