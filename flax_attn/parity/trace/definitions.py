"""The lines that define the constants which a line of source reads.

A run shows where a mask, a table or a scale is used, and not where it was made: in a constructor,
in a helper function that NumPy computes, at the top of a file. These are read from the source.
"""

import ast
from collections import deque
from collections.abc import Collection, Sequence

from flax_attn.parity.trace.program import Place, in_library
from flax_attn.parity.trace.source_files import (
    CONSTRUCTORS,
    Callers,
    Scope,
    Source,
    arguments_of,
    classes_of,
    given_to_loop,
    imported_function,
    source_of,
)
from flax_attn.parity.trace.syntax import (
    ABOUT,
    Function,
    default_of,
    expressions,
    iterated_by,
    last_assigned,
    last_name,
    layers_called,
    makes_a_layer,
    parameters,
    parts,
    reads_sizes,
    sets_attribute,
    statements_of,
    targets,
)

# The lines that are followed for one line.
MOST = 24
# Parameters of constructors that draw weights, and say nothing of constants.
RANDOM = ("rngs", "rng", "key")


class _InputsError(Exception):
    """Raised where a value depends on what the function is given when it is called."""


def definitions(place: Place) -> tuple[Place, ...]:
    """Return the lines that define the constants which a line reads, the nearest first.

    Left out are what depends on the inputs, whose operations have lines of their own, and
    parameters, which have names.

    Args:
        place: line of an operation.
    """
    source = source_of(place.file)
    statement = source.statement(place.line) if source else None
    if source is None or statement is None or in_library(place.file):
        return ()
    found: dict[tuple[str, int], Place] = {}
    scope = source.scope(statement, place.callers)
    for expression in expressions(statement):
        for part in parts(expression):
            read = _Definitions()
            for definition in read.of(part, scope):
                found.setdefault((definition.file, definition.line), definition)
        # Of a layer in which the operation is, the constructor has the settings.
        for name in layers_called(expression, place.module):
            for definition in _Definitions().of_layer(name, scope):
                found.setdefault((definition.file, definition.line), definition)
    found.pop((place.file, place.line), None)
    return tuple(found.values())[:MOST]


