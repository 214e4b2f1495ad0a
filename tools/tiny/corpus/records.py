"""Define the kinds of record that the extraction tasks hide in a text: their keys, values and sentences."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from string import Formatter

from tools.tiny.corpus import words
from tools.tiny.corpus.base import Phrases, Split, phrases
from tools.tiny.corpus.things import DAYS, MONTHS

Scalar = str | int | float
Draw = Callable[[Random, Split], Scalar]


@dataclass(frozen=True, slots=True)
class Record:
    """`fields` draws each value; `aliases` are other names of a key; `texts` mention some or all of the fields.

    A sentence may be about the field `subject`, which is shown as `shown` has it.
    """

    name: str
    fields: dict[str, Draw]
    texts: Phrases
    aliases: dict[str, tuple[str, ...]]
    subject: str
    shown: str


def _between(low: int, high: int) -> Draw:
    return lambda rng, split: rng.randint(low, high)


def _price(rng: Random, split: Split) -> Scalar:
    whole = rng.randint(1, 10 ** rng.randint(1, 3))
    return whole if rng.random() < 0.4 else float(f"{whole}.{rng.randint(0, 9)}{rng.randint(1, 9)}")


def _from(pool: words.Pool) -> Draw:
    return lambda rng, split: words.open_pick(pool, rng, split)


def _date(rng: Random, split: Split) -> str:
    return f"{rng.randint(1, 28)} {rng.choice(MONTHS)}" + (f" {rng.randint(1950, 2035)}" if rng.random() < 0.6 else "")


def _time(rng: Random, split: Split) -> str:
    return f"{rng.randint(0, 23)}:{rng.randint(0, 59):02d}"


def _email(rng: Random, split: Split) -> str:
    return f"{words.first_name(rng, split).lower()}@{words.made_up(rng, split)}.{rng.choice(('com', 'org', 'net'))}"


def _phone(rng: Random, split: Split) -> str:
    return f"{rng.randint(100, 999)}-{rng.randint(1000, 9999)}"


def _title(rng: Random, split: Split) -> str:
    adjective, thing = words.open_pick(words.ADJECTIVES, rng, split).capitalize(), words.noun(rng, split).capitalize()
    return rng.choice(
        (f"The {adjective} {thing}", f"The {thing}", f"{adjective} {thing}", f"{thing} of {words.city(rng, split)}")
    )


def _item(rng: Random, split: Split) -> str:
    plain = words.noun(rng, split)
    return plain if rng.random() < 0.7 else f"{words.open_pick(words.ADJECTIVES, rng, split)} {plain}"


def _day(rng: Random, split: Split) -> str:
    return rng.choice(DAYS)


def _code(rng: Random, split: Split) -> str:
    return words.code(rng)


RECORDS: tuple[Record, ...] = (
    Record(
        "person",
        {
            "name": words.person,
            "age": _between(1, 99),
            "city": words.city,
            "job": _from(words.JOBS),
            "hobby": _from(words.HOBBIES),
        },
        phrases(
            """{name} is {age} years old, lives in {city}, works as a {job} and likes {hobby}.
            {name} lives in {city}. {name} is a {job}, {age} years old, and enjoys {hobby}.
            I met {name} in {city}. At {age}, this {job} still loves {hobby}.
            My name is {name}. I am {age} years old and I live in {city}. I work as a {job}. My hobby is {hobby}.
            The {job} {name} ({age}) comes from {city} and spends weekends on {hobby}.
            In {city} there lives a {job} called {name} who is {age} and fond of {hobby}.
            Name: {name}. Age: {age}. City: {city}. Job: {job}. Hobby: {hobby}.
            This is {name}, a {age}-year-old {job} from {city} whose hobby is {hobby}.
            {name}, {age}, a {job} in {city}, does {hobby} after work.
            At the age of {age}, {name} moved to {city} to be a {job} and took up {hobby}.
            Hello, I'm {name} from {city}. I'm {age}, I'm a {job}, and {hobby} is what I like most.
            When not at work as a {job}, {name} enjoys {hobby}. {name} is {age} and lives in {city}.
            {name} is {age} years old and lives in {city}.
            {name} is {age} and lives in {city}.
            {name} is {age} years old.
            {name} lives in {city}.
            {name} is a {job} from {city}.
            My name is {name} and I am {age} years old.
            I am {name}, {age} years old, from {city}.
            {name}, {age}, lives in {city}.
            {name} is a {age}-year-old {job} who lives in {city}.
            {name} from {city} is {age} years old.
            {name} ({age}) lives in {city} and works as a {job}.
            {name} works as a {job} in {city}.
            {name} loves {hobby} and is {age} years old.
            Yesterday I talked to {name}, who is {age} and works in {city} as a {job}.
            [My|Your|Our] [friend|cousin|brother|sister|boss|teacher] {name} [lives|works|stays] in {city} and is {age} [years old|].
            {age} [years|summers] old, {name} [still|now] [lives|works] in {city}.
            A [young|tired|famous|quiet] {job} of {age} called {name} [came|moved|went] to {city}.
            [Do you know|Have you met|Let me introduce] {name}[?|, please.] {age} years old, a {job} in {city}, and [crazy about|always up for|good at] {hobby}.
            {city} is the home of {name}, [a|the] {job} who is {age} and [loves|likes] {hobby}.
            For {name}, {hobby} is everything. [The|This] {job} is {age} and [lives|works] in {city}.
            {name}: {job}, {age}, {city}, {hobby}.
            {name} / {age} / {city} / {job}
            [There is|We have] a {job} in {city}[ whose name is|,] {name}, [aged|age] {age}.
            {hobby}, that is what {name} [likes|does]. [At {age},|Aged {age},] {name} is a {job} in {city}.
            {name} will [turn|be] {age} [soon|next week|this month] and [wants to stay|is staying] in {city}.
            [Since|For] years {name} has been a {job} [in|at] {city}; {name} is {age} [now|].
            [The name is|I'm called|They call me] {name}. [Age|I'm] {age}. [From|Based in] {city}. [{job}|I'm a {job}] [who likes|with a love for] {hobby}.""",
            """Our neighbour {name} turned {age} this year. {name} is a {job} here in {city} and loves {hobby}.
            A {job} from {city}, {name} is {age} years of age and very keen on {hobby}.
            Meet {name}: {age} years old, {job}, at home in {city}, never tired of {hobby}.
            {name} has lived in {city} for years and is now {age} years old.
            This is {name}, aged {age}, from {city}.""",
        ),
        {
            "name": ("full_name", "person"),
            "city": ("town", "location", "home"),
            "job": ("profession", "occupation"),
            "age": ("years",),
        },
        "name",
        "{s}",
    ),
    Record(
        "product",
        {
            "product": _item,
            "color": _from(words.COLOURS),
            "price": _price,
            "stock": _between(0, 500),
            "brand": _from(words.BRANDS),
        },
        phrases(
            """The {color} {product} by {brand} costs {price} dollars and there are {stock} in stock.
            {brand} sells a {product} in {color} for {price} dollars. {stock} are left.
            For sale: {product}, {color}, made by {brand}. Price: {price} dollars. Stock: {stock}.
            We have {stock} pieces of the {product} from {brand}. It is {color} and costs {price} dollars.
            You can buy the {product} ({brand}) in {color} at {price} dollars; stock is {stock}.
            Product: {product}. Brand: {brand}. Color: {color}. Price: {price}. Stock: {stock}.
            I bought a {color} {product} for {price} dollars. The brand is {brand}. They had {stock} of them.
            At {price} dollars, the {brand} {product} in {color} is a good buy, and {stock} are available.
            There are {stock} units of a {color} {product} from {brand}, each at {price} dollars.
            The {product} costs {price} dollars.
            The {color} {product} costs {price} dollars.
            I bought a {color} {product} for {price} dollars.
            A {product} by {brand} costs {price} dollars.
            We have {stock} pieces of the {color} {product}.
            [This|That|Our|The] {product} [is|looks] {color} and [costs|is] {price} dollars.
            [Only|Just|Still] {stock} of the {color} {product} [from|by] {brand} [are left|are here] [at|for] {price} dollars [each|].
            {brand} [presents|offers|shows|has] [a|the] [new|] {color} {product}: {price} dollars, {stock} [in stock|pieces|available].
            {price} dollars [buy|get] you a {color} {product} [made by|from|by] {brand}.
            [Buy|Take|Order|Try] [this|the] {product} [by|from] {brand}! [Color|It is] {color}, [price|only] {price} dollars, {stock} [in stock|left].
            [In stock|Available]: {stock} x {product} ({color}, {brand}), {price} dollars [each|per piece].
            {product}, {color}, {price} dollars
            {color} {product} - {brand} - {price} dollars - {stock} pieces
            [Someone|A man|A woman] paid {price} dollars for a {product} [of|in] {color}. [The maker is|It was made by] {brand}.
            [You pay|We ask] {price} dollars for the {product} [of|by] {brand}, which is {color}; we have {stock}.""",
            """This {product} is {color}, comes from {brand}, costs {price} dollars, and {stock} remain.
            {stock} items left! Get the {brand} {product} in {color} for just {price} dollars.
            The price of the {color} {product} is {price} dollars.""",
        ),
        {
            "product": ("item", "article"),
            "color": ("colour",),
            "stock": ("quantity", "count", "available"),
            "price": ("cost",),
        },
        "product",
        "The {s}",
    ),
    Record(
        "event",
        {"event": _title, "date": _date, "time": _time, "place": words.city, "guests": _between(2, 900)},
        phrases(
            """The event "{event}" takes place on {date} at {time} in {place} with {guests} guests.
            "{event}" is on {date} in {place}. It starts at {time}. We expect {guests} guests.
            Join us in {place} on {date} at {time} for "{event}". There will be {guests} guests.
            Event: {event}. Date: {date}. Time: {time}. Place: {place}. Guests: {guests}.
            On {date}, {guests} guests will come to {place} for "{event}", which begins at {time}.
            At {time} on {date} we open "{event}" in {place} for {guests} guests.
            {guests} guests are invited to "{event}" in {place}; the date is {date} and the time is {time}.
            "{event}" is on {date} at {time}.
            The {event} takes place in {place} on {date}.
            We meet in {place} at {time} on {date}.
            [Do not miss|Come and see|Everyone talks about] "{event}" [in|at] {place} on {date}[.|, {time}.]
            {guests} [people|guests|visitors] [came|will come|go] to {place} [for|to see] "{event}" at {time} on {date}.
            {place} [hosts|shows|has|celebrates] "{event}" on {date} at {time} [for|before|with] {guests} guests.
            [The doors of|The show] "{event}" [open|opens] at {time} on {date}; {guests} guests [meet|are invited] in {place}.
            "{event}": {date}, {time}, {place}, {guests} guests
            {date}, {time}: "{event}" in {place} ({guests} guests)
            [With|Before] {guests} guests, "{event}" [started|began|opened] in {place} at {time} on {date}.
            [The day is|Note the day:] {date}. [At|From] {time}, {place} [sees|enjoys] "{event}" with {guests} guests.""",
            """Please come to "{event}" in {place}: {date}, {time}. We have {guests} guests.
            In {place}, "{event}" will welcome {guests} guests at {time} on {date}.""",
        ),
        {
            "event": ("title",),
            "place": ("location", "city", "venue"),
            "guests": ("attendees", "people"),
            "time": ("start",),
        },
        "event",
        '"{s}"',
    ),
    Record(
        "trip",
        {
            "traveler": words.first_name,
            "origin": words.city,
            "destination": words.city,
            "day": _day,
            "transport": _from(words.VEHICLES),
        },
        phrases(
            """{traveler} travels from {origin} to {destination} on {day} by {transport}.
            On {day}, {traveler} takes the {transport} from {origin} to {destination}.
            {traveler} leaves {origin} on {day} and goes to {destination} by {transport}.
            The {transport} takes {traveler} to {destination} on {day}, starting in {origin}.
            By {transport}, {traveler} goes to {destination}. The trip starts in {origin} on {day}.
            Next {day} {traveler} will go from {origin} to {destination}. The trip is by {transport}.
            Book a {transport} for {traveler} from {origin} to {destination} on {day}.
            {traveler} goes from {origin} to {destination}.
            {traveler} takes the {transport} to {destination} on {day}.
            [On|This|Next] {day} the {transport} [brings|carries|drives] {traveler} from {origin} to {destination}.
            [A|One] {transport} [ticket|ride] for {traveler}[:|,] {origin} to {destination}, {day}.
            {origin} - {destination}, {day}, {transport}, {traveler}
            [It is a long way|The trip goes] from {origin} to {destination}, [so|and] {traveler} [takes|needs] the {transport} on {day}.
            {traveler} [said|wrote|told us]: on {day} I [go|travel] from {origin} to {destination} by {transport}.
            [In|At] {origin}, {traveler} [gets on|boards|enters] the {transport} to {destination}. [It is|The day is] {day}.
            {destination} is where {traveler} [arrives|will be] on {day}, [coming|after leaving] from {origin} by {transport}.
            [We see|I saw] {traveler} on the {transport} from {origin} [on|last] {day}; the goal [is|was] {destination}.""",
            """{traveler} starts in {origin} and reaches {destination} by {transport} on {day}.
            It is {day}, and {traveler} is on the {transport} from {origin} to {destination}.""",
        ),
        {
            "traveler": ("name", "passenger"),
            "origin": ("from", "start"),
            "destination": ("to", "end"),
            "transport": ("vehicle",),
        },
        "traveler",
        "{s}",
    ),
    Record(
        "pet",
        {
            "pet": words.first_name,
            "species": _from(words.ANIMALS),
            "age": _between(1, 30),
            "owner": words.person,
            "color": _from(words.COLOURS),
        },
        phrases(
            """{owner} has a {color} {species} called {pet} that is {age} years old.
            {pet} is a {color} {species}, {age} years old, and belongs to {owner}.
            The {species} {pet} is {age} years old and {color}. The owner is {owner}.
            My {color} {species} is called {pet}. It is {age}. Signed, {owner}.
            Pet: {pet}. Species: {species}. Age: {age}. Color: {color}. Owner: {owner}.
            {owner} takes care of {pet}, a {species} of {age} years with {color} fur.
            At {age}, {pet} the {color} {species} is the favourite of {owner}.
            {owner} has a {species} called {pet}.
            {pet} is a {age} year old {species}.
            [The|A|This] {color} {species} [of|with] {owner} [is|has reached the age of] {age} [and is called|and is named|; the name is] {pet}.
            [At home,|In the garden,|Every day,] {owner} [plays|walks|sits] with {pet}, [a|the] {color} {species} [aged|of] {age}.
            {pet}: {species}, {color}, {age} years, owner {owner}
            {owner} [bought|found|got|adopted] [a|the] {color} {species} {age} years ago. [Its name is|They call it] {pet}.
            [Say hello to|Look at|Meet] {pet}, [the|a] {age}-year-old {species} [of|from the house of] {owner}. [It|The fur] is {color}.
            [Lost|Found]: {species}, {color}, {age} years old, [answers to|called] {pet}. [Owner|Please call]: {owner}.
            {age} years [old|] and {color}: that is {pet}, the {species} of {owner}.""",
            """There is a {species} named {pet} at the home of {owner}. It is {color} and {age} years old.
            {owner}'s {species} is {color}, is {age} years old and answers to {pet}.""",
        ),
        {"pet": ("name", "pet_name"), "species": ("animal", "kind"), "color": ("colour",)},
        "pet",
        "{s}",
    ),
    Record(
        "book",
        {"title": _title, "author": words.full_name, "year": _between(1500, 2035), "pages": _between(20, 1500)},
        phrases(
            """"{title}" by {author} was published in {year} and has {pages} pages.
            {author} wrote "{title}" in {year}. It has {pages} pages.
            In {year}, {author} published "{title}", a book of {pages} pages.
            The book "{title}" ({year}, {pages} pages) is by {author}.
            Title: {title}. Author: {author}. Year: {year}. Pages: {pages}.
            I am reading "{title}". It has {pages} pages, came out in {year} and was written by {author}.
            With its {pages} pages, "{title}" made {author} famous in {year}.
            {author} wrote "{title}" in {year}.
            "{title}" by {author} has {pages} pages.
            [Have you read|I like|Do you know] "{title}" [by|from] {author}? [It has|There are] {pages} pages [and it is from|; it came out in] {year}.
            {year}: {author} [writes|finishes|prints] "{title}" ({pages} pages).
            {pages} pages [long|thick|in all], "{title}" [is|was] the [first|last|best] book of {author} [and came out in|from] {year}.
            [The year|It was] {year}[ brought|, the year of] "{title}", [a|the] {pages}-page [book|novel|story] [of|by] {author}.
            "{title}", {author}, {year}, {pages} pages
            [A|One] copy of "{title}" has {pages} pages. {author} [wrote|made|finished] it in {year}.
            [After|With] {pages} pages {author} [ended|finished|closed] "{title}" in {year}.
            [The writer|The author] {author} [gave us|is known for] "{title}" [in|, printed in] {year}; it has {pages} pages.""",
            """There are {pages} pages in "{title}", which {author} finished in {year}.
            {year} saw a new book by {author}: "{title}", {pages} pages long.""",
        ),
        {"title": ("book", "name"), "author": ("writer",), "year": ("published",), "pages": ("page_count", "length")},
        "title",
        '"{s}"',
    ),
    Record(
        "contact",
        {"name": words.full_name, "email": _email, "phone": _phone, "company": words.made_up_name},
        phrases(
            """Contact {name} at {company}: email {email}, phone {phone}.
            {name} works for {company}. The email is {email} and the phone number is {phone}.
            You can reach {name} of {company} by phone at {phone} or by email at {email}.
            Name: {name}. Company: {company}. Email: {email}. Phone: {phone}.
            Please call {phone} and ask for {name} from {company}, or write to {email}.
            {company} sent a letter. Answer to {name}, {email}, or call {phone}.
            The email of {name} is {email}.
            {name} has the phone number {phone} and the email {email}.
            My name is {name} and my email is {email}.
            [Questions?|Need help?|Problems?] [Ask|Call|Write to] {name} [at|from|of] {company}: {phone} or {email}.
            {name} ({company}), {email}, {phone}
            [The phone of|To call] {name} [from|at] {company} [is|use] {phone}; [the email|the address] is {email}.
            [Dial|Use] {phone} [for|to reach] {name}. [Email|Mail]: {email}. [Works for|Company]: {company}.
            [I am|Here is] {name} [of|from] {company}. [My|The] number is {phone} and [my|the] address is {email}.
            {email} [is|belongs to] {name}, who [works|sits] at {company} and [has|answers] the phone {phone}.
            [From|By] {company}: {name} [can be called at|waits for you at] {phone} or {email}.""",
            """Write to {email} or call {phone} to speak with {name} of {company}.
            At {company}, your contact is {name} ({email}, {phone}).""",
        ),
        {"name": ("contact", "full_name"), "phone": ("phone_number", "tel"), "company": ("employer", "organization")},
        "name",
        "{s}",
    ),
    Record(
        "order",
        {
            "order_id": _code,
            "customer": words.full_name,
            "item": _item,
            "quantity": _between(1, 200),
            "total": _price,
            "city": words.city,
        },
        phrases(
            """Order {order_id}: {customer} from {city} bought {quantity} of the {item} for {total} dollars.
            {customer} in {city} ordered {quantity} x {item}. The total is {total} dollars. Order number {order_id}.
            The order {order_id} by {customer} has {quantity} pieces of the {item}, costs {total} dollars and goes to {city}.
            Ship {quantity} of the {item} to {customer} in {city}. Order: {order_id}. Total: {total} dollars.
            Order: {order_id}. Customer: {customer}. Item: {item}. Quantity: {quantity}. Total: {total}. City: {city}.
            {customer} paid {total} dollars for {quantity} of the {item} (order {order_id}, delivery to {city}).
            {customer} ordered {quantity} of the {item}.
            {customer} bought a {item} for {total} dollars.
            [New|Open|Paid] order {order_id}: {quantity} x {item} for {customer}, {city}, {total} dollars.
            [Dear|Hello] {customer}, your order {order_id} ({quantity} of the {item}) [costs|comes to] {total} dollars [and goes|and will be sent] to {city}.
            {order_id}, {customer}, {item}, {quantity}, {total}, {city}
            [In|From] {city}, {customer} [asked for|wants|ordered] {quantity} [pieces|units] of the {item}. [Number|Order] {order_id}, {total} dollars.
            {quantity} [times|x] {item}, {total} dollars, [for|to] {customer} in {city}: [that is|this is] order {order_id}.
            [The bill|The invoice] of order {order_id} [is|says] {total} dollars; {customer} [from|in] {city} [gets|receives] {quantity} of the {item}.
            [We sent|We packed|Please send] {quantity} of the {item} to {city}. [Customer|It is for]: {customer}. [Paid|Price]: {total} dollars. Order {order_id}.""",
            """We received {total} dollars from {customer}, {city}, for order {order_id}: {quantity} of the {item}.
            For {total} dollars, {customer} of {city} gets {quantity} of the {item}. The order is {order_id}.""",
        ),
        {
            "customer": ("name", "buyer"),
            "order_id": ("id", "order"),
            "item": ("product",),
            "quantity": ("count", "amount"),
            "total": ("price",),
        },
        "customer",
        "{s}",
    ),
)


def mentioned(text: str) -> tuple[str, ...]:
    """Return the fields that a text pattern names, each once."""
    return tuple(dict.fromkeys(name for _, name, _, _ in Formatter().parse(text) if name))
