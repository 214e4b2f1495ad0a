"""Move words between the memory of ranks, and compute with them. A word is an int32 that holds two values of 16 bits.

Loads and stores are inline assembly, because a thread must load, store and wait for the same 16 bytes, and Triton's own
operations do not say which thread has which element. Interpreted, they are Triton's operations.
"""

from __future__ import annotations

import functools

import triton
import triton.language as tl

from dovetail.ops.triton.peer_rules import MOST_RANKS

EMPTY = -0x7FFF8000
"""The word that fills empty slots: two negative zeros of 16 bits."""

_EMPTY = tl.constexpr(EMPTY)
_LOAD = tl.constexpr(
    "{ .reg .pred p; setp.ne.b32 p, $5, 0; mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;"
    " @p ld.global.v4.b32 {$0, $1, $2, $3}, [$4]; }"
)
_STORE = tl.constexpr(
    "{ .reg .pred p; setp.ne.b32 p, $6, 0; @p st.global.v4.b32 [$1], {$2, $3, $4, $5}; mov.b32 $0, 0; }"
)
_SEND = tl.constexpr(
    "{ .reg .pred p; setp.ne.b32 p, $6, 0; @p st.relaxed.sys.global.v4.b32 [$1], {$2, $3, $4, $5}; mov.b32 $0, 0; }"
)


@functools.cache
def receiving(sources: int) -> tuple[str, str]:
    """Return assembly that receives 16 bytes of each of ``sources`` ranks, and its constraints. Results: four words of
    each rank. Operands: the address of the first rank's, the distance of addresses, the most clock cycles to wait, and
    whether to receive anything (results are 0 if not)."""
    words = 4 * sources
    address, distance, limit, inside = (f"${words + i}" for i in range(4))
    text = [
        "{ .reg .pred p; .reg .pred q; .reg .b32 e; .reg .b64 begin; .reg .b64 now; .reg .b64 a<8>;",
        f"setp.eq.b32 p, {inside}, 0; mov.b32 e, {EMPTY};",
        *(f"mov.b32 ${word}, 0;" for word in range(words)),
        f"mov.b64 a0, {address};",
        *(f"add.s64 a{i}, a{i - 1}, {distance};" for i in range(1, sources)),
        "@p bra DONE; mov.u64 begin, %clock64;",
        "AGAIN:",
    ]
    for i in range(sources):
        values = ", ".join(f"${4 * i + j}" for j in range(4))
        text.append(f"ld.relaxed.sys.global.v4.b32 {{{values}}}, [a{i}];")
    text.append("setp.eq.s32 p, $0, e;")
    text += [f"setp.eq.or.s32 p, ${word}, e, p;" for word in range(1, words)]
    text.append("@!p bra RECEIVED; mov.u64 now, %clock64; sub.s64 now, now, begin;")
    text.append(f"setp.gt.s64 q, now, {limit}; @q trap; bra AGAIN; RECEIVED:")
    text += [f"st.global.v4.b32 [a{i}], {{e, e, e, e}};" for i in range(sources)]
    text.append("DONE: }")
    return "\n".join(text), ",".join(["=&r"] * words + ["l", "l", "l", "r"])


_RECEIVE = tl.constexpr(tuple(receiving(sources)[0] for sources in range(1, MOST_RANKS + 1)))
_OPERANDS = tl.constexpr(tuple(receiving(sources)[1] for sources in range(1, MOST_RANKS + 1)))
_WORDS = tl.constexpr(tuple((tl.int32,) * (4 * sources) for sources in range(1, MOST_RANKS + 1)))


@triton.jit
def fetch_words(address, inside, ASM: tl.constexpr):
    """Load 16 bytes from each address, as four words."""
    if ASM:
        words = tl.inline_asm_elementwise(
            _LOAD, "=&r,=&r,=&r,=&r,l,r", [address, inside], (tl.int32, tl.int32, tl.int32, tl.int32), False, 1
        )
    else:
        at = address.to(tl.pointer_type(tl.int32))
        words = (
            tl.load(at, inside != 0, 0),
            tl.load(at + 1, inside != 0, 0),
            tl.load(at + 2, inside != 0, 0),
            tl.load(at + 3, inside != 0, 0),
        )
    return words


@triton.jit
def put_words(address, words, inside, SEND: tl.constexpr, ASM: tl.constexpr) -> None:
    """Store four words to each address, which may be a peer's if SEND."""
    if ASM:
        if SEND:
            tl.inline_asm_elementwise(
                _SEND, "=r,l,r,r,r,r,r", [address, words[0], words[1], words[2], words[3], inside], tl.int32, False, 1
            )
        else:
            tl.inline_asm_elementwise(
                _STORE, "=r,l,r,r,r,r,r", [address, words[0], words[1], words[2], words[3], inside], tl.int32, False, 1
            )
    else:
        at = address.to(tl.pointer_type(tl.int32))
        for j in tl.static_range(4):
            tl.store(at + j, words[j], inside != 0)


@triton.jit
def receive_words(address, distance, limit, inside, SOURCES: tl.constexpr, ASM: tl.constexpr):
    """Wait for the words of SOURCES ranks at ``address + source * distance``, and empty what they were in. Returns four
    words of each rank."""
    if ASM:
        words = tl.inline_asm_elementwise(
            _RECEIVE[SOURCES - 1],
            _OPERANDS[SOURCES - 1],
            [address, tl.cast(distance, tl.int64), tl.cast(limit, tl.int64), inside],
            _WORDS[SOURCES - 1],
            False,
            1,
        )
    else:
        words = ()
        for source in tl.static_range(SOURCES):
            at = (address + source * distance).to(tl.pointer_type(tl.int32))
            for j in tl.static_range(4):
                word = tl.load(at + j, inside != 0, 0, volatile=True)
                while tl.max((word == _EMPTY).to(tl.int32), 0) == 1:
                    word = tl.load(at + j, inside != 0, 0, volatile=True)
                words = words + (word,)  # noqa: RUF005
                tl.store(at + j, tl.full(word.shape, _EMPTY, tl.int32), inside != 0)
    return words


@triton.jit
def low_half(word, DTYPE: tl.constexpr):
    if tl.bfloat16 == DTYPE:
        return (word << 16).to(tl.float32, bitcast=True)
    else:
        return (word & 0xFFFF).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def high_half(word, DTYPE: tl.constexpr):
    if tl.bfloat16 == DTYPE:
        return (word & -65536).to(tl.float32, bitcast=True)
    else:
        return (word >> 16).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def pack_words(low, high, DTYPE: tl.constexpr):
    """Return words of two values, rounded to DTYPE."""
    low_bits = low.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return low_bits | high.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) << 16


@triton.jit
def add_words(a, b, DTYPE: tl.constexpr):
    return pack_words(low_half(a, DTYPE) + low_half(b, DTYPE), high_half(a, DTYPE) + high_half(b, DTYPE), DTYPE)


@triton.jit
def sendable(word):
    return tl.where(word == _EMPTY, 0, word)


@triton.jit
def squares(word, DTYPE: tl.constexpr):
    low, high = low_half(word, DTYPE), high_half(word, DTYPE)
    return low * low + high * high


@triton.jit
def scaled_words(word, scale, weight, DTYPE: tl.constexpr):
    return pack_words(
        low_half(word, DTYPE) * scale * low_half(weight, DTYPE),
        high_half(word, DTYPE) * scale * high_half(weight, DTYPE),
        DTYPE,
    )


@triton.jit
def as_float(word):
    return word.to(tl.float32, bitcast=True)
