"""Run Hugging Face transformers: ``generate`` over a left-padded batch, up to the longest output."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

from peers.worker import Setup, serve


class HF:
    """Run ``AutoModelForCausalLM`` with its defaults: sdpa attention, dynamic cache, no compilation."""

    def __init__(self, setup: Setup) -> None:
        torch.set_num_threads(setup.threads)
        transformers.logging.set_verbosity_error()
        self.model: Any = AutoModelForCausalLM.from_pretrained(setup.model, dtype=getattr(torch, setup.dtype)).eval()
        generation = self.model.generation_config
        generation.eos_token_id, generation.pad_token_id, generation.do_sample = None, 0, False

    @torch.inference_mode()
    def generate(self, prompts: list[list[int]], output_lens: list[int]) -> list[list[int]]:
        width, count = max(map(len, prompts)), max(output_lens)
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        out = self.model.generate(ids, attention_mask=mask, max_new_tokens=count)
        return [row[:n] for row, n in zip(out[:, width:].tolist(), output_lens, strict=True)]

    def reset(self) -> None:
        """Do nothing, because no state remains after a call."""

    def profile(self, prompts: list[list[int]], output_lens: list[int]) -> str:
        with torch.profiler.profile() as profiler:
            self.generate(prompts, output_lens)
        return profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=40)

    def versions(self) -> dict[str, str]:
        return {"transformers": transformers.__version__, "torch": torch.__version__}


if __name__ == "__main__":
    serve(HF)
