"""A mistake in a config, as one sentence."""

from __future__ import annotations

import difflib

from pydantic import BaseModel, ValidationError


def first_mistake(error: ValidationError, root: type[BaseModel]) -> str:
    """The first problem, in words; the number of others behind it."""
    # A misspelt key comes first: it is why another one seems to be missing.
    problems = sorted(error.errors(include_url=False), key=lambda one: one["type"] != "extra_forbidden")
    first = problems[0]
    where = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        known = _keys_at(root, first["loc"][:-1])
        near = difflib.get_close_matches(str(first["loc"][-1]), known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else f"known here: {', '.join(known)}"
        sentence = f"unknown key {where}: {hint}"
    elif first["type"] == "missing":
        sentence = f"{where} is missing and has no default"
    elif first["type"] == "model_type":
        sentence = f"{where} = {first['input']!r}: it is a section, write [{where}] and its keys below"
    elif first["type"] == "value_error":
        sentence = str(first["ctx"]["error"])
    else:
        message = first["msg"][0].lower() + first["msg"][1:]
        sentence = f"{where} = {first['input']!r}: {message}"
    return sentence + (f" (and {len(problems) - 1} more)" if len(problems) > 1 else "")


def _keys_at(model: type[BaseModel], location: tuple[int | str, ...]) -> list[str]:
    for part in location:
        annotation = model.model_fields[str(part)].annotation
        assert isinstance(annotation, type)
        assert issubclass(annotation, BaseModel)
        model = annotation
    return list(model.model_fields)
