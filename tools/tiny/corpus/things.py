"""Hold everyday fact tables: `subject:value` pairs, one table per relation."""


def pairs(text: str) -> dict[str, str]:
    """Parse `a:b; c:d` (line breaks count as blanks) into {a: b, c: d}."""
    rows = (row.split(":") for row in text.replace("\n", " ").split(";") if row.strip())
    return {" ".join(subject.split()): " ".join(value.split()) for subject, value in rows}


COLOURS = pairs("""
grass:green; the sky:blue; a ripe banana:yellow; a lemon:yellow; snow:white; milk:white; coal:black; blood:red;
a strawberry:red; a carrot:orange; a pumpkin:orange; an orange:orange; a lime:green; a cucumber:green; broccoli:green;
spinach:green; a tomato:red; a cherry:red; a fire engine:red; chocolate:brown; coffee:brown; a brown bear:brown;
a flamingo:pink; a pig:pink; a polar bear:white; a swan:white; salt:white; sugar:white; cotton:white; an elephant:grey;
a mouse:grey; ash:grey; the sea:blue; a sapphire:blue; a ruby:red; an emerald:green; gold:yellow; the sun:yellow;
a sunflower:yellow; corn:yellow; a canary:yellow; a raven:black; a crow:black; a panther:black; tar:black; ink:black;
an aubergine:purple; lavender:purple; a plum:purple; a violet:purple; a frog:green; a crocodile:green; a leaf:green;
a pea:green; a stop sign:red; a lobster:red; rust:brown; wood:brown; soil:brown; a blueberry:blue; butter:yellow;
rice:white; chalk:white; a raspberry:red; mint:green; a peach:orange; a grape:purple; the night sky:black
""")

OPPOSITES = pairs("""
hot:cold; big:small; tall:short; fast:slow; up:down; left:right; happy:sad; day:night; light:dark; hard:soft; wet:dry;
young:old; rich:poor; strong:weak; open:closed; full:empty; early:late; high:low; near:far; good:bad; clean:dirty;
loud:quiet; thick:thin; wide:narrow; deep:shallow; begin:end; start:stop; push:pull; give:take;
buy:sell; win:lose; love:hate; laugh:cry; arrive:leave; remember:forget; always:never; inside:outside; before:after;
above:below; front:back; top:bottom; first:last; true:false; yes:no; easy:difficult; cheap:expensive; safe:dangerous;
brave:cowardly; smooth:rough; sharp:blunt; sweet:bitter; new:ancient; alive:dead; asleep:awake; polite:rude;
friend:enemy; question:answer; summer:winter; morning:evening; east:west; north:south; black:white; male:female;
king:queen; success:failure; war:peace; truth:lie; profit:loss; entrance:exit; increase:decrease; expand:shrink;
attack:defend; build:destroy; float:sink; freeze:melt; accept:refuse; add:subtract; multiply:divide; generous:selfish;
honest:dishonest; possible:impossible; visible:invisible; legal:illegal; lucky:unlucky; patient:impatient;
public:private; simple:complex; solid:liquid; tight:loose; tiny:huge; ugly:beautiful; lazy:hardworking; busy:free;
careful:careless; odd:even; plus:minus; lead:follow; teach:learn; lend:borrow; hide:show; whisper:shout; appear:vanish
""")

UNITS = pairs("""
seconds|a minute:60; minutes|an hour:60; hours|a day:24; days|a week:7; months|a year:12; weeks|a year:52;
days|a year:365; days|a leap year:366; years|a decade:10; years|a century:100; years|a millennium:1000;
centimetres|a metre:100; metres|a kilometre:1000; millimetres|a centimetre:10; grams|a kilogram:1000;
kilograms|a tonne:1000; millilitres|a litre:1000; inches|a foot:12; feet|a yard:3; ounces|a pound:16;
eggs|a dozen:12; cents|a dollar:100; pence|a pound sterling:100; degrees|a circle:360; degrees|a right angle:90;
bits|a byte:8; bytes|a kilobyte:1024; players|a football team:11; players|a basketball team:5; strings|a violin:4;
keys|a piano:88; letters|the English alphabet:26; vowels|the English alphabet:5; cards|a deck:52; squares|a chessboard:64;
planets|the solar system:8; continents|the world:7; oceans|the world:5; colours|a rainbow:7; quarters|a year:4;
minutes|a day:1440; seconds|an hour:3600; hours|a week:168; seasons|a year:4; sides|a coin:2; faces|a cube:6; milligrams|a gram:1000
""")

