"""The einops patterns by which a parameter of one framework may be that of another one."""

from collections.abc import Iterator, Sequence
from itertools import count
from math import prod

from flax_attn.convert.entry import axes_of_side
from flax_attn.convert.rules import Shape

# A matrix of heads that is one axis on the other side, as it lies before and after.
_WITH_HEADS = ("i n h -> (n h) i", "n i h -> (n h) i", "n h o -> o (n h)", "n h -> (n h)")
# Several projections as one array with an axis `e` that counts them, and as they are joined.
_COUNTED = (
    "e i o -> (e o) i",
    "i e o -> (e o) i",
    "e o i -> (e o) i",
    "e o -> (e o)",
    "e i n h -> (e n h) i",
    "i e n h -> (e n h) i",
    "i n e h -> (e n h) i",
    "e n h -> (e n h)",
    "n e h -> (e n h)",
)


def fitting(shape: Shape, wanted: Shape, is_kernel: bool, is_transposed: bool = False) -> list[str]:
    """Return the patterns from a shape to another one.

    Args:
        shape: the one shape.
        wanted: the other one.
        is_kernel: whether it lies as kernels of Flax do.
        is_transposed: whether the other one is of a transposed convolution, which has inputs first.
    """
    ways = _ways_to_transposed(len(shape)) if is_transposed else _ways(len(shape))
    found = [pattern for pattern in ways if shape_after(pattern, shape) == wanted]
    if shape == wanted and not (is_kernel and found):
        found.append("")
    return found or _with_ones(shape, wanted)


def _with_ones(shape: Shape, wanted: Shape) -> list[str]:
    """Return the pattern between shapes that differ in axes of size 1 alone, such as scales."""
    sides = [_without_ones(shape), _without_ones(wanted)]
    if sides[0] != sides[1] or shape == wanted:
        return []
    return [f"{_axes_with_ones(shape)} -> {_axes_with_ones(wanted)}"]


def _without_ones(shape: Shape) -> list[int]:
    return [size for size in shape if size != 1]


def _axes_with_ones(shape: Shape) -> str:
    number = count()
    return " ".join("1" if size == 1 else f"s{next(number)}" for size in shape)


def _ways_to_transposed(rank: int) -> Iterator[str]:
    """Yield the patterns by which a kernel may become that of a transposed convolution."""
    if rank < 3:
        return
    axes = _names_of_axes(rank)
    *places, i, o = axes
    yield f"{' '.join(axes)} -> {' '.join([i, o, *places])}"
    yield f"{' '.join([*places, o, i])} -> {' '.join([i, o, *places])}"


def places_of(pattern: str) -> tuple[str, ...]:
    """Return the axes of space of a pattern for a kernel.

    Example:
        >>> places_of("s0 s1 i o -> i o s0 s1")
        ('s0', 's1')
    """
    left = pattern.partition(" -> ")[0]
    return tuple(axis for axis in axes_of_side(left) if axis not in ("i", "o"))


def fitting_of_several(shape: Shape, wanted: Shape, is_kernel: bool, count: int) -> list[str]:
    """Return the patterns from a parameter that holds so many to these, joined along an axis."""
    counted = [pattern for pattern in _COUNTED if shape_after(pattern, shape) == wanted]
    right = [pattern for pattern in counted if _counted(pattern, shape) == count]
    return fitting(shape, wanted, is_kernel) + right


def _counted(pattern: str, shape: Shape) -> int:
    """Return the size of the axis that counts the projections."""
    left = pattern.partition(" -> ")[0].split()
    return shape[left.index("e")]


def fitting_to_join(shapes: Sequence[Shape], wanted: Shape, is_kernel: bool) -> list[str]:
    """Return the patterns from several parameters to parts that are one if they are joined."""
    ways = ["", *_ways(len(shapes[0]))]
    found = [way for way in ways if _joined(_all_after(way, shapes)) == wanted]
    turned = [pattern for pattern in found if pattern]
    return turned if is_kernel and turned else found


