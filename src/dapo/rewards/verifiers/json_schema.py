"""`json_schema`: the response must be JSON that is valid for a schema."""

import json
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any

from dapo.core.errors import RewardError
from dapo.core.loading import Failure, require_package, try_call
from dapo.core.verifier_limits import PATTERN_CPU_S
from dapo.libs.strict_math.text import fences, final_part
from dapo.rewards.ecma_pattern import python_pattern, translated
from dapo.rewards.verdicts import binary_verdict, error_verdict
from dapo.types import Problem, Verdict

FIELD = "schema"
"""The row's column that holds the schema, as a mapping or a string; without it, the reference is
the schema.
"""

_CACHE_SIZE = 1024


class JsonSchemaVerifier:
    """Right if the response is one JSON value, bare or in its only fence, and the schema allows it.

    Strict JSON: no NaN, no repeated key. Schemas of any draft (`$schema`; default 2020-12); `$ref`
    refers to the schema itself only, never to the network; `format` is not checked. Patterns are
    ECMA 262's: `$` is the end of the text.
    """

    def __init__(self, schema: Mapping[str, Any] | bool | None = None) -> None:
        """`schema`: used for all problems instead of the row's.

        Raises RewardError without jsonschema.
        """
        self._validator_of = lru_cache(_CACHE_SIZE)(_validators())
        self._schema: str | None = None
        if schema is not None:
            if not isinstance(schema, Mapping | bool):
                raise RewardError(
                    f"json_schema: schema must be a JSON schema as a mapping, got {schema!r}"
                )
            self._schema = json.dumps(schema)
            failure = try_call(lambda: self._validator_of(self._schema))
            if isinstance(failure, Failure):
                raise RewardError(
                    f"json_schema: reward.options.schema is not a JSON schema: it {failure.reason}"
                )

    def __call__(self, problem: Problem, response: str) -> Verdict:
        text = self._schema or _schema_of(problem)
        if text is None:
            return error_verdict(
                f"json_schema: problem {problem.id!r} has no schema: no field {FIELD!r}, an empty"
                " reference"
            )
        is_valid = try_call(lambda: self._validator_of(text))
        if isinstance(is_valid, Failure):
            return error_verdict(f"json_schema: the schema {text[:80]!r} {is_valid.reason}")
        try:
            value = strict_json(json_text(response))
        except (ValueError, RecursionError):
            return binary_verdict(False)
        # the schema has been tried: what fails here is due to the response, such as its depth or
        # the time it takes
        return binary_verdict(try_call(lambda: is_valid(value), cpu_s=PATTERN_CPU_S) is True)


def json_text(response: str) -> str:
    """Return the text in the response's only fence; without a fence, all of it.

    Raises ValueError for any other fence.
    """
    text = final_part(response)
    match fences(text):
        case []:
            return text
        case [("" | "json", content)]:
            return content
    raise ValueError("several fences, or one of another language")


def strict_json(text: str) -> Any:
    """Return the value of a JSON text.

    Raises ValueError for anything else, NaN and repeated keys included.
    """

    def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) < len(pairs):
            raise ValueError("a repeated key")
        return values

    def reject_constant(name: str) -> Any:
        raise ValueError(f"{name} is not JSON")

    return json.loads(text, object_pairs_hook=unique_keys, parse_constant=reject_constant)


def _schema_of(problem: Problem) -> str | None:
    schema = problem.fields.get(FIELD)
    if schema is None:
        return problem.answer.strip() or None
    return schema if isinstance(schema, str) else json.dumps(schema)


def _validators() -> Callable[[str], Callable[[Any], bool]]:
    """Return a function from a schema's text to a test of values, tried on a value of each type."""
    for package in ("jsonschema", "referencing"):
        require_package(package, purpose="verifier json_schema", error=RewardError)
    import jsonschema
    import referencing.jsonschema

    nothing: Any = referencing.Registry()  # the default one fetches what a $ref names

    def unique_items(validator: Any, unique: Any, value: Any, schema: Any) -> Iterator[Any]:
        if unique and isinstance(value, list) and len(set(map(_comparable, value))) < len(value):
            # jsonschema's own test takes quadratic time
            yield jsonschema.ValidationError("a repeated item")

    def validator_of(text: str) -> Callable[[Any], bool]:
        schema = strict_json(text)
        if not isinstance(schema, dict | bool):
            raise ValueError(f"expected a mapping, got a {type(schema).__name__}")
        kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
        kind.check_schema(schema)
        draft = referencing.jsonschema.specification_with(str(kind.META_SCHEMA["$schema"]))
        resource = referencing.Resource.from_contents(schema, default_specification=draft)
        _check_subschemas(nothing.with_resource("", resource).resolver(), resource)
        schema = translated(schema)
        kind = jsonschema.validators.extend(kind, {"uniqueItems": unique_items})
        is_valid = kind(schema, registry=nothing).is_valid
        tried: list[Any] = [None, True, 0, "", [], {}]
        for value in tried:
            is_valid(value)  # a schema that refers to itself at once has no end
        return is_valid

    return validator_of


def _check_subschemas(resolver: Any, resource: Any) -> None:
    """Raise an exception for a dangling reference or an invalid pattern anywhere in the schema."""
    resolver = resolver.in_subresource(resource)
    if isinstance(resource.contents, Mapping):
        for key in ("$ref", "$dynamicRef"):
            if isinstance(target := resource.contents.get(key), str):
                resolver.lookup(target)
        for pattern in (
            resource.contents.get("pattern", ""),
            *resource.contents.get("patternProperties", ()),
        ):
            python_pattern(pattern)
    for subresource in resource.subresources():
        _check_subschemas(resolver, subresource)


def _comparable(value: Any) -> str:
    """Return a text that is equal for equal JSON values: 1 equals 1.0 and does not equal true."""
    if isinstance(value, dict):
        return f"{{{','.join(f'{json.dumps(key)}:{_comparable(value[key])}' for key in sorted(value))}}}"
    if isinstance(value, list):
        return f"[{','.join(map(_comparable, value))}]"
    is_whole = isinstance(value, float) and value.is_integer()
    return json.dumps(int(value) if is_whole else value)