SOUNDS = pairs("""
a cow:moo; a dog:woof; a cat:meow; a duck:quack; a sheep:baa; a pig:oink; a horse:neigh; a rooster:cock-a-doodle-doo;
a lion:roar; a snake:hiss; a bee:buzz; a frog:ribbit; an owl:hoot; a mouse:squeak; a crow:caw; a hen:cluck; a wolf:howl;
a turkey:gobble; a dove:coo; a donkey:hee-haw; a bird:tweet; an elephant:trumpet; a goose:honk
""")

YOUNG = pairs("""
cow:calf; dog:puppy; cat:kitten; duck:duckling; sheep:lamb; pig:piglet; horse:foal; hen:chick; lion:cub; bear:cub; goat:kid;
deer:fawn; frog:tadpole; kangaroo:joey; goose:gosling; swan:cygnet; owl:owlet; rabbit:kit; whale:calf; seal:pup; wolf:pup;
butterfly:caterpillar; eagle:eaglet; fish:fry; hare:leveret; elephant:calf; tiger:cub; shark:pup
""")

LEGS = pairs("""
a spider:8; a dog:4; a cat:4; a bird:2; an ant:6; a snake:0; a horse:4; a bee:6; a person:2; a crab:10; a duck:2; a cow:4;
a fly:6; a beetle:6; a chicken:2; an elephant:4; a worm:0; a fish:0; an octopus:0; a lobster:10; a lion:4; a scorpion:8;
a butterfly:6; a frog:4; an ostrich:2; a mouse:4; a lizard:4; a tortoise:4; a mosquito:6; a penguin:2; a whale:0
""")

ANIMAL_CLASSES = pairs("""
frog:amphibian; toad:amphibian; newt:amphibian; salamander:amphibian; dog:mammal; cat:mammal; whale:mammal; dolphin:mammal;
bat:mammal; horse:mammal; cow:mammal; elephant:mammal; mouse:mammal; kangaroo:mammal; lion:mammal; tiger:mammal; rabbit:mammal;
human:mammal; eagle:bird; penguin:bird; ostrich:bird; sparrow:bird; owl:bird; duck:bird; parrot:bird; robin:bird; swan:bird;
shark:fish; salmon:fish; trout:fish; tuna:fish; goldfish:fish; cod:fish; snake:reptile; lizard:reptile; crocodile:reptile;
turtle:reptile; tortoise:reptile; gecko:reptile; ant:insect; bee:insect; butterfly:insect; beetle:insect; mosquito:insect;
wasp:insect; grasshopper:insect; spider:arachnid; scorpion:arachnid; crab:crustacean; lobster:crustacean; shrimp:crustacean
""")

HOMES = pairs("""
a bee:a hive; a bird:a nest; a spider:a web; a dog:a kennel; a horse:a stable; a rabbit:a burrow; a lion:a den; a fox:a den;
a cow:a barn; a pig:a sty; a beaver:a lodge; a fish:water; a chicken:a coop; a king:a castle; a monk:a monastery;
a squirrel:a drey; an ant:an anthill; a mole:a tunnel; a badger:a sett; a prisoner:a cell; a soldier:barracks; an eagle:an eyrie
""")

PLURALS = pairs("""
mouse:mice; child:children; man:men; woman:women; foot:feet; tooth:teeth; goose:geese; person:people; ox:oxen; sheep:sheep;
fish:fish; deer:deer; leaf:leaves; knife:knives; wolf:wolves; life:lives; wife:wives; shelf:shelves; half:halves; loaf:loaves;
city:cities; baby:babies; lady:ladies; story:stories; country:countries; party:parties; cherry:cherries; box:boxes; bus:buses;
glass:glasses; watch:watches; dish:dishes; fox:foxes; tomato:tomatoes; potato:potatoes; hero:heroes; cat:cats; dog:dogs;
book:books; house:houses; tree:trees; car:cars; apple:apples; chair:chairs; river:rivers; cactus:cacti; crisis:crises;
louse:lice; thief:thieves; calf:calves; bench:benches; brush:brushes; penny:pennies; fly:flies; boy:boys; day:days; key:keys
""")

PAST_TENSES = pairs("""
go:went; eat:ate; see:saw; take:took; give:gave; come:came; run:ran; write:wrote; read:read; drink:drank; sing:sang; swim:swam;
buy:bought; bring:brought; think:thought; teach:taught; catch:caught; find:found; fly:flew; know:knew; grow:grew; throw:threw;
speak:spoke; break:broke; steal:stole; choose:chose; drive:drove; ride:rode; rise:rose; sleep:slept; keep:kept; feel:felt;
leave:left; lose:lost; make:made; say:said; sell:sold; tell:told; send:sent; build:built; spend:spent; sit:sat; stand:stood;
understand:understood; win:won; begin:began; forget:forgot; get:got; have:had; hear:heard; hold:held; meet:met; pay:paid;
put:put; cut:cut; shut:shut; walk:walked; talk:talked; play:played; jump:jumped; cook:cooked; open:opened; wash:washed;
help:helped; look:looked; call:called; ask:asked; work:worked; love:loved; dance:danced; stop:stopped; try:tried; cry:cried
""")

