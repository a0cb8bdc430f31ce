"""The lines that define the constants which a line of source reads.

A run shows where a mask, a table or a scale is used, and not where it was made: in a constructor,
in a helper function that NumPy computes, at the top of a file. These are read from the source.
"""

import ast
import functools
import inspect
import linecache
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from flax_attn.parity.trace.program import Place, in_library

# The lines that are followed for one line.
MOST = 24
# What an array says of itself without its numbers.
ABOUT = ("shape", "ndim", "dtype", "device", "size")
CONSTRUCTORS = ("__init__", "__post_init__", "setup")
# Methods that run where a module is called like a function.
CALLED = ("__call__", "forward")
# Classes whose instances hold constants; an instance of another one is a layer or a parameter.
HOLDERS = ("Variable", "Buffer", "Constant")

Function = ast.FunctionDef | ast.AsyncFunctionDef
Assignment = ast.Assign | ast.AnnAssign | ast.AugAssign


@dataclass(frozen=True)
class _Scope:
    """Where names are looked up.

    Args:
        source: file, with its syntax tree.
        functions: functions around a line, from the inside out.
        owner: class of which the outermost function is a method; None where it is in none.
        line: line before which a variable is assigned.
        callers: file and line of each call around the line, from the inside out, as they ran.
    """

    source: "_Source"
    functions: tuple[Function, ...]
    owner: ast.ClassDef | None
    line: int
    callers: tuple[tuple[str, int], ...] = ()


class _InputsError(Exception):
    """Raised where a value depends on what the function is given when it is called."""


