"""Compare what compiled constraints are counted for with the memory that they take. A process of its own measures it.

.venv/bin/python -m pytest -q tests/plugins/test_grammar_memory.py
"""

import json
import subprocess
import sys

import pytest

MEASURE = """
import ctypes, gc, importlib, json, sys
from dovetail.config.checkpoint import locate
from dovetail.interfaces.grammar import GrammarContext
from dovetail.sampling_params import GrammarKind, GrammarSpec
from dovetail.tokenizer import Tokenizer
from dovetail_grammar import config

module, backend, section, loads, count = json.loads(sys.argv[1])
tokenizer = Tokenizer.from_dir(locate("tiny"))
context = GrammarContext(
    tokenizer.vocab_size, tokenizer.token_bytes, tuple(tokenizer.eos_token_ids), tokenizer.json
)
backend = getattr(importlib.import_module(f"dovetail_grammar.{module}"), backend)(getattr(config, section)(), context)
TYPES = [{"type": "integer"}, {"type": "string"}, {"enum": ["ab", "abc", "b"]}, {"type": "array", "items": {"type": "number"}}]

def schema(seed, depth=2):
    names = [f"f{seed}_{depth}_{i}" for i in range(8)]
    fields = {name: TYPES[(seed + i) % 4] for i, name in enumerate(names)}
    if depth:
        fields |= {f"inner{i}": schema(seed + i, depth - 1) for i in range(2)}
    return {"type": "object", "properties": fields, "required": names[:4], "additionalProperties": False}

def compiled(seed):
    grammar = backend.compile(GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(schema(seed)), None))
    return backend.load(backend.dump(grammar)) if loads else grammar

def taken():
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

warm = compiled(1000)
before = taken()
grammars = [compiled(seed) for seed in range(count)]
print(json.dumps([taken() - before, sum(grammar.num_bytes for grammar in grammars)]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
@pytest.mark.parametrize(
    ("module", "backend", "section", "loads", "count"),
    [
        ("xgrammar_backend", "XGrammarBackend", "XGrammarConfig", True, 3),
        ("xgrammar_backend", "XGrammarBackend", "XGrammarConfig", False, 3),
        ("llguidance_backend", "LLGuidanceBackend", "LLGuidanceConfig", False, 40),
    ],
)
def test_a_compiled_constraint_is_counted_for_what_it_takes(
    module: str, backend: str, section: str, loads: bool, count: int
):
    pytest.importorskip(module.removesuffix("_backend"))
    case = json.dumps([module, backend, section, loads, count])
    done = subprocess.run([sys.executable, "-c", MEASURE, case], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    taken, counted = json.loads(done.stdout)
    assert taken < 1.3 * counted + 2**20, "the cache would exceed its limit"
    assert counted < 4 * taken + 8 * 2**20, "the cache would hold too little"
