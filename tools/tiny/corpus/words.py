"""Provide word pools and made-up words, from which the copy-heavy tasks draw their values."""

from functools import cache
from random import Random

from tools.tiny.corpus.base import Pool, Split, is_held
from tools.tiny.corpus.python_docs import english_words
from tools.tiny.corpus.world import COUNTRIES

_FIRST_NAMES = """
Adam Ada Aisha Alan Alba Albert Alex Alice Alma Amara Amir Amy Ana Andre Andrew Angela Anna Anton Ara Arthur Astrid Aya Barbara Bella
Ben Bianca Boris Bruno Camila Carl Carla Carlos Carmen Caroline Cecil Chen Chloe Clara Claire Daniel Daria David Diana Diego Dora Edgar
Edith Elena Eli Elias Elif Elsa Emil Emily Emma Enzo Erik Esther Eva Farid Fatima Felix Fiona Flora Frank Frida Gabriel George Gina Grace
Greta Gustav Hana Hannah Hans Harry Hassan Hector Helen Henry Hugo Ian Ida Igor Ines Ingrid Iris Isaac Isabel Ivan Ivy Jack Jacob James Jan
Jane Jasmine Javier Joan Joe John Jonas Jorge Josef Julia Julian Kai Karim Karin Kate Keiko Kenji Kim Klara Kofi Lana Lara Lars Laura Lea Leo
Leon Liam Lily Lina Linda Louis Lucas Lucia Lucy Luis Luka Maja Malik Marco Maria Marie Mario Mark Marta Martin Mary Mateo Max Maya Mei Mia
Mila Milo Mina Mira Mohamed Nadia Naomi Nasir Nell Nico Nina Noah Nora Olaf Olga Oliver Olivia Omar Oscar Otto Pablo Paul Paula Pedro Peter
Petra Pia Priya Quentin Rafael Raj Ravi Rita Robert Rosa Ruth Sam Samir Sara Sasha Sean Selma Silvia Simon Sofia Sonia Stefan Stella Sven
Tara Theo Thomas Tim Tina Tom Tomas Uma Vera Victor Viktor Viola Walter Wei Wendy Will Xenia Yara Yasmin Yuki Yusuf Zara Zoe
"""
_LAST_NAMES = """
Abbott Adler Ahmed Ali Andersen Arnold Bailey Baker Barnes Bauer Becker Bell Bennett Berg Black Blanc Brown Bruno Butler Carter Castro Chan
Clark Cole Cook Cooper Costa Cruz Dale Davies Diaz Dixon Dubois Duran Ellis Evans Fischer Fisher Flores Ford Foster Fox Garcia Gibson Gomez
Gray Green Gupta Haas Hall Hansen Harris Hayes Hill Hoffman Holt Hughes Hunt Ito Jensen Johnson Jones Kaya Keller Kelly Khan Kim King Klein
Koch Kovacs Kumar Lang Larsen Lee Lewis Lind Lopez Marino Marsh Martin Meyer Miller Mills Moore Moreau Morgan Mori Murphy Nagy Nash Nelson
Novak Olsen Ortiz Owens Park Parker Patel Perez Petrov Porter Quinn Ramos Reed Reyes Rice Rivera Rossi Roth Ruiz Ryan Sato Schmidt Scott Shah
Silva Singh Smith Stone Suzuki Tanaka Taylor Torres Turner Vega Wagner Walker Wang Ward Weber West White Wood Wright Yang Young Zhang Ziegler
"""
_TOWNS = """
Bristol Leeds York Oxford Lyon Nice Lille Turin Milan Naples Venice Porto Seville Valencia Bilbao Munich Hamburg Cologne Dresden Leipzig
Basel Geneva Zurich Graz Linz Krakow Gdansk Brno Ghent Bruges Rotterdam Utrecht Aarhus Bergen Malmo Tampere Tartu Kaunas Split Bursa Izmir
Haifa Alexandria Casablanca Lagos Mombasa Durban Mumbai Chennai Pune Karachi Lahore Shanghai Shenzhen Osaka Kyoto Busan Cebu Perth Sydney
Melbourne Auckland Boston Chicago Denver Dallas Seattle Portland Houston Miami Atlanta Toronto Montreal Vancouver Cancun Medellin Cordoba
"""
_NOUNS = """
apple anchor arrow axe badge bag ball balloon banana basket bell bench bicycle blanket boat book boot bottle bowl box bread brick brush bucket
button cake camera candle cap card carpet chair cheese chest clock cloak coat coin comb compass cookie cup curtain desk diamond dish doll door
dress drum egg engine envelope fan feather flag flask flute fork fountain frame garden gate glass glove guitar hammer hat helmet honey hook
horn iron jacket jar jewel jug kettle key kite knife ladder lamp lantern leaf lemon letter lock magnet map mask medal melon mirror mug nail
necklace needle net notebook oar olive onion oven paddle pan paper parcel pear pearl pen pencil pepper phone piano pillow pin pipe plate pot
potion pumpkin puzzle quilt radio rake ribbon ring robe rope rug saddle sail salt sandal saw scarf scroll shelf shell shield shirt shoe shovel
silk skate soap sock sofa spear spoon stamp stick stone stool string suitcase sword table tent ticket torch towel toy tray trumpet tunic umbrella
vase vest violin wagon wallet wand watch wheel whistle window wool yarn zipper tiger river forest mountain ocean valley planet rocket castle
bridge tower market village island desert harbour meadow orchard cabin kitchen library museum station school theatre temple tunnel
"""
_ANIMALS = """
cat dog fox owl bear wolf deer hare mouse otter badger beaver frog toad duck goose swan hen goat sheep pig horse donkey rabbit turtle lizard crow
raven eagle hawk parrot penguin seal whale dolphin tiger lion zebra camel monkey panda koala hedgehog squirrel sparrow snail crab dragon
"""
_COLOURS = """
red blue green yellow orange purple pink brown black white grey silver golden turquoise violet crimson navy beige teal olive
"""
_JOBS = """
teacher doctor nurse baker farmer pilot engineer lawyer plumber carpenter painter writer singer actor chef waiter driver mechanic dentist
gardener librarian photographer programmer architect journalist electrician fisherman soldier scientist tailor florist barber
"""
_HOBBIES = """
chess tennis painting cycling swimming reading cooking hiking gardening football dancing singing fishing photography knitting running
sailing climbing pottery archery skiing surfing drawing yoga poetry astronomy karate
"""
_FRUITS = """
apples pears plums cherries grapes lemons limes oranges peaches bananas mangoes figs dates melons kiwis apricots olives
"""
_BRANDS = """
Acme Lumo Nordik Zenta Orbix Vela Kappa Solis Tekra Mono Quanta Fjord Bolt Pluto Rivo Stellar Astra Zephyr Ostro Delta
"""
_CLASSES = """
wizard warrior rogue cleric ranger bard paladin druid monk sorcerer knight archer alchemist warlock barbarian assassin
"""
_VEHICLES = """
train bus plane car ship ferry tram bicycle boat taxi
"""
_ADJECTIVES = """
small large old new heavy light shiny broken wooden plastic round square soft warm cold bright simple elegant sturdy
"""
_VERBS = """
runs jumps sings dances sleeps reads writes waits walks swims laughs smiles paints cooks travels listens climbs works
"""

