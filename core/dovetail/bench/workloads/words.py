"""List the words from which texts for the embedded model are made."""

from __future__ import annotations

NAMES = ("Ada Brown", "Omar Lind", "Ines Cole", "Felix Moreau", "Mila Stone", "Viola Hart", "Hugo Park", "Lea Novak")
CITIES = ("Paris", "Lima", "Oslo", "Cebu", "Porto", "Kyoto", "Quito", "Turin")
COUNTRIES = ("France", "Peru", "Norway", "Japan", "Italy", "Spain", "Egypt", "Kenya", "Chile", "Poland")
WORDS = ("planet", "axe", "station", "phrase", "stone", "horn", "cookie", "basket", "lamp", "river", "chair", "bridge")
