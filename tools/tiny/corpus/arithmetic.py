"""Draw arithmetic tasks: the four operations, comparisons and small word problems."""

from random import Random

from tools.tiny.corpus.base import Split, Task, Turn, is_held, phrases
from tools.tiny.corpus.things import number_word
from tools.tiny.corpus.words import FRUITS, first_name, open_pick

_EXPRESSION = phrases(
    """What is {e}?
    {e}
    {e} =
    {e}?
    {e} = ?
    What's {e}?
    Calculate {e}.
    Compute {e}.
    How much is {e}?
    Please compute {e}.
    Tell me {e}.
    Can you calculate {e}?
    What is the result of {e}?
    What do you get for {e}?
    Work out {e}.
    Solve {e}.
    Hi, what is {e}?
    Quick question: what is {e}?
    I need the result of {e}.
    What does {e} equal?
    Give me the answer to {e}.
    Question: What is {e}?
    Find the value of {e}.
    Maths: {e}""",
    """What is the value of {e}?
    Please work out {e}.
    Could you tell me what {e} is?
    Hey, how much is {e}?
    {e} equals what?""",
)
_SPOKEN = {
    "+": ("{a} plus {b}", "the sum of {a} and {b}", "{a} and {b} together", "{a} added to {b}"),
    "-": ("{a} minus {b}", "the difference between {a} and {b}", "{a} take away {b}"),
    "*": ("{a} times {b}", "the product of {a} and {b}", "{a} multiplied by {b}"),
    "/": ("{a} divided by {b}",),
}
_RESULT = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b, "/": lambda a, b: a // b}


def _written(a: int, b: int, sign: str, rng: Random) -> str:
    form = rng.random()
    if form < 0.3:
        return rng.choice(_SPOKEN[sign]).format(a=a, b=b)
    if form < 0.4:
        return f"{a}{sign}{b}"
    return f"{a} {'x' if sign == '*' and form < 0.6 else sign} {b}"


def _column_steps(a: int, b: int) -> str:
    """Write the addition column by column, ones first, as the reasoning before the answer."""
    steps, carry, place = [], 0, 0
    while place < len(str(max(a, b))):
        x, y = a // 10**place % 10, b // 10**place % 10
        total = x + y + carry
        steps.append(f"{x} + {y}{f' + {carry}' if carry else ''} = {total}")
        carry, place = total // 10, place + 1
    return f"Column by column: {', '.join(steps)}. So {a} + {b} = {a + b}."


def operation(a: int, b: int, sign: str, rng: Random, split: Split) -> Turn:
    """Return a turn that asks for `a sign b` and answers with the whole equation."""
    value = str(_RESULT[sign](a, b))
    equation = f"{a} {sign} {b} = {value}"
    thought = _column_steps(a, b) if sign == "+" else f"I compute {equation}."
    question = _EXPRESSION.pick(rng, split).format(e=_written(a, b, sign, rng))
    return Turn(question[:1].upper() + question[1:], f"{equation}.", value, thought=thought)


def _operands(sign: str, top: int, rng: Random) -> tuple[int, int]:
    if sign == "*":
        return rng.randint(0, 12), rng.randint(0, 12)
    if sign == "/":
        b = rng.randint(1, 12)
        return b * rng.randint(0, 12), b
    a, b = rng.randint(0, top), rng.randint(0, top)
    return (max(a, b), min(a, b)) if sign == "-" and rng.random() < 0.8 else (a, b)


def _fresh(sign: str, top: int, rng: Random, split: Split) -> tuple[int, int]:
    """Draw operands of the split; tables and small sums are facts to know, so they are in both splits."""
    while True:
        a, b = _operands(sign, top, rng)
        if sign in "*/" or a + b < 20 or is_held((sign, a, b)) == (split != "train"):
            return a, b


