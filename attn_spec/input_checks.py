"""Checks of images and sound that models are given."""


def check_features(shape: tuple[int, ...], channels: int, frames: int) -> None:
    """Raise unless `shape` is `(channels, frames)`, or a batch of them."""
    if len(shape) not in (2, 3) or shape[-2:] != (channels, frames):
        raise ValueError(
            f"features must have shape (mel, frames) or (b, mel, frames) with mel={channels},"
            f" frames={frames}; got shape {shape}. Pad or cut the sound, as the feature extractor"
            " of the model does"
        )


def check_image(shape: tuple[int, ...], channels: int, height: int, width: int) -> None:
    """Raise unless `shape` is `(channels, rows, columns)`, or a batch of them.

    Patches of this height and width must fill the images.
    """
    if (
        len(shape) not in (3, 4)
        or shape[-3] != channels
        or shape[-2] % height
        or shape[-1] % width
        or 0 in shape[-2:]
    ):
        raise ValueError(
            f"images must have shape (c, rows, columns) or (b, c, rows, columns), with c={channels}"
            f" channels, and patches of {height} x {width} pixels must fill them; got shape"
            f" {shape}. Resize them first; of images with channels last move these to the front"
        )


def check_image_size(got: tuple[int, ...], wanted: tuple[int, int]) -> None:
    """Raise unless images have the size that a table of positions is for."""
    if got != wanted:
        raise ValueError(
            f"positions are learned for images of {wanted[0]} x {wanted[1]} pixels; got {got[0]} x"
            f" {got[1]}. Resize the images first"
        )