SYMBOLS = pairs("""
hydrogen:H; helium:He; lithium:Li; carbon:C; nitrogen:N; oxygen:O; fluorine:F; neon:Ne; sodium:Na; magnesium:Mg; aluminium:Al;
silicon:Si; phosphorus:P; sulfur:S; chlorine:Cl; argon:Ar; potassium:K; calcium:Ca; titanium:Ti; chromium:Cr; manganese:Mn;
iron:Fe; cobalt:Co; nickel:Ni; copper:Cu; zinc:Zn; silver:Ag; tin:Sn; iodine:I; tungsten:W; platinum:Pt; gold:Au; mercury:Hg;
lead:Pb; uranium:U; radium:Ra; boron:B; barium:Ba; krypton:Kr; xenon:Xe
""")

SIDES = pairs("""
triangle:3; square:4; rectangle:4; pentagon:5; hexagon:6; heptagon:7; octagon:8; nonagon:9; decagon:10; dodecagon:12; rhombus:4;
trapezium:4; parallelogram:4
""")

AUTHORS = pairs("""
Hamlet:William Shakespeare; Romeo and Juliet:William Shakespeare; Macbeth:William Shakespeare; Pride and Prejudice:Jane Austen;
Emma:Jane Austen; Oliver Twist:Charles Dickens; A Christmas Carol:Charles Dickens; Great Expectations:Charles Dickens;
Frankenstein:Mary Shelley; Dracula:Bram Stoker; War and Peace:Leo Tolstoy; Anna Karenina:Leo Tolstoy;
Crime and Punishment:Fyodor Dostoevsky; Don Quixote:Miguel de Cervantes; The Odyssey:Homer; The Iliad:Homer;
The Divine Comedy:Dante Alighieri; Faust:Johann Wolfgang von Goethe; Les Miserables:Victor Hugo; Moby-Dick:Herman Melville;
Alice in Wonderland:Lewis Carroll; Treasure Island:Robert Louis Stevenson; The Time Machine:H. G. Wells;
The War of the Worlds:H. G. Wells; The Jungle Book:Rudyard Kipling; Peter Pan:J. M. Barrie; Jane Eyre:Charlotte Bronte;
Wuthering Heights:Emily Bronte; The Three Musketeers:Alexandre Dumas; Robinson Crusoe:Daniel Defoe;
Gulliver's Travels:Jonathan Swift; Little Women:Louisa May Alcott; Walden:Henry David Thoreau; Candide:Voltaire;
The Metamorphosis:Franz Kafka; The Republic:Plato; Ulysses:James Joyce; Tom Sawyer:Mark Twain; Pinocchio:Carlo Collodi
""")

JOBS = pairs("""
bakes bread:a baker; teaches children:a teacher; flies planes:a pilot; grows crops:a farmer; catches fish:a fisherman;
puts out fires:a firefighter; repairs cars:a mechanic; writes books:an author; cuts hair:a barber; treats sick people:a doctor;
treats sick animals:a vet; fixes teeth:a dentist; paints pictures:a painter; plays music:a musician; builds houses:a builder;
cooks in a restaurant:a chef; drives a bus:a bus driver; delivers letters:a postman; sells meat:a butcher; sews clothes:a tailor;
works with wood:a carpenter; repairs pipes:a plumber; writes programs:a programmer; designs buildings:an architect;
looks after a library:a librarian; studies the stars:an astronomer; acts in films:an actor; judges in court:a judge;
takes photographs:a photographer; sells flowers:a florist; works under the ground:a miner; travels into space:an astronaut
""")

