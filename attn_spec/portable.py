"""Settings of which each package makes a function, and which are equal in both."""

from __future__ import annotations

from typing import Any, ClassVar, TypeVar

P = TypeVar("P", bound="Portable")


class Portable:
    """Base class of settings that each package derives a callable class from.

    `class RoPE(RotaryPositions, portable=True)` computes what its base describes: objects of the
    two classes are equal where their fields are. A class that derives from it without `portable`
    may compute something else, and is equal to itself alone.
    """

    _meaning: ClassVar[type]

    def __init_subclass__(cls, *, portable: bool = False, **keywords: Any):
        super().__init_subclass__(**keywords)
        # Without the word a class may compute something else, as one of a user does.
        if not portable:
            cls._meaning = cls

    @classmethod
    def of(cls: type[P], settings: Portable) -> P:
        """Return settings as an object of this class.

        Raises:
            ValueError: if they are of a class that may compute something else.
        """
        if isinstance(settings, cls):
            return settings
        if getattr(settings, "_meaning", None) is not cls._meaning:
            raise ValueError(
                f"these settings must be {cls.__name__} or {cls._meaning.__name__}; got"
                f" {type(settings).__name__}, which may compute something else. Pass"
                f" {cls.__name__}(...)"
            )
        return cls(**vars(settings))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Portable):
            return NotImplemented
        # Not the classes: those of the two packages differ, and mean the same.
        return self._meaning is other._meaning and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((self._meaning, *vars(self).values()))