def add(rng: Random, split: Split) -> Turn:
    """Draw an addition of numbers of one or two digits."""
    return operation(*_fresh("+", rng.choice((9, 20, 99, 99, 99, 99)), rng, split), "+", rng, split)


def subtract(rng: Random, split: Split) -> Turn:
    """Draw a subtraction of numbers of one or two digits."""
    return operation(*_fresh("-", rng.choice((9, 20, 99, 99, 99)), rng, split), "-", rng, split)


def multiply(rng: Random, split: Split) -> Turn:
    """Draw from the multiplication table up to 12, or the division back."""
    sign = rng.choice("***/")
    return operation(*_fresh(sign, 12, rng, split), sign, rng, split)


def add_large(rng: Random, split: Split) -> Turn:
    """Draw an addition or subtraction of numbers of up to three digits."""
    sign = rng.choice("++-")
    return operation(*_fresh(sign, 999, rng, split), sign, rng, split)


_COMPARE = phrases(
    """Which [is|one is|number is] {w}, {a} or {b}?
    Which [number|one|of these] is {w}: {a} or {b}?
    [What is|What's] {w}, {a} or {b}?
    {a} or {b}: [which is {w}?|which one is {w}?|what is {w}?]
    [Tell me|Say|Decide|Find out] which [is|number is|one is] {w}, {a} or {b}.
    Is {a} or {b} {w}?
    Compare {a} and {b}. Which [is|number is|one is] {w}?
    [Give me|Name|Choose|Pick] the {w} [number|one]: {a} or {b}
    [Give me|Name|Choose|Pick] the {w} of {a} and {b}.
    [I have|Here are|There are] two numbers, {a} and {b}. Which is {w}?
    [Among|From|Out of] {a} and {b}, [which is|pick] the {w} [one|number]?""",
    """Of {a} and {b}, which is {w}?
    Between {a} and {b}, which number is {w}?""",
)


def compare(rng: Random, split: Split) -> Turn:
    """Ask for the larger or the smaller of two numbers."""
    top = rng.choice((20, 99, 999))
    a, b = rng.sample(range(top + 1), 2)
    word, pick = rng.choice((("larger", max), ("bigger", max), ("greater", max), ("smaller", min)))
    best = pick(a, b)
    other = a + b - best
    user = _COMPARE.pick(rng, split).format(w=word, a=a, b=b)
    return Turn(
        user, f"{best} is {word} than {other}.", str(best), thought=f"I compare {a} with {b}: {best} is {word}."
    )


_GAIN = phrases(
    """{n} [has|owns|holds|carries|had] {a} {f} and [buys|gets|picks|takes|receives|wins] {b} more. How many {f} [does {n} have now|does {n} have|are there now|is that]?
    {n} [has|owns|had] {a} {f}. A friend [gives|hands|sends] {n} {b} more. How many {f} are there [now|in total]?
    There [are|were] {a} {f} [in a bowl|on the table|in a bag|in the kitchen]. {n} [adds|brings|puts in] {b} [more|]. How many {f} are there [now|in total]?
    {n} [picks|buys|gets|counts] {a} {f} [in the morning|on Monday|first] and {b} [in the evening|on Tuesday|later]. How many {f} is that [in total|]?
    [A bowl|A bag|A basket|The table] [has|holds|had] {a} {f}. {n} [adds|drops in|brings] {b} [more|]. How many {f} are [there now|in it]?
    [First|Yesterday] {n} had {a} {f}. [Then|Today] {b} more [came|were added|arrived]. How many {f} are there?
    {n} and a friend have {a} and {b} {f}. How many {f} do they have [together|in total]?
    [If|When] {n} has {a} {f} and gets {b} more, how many {f} [does {n} have|are there]?""",
    """{n} finds {a} {f} and later finds {b} more. How many {f} does {n} have?
    A box has {a} {f}. {n} puts in {b} more. How many {f} are in the box?""",
)
_LOSS = phrases(
    """{n} [has|owns|holds|had|bought] {a} {f} and [eats|loses|uses|drops|sells|throws away] {b}. How many {f} [are left|remain|does {n} have left|does {n} still have]?
    {n} [has|had|owns] {a} {f} [and|but] [gives away|gives a friend|lends out|sends away] {b}. How many {f} [does {n} have now|are left|remain]?
    There [are|were] {a} {f} [in a bowl|on the table|in a bag]. {n} [takes|eats|steals|removes] {b}. How many {f} [are left|remain|are there now]?
    {n} [buys|gets|picks] {a} {f} [and|but] [loses|drops|breaks|eats|sold] {b} of them. How many {f} [are left|remain]?
    {n} [had|has] {a} {f}. [Then|Later|Today] {b} [were gone|were eaten|were stolen|were lost]. How many {f} [are left|remain]?
    [Of|From] {a} {f}, {n} [takes|gives away|loses|sells] {b}. How many {f} are [left|still there]?
    [If|When] {n} has {a} {f} and [eats|loses|sells] {b}, how many {f} [are left|remain]?""",
    """{n} had {a} {f} but sold {b}. How many {f} are left?
    Out of {a} {f}, {n} eats {b}. How many {f} remain?""",
)


