"""Run Dovetail: the offline ``LLM`` with its defaults, with the engine in this process."""

from __future__ import annotations

import cProfile
import io
import pstats
import time

import torch

import dovetail
from dovetail.messages import CommandReply, FlushCacheMsg
from peers.worker import Setup, serve


class Dovetail:
    """Run ``dovetail.LLM`` without a grammar backend, because no output here is constrained."""

    def __init__(self, setup: Setup) -> None:
        sections = {"grammar": "none", "threads": setup.threads, **setup.options}
        sections["model"] = {"dtype": setup.dtype, **sections.get("model", {})}
        self.llm = dovetail.LLM(setup.model, **sections)

    def generate(self, prompts: list[list[int]], output_lens: list[int]) -> list[list[int]]:
        params = [dovetail.SamplingParams(temperature=0, max_new_tokens=n, ignore_eos=True) for n in output_lens]
        return [output.token_ids for output in self.llm.generate(prompts, params)]

    def reset(self) -> None:
        self.llm.loop.handle(FlushCacheMsg("reset"))
        for answer in self.llm.loop.step():
            if isinstance(answer, CommandReply) and not answer.ok:
                raise RuntimeError(answer.message)

    def profile(self, prompts: list[list[int]], output_lens: list[int]) -> str:
        return "\n".join(
            [self._shares(prompts, output_lens), self._python(prompts, output_lens), self._ops(prompts, output_lens)]
        )

    def _shares(self, prompts: list[list[int]], output_lens: list[int]) -> str:
        self.generate(prompts, output_lens)
        self.reset()
        before, start = self.llm.loop.stats(), time.perf_counter()
        self.generate(prompts, output_lens)
        wall, after = time.perf_counter() - start, self.llm.loop.stats()
        steps = after.steps - before.steps
        parts = {
            "all": wall,
            "loop.step": after.step_seconds - before.step_seconds,
            "schedule": after.schedule_seconds - before.schedule_seconds,
            "commit": after.commit_seconds - before.commit_seconds,
        }
        parts["forward"] = parts["loop.step"] - parts["schedule"] - parts["commit"]
        parts["outside loop.step"] = wall - parts["loop.step"]
        lines = [f"{name:20}{seconds / steps * 1e6:12.1f} us a step" for name, seconds in parts.items()]
        return "\n".join([f"{steps} steps, {sum(output_lens)} tokens, {wall:.3f} s", *lines])

    def _python(self, prompts: list[list[int]], output_lens: list[int]) -> str:
        self.reset()
        profiler = cProfile.Profile()
        profiler.runcall(self.generate, prompts, output_lens)
        text = io.StringIO()
        pstats.Stats(profiler, stream=text).sort_stats("tottime").print_stats(40)
        return text.getvalue()

    def _ops(self, prompts: list[list[int]], output_lens: list[int]) -> str:
        self.reset()
        with torch.profiler.profile() as profiler:
            self.generate(prompts, output_lens)
        return profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=40)

    def versions(self) -> dict[str, str]:
        return {"dovetail": dovetail.__version__, "torch": torch.__version__}


if __name__ == "__main__":
    serve(Dovetail)
