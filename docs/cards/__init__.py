"""The cards of the gallery, `docs/gallery.md`: one a thing, in a file for each group."""

from cards.attention import ATTENTION
from cards.caches import CACHES
from cards.layers import LAYERS
from cards.masks import MASKS
from cards.positions import POSITIONS
from cards.recurrent import RECURRENT
from cards.scores import SCORES

GROUPS = {
    "Masks": MASKS,
    "Positions": POSITIONS,
    "Changes of the scores": SCORES,
    "Attention": ATTENTION,
    "Linear attention": RECURRENT,
    "Other layers": LAYERS,
    "Caches": CACHES,
}
