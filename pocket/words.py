"""The words of the pocket language. Each is one token of the vocabulary, with a space before it.

Lists only; the sentences that use them stand in `generate`, `stories` and `tools`.
"""

from __future__ import annotations


def _w(text: str) -> tuple[str, ...]:
    return tuple(text.split())


WOMEN = _w("Alice Ana Clara Elsa Emma Eva Grace Irene Ivy Julia Lily Lucy Maya Mia Nora Olga Rosa")
WOMEN += _w("Ruby Sofia Zoe")
MEN = _w("Adam Ben David Felix Finn Henry Hugo Jack Leo Martin Max Noah Oscar Owen Paul Peter Sam")
MEN += _w("Simon Tom Victor")
NAMES = tuple(sorted(WOMEN + MEN))

PLACES = _w("beach bridge castle farm forest garden harbor island lake library market meadow")
PLACES += _w("mountain museum river school station tower valley village")
OBJECTS = _w("basket bell blanket book bottle box button candle clock coin compass cup drum flute")
OBJECTS += _w("hat key kite ladder lantern letter map mirror pillow ring rope scarf shovel teapot")
OBJECTS += _w("umbrella violin")
ANIMALS = _w(
    "badger bear cat crow deer dog duck fox frog goat hedgehog horse mouse otter owl rabbit"
)
ANIMALS += _w("sheep squirrel turtle wolf")
COLORS = _w("black blue brown golden gray green orange pink purple red silver white yellow")
ADJECTIVES = _w(
    "brave bright broken clever gentle happy heavy hungry kind lazy lost old quiet round"
)
ADJECTIVES += _w("shiny shy small soft tall tired")
FOODS = _w(
    "apples beans bread cake cheese grapes honey noodles pasta pears pie pizza rice salad soup"
)
JOBS = _w(
    "baker carpenter doctor farmer gardener painter pilot sailor singer tailor teacher writer"
)
ROOMS = _w("attic bathroom bedroom cellar garage hallway kitchen office pantry studio")
CITIES = _w("Athens Berlin Boston Cairo Chicago Delhi Dublin Geneva Lima Lisbon London Madrid Oslo")
CITIES += _w("Paris Prague Rome Sydney Tokyo Vienna Warsaw")

# Words a code or a password may belong to; unlike OBJECTS they appear in no story.
KEYS = _w("almond alpha amber anchor anvil apollo apricot aspen atlas banjo basil beacon birch")
KEYS += _w("blizzard bravo breeze bronze bugle canvas canyon cedar cello cherry chisel chrome")
KEYS += _w(
    "cinnamon clove cobalt comet condor copper coral cotton cypress delta denim desert drill"
)
KEYS += _w("eagle echo falcon fig foxtrot gamma garnet ginger glacier guitar hammer harbor harp")
KEYS += _w(
    "hazel heron iron ivory jade juniper kappa lace lagoon lambda laurel leather lemon lever"
)
KEYS += _w("linen magpie mango maple mercury meteor mint nickel nova nutmeg olive omega onyx opal")
KEYS += _w("orbit organ peach pearl pelican pepper piano plane pliers plum pluto poplar prairie")
KEYS += _w("pulley raven robin ruby saffron satin saturn saw sierra sigma silk silver")
KEYS += _w(
    "sparrow spring steel storm summer summit sunrise sunset swift tango theta thunder thyme"
)
KEYS += _w("tin topaz trumpet tuba tundra vanilla velvet venus victor walnut whistle willow winter")
KEYS += _w("wool wrench zeta zinc autumn")

SPOTS = (
    *("behind the barn", "behind the door", "beside the lamp", "by the gate", "in the drawer"),
    *("inside the chest", "near the window", "next to the well", "on the roof", "on the shelf"),
    *("under the old tree", "under the table"),
)
DAYS = _w("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = _w("January February March April May June July August September October November December")
GENRES = _w("blues classical folk jazz pop rock")
WEATHER = _w("cloudy cold foggy rainy snowy sunny warm windy")
TIMES = _w("morning afternoon evening day night")
EVENTS = _w("lunch meeting dinner concert lesson picnic party exam")
NUMBERS = _w("zero one two three four five six seven eight nine ten eleven twelve")
ORDINALS = _w("first second third fourth fifth sixth seventh eighth")

OPPOSITES = {
    **{"big": "small", "clean": "dirty", "day": "night", "early": "late", "fast": "slow"},
    **{"full": "empty", "happy": "sad", "hard": "soft", "high": "low", "hot": "cold"},
    **{"light": "dark", "long": "short", "loud": "quiet", "near": "far", "old": "new"},
    **{"open": "closed", "rich": "poor", "strong": "weak", "up": "down", "wet": "dry"},
}
SOUNDS = {
    **{"cat": "meow", "cow": "moo", "crow": "caw", "dog": "woof", "duck": "quack"},
    **{"frog": "ribbit", "horse": "neigh", "owl": "hoot", "pig": "oink", "sheep": "baa"},
}
COLORS_OF = {
    **{"bananas": "yellow", "blood": "red", "chocolate": "brown", "coal": "black"},
    **{"gold": "yellow", "grass": "green", "lemons": "yellow", "milk": "white", "snow": "white"},
}

# Everything that may stand in a list to copy, reverse or count.
LISTED = tuple(
    sorted({*KEYS, *OBJECTS, *ANIMALS, *COLORS, *PLACES, *FOODS, *JOBS, *ROOMS, *ADJECTIVES})
)