class _Definitions:
    """Follows the names in an expression to the statements that define them."""

    def __init__(self, around: Collection[tuple[Function, str]] = ()) -> None:
        self.places: list[Place] = []
        # The parameters of functions that are followed to what they are given.
        self.around = set(around)
        self.seen: set[ast.AST] = set()
        self.waiting: deque[tuple[ast.AST, Scope]] = deque()

    def of(self, expression: ast.expr, scope: Scope) -> list[Place]:
        """Return the lines that define an expression; none if it depends on inputs."""
        self.waiting.append((expression, scope))
        return self._found()

    def of_layer(self, name: str, scope: Scope) -> list[Place]:
        """Return the lines that define a layer, and the constants that it is made with."""
        for owner in classes_of(scope):
            for statement in ast.walk(owner):
                if isinstance(statement, ast.stmt) and sets_attribute(statement, name):
                    self._assigned(statement, scope.source)
        return self._found()

    def _found(self) -> list[Place]:
        try:
            while self.waiting and len(self.places) < MOST:
                self._follow(*self.waiting.popleft())
        except _InputsError:
            return []
        return self.places

    def _follow(self, node: ast.AST, scope: Scope) -> None:
        match node:
            case ast.Attribute(attr=name) if name in ABOUT:
                return
            case ast.Attribute(value=ast.Name(id="self"), attr=name):
                self._attribute(name, scope)
                return
            case ast.Attribute(value=ast.Name(), attr=name):
                self._field(name, scope)
            case ast.Call(func=ast.Name(id="len")):
                return
            case ast.Call(func=function):
                self._called(function, scope)
                # A function of a library is no constant of its own.
                inner = [function.value] if isinstance(function, ast.Attribute) else []
                keywords = [keyword.value for keyword in node.keywords]
                for argument in (*inner, *node.args, *keywords):
                    self.waiting.append((argument, scope))
                return
            case ast.Name(id=name):
                self._name(name, scope)
            case ast.Slice(lower=lower, upper=upper):
                # How much is taken may depend on inputs; the numbers do not.
                for bound in filter(None, (lower, upper)):
                    self.places += _Definitions(self.around).of(bound, scope)
                return
        for child in ast.iter_child_nodes(node):
            self.waiting.append((child, scope))

    def _define(self, statement: ast.stmt, source: Source) -> bool:
        """Add a statement; return whether it is a new one."""
        if statement in self.seen:
            return False
        self.seen.add(statement)
        self.places.append(Place(source.file, statement.lineno))
        return True

    def _assigned(self, statement: ast.stmt, source: Source, callers: Callers = ()) -> None:
        """Add a statement that assigns something, and follow what it assigns."""
        # Sizes that are read off an array are none of its numbers.
        if not reads_sizes(statement) and self._define(statement, source):
            scope = source.scope(statement, callers)
            for expression in expressions(statement):
                self.waiting.append((expression, scope))

    def _attribute(self, name: str, scope: Scope) -> None:
        """Follow an attribute of the module to where it is assigned."""
        found = False
        for owner in classes_of(scope):
            for statement in ast.walk(owner):
                if isinstance(statement, ast.stmt) and sets_attribute(statement, name):
                    # The parameters of a layer are no constants, and depend on no input either.
                    if makes_a_layer(statement, name):
                        raise _InputsError
                    self._assigned(statement, scope.source)
                    found = True
        # A method or a property that computes it.
        if not found:
            self._method(name, scope)

    def _method(self, name: str, scope: Scope) -> None:
        for owner in classes_of(scope):
            for statement in owner.body:
                if isinstance(statement, Function) and statement.name == name:
                    self._body(statement, scope.source)

    def _field(self, name: str, scope: Scope) -> None:
        """Follow a field of a configuration to its default."""
        for owner in ast.walk(scope.source.tree):
            if not isinstance(owner, ast.ClassDef):
                continue
            for statement in owner.body:
                if isinstance(statement, ast.AnnAssign) and name in targets(statement):
                    self._define(statement, scope.source)

    def _called(self, function: ast.expr, scope: Scope) -> None:
        """Follow a function of the user's that is called."""
        match function:
            case ast.Attribute(value=ast.Name(id="self"), attr=name):
                self._attribute(name, scope)
                return
        name = last_name(function)
        # Such as a lambda of the function around.
        local = [last_assigned(name, outer, scope.line) for outer in scope.functions]
        if isinstance(function, ast.Name) and any(local):
            self._name(name, scope)
            return
        own = scope.source.functions.get(name)
        if own is not None:
            self._body(own, scope.source)
            return
        imported = imported_function(scope.source.file, name)
        if imported is not None:
            self._body(*imported)
            return
        # A function may be a variable, as one that `partial` makes is.
        self._of_file(name, scope.source)

    def _body(self, function: Function, source: Source) -> None:
        """Add the statements of a function."""
        if function in self.seen:
            return
        self.seen.add(function)
        for statement in statements_of(function):
            if self._define(statement, source):
                for expression in expressions(statement):
                    self._read_by(expression, source.scope(statement))

    def _read_by(self, expression: ast.expr, scope: Scope) -> None:
        """Follow the functions and the names of the file that a line of a function reads."""
        for part in ast.walk(expression):
            if isinstance(part, ast.Call):
                self._called(part.func, scope)
            elif isinstance(part, ast.Name):
                self._of_file(part.id, scope.source)

    def _name(self, name: str, scope: Scope) -> None:
        """Follow a variable to where it is assigned, in the functions around it or at the top."""
        if name in RANDOM:
            return
        for iterated in iterated_by(name, scope.statement):
            self.waiting.append((iterated, scope))
        for function in scope.functions:
            assigned = last_assigned(name, function, scope.line)
            if assigned:
                for statement in assigned:
                    self._assigned(statement, scope.source, scope.callers)
                return
            if name in parameters(function):
                self._argument(name, function, scope)
                return
        self._of_file(name, scope.source)

    def _of_file(self, name: str, source: Source) -> None:
        """Follow a name that is assigned at the top of a file."""
        for statement in source.tree.body:
            if name in targets(statement):
                self._assigned(statement, source)

    def _argument(self, name: str, function: Function, scope: Scope) -> None:
        """Follow a parameter of a function to what the calls of the function give it."""
        is_constructor = scope.owner is not None and function.name in CONSTRUCTORS
        given = list(arguments_of(name, function, scope))
        default = default_of(function, name)
        if not given and default is not None:
            self.places.append(Place(scope.source.file, default.lineno))
            return
        if is_constructor:
            for argument, outer in given:
                if not isinstance(argument, ast.Name):
                    self._define(outer.source.statement_around(argument), outer.source)
                self.waiting.append((argument, outer))
            return
        given = given or list(given_to_loop(name, function, scope))
        followed = function, name
        # What a function gives itself says nothing new.
        self._any_of([] if followed in self.around else given, followed)

    def _any_of(
        self, given: Sequence[tuple[ast.expr, Scope]], followed: tuple[Function, str]
    ) -> None:
        """Follow those of several expressions that do not depend on inputs."""
        found = []
        for argument, outer in given:
            inner = _Definitions({*self.around, followed})
            found += inner.of(argument, outer)
        # What a module is called with are the inputs.
        if not found:
            raise _InputsError
        self.places += found
