"""Test load generators and evaluation harnesses of other projects, unmodified, against a server of the embedded model:
SGLang's bench_serving, vLLM's bench serve, GuideLLM, AIPerf and lm-eval.

.venv/bin/python -m pytest -q -p no:xdist tests/clients/test_load_generators.py
"""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from client_environments import AIPERF, GUIDELLM, LM_EVAL, SGLANG, VLLM

import dovetail

pytestmark = [pytest.mark.full, pytest.mark.timeout(2400)]

TOKENIZER = str(Path(dovetail.__file__).parent / "assets" / "tiny")
OFFLINE = {"HF_HUB_OFFLINE": "1"}
COUNT = 4


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("backend", ["sglang", "sglang-oai", "sglang-oai-chat", "vllm", "vllm-chat"])
def test_bench_serving(url: str, tmp_path: Path, backend: str, stream: bool):
    """All requests succeed with every token, and the backends that report cached tokens find the second run cached."""
    results = [bench_serving(url, tmp_path, backend, *([] if stream else ["--disable-stream"])) for _ in range(2)]
    for result in results:
        assert result["completed"] == COUNT
        assert result["total_output_tokens"] == 8 * COUNT
        assert result["total_output_tokens_retokenized"] > 0
        assert result["server_info"]["version"] == dovetail.__version__
    if backend.startswith("sglang"):
        report = results[-1]["cache_report"]
        assert report["total_cached_tokens"] == report["device_cached_tokens"] >= 32 * COUNT


def bench_serving(url: str, folder: Path, backend: str, *more: str) -> dict[str, Any]:
    """Return the results that it writes."""
    host, port = url.removeprefix("http://").split(":")
    written = folder / f"{backend}.jsonl"
    arguments = ["--backend", backend, "--host", host, "--port", port, "--tokenizer", TOKENIZER]
    arguments += ["--dataset-name", "random-ids", "--random-input-len", "64", "--random-output-len", "8"]
    arguments += ["--random-range-ratio", "1", "--num-prompts", str(COUNT), "--cache-report", "--disable-tqdm"]
    script = Path(__file__).with_name("use_sglang_bench.py")
    SGLANG.run(script, *arguments, "--output-file", str(written), *more, folder=folder, **OFFLINE)
    return json.loads(written.read_text().splitlines()[-1])


BENCH_SERVE = """
from argparse import ArgumentParser
from vllm.benchmarks.serve import add_cli_args, main
parser = ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
"""What ``vllm bench serve`` runs; the command itself would import the engine."""


@pytest.mark.parametrize(
    ("backend", "path"),
    [
        ("vllm", "/v1/completions"),
        ("openai-chat", "/v1/chat/completions"),
        ("openai-responses", "/v1/responses"),
        ("openai-embeddings", "/v1/embeddings"),
        ("vllm-rerank", "/v1/rerank"),
    ],
)
def test_vllm_bench_serve(url: str, tmp_path: Path, backend: str, path: str):
    """All requests succeed with the number of tokens requested. The first model of /v1/models is chosen."""
    generates = backend not in ("openai-embeddings", "vllm-rerank")
    dataset = "random-rerank" if backend == "vllm-rerank" else "random"
    arguments = ["--backend", backend, "--base-url", url, "--endpoint", path, "--tokenizer", TOKENIZER]
    arguments += ["--dataset-name", dataset, "--random-input-len", "64", "--random-output-len", "8"]
    arguments += ["--num-prompts", str(COUNT), "--save-result", "--result-filename", "result.json", "--disable-tqdm"]
    VLLM.run(
        "-c",
        BENCH_SERVE,
        *arguments,
        *(["--ignore-eos"] if generates else []),
        folder=tmp_path,
        VLLM_LOGGING_LEVEL="WARNING",
        **OFFLINE,
    )
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result.get("failed", 0), result["model_id"]) == (COUNT, 0, "tiny")
    assert result["total_input_tokens"] >= 32 * COUNT
    if generates:
        assert result["total_output_tokens"] == 8 * COUNT


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_guidellm(url: str, tmp_path: Path, path: str):
    """All requests succeed, and the server's token counts are those requested."""
    kind = "chat_completions" if "chat" in path else "text_completions"
    settings = {
        "--backend": f"kind=openai_http,target={url},request_format={path}",
        "--profile": "kind=concurrent,streams=2",
        "--constraint": f"kind=max_requests,count={COUNT}",
        "--tokenizer": f"kind=hf_auto,model={TOKENIZER}",
        "--data": "kind=synthetic_text,prompt_tokens=32,output_tokens=8",
        "--output": "kind=json,path=report.json",
    }
    arguments = [part for pair in settings.items() for part in pair]
    GUIDELLM.run("-m", "guidellm", "run", *arguments, "--disable-progress", folder=tmp_path, **OFFLINE)
    (benchmark,) = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
    requests = benchmark["requests"]
    assert [len(requests[name]) for name in ("successful", "errored", "incomplete")] == [COUNT, 0, 0], kind
    assert all(request["output_tokens"] == 8 for request in requests["successful"])


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_aiperf(url: str, tmp_path: Path, endpoint: str):
    """All requests succeed with the output length requested, by the server's counts, and its metrics are read."""
    arguments = ["profile", "--model", "tiny", "--url", url, "--endpoint-type", endpoint, "--streaming", "--ui", "none"]
    arguments += ["--tokenizer", TOKENIZER, "--synthetic-input-tokens-mean", "32", "--output-tokens-mean", "8"]
    arguments += ["--request-count", str(COUNT), "--concurrency", "2", "--use-server-token-count"]
    arguments += ["--extra-inputs", "ignore_eos:true", "--artifact-dir", "aiperf", "--reset-kv-cache"]
    AIPERF.run(AIPERF.python().with_name("aiperf"), *arguments, folder=tmp_path)
    report = json.loads((tmp_path / "aiperf" / "profile_export_aiperf.json").read_text())
    assert report["request_count"]["avg"] == COUNT
    assert not report.get("error_summary")
    assert report["output_sequence_length"]["avg"] == 8
    assert (tmp_path / "aiperf" / "server_metrics_export.json").exists()