class _Source:
    """A file with its syntax tree."""

    def __init__(self, file: str, text: str):
        self.file = file
        self.tree = ast.parse(text)
        self.outer: dict[ast.AST, ast.AST] = {}
        for node in ast.walk(self.tree):
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

    def scope(self, node: ast.stmt, callers: tuple[tuple[str, int], ...] = ()) -> _Scope:
        """Return the scope of a statement."""
        functions, owner = [], None
        around = self.outer.get(node)
        while around is not None:
            if isinstance(around, Function):
                functions.append(around)
            if isinstance(around, ast.ClassDef) and owner is None:
                owner = around
            around = self.outer.get(around)
        return _Scope(self, tuple(functions), owner, node.lineno, callers)

    def named(self, kind: type, name: str) -> Iterator[ast.AST]:
        """Yield the functions or classes with a name."""
        for node in ast.walk(self.tree):
            if isinstance(node, kind) and node.name == name:
                yield node

    def calls(self, name: str) -> Iterator[ast.Call]:
        """Yield the calls of a function, or of a method, by its name."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call) and _last_name(node.func) == name:
                yield node

    def statement_around(self, node: ast.AST) -> ast.stmt:
        """Return the statement that an expression is in."""
        while not isinstance(node, ast.stmt):
            node = self.outer[node]
        return node


@functools.lru_cache(maxsize=32)
def _parsed(file: str, text: str) -> _Source | None:
    try:
        return _Source(file, text)
    # A template, or a file that was changed since it was loaded.
    except SyntaxError:
        return None


def _source_of(file: str) -> _Source | None:
    return _parsed(file, "".join(linecache.getlines(file)))


def definitions(place: Place) -> tuple[Place, ...]:
    """Return the lines that define the constants which a line reads, the nearest first.

    Left out are what depends on the inputs, whose operations have lines of their own, and
    parameters, which have names.

    Args:
        place: line of an operation.
    """
    source = _source_of(place.file)
    statement = source.statement(place.line) if source else None
    if source is None or statement is None or in_library(place.file):
        return ()
    found: dict[tuple[str, int], Place] = {}
    scope = source.scope(statement, place.callers)
    for expression in _expressions(statement):
        for part in _parts(expression):
            read = _Definitions()
            for definition in read.of(part, scope):
                found.setdefault((definition.file, definition.line), definition)
        # Of a layer in which the operation is, the constructor has the settings.
        for name in _layers_called(expression, place.module):
            for definition in _Definitions().of_layer(name, scope):
                found.setdefault((definition.file, definition.line), definition)
    found.pop((place.file, place.line), None)
    return tuple(found.values())[:MOST]


class _Definitions:
    """Follows the names in an expression to the statements that define them."""

    def __init__(self) -> None:
        self.places: list[Place] = []
        self.seen: set[ast.AST] = set()
        self.waiting: deque[tuple[ast.AST, _Scope]] = deque()

    def of(self, expression: ast.expr, scope: _Scope) -> list[Place]:
        """Return the lines that define an expression; none if it depends on inputs."""
        self.waiting.append((expression, scope))
        return self._found()

    def of_layer(self, name: str, scope: _Scope) -> list[Place]:
        """Return the lines that define a layer, and the constants that it is made with."""
        for owner in _classes(scope):
            for statement in ast.walk(owner):
                if isinstance(statement, ast.stmt) and _sets_attribute(statement, name):
                    self._assigned(statement, scope.source)
        return self._found()

    def _found(self) -> list[Place]:
        try:
            while self.waiting and len(self.places) < MOST:
                self._follow(*self.waiting.popleft())
        except _InputsError:
            return []
        return self.places

    def _follow(self, node: ast.AST, scope: _Scope) -> None:
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
        for child in ast.iter_child_nodes(node):
            self.waiting.append((child, scope))

    def _define(self, statement: ast.stmt, source: _Source) -> bool:
        """Add a statement; return whether it is a new one."""
        if statement in self.seen:
            return False
        self.seen.add(statement)
        self.places.append(Place(source.file, statement.lineno))
        return True

    def _assigned(
        self, statement: ast.stmt, source: _Source, callers: tuple[tuple[str, int], ...] = ()
    ) -> None:
        """Add a statement that assigns something, and follow what it assigns."""
        # Sizes that are read off an array are none of its numbers.
        if not _reads_sizes(statement) and self._define(statement, source):
            scope = source.scope(statement, callers)
            for expression in _expressions(statement):
                self.waiting.append((expression, scope))

    def _attribute(self, name: str, scope: _Scope) -> None:
        """Follow an attribute of the module to where it is assigned."""
        found = False
        for owner in _classes(scope):
            for statement in ast.walk(owner):
                if isinstance(statement, ast.stmt) and _sets_attribute(statement, name):
                    # The parameters of a layer are no constants, and depend on no input either.
                    if _makes_a_layer(statement):
                        raise _InputsError
                    self._assigned(statement, scope.source)
                    found = True
        # A method or a property that computes it.
        if not found:
            self._method(name, scope)

    def _method(self, name: str, scope: _Scope) -> None:
        for owner in _classes(scope):
            for statement in owner.body:
                if isinstance(statement, Function) and statement.name == name:
                    self._body(statement, scope.source)

    def _field(self, name: str, scope: _Scope) -> None:
        """Follow a field of a configuration to its default."""
        for owner in ast.walk(scope.source.tree):
            if not isinstance(owner, ast.ClassDef):
                continue
            for statement in owner.body:
                if isinstance(statement, ast.AnnAssign) and _target(statement.target) == name:
                    self._define(statement, scope.source)

    def _called(self, function: ast.expr, scope: _Scope) -> None:
        """Follow a function of the user's that is called."""
        match function:
            case ast.Attribute(value=ast.Name(id="self"), attr=name):
                self._attribute(name, scope)
                return
        name = _last_name(function)
        for found in scope.source.named(Function, name):
            self._body(found, scope.source)
            return
        found = _imported(scope.source.file, name)
        if found is not None:
            self._body(*found)

    def _body(self, function: Function, source: _Source) -> None:
        """Add the statements of a function."""
        if function in self.seen:
            return
        self.seen.add(function)
        for statement in ast.walk(function):
            is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
            inside = isinstance(statement, ast.stmt) and statement is not function
            if inside and not is_text and self._define(statement, source):
                for expression in _expressions(statement):
                    self._read_by(expression, source.scope(statement))

    def _read_by(self, expression: ast.expr, scope: _Scope) -> None:
        """Follow the functions and the names of the file that a line of a function reads."""
        for part in ast.walk(expression):
            if isinstance(part, ast.Call):
                self._called(part.func, scope)
            elif isinstance(part, ast.Name):
                self._of_file(part.id, scope.source)

    def _name(self, name: str, scope: _Scope) -> None:
        """Follow a variable to where it is assigned, in the functions around it or at the top."""
        for function in scope.functions:
            assigned = _last_assigned(name, function, scope.line)
            if assigned:
                for statement in assigned:
                    self._assigned(statement, scope.source, scope.callers)
                return
            if name in _parameters(function):
                self._argument(name, function, scope)
                return
        self._of_file(name, scope.source)

    def _of_file(self, name: str, source: _Source) -> None:
        """Follow a name that is assigned at the top of a file."""
        for statement in source.tree.body:
            if name in _targets(statement):
                self._assigned(statement, source)

    def _argument(self, name: str, function: Function, scope: _Scope) -> None:
        """Follow a parameter of a function to what the calls of the function give it."""
        is_constructor = scope.owner is not None and function.name in CONSTRUCTORS
        given = list(_arguments(name, function, scope))
        default = _default(function, name)
        # What a module is called with are the inputs.
        if not given and not is_constructor and default is None:
            raise _InputsError
        for argument, outer in given:
            if is_constructor and not isinstance(argument, ast.Name):
                self._define(outer.source.statement_around(argument), outer.source)
            self.waiting.append((argument, outer))
        if not given and default is not None:
            self.places.append(Place(scope.source.file, default.lineno))


