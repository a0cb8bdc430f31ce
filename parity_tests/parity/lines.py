"""Lines of source in tests of the programs of both sides."""

import inspect


def line_of(function, text):
    """Return the number of the one line of a function that contains a text."""
    lines, first = inspect.getsourcelines(function)
    # A text that stands in no line or in several fails here.
    (found,) = [i for i, line in enumerate(lines, first) if text in line]
    return found


def places(program, operation):
    """Return the lines of the operations of a name."""
    return [node.place for node in program.nodes if node.operation == operation]
