"""The vocabulary of negotiation: what parts offer and need. A feature is refused unless it is declared.

Nobody asks what a component is called; everybody asks what it offers. The resolver checks the union of needs (of the
model, the cache, the drafter, the grammar backend and the runtime) against the union of offers, jointly.
"""

from __future__ import annotations

import enum


class Feature(enum.StrEnum):
    """A capability, namespaced by the side that offers it."""

    # attention backends
    ATTN_EXTEND = "attention.extend"  # ragged queries over a paged prefix
    ATTN_DECODE = "attention.decode"  # one query a row
    ATTN_VERIFY = "attention.verify"  # several queries a row at the end of its context
    ATTN_MIXED = "attention.mixed"  # extend and decode rows in one batch
    ATTN_TREE_MASK = "attention.tree_mask"  # verify rows whose queries see their ancestors only
    ATTN_SLIDING_WINDOW = "attention.sliding_window"
    ATTN_SOFT_CAP = "attention.soft_cap"
    ATTN_SINKS = "attention.sinks"
    ATTN_GRAPH = "attention.graph"  # plan and forward can be captured and replayed
    ATTN_VERIFY_GRAPH = "attention.verify_graph"  # so can those of verify rows, with tree masks where they are offered
    ATTN_SHARED_PREFIX = "attention.shared_prefix"  # a prefix that decode rows share is read once for all of them
    ATTN_BATCH_INVARIANT = "attention.batch_invariant"  # bits depend on a row's tokens alone, where the context asks
    ATTN_INVARIANT_WINDOW = "attention.batch_invariant_window"  # that, in layers with a sliding window too

    # prefix caches
    CACHE_REUSE = "cache.reuse"  # match can return a non-empty prefix
    CACHE_NAMESPACES = "cache.namespaces"
    CACHE_EVICT = "cache.evict"
    CACHE_SHARED_PREFIXES = "cache.shared_prefixes"  # says which running rows share which prefix

    # KV state
    KV_ROLLBACK = "kv.rollback"  # KV of rejected drafts can be abandoned
    KV_STATE_ROLLBACK = "kv.state_rollback"  # recurrent state can be restored

    # grammar backends
    GRAMMAR_JSON_SCHEMA = "grammar.json_schema"
    GRAMMAR_JSON_OBJECT = "grammar.json_object"
    GRAMMAR_REGEX = "grammar.regex"
    GRAMMAR_EBNF = "grammar.ebnf"
    GRAMMAR_LARK = "grammar.lark"
    GRAMMAR_CHOICE = "grammar.choice"
    GRAMMAR_STRUCTURAL_TAG = "grammar.structural_tag"
    GRAMMAR_ROLLBACK = "grammar.rollback"
    GRAMMAR_JUMP_FORWARD = "grammar.jump_forward"
    GRAMMAR_PORTABLE = "grammar.portable"  # compiled grammars can be written to bytes and read in another process

    # drafters
    DRAFT_CHAIN = "draft.chain"
    DRAFT_TREE = "draft.tree"
    DRAFT_PROBS = "draft.probs"  # states the probabilities of its drafts: DraftTree.probs

    # schedule policies
    POLICY_PREFIX_AWARE = "policy.prefix_aware"  # orders by what the prefix cache holds

    # the runtime
    RUNTIME_OVERLAP = "runtime.overlap"  # commit lags one step
    RUNTIME_DELAYED_MASK = "runtime.delayed_mask"  # bitmasks are filled while the forward pass runs

    # model architectures
    MODEL_EMBED = "model.embed"  # hidden states after the final norm are of use as embeddings of texts
    MODEL_MTP_HEAD = "model.mtp_head"  # the checkpoint has layers that predict further tokens
    MODEL_HIDDEN_STATES = "model.hidden_states"  # forward keeps hidden states of named layers; embed_tokens
    MODEL_LAST_ROWS = "model.last_rows"  # the last layer computes no more than the rows that are sampled
    MODEL_BATCH_INVARIANT = "model.batch_invariant"  # all products are those of Linear, all else goes token by token