COUNTRIES = {"France": "Paris", "Germany": "Berlin", "Italy": "Rome"}
TASK = """
task: capitals{kind}
dataset_path: json
dataset_kwargs: {{data_files: {{test: capitals.jsonl}}}}
test_split: test
output_type: {output}
doc_to_text: "{question}"
doc_to_target: "{target}"
{more}
"""
GENERATED = {
    model: TASK.format(
        kind="",
        output="generate_until",
        question=question,
        target="The capital of {{country}} is {{capital}}",
        more='generation_kwargs: {until: ["."], max_gen_toks: 32}\nmetric_list: [{metric: exact_match}]',
    )
    for model, question in {
        "local-completions": "The capital of {{country}} is",
        "local-chat-completions": "What is the capital of {{country}}?",
    }.items()
}
CHOSEN = TASK.format(
    kind="_chosen",
    output="multiple_choice",
    question="The capital of {{country}} is",
    target="{{capital}}",
    more=f"doc_to_choice: {json.dumps([*COUNTRIES.values()])}\nmetric_list: [{{metric: acc}}]",
)


@pytest.mark.parametrize("tokenizer", ["huggingface", "remote"])
def test_lm_eval_completions(url: str, tmp_path: Path, tokenizer: str):
    """The harness generates, and its log-likelihoods are those that the server returns for the same tokens."""
    settings = f"model=tiny,base_url={url}/v1/completions,num_concurrent=2,tokenizer_backend={tokenizer}"
    given = settings + (f",tokenizer={TOKENIZER}" if tokenizer == "huggingface" else "")
    scores, samples = evaluate(tmp_path, "local-completions", given, "capitals,capitals_chosen")
    assert scores["capitals_chosen"]["acc,none"] == 1
    for sample in samples["capitals_chosen"]:
        for number, choice in enumerate(COUNTRIES.values()):
            loglikelihood = float(sample["resps"][number][0][0])
            expected = scored(url, f"The capital of {sample['doc']['country']} is", f" {choice}")
            assert loglikelihood == pytest.approx(expected, abs=2e-3), choice
    for sample in samples["capitals"]:
        assert sample["resps"][0][0].strip() == sample["doc"]["capital"]


def test_lm_eval_chat(url: str, tmp_path: Path):
    given = f"model=tiny,base_url={url}/v1/chat/completions,num_concurrent=2"
    scores, _ = evaluate(tmp_path, "local-chat-completions", given, "capitals", "--apply_chat_template")
    assert scores["capitals"]["exact_match,none"] == 1


def evaluate(
    folder: Path, model: str, settings: str, tasks: str, *more: str
) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Return the scores of each task and its samples."""
    lines = [json.dumps({"country": country, "capital": capital}) for country, capital in COUNTRIES.items()]
    (folder / "capitals.jsonl").write_text("\n".join(lines))
    (folder / "generated.yaml").write_text(GENERATED[model])
    (folder / "chosen.yaml").write_text(CHOSEN)
    arguments = ["run", "--model", model, "--model_args", settings, "--tasks", tasks, "--include_path", "."]
    arguments += ["--output_path", "out", "--log_samples", *more]
    LM_EVAL.run("-m", "lm_eval", *arguments, folder=folder, **OFFLINE)
    (results,) = folder.glob("out/*/results_*.json")
    samples = {
        name: [
            json.loads(line) for line in next(folder.glob(f"out/*/samples_{name}_2*.jsonl")).read_text().splitlines()
        ]
        for name in tasks.split(",")
    }
    return json.loads(results.read_text())["results"], samples


def scored(url: str, context: str, continuation: str) -> float:
    """Return the log-probability of a continuation, by /generate."""
    tokens = httpx.post(f"{url}/tokenize", json={"prompt": context}, timeout=60).json()["count"]
    body = {
        "text": context + continuation,
        "sampling_params": {"max_new_tokens": 0},
        "return_logprob": True,
        "logprob_start_len": tokens,
    }
    meta = httpx.post(f"{url}/generate", json=body, timeout=60).json()["meta_info"]
    return sum(entry[0] for entry in meta["input_token_logprobs"])
