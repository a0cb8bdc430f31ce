"""What a statement of Python reads, assigns and calls, from its syntax tree."""

import ast
from collections.abc import Iterator

# What an array says of itself without its numbers.
ABOUT = ("shape", "ndim", "dtype", "device", "size")
# Classes whose instances hold constants; an instance of another one is a layer or a parameter.
HOLDERS = ("Variable", "Buffer", "Constant")

Function = ast.FunctionDef | ast.AsyncFunctionDef
Assignment = ast.Assign | ast.AnnAssign | ast.AugAssign


def expressions(statement: ast.stmt) -> list[ast.expr]:
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


def parts(expression: ast.expr) -> Iterator[ast.expr]:
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
            yield from parts(inner)


def layers_called(expression: ast.expr, module: str) -> Iterator[str]:
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
        if name and isinstance(function, ast.Attribute) and name in innermost:
            yield name


def sets_attribute(statement: ast.stmt, name: str) -> bool:
    """Whether a statement sets an attribute of the module, or a part of it."""
    if isinstance(statement, Assignment):
        return f"self.{name}" in targets(statement) or _is_class_field(statement, name)
    match statement:
        case ast.Expr(
            value=ast.Call(
                func=ast.Attribute(attr="register_buffer"), args=[ast.Constant(value=own), *_]
            )
        ):
            return own == name
    return False


def _is_class_field(statement: ast.stmt, name: str) -> bool:
    return statement.col_offset > 0 and name in targets(statement) and _at_class_level(statement)


def _at_class_level(statement: ast.stmt) -> bool:
    # A variable of a method has the same name now and then: it stands deeper.
    return statement.col_offset <= 4


def reads_sizes(statement: ast.stmt) -> bool:
    """Whether a statement reads the sizes of an array, and nothing else."""
    match statement:
        case ast.Assign(value=ast.Attribute(attr=name)):
            return name in ABOUT
        case ast.Assign(value=ast.Subscript(value=ast.Attribute(attr=name))):
            return name in ABOUT
    return False


def makes_a_layer(statement: ast.stmt, name: str) -> bool:
    """Whether a statement sets an attribute to an instance of a class that holds no constants."""
    match statement:
        case ast.Assign(targets=[ast.Tuple(elts=elements)], value=ast.Tuple(elts=values)):
            own = [
                value
                for one, value in zip(elements, values, strict=False)
                if _target(one) == f"self.{name}"
            ]
            return any(map(_is_layer, own))
        case ast.Assign(value=value):
            return _is_layer(value)
    return False


def _is_layer(value: ast.expr) -> bool:
    match value:
        case ast.Call(func=function):
            name = last_name(function)
            return name[:1].isupper() and not name.endswith(HOLDERS)
    return False


def targets(statement: ast.AST) -> list[str]:
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


def statements_of(function: Function) -> list[ast.stmt]:
    """Return the statements inside a function in the order of lines, without texts."""
    found = []
    for node in ast.walk(function):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node, ast.stmt) and node is not function and not is_text:
            found.append(node)
    return sorted(found, key=lambda statement: statement.lineno)


def last_assigned(name: str, function: Function, line: int) -> list[ast.stmt]:
    """Return the last statement before a line that assigns a variable, and those that change it."""
    found: list[ast.stmt] = []
    for statement in statements_of(function):
        if statement.lineno < line and name in targets(statement):
            found = [*found, statement] if _is_partial(statement) else [statement]
    return found


def iterated_by(name: str, statement: ast.stmt) -> Iterator[ast.expr]:
    """Yield what the comprehensions in a statement go through by a name."""
    for part in ast.walk(statement):
        if isinstance(part, ast.comprehension):
            names = [node.id for node in ast.walk(part.target) if isinstance(node, ast.Name)]
            if name in names:
                yield part.iter


def parameters(function: Function) -> list[str]:
    """Return the names of the parameters of a function."""
    arguments = function.args
    every = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
    return [argument.arg for argument in every]


def default_of(function: Function, name: str) -> ast.expr | None:
    """Return the default of a parameter; None where it has none."""
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    with_default = positional[len(positional) - len(arguments.defaults) :]
    of_positional = zip(with_default, arguments.defaults, strict=True)
    of_keywords = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    for argument, default in [*of_positional, *of_keywords]:
        if argument.arg == name:
            return default
    return None


def given_to(call: ast.Call, name: str, function: Function) -> ast.expr | None:
    """Return what a call gives a parameter; None where it gives nothing."""
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    names = parameters(function)
    if names and names[0] == "self":
        names = names[1:]
    index = names.index(name) if name in names else len(call.args)
    return call.args[index] if index < len(call.args) else None


def last_name(function: ast.expr) -> str:
    """Return the name of a function or class, without that of its module."""
    match function:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""