TRIVIA = pairs("""
the largest ocean:the Pacific Ocean; the tallest mountain in the world:Mount Everest; the longest river in Africa:the Nile;
the largest planet:Jupiter; the smallest planet:Mercury; the red planet:Mars; the planet with the brightest rings:Saturn;
the hottest planet:Venus; the fastest land animal:the cheetah; the largest animal:the blue whale; the tallest animal:the giraffe;
the king of the jungle:the lion; the largest continent:Asia; the smallest continent:Australia; the largest country:Russia;
the smallest country:Vatican City; the largest hot desert:the Sahara; the coldest continent:Antarctica;
the first month of the year:January; the last month of the year:December; the shortest month:February;
the first day of the week:Monday; the last letter of the alphabet:Z; the first letter of the alphabet:A;
the freezing point of water:0 degrees Celsius; the boiling point of water:100 degrees Celsius; the star nearest to the Earth:the Sun;
the smallest prime number:2; the longest bone in the body:the femur; the largest organ of the body:the skin;
the largest land animal:the elephant; the largest bird:the ostrich; the capital of England:London; the capital of Scotland:Edinburgh;
the capital of Wales:Cardiff; the hardest natural material:diamond;
the main gas in the air:nitrogen; the gas that we breathe in to live:oxygen; the force that pulls things down:gravity;
the tower in the middle of Paris:the Eiffel Tower; the longest wall in the world:the Great Wall of China;
the language with the most native speakers:Chinese; the largest rainforest:the Amazon; the deepest ocean:the Pacific Ocean;
the formula of water:H2O; the square root of 9:3; the square root of 16:4; the square root of 25:5; the square root of 64:8;
the square root of 81:9; the square root of 100:10; the number of sides of a cube:6; the season after winter:spring;
the season after spring:summer; the season after summer:autumn; the season after autumn:winter; the answer to everything:42
""")

DEFINITIONS = pairs("""
a computer:a machine that follows instructions to store and process information;
a keyboard:a set of keys that you press to type letters and numbers; a bridge:a structure that carries a road over a river;
a library:a place where people read and borrow books; a hospital:a place where sick people are treated;
a school:a place where children learn; a museum:a place where old or beautiful things are shown;
a volcano:a mountain that can throw out hot rock and ash; an island:a piece of land with water all around it;
a desert:a dry place where little rain falls; a forest:a large area covered with trees; a river:a long stream of water that flows to the sea;
a clock:a device that shows the time; a map:a drawing that shows where places are; a telescope:an instrument for looking at distant things;
a microscope:an instrument for looking at very small things; a thermometer:an instrument that measures temperature;
an umbrella:a cover that keeps the rain off you; a dictionary:a book that explains what words mean;
a poem:a short piece of writing that often rhymes; a recipe:a list of steps for cooking a dish; a triangle:a shape with three sides;
a circle:a round shape with no corners; a prime number:a number that only one and itself divide; a planet:a large ball that travels around a star;
a star:a huge ball of hot gas that gives light; the moon:the ball of rock that travels around the Earth; gravity:the force that pulls things together;
ice:water that has frozen solid; steam:water that has become a hot gas; rain:water that falls from clouds; a cloud:a mass of tiny drops of water in the air;
wind:air that moves; a shadow:a dark shape that is made when light is blocked; an echo:a sound that comes back to you;
a language model:a program that predicts the next word of a text; a token:a small piece of text that a language model reads or writes;
a prompt:the text that you give to a language model; a GPU:a chip that does many calculations at the same time;
a cache:a store that keeps results so that they need not be computed again; a server:a computer that answers requests from other computers;
a program:a list of instructions for a computer; an algorithm:a list of steps that solves a problem; a bug:a mistake in a program;
JSON:a text format for data made of keys and values; Python:a programming language that is easy to read; a file:a named piece of data on a computer;
a list:a number of items in order; a function:a piece of a program that does one job; a database:a store of data that can be searched;
the internet:a network that joins computers all over the world; a robot:a machine that can do tasks by itself; a battery:a device that stores electricity;
a bicycle:a vehicle with two wheels that you ride; a train:a line of wagons that runs on rails; a ship:a large boat that crosses the sea;
an aeroplane:a machine with wings that flies; a lighthouse:a tower with a light that guides ships; a castle:a strong building with thick walls and towers
""")

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
    "January", "February", "March", "April", "May", "June",
    "July", "August", "September", "October", "November", "December",
)  # fmt: skip
MONTH_LENGTHS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
ORDINALS = (
    "first", "second", "third", "fourth", "fifth", "sixth",
    "seventh", "eighth", "ninth", "tenth", "eleventh", "twelfth",
)  # fmt: skip
PLANETS = ("Mercury", "Venus", "Earth", "Mars", "Jupiter", "Saturn", "Uranus", "Neptune")
ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_NUMBER_NAMES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty"
)
SMALL_NUMBERS = tuple(_NUMBER_NAMES.split())
TENS = ("", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")


def number_word(value: int) -> str:
    """Spell 0..100 in English: 42 gives `forty-two`."""
    if value == 100:
        return "one hundred"
    if value <= 20:
        return SMALL_NUMBERS[value]
    tens, ones = divmod(value, 10)
    return TENS[tens] + (f"-{SMALL_NUMBERS[ones]}" if ones else "")


def roman(value: int) -> str:
    """Write 1..50 as a Roman numeral: 14 gives `XIV`."""
    out = ""
    for size, sign in ((50, "L"), (40, "XL"), (10, "X"), (9, "IX"), (5, "V"), (4, "IV"), (1, "I")):
        out += sign * (value // size)
        value %= size
    return out