FIRST_NAMES = Pool(_FIRST_NAMES.split())
LAST_NAMES = Pool(_LAST_NAMES.split())
CITIES = Pool(_TOWNS.split() + [country.capital for country in COUNTRIES])
NOUNS = Pool(_NOUNS.split())
ANIMALS = Pool(_ANIMALS.split())
COLOURS = Pool(_COLOURS.split())
JOBS = Pool(_JOBS.split())
HOBBIES = Pool(_HOBBIES.split())
VEHICLES = Pool(_VEHICLES.split())
FRUITS = Pool(_FRUITS.split())
BRANDS = Pool(_BRANDS.split())
CLASSES = Pool(_CLASSES.split())
ADJECTIVES = Pool(_ADJECTIVES.split())
VERBS = Pool(_VERBS.split())

_ONSET_TEXT = "b br c ch cl d dr f fl g gl gr h j k kl kr l m n p pl pr qu r s sh sk sl sn st str t th tr v w y z zh"
_VOWEL_TEXT = "a e i o u a e i o u ai ea ee ia oo ou ue y"
_CODA_TEXT = "b ck d f g k l lm m n nd nt p r rd rk rn s ss st t th v x z"
_ONSETS, _VOWELS, _CODAS = _ONSET_TEXT.split(), _VOWEL_TEXT.split(), ["", "", "", "", *_CODA_TEXT.split()]


def made_up(rng: Random, split: Split) -> str:
    """Invent a lower-case word of one to four syllables; training and the other splits never share one."""
    while True:
        word = "".join(
            rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS)
            for _ in range(rng.choice((1, 2, 2, 2, 3, 3, 4)))
        )
        if len(word) > 2 and is_held(word) == (split != "train"):
            return word


def made_up_name(rng: Random, split: Split) -> str:
    """Invent a capitalised word."""
    return made_up(rng, split).capitalize()


def first_name(rng: Random, split: Split) -> str:
    """Draw a given name; one in three is invented."""
    return made_up_name(rng, split) if rng.random() < 0.33 else FIRST_NAMES.pick(rng, split)


def full_name(rng: Random, split: Split) -> str:
    """Draw a given name and a family name; one family name in three is invented."""
    last = made_up_name(rng, split) if rng.random() < 0.33 else LAST_NAMES.pick(rng, split)
    return f"{first_name(rng, split)} {last}"


def person(rng: Random, split: Split) -> str:
    """Draw a given name, with or without a family name."""
    return full_name(rng, split) if rng.random() < 0.4 else first_name(rng, split)


def city(rng: Random, split: Split) -> str:
    """Draw a city; one in three is invented."""
    return made_up_name(rng, split) if rng.random() < 0.33 else CITIES.pick(rng, split)


@cache
def _english() -> Pool:
    return Pool(english_words())


def any_word(rng: Random, split: Split) -> str:
    """Draw a word of a large vocabulary, an everyday thing or an invented word."""
    form = rng.random()
    if form < 0.5:
        return _english().pick(rng, split)
    return NOUNS.pick(rng, split) if form < 0.75 else made_up(rng, split)


def noun(rng: Random, split: Split) -> str:
    """Draw a thing; one in three is any word."""
    return any_word(rng, split) if rng.random() < 0.33 else NOUNS.pick(rng, split)


def open_pick(pool: Pool, rng: Random, split: Split) -> str:
    """Draw a value of a small pool; one in four is any word, so that the value must be read and not guessed."""
    return any_word(rng, split) if rng.random() < 0.25 else pool.pick(rng, split)


def code(rng: Random) -> str:
    """Draw a short code such as `QX-4821`."""
    letters = "".join(rng.choice("ABCDEFGHJKLMNPQRSTUVWXYZ") for _ in range(rng.randint(1, 3)))
    return f"{letters}{rng.choice(('-', '', '-'))}{rng.randint(10, 9999)}"


def distinct(items: list[str]) -> list[str]:
    """Drop repeated words, keeping the order of their first occurrence."""
    return list(dict.fromkeys(items))