def _arguments(name: str, function: Function, scope: _Scope) -> Iterator[tuple[ast.expr, _Scope]]:
    """Yield what is given to a parameter, with the scope of each call.

    The call that ran is known of what the run shows, and of a constructor any call may be.
    """
    owner = scope.owner
    if owner is not None and function.name in CONSTRUCTORS:
        for call in scope.source.calls(owner.name):
            argument = _given(call, name, function)
            if argument is not None:
                yield argument, scope.source.scope(scope.source.statement_around(call))
        return
    if not scope.callers:
        return
    (file, line), *outer = scope.callers
    source = _source_of(file)
    statement = source.statement(line) if source else None
    if source is None or statement is None:
        return
    for expression in _expressions(statement):
        for call in ast.walk(expression):
            if isinstance(call, ast.Call) and _may_call(call, function):
                argument = _given(call, name, function)
                if argument is not None:
                    yield argument, source.scope(statement, tuple(outer))


def _may_call(call: ast.Call, function: Function) -> bool:
    """Whether a call in a line that called a function may be the one."""
    return function.name in CALLED or _last_name(call.func) == function.name


def _layers_called(expression: ast.expr, module: str) -> Iterator[str]:
    """Yield the attributes that are called in an expression and are the innermost submodule."""
    # That of a list is followed by its index.
    innermost = module.split(".")[-2:]
    for call in ast.walk(expression):
        if not isinstance(call, ast.Call):
            continue
        function = call.func
        if isinstance(function, ast.Subscript):
            function = function.value
        name = _target(function).removeprefix("self.")
        if isinstance(function, ast.Attribute) and name in innermost:
            yield name


def _expressions(statement: ast.stmt) -> list[ast.expr]:
    """Return what a statement reads, without the statements inside it."""
    match statement:
        case ast.Assign(value=value) | ast.AugAssign(value=value):
            return [value]
        case ast.AnnAssign(value=value):
            return [] if value is None else [value]
        case ast.Expr(
            value=ast.Call(func=ast.Attribute(attr="register_buffer"), args=[_, value, *_])
        ):
            return [value]
    return [node for node in ast.iter_child_nodes(statement) if isinstance(node, ast.expr)]


def _parts(expression: ast.expr) -> Iterator[ast.expr]:
    """Yield the names, attributes and calls in an expression that each may be a constant."""
    match expression:
        case ast.Name() | ast.Attribute(value=ast.Name()):
            yield expression
            return
        case ast.Call():
            # Called with constants, a function makes one.
            yield expression
    for child in ast.iter_child_nodes(expression):
        inner = child.value if isinstance(child, ast.keyword) else child
        if isinstance(inner, ast.expr):
            yield from _parts(inner)


def _classes(scope: _Scope) -> Iterator[ast.ClassDef]:
    """Yield the class of a scope, and its bases in the same file."""
    waiting = [scope.owner]
    while waiting:
        owner = waiting.pop(0)
        if owner is None:
            continue
        yield owner
        for base in owner.bases:
            for found in scope.source.named(ast.ClassDef, _last_name(base)):
                if isinstance(found, ast.ClassDef) and found is not owner:
                    waiting.append(found)


