"""Run SGLang's bench_serving with the arguments of the command line.

The modules of the benchmark are those of the installed package. What they import from the server's half of the package
would need a build of torch for CUDA: one constant stands in for it.
"""

import importlib.util
import runpy
import sys
import types

folders = importlib.util.find_spec("sglang").submodule_search_locations
for name, inside in (("sglang", ""), ("sglang.srt.utils", "/srt/utils")):
    module = types.ModuleType(name)
    module.__path__ = [folder + inside for folder in folders]
    sys.modules[name] = module
constant = types.ModuleType("sglang.srt.disaggregation.utils")
constant.FAKE_BOOTSTRAP_HOST = "2.2.2.2"
sys.modules[constant.__name__] = constant

runpy.run_module("sglang.bench_serving", run_name="__main__", alter_sys=True)
