"""Run vLLM's CPU build: the offline ``LLM`` with its defaults (prefix caching on), eager or compiled."""

from __future__ import annotations

import os

from peers.worker import Setup, serve

KV_GIB = "1"


class VLLM:
    """Run the engine core in a separate process, as ``LLM`` starts it, because vLLM's preloaded libraries are active
    only there."""

    def __init__(self, setup: Setup) -> None:
        cpus = sorted(os.sched_getaffinity(0))[: setup.threads]
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cpus))
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = KV_GIB
        from vllm import LLM

        self.llm = LLM(
            model=setup.model,
            skip_tokenizer_init=True,
            dtype=setup.dtype,
            max_model_len=2048,
            **setup.options,
        )

    def generate(self, prompts: list[list[int]], output_lens: list[int]) -> list[list[int]]:
        from vllm import SamplingParams

        params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False) for n in output_lens]
        outputs = self.llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def reset(self) -> None:
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not reset its prefix cache")

    def profile(self, prompts: list[list[int]], output_lens: list[int]) -> str:
        raise NotImplementedError("only the Dovetail and HF arms are profiled")

    def versions(self) -> dict[str, str]:
        import torch
        import vllm

        return {"vllm": f"{vllm.__version__} (torch {torch.__version__})"}


if __name__ == "__main__":
    serve(VLLM)
