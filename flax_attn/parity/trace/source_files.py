"""Files of source with their syntax trees, and where the names of a line are looked up."""

import ast
import functools
import inspect
import linecache
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from flax_attn.parity.trace.program import in_library
from flax_attn.parity.trace.syntax import Function, expressions, given_to, last_name, parameters

CONSTRUCTORS = ("__init__", "__post_init__", "setup")
# Methods that run where a module is called like a function.
CALLED = ("__call__", "forward")
# Functions of JAX that run another one again and again: what gives each parameter of that one its
# values, as the place and the name of an argument.
LOOPS = {
    "scan": ((1, "init"), (2, "xs")),
    "map": ((1, "xs"),),
    "fori_loop": (None, (3, "init_val")),
    "while_loop": ((2, "init_val"),),
}
# File and line of each call around a line, from the inside out.
Callers = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Scope:
    """Where names are looked up.

    Args:
        source: file, with its syntax tree.
        functions: functions around a line, from the inside out.
        owner: class of which the outermost function is a method; None where it is in none.
        statement: statement before which a variable is assigned.
        callers: file and line of each call around the line, from the inside out, as they ran.
    """

    source: "Source"
    functions: tuple[Function, ...]
    owner: ast.ClassDef | None
    statement: ast.stmt
    callers: Callers = ()

    @property
    def line(self) -> int:
        """The line of the statement."""
        return self.statement.lineno


class Source:
    """A file with its syntax tree."""

    def __init__(self, file: str, text: str):
        self.file = file
        self.tree = ast.parse(text)
        self.outer: dict[ast.AST, ast.AST] = {}
        self.functions: dict[str, Function] = {}
        self.classes: dict[str, ast.ClassDef] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, Function):
                self.functions.setdefault(node.name, node)
            elif isinstance(node, ast.ClassDef):
                self.classes.setdefault(node.name, node)
            for child in ast.iter_child_nodes(node):
                self.outer[child] = node

    def statement(self, line: int) -> ast.stmt | None:
        """Return the innermost statement that a line is in."""
        found = None
        for node in ast.walk(self.tree):
            # What is inside another statement is walked after it.
            if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or line):
                found = node
        return found

    def scope(self, node: ast.stmt, callers: Callers = ()) -> Scope:
        """Return the scope of a statement."""
        functions, owner = [], None
        around = self.outer.get(node)
        while around is not None:
            if isinstance(around, Function):
                functions.append(around)
            if isinstance(around, ast.ClassDef) and owner is None:
                owner = around
            around = self.outer.get(around)
        return Scope(self, tuple(functions), owner, node, callers)

    def calls(self, name: str) -> Iterator[ast.Call]:
        """Yield the calls of a function, or of a method, by its name."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call) and last_name(node.func) == name:
                yield node

    def statement_around(self, node: ast.AST) -> ast.stmt:
        """Return the statement that an expression is in."""
        while not isinstance(node, ast.stmt):
            node = self.outer[node]
        return node


@functools.lru_cache(maxsize=32)
def _parsed(file: str, text: str) -> Source | None:
    try:
        return Source(file, text)
    # A template, or a file that was changed since it was loaded.
    except SyntaxError:
        return None


def source_of(file: str) -> Source | None:
    """Return a file with its syntax tree; None where it cannot be read."""
    return _parsed(file, "".join(linecache.getlines(file)))


def classes_of(scope: Scope) -> Iterator[ast.ClassDef]:
    """Yield the class of a scope, and its bases in the same file."""
    waiting = [scope.owner]
    while waiting:
        owner = waiting.pop(0)
        if owner is None:
            continue
        yield owner
        for base in owner.bases:
            found = scope.source.classes.get(last_name(base))
            if found is not owner:
                waiting.append(found)


def arguments_of(name: str, function: Function, scope: Scope) -> Iterator[tuple[ast.expr, Scope]]:
    """Yield what is given to a parameter, with the scope of each call.

    The call that ran is known of what the run shows, and of a constructor any call may be.
    """
    owner = scope.owner
    if owner is not None and function.name in CONSTRUCTORS:
        for call in scope.source.calls(owner.name):
            argument = given_to(call, name, function)
            if argument is not None:
                yield argument, scope.source.scope(scope.source.statement_around(call))
        return
    callers = list(scope.callers)
    # A function inside is called from the one around it, as a step of a scan is.
    while callers and _is_inside(callers[0], function, scope.source):
        callers.pop(0)
    if not callers:
        return
    (file, line), *outer = callers
    source = source_of(file)
    statement = source.statement(line) if source else None
    if source is None or statement is None:
        return
    for expression in expressions(statement):
        for call in ast.walk(expression):
            if isinstance(call, ast.Call) and _may_call(call, function, source):
                argument = given_to(call, name, function)
                if argument is not None:
                    yield argument, source.scope(statement, tuple(outer))


def given_to_loop(name: str, function: Function, scope: Scope) -> Iterator[tuple[ast.expr, Scope]]:
    """Yield what a loop of JAX gives to a parameter of its step, such as what a scan runs over."""
    at = parameters(function).index(name)
    for loop, places in LOOPS.items():
        for call in scope.source.calls(loop):
            steps = [argument.id for argument in call.args if isinstance(argument, ast.Name)]
            place = places[at] if at < len(places) else None
            if function.name in steps and place is not None:
                outer = scope.source.scope(scope.source.statement_around(call), scope.callers)
                yield from ((argument, outer) for argument in _arguments_at(call, *place))


def _arguments_at(call: ast.Call, place: int, keyword: str) -> list[ast.expr]:
    """Return the argument of a call at a place, or under a keyword."""
    named = [one.value for one in call.keywords if one.arg == keyword]
    return [*call.args[place : place + 1], *named]


def _is_inside(caller: tuple[str, int], function: Function, source: Source) -> bool:
    file, line = caller
    return file == source.file and function.lineno <= line <= (function.end_lineno or line)


def _may_call(call: ast.Call, function: Function, source: Source) -> bool:
    """Whether a call in a line that called a function may be the one."""
    name = last_name(call.func)
    if function.name not in CALLED:
        return name == function.name
    # A module is called like a function, and is none.
    return not (isinstance(call.func, ast.Name) and name in source.functions)


def imported_function(file: str, name: str) -> tuple[Function, Source] | None:
    """Return a function that a file has imported from another one of the user's."""
    for module in list(sys.modules.values()):
        if getattr(module, "__file__", None) != file:
            continue
        function = getattr(module, name, None)
        code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
        if code is None or in_library(code.co_filename):
            return None
        source = source_of(code.co_filename)
        found = source.functions.get(name) if source else None
        return None if source is None or found is None else (found, source)
    return None