def fitting_patches(shape: Shape, wanted: Shape, is_kernel: bool) -> list[str]:
    """Return the patterns between a linear layer over patches and a convolution."""
    if len(shape) > len(wanted):
        return _from_convolution(shape, wanted)
    axes, patches = _patches(len(wanted))
    o, *rest = wanted
    found = []
    if shape == (prod(rest), o):
        found += [f"({patch}) o -> o c {axes}" for patch in patches]
    if shape == (o, prod(rest)) and not is_kernel:
        found += [f"o ({patch}) -> o c {axes}" for patch in patches]
    return found


def _from_convolution(shape: Shape, wanted: Shape) -> list[str]:
    axes, patches = _patches(len(shape))
    patterns = [f"{axes} c o -> o ({patch})" for patch in patches]
    return [pattern for pattern in patterns if shape_after(pattern, shape) == wanted]


def _patches(rank: int) -> tuple[str, list[str]]:
    """Return the axes of space of a convolution, and of a patch: channels come first or last."""
    axes = " ".join(f"p{i}" for i in range(rank - 2))
    return axes, [f"c {axes}", f"{axes} c"]


def sizes_of_patches(pattern: str, wanted: Shape) -> tuple[tuple[str, int], ...]:
    """Return the axes of a pattern that only what it makes tells the sizes of."""
    left, _, right = pattern.partition(" -> ")
    if "(" not in left:
        return ()
    sizes = zip(right.split(), wanted, strict=True)
    return tuple((axis, size) for axis, size in sizes if axis != "o")


def _joined(shapes: Sequence[Shape | None]) -> Shape | None:
    """Return the shape of what is joined along the first axis; None if that is not possible."""
    known = [shape for shape in shapes if shape]
    rests = {shape[1:] for shape in known}
    if len(known) < len(shapes) or len(rests) > 1:
        return None
    return sum(shape[0] for shape in known), *rests.pop()


def of_list(pattern: str) -> str:
    """Return a pattern for each layer of a list, which an axis in front counts on both sides."""
    return pattern and _behind("e", "e", pattern)


def of_parts(pattern: str, rank: int) -> str:
    """Return a pattern for parts that are joined along an axis of size 1 in front."""
    same = " ".join(_names_of_axes(rank))
    return _behind("", "1", pattern or f"{same} -> {same}")


def first_sizes(pattern: str, shapes: Sequence[Shape]) -> list[int]:
    """Return the size of the first axis of each of several after a pattern."""
    return [shape[0] for shape in _all_after(pattern, shapes) if shape]


def _all_after(pattern: str, shapes: Sequence[Shape]) -> list[Shape | None]:
    """Return the shapes that a pattern makes of several; `""` leaves them as they are."""
    return [shape_after(pattern, shape) if pattern else shape for shape in shapes]


def shape_after(pattern: str, shape: Shape) -> Shape | None:
    """Return the shape that a pattern makes of one; None if it has another number of axes."""
    left, right = map(axes_of_side, pattern.split(" -> "))
    if len(left) != len(shape):
        return None
    sizes = dict(zip(left, shape, strict=True))
    return tuple(prod(sizes[axis] for axis in side.strip("()").split()) for side in right)


def _behind(left: str, right: str, pattern: str) -> str:
    """Return a pattern with an axis in front of each side."""
    ours, theirs = pattern.split(" -> ")
    return f"{left} {ours} -> {right} {theirs}".strip()


def _ways(rank: int) -> Iterator[str]:
    """Yield the patterns by which a weight may become that of another framework."""
    if rank > 1:
        axes = _names_of_axes(rank)
        *places, i, o = axes
        # As convolutions and linear layers have them, or with the last two axes transposed.
        for target in dict.fromkeys([(o, i, *places), (*places, o, i)]):
            yield f"{' '.join(axes)} -> {' '.join(target)}"
    yield from _WITH_HEADS


def _names_of_axes(rank: int) -> list[str]:
    last = ["i", "o"][-rank:] if rank else []
    return [f"s{axis}" for axis in range(rank - len(last))] + last