def _sets_attribute(statement: ast.stmt, name: str) -> bool:
    """Whether a statement sets an attribute of the module, or a part of it."""
    if isinstance(statement, Assignment):
        return f"self.{name}" in _targets(statement) or _is_class_field(statement, name)
    match statement:
        case ast.Expr(
            value=ast.Call(
                func=ast.Attribute(attr="register_buffer"), args=[ast.Constant(value=own), *_]
            )
        ):
            return own == name
    return False


def _is_class_field(statement: ast.stmt, name: str) -> bool:
    return statement.col_offset > 0 and name in _targets(statement) and _at_class_level(statement)


def _at_class_level(statement: ast.stmt) -> bool:
    # A variable of a method has the same name now and then: it stands deeper.
    return statement.col_offset <= 4


def _reads_sizes(statement: ast.stmt) -> bool:
    """Whether a statement reads the sizes of an array, and nothing else."""
    match statement:
        case ast.Assign(value=ast.Attribute(attr=name)):
            return name in ABOUT
        case ast.Assign(value=ast.Subscript(value=ast.Attribute(attr=name))):
            return name in ABOUT
    return False


def _makes_a_layer(statement: ast.stmt) -> bool:
    match statement:
        case ast.Assign(value=ast.Call(func=function)):
            name = _last_name(function)
            return name[:1].isupper() and not name.endswith(HOLDERS)
    return False


def _targets(statement: ast.AST) -> list[str]:
    """Return the names that a statement assigns, those of elements included."""
    match statement:
        case ast.Assign(targets=targets):
            found = targets
        case ast.AnnAssign(target=target) | ast.AugAssign(target=target):
            found = [target]
        case ast.For(target=target):
            found = [target]
        case _:
            return []
    names = []
    for target in found:
        inner = target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
        names += map(_target, inner)
    return names


def _target(target: ast.expr) -> str:
    """Return the name that is assigned, or whose element is."""
    match target:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=ast.Name(id="self"), attr=name):
            return f"self.{name}"
        case ast.Subscript(value=value) | ast.Starred(value=value):
            return _target(value)
    return ""


def _is_partial(statement: ast.stmt) -> bool:
    """Whether a statement changes what a variable holds, and does not replace it."""
    match statement:
        case ast.AugAssign():
            return True
        case ast.Assign(targets=[ast.Subscript()]):
            return True
    return False


def _last_assigned(name: str, function: Function, line: int) -> list[ast.stmt]:
    """Return the last statement before a line that assigns a variable, and those that change it."""
    found: list[ast.stmt] = []
    inside = [node for node in ast.walk(function) if isinstance(node, ast.stmt)]
    for statement in sorted(inside, key=lambda node: node.lineno):
        if statement.lineno < line and name in _targets(statement):
            found = [*found, statement] if _is_partial(statement) else [statement]
    return found


def _parameters(function: Function) -> list[str]:
    arguments = function.args
    every = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
    return [argument.arg for argument in every]


def _default(function: Function, name: str) -> ast.expr | None:
    """Return the default of a parameter; None where it has none."""
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    with_default = positional[len(positional) - len(arguments.defaults) :]
    defaults = [*zip(with_default, arguments.defaults, strict=True)]
    defaults += zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    for argument, default in defaults:
        if argument.arg == name:
            return default
    return None


def _given(call: ast.Call, name: str, function: Function) -> ast.expr | None:
    """Return what a call gives a parameter; None where it gives nothing."""
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    names = _parameters(function)
    if names and names[0] == "self":
        names = names[1:]
    index = names.index(name) if name in names else len(call.args)
    return call.args[index] if index < len(call.args) else None


def _last_name(function: ast.expr) -> str:
    match function:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def _imported(file: str, name: str) -> tuple[Function, _Source] | None:
    """Return a function that a file has imported from another one of the user's."""
    for module in list(sys.modules.values()):
        if getattr(module, "__file__", None) != file:
            continue
        code = getattr(inspect.unwrap(getattr(module, name, None)), "__code__", None)
        if code is None or in_library(code.co_filename):
            return None
        source = _source_of(code.co_filename)
        for function in source.named(Function, name) if source else ():
            if isinstance(function, Function):
                return function, source
    return None