def word_problem(rng: Random, split: Split) -> Turn:
    """Add or subtract in a one-sentence story."""
    gain = rng.random() < 0.5
    a, b = sorted((rng.randint(1, 50), rng.randint(1, 50)), reverse=True)
    fruit = open_pick(FRUITS, rng, split)
    user = (_GAIN if gain else _LOSS).pick(rng, split).format(n=first_name(rng, split), a=a, b=b, f=fruit)
    sign = "+" if gain else "-"
    value = str(_RESULT[sign](a, b))
    return Turn(
        user,
        f"{a} {sign} {b} = {value}, so there are {value} {fruit}.",
        value,
        thought=f"I compute {a} {sign} {b} = {value}.",
    )


_COUNT = phrases(
    """[Count|Please count|Now count|Start counting] from {a} to {z}{by}.
    [Can|Could|Would] you count from {a} to {z}{by}?
    [Count|Go] {by} from {a} [to|up to|until] {z}.
    [Write|List|Give me|Say|Print] [the numbers|all numbers] from {a} to {z}{by}.
    [Show me how you|Let me hear you] count from {a} to {z}{by}.
    Count{by}, [starting at|beginning with] {a}, [ending at|up to] {z}.""",
    """I want you to count from {a} to {z}{by}.""",
)


def count(rng: Random, split: Split) -> Turn:
    """Count upwards or downwards in steps."""
    step = rng.choice((1, 1, 1, 2, 5, 10))
    first = rng.choice((1, 1, 0, step, rng.randint(0, 60)))
    numbers = [first + step * i for i in range(rng.randint(3, 30))]
    if rng.random() < 0.2:
        numbers.reverse()
    by = "" if step == 1 else f" in steps of {step}"
    wording = _COUNT.pick(rng, split)
    reply = ", ".join(map(str, numbers))
    return Turn(wording.format(a=numbers[0], z=numbers[-1], by=by), reply, reply, "same")


def plain_sum(rng: Random) -> str:
    """Write equations as plain text, in digits and sometimes in words."""
    rows = []
    for _ in range(rng.randint(1, 12)):
        sign = rng.choice("++-*")
        a, b = _fresh(sign, 99, rng, "train")
        if sign == "+" and a + b <= 100 and rng.random() < 0.1:
            rows.append(f"{number_word(a)} plus {number_word(b)} is {number_word(a + b)}")
        else:
            rows.append(f"{a} {sign} {b} = {_RESULT[sign](a, b)}")
    return "\n".join(rows)


TASKS: dict[str, Task] = {
    "add": add, "subtract": subtract, "multiply": multiply, "add_large": add_large,
    "compare": compare, "word_problem": word_problem, "count": count,
}  # fmt: skip
