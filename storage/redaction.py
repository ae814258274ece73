"""Secrets in parameters: what is stored or shown has a mask in their place, and what a run works with their value.

A secret is what a name such as `api_key` says to be one, or what a URL carries to log in with. A value `env:NAME` is no
secret but the name of an environment variable that holds one: it is stored as it is, and resolved where it is used.
"""

import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

MASK = "***"

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_REFERENCE = re.compile(r"env:([A-Za-z_][A-Za-z0-9_]*)")
_SLICE = r"\[[^\]:]*:[^\]:]*\]"  # of `path@[a:b]`, which is no host
_LOGIN = re.compile(rf'(?<=://)[^/?#\s"<>]*@(?!{_SLICE})')
_QUERY_NAME = re.compile(r'(?<=[?&#;])([^=&#;?\s"<>/]+)=')
_QUERY_VALUE = re.compile(r'[^&#\s"<>]*')

_ALWAYS = frozenset("password passwd pwd passphrase secret secrets credential credentials apikey".split())
_IN_URLS = frozenset("sig signature".split())
# Words that hide something, unless the word before or after them says what else they are: `label_key`, `token_id`.
_UNLESS_AFTER = {
    "key": frozenset(
        "answer cache column group id input label metadata metric output primary prompt public response sort "
        "tools".split()
    ),
    "token": frozenset(
        "begin bos end eos first image last mask max min next pad per special start stop think unk".split()
    ),
}
_UNLESS_BEFORE = frozenset(
    "budget column count env field file id ids index length level limit logprob logprobs loss map mean name path ratio "
    "size sum type weight".split()
)


def is_secret_name(name: str) -> bool:
    """Whether what is called `name`, in snake, camel or kebab case, is to be kept secret."""
    words = [word.lower() for word in _WORD.findall(name)]
    if _ALWAYS.intersection(words):
        return True
    return any(
        word in _UNLESS_AFTER
        and not _UNLESS_AFTER[word].intersection(words[max(at - 1, 0) : at])
        and not _UNLESS_BEFORE.intersection(words[at + 1 : at + 2])
        for at, word in enumerate(words)
    )


def masked_text(text: str) -> str:
    """`text` with a mask for what the URLs in it log in with: user and password, and secrets of the query."""
    text, found, end = _LOGIN.sub(f"{MASK}@", text), [], 0
    for start, stop in _secrets_of_queries(text):
        found += [text[end:start], MASK]
        end = stop
    return "".join([*found, text[end:]])


def _secrets_of_queries(text: str) -> Iterator[tuple[int, int]]:
    """Where in `text` the values of secret names in queries and fragments of URLs begin and end."""
    end = 0
    for pair in _QUERY_NAME.finditer(text):
        if pair.start() >= end and _is_secret_in_url(unquote(pair[1])):
            value = _QUERY_VALUE.match(text, pair.end())
            end = value.end() if value else pair.end()
            yield pair.end(), end


def _is_secret_in_url(name: str) -> bool:
    return is_secret_name(name) or bool(_IN_URLS.intersection(word.lower() for word in _WORD.findall(name)))


def masked(value: Any, name: str = "") -> Any:
    """JSON content with a mask for every secret; `name` is what the value is called. Masking twice is masking once."""
    if isinstance(value, Mapping):
        return {masked_text(str(key)): masked(item, _name(name, str(key))) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [masked(item, name) for item in value]
    if value is None or isinstance(value, bool) or value == "":
        return value
    if is_secret_name(name):
        return value if is_reference(value) else MASK
    return masked_text(value) if isinstance(value, str) else value


def _name(above: str, key: str) -> str:
    """What a value counts as: all of what is below a secret name is secret."""
    return above if is_secret_name(above) else key


def is_reference(value: Any) -> bool:
    """Whether a value is `env:NAME`."""
    return isinstance(value, str) and _REFERENCE.fullmatch(value) is not None


def without_references(value: Any) -> Any:
    """Masked content in which a secret is a mask also where it was a reference: equal whatever the secret is."""
    return masked(_replaced(value, lambda name, leaf: MASK if is_reference(leaf) and is_secret_name(name) else leaf))


def resolved(value: Any, *, unread: Collection[str] = ()) -> Any:
    """`value` with what the variables hold in place of every reference.

    LookupError names a variable that is not set, ValueError a field, other than those in `unread`, of which only the
    mask is known.
    """
    for path, name, leaf in _leaves(value):
        if _is_masked(name, leaf) and path not in unread:
            raise ValueError(
                f"{path} is a secret and stored as {leaf!r} only: give it again with --set {path}=..., or once for all "
                f"as --set {path}=env:NAME with the value in the environment variable NAME"
            )
        if is_reference(leaf) and leaf.removeprefix("env:") not in os.environ:
            raise LookupError(f"{path} is {leaf!r}, and there is no environment variable of that name: set it")
    return _replaced(value, lambda _, leaf: os.environ[leaf.removeprefix("env:")] if is_reference(leaf) else leaf)


def masks(value: Any) -> list[str]:
    """The fields, as `section.field`, of whose secret only the mask is there."""
    return [path for path, name, leaf in _leaves(value) if _is_masked(name, leaf)]


def literals(value: Any) -> list[str]:
    """The fields, as `section.field`, that hold a secret itself, so that only a mask of it is stored."""
    return [path for path, name, leaf in _leaves(value) if masked(leaf, name) != leaf]


def scrubbed(text: str, values: Mapping[str, Any]) -> str:
    """`text` with a mask for every secret of `values` that it repeats, such as the message of an error."""
    secrets = [str(leaf) for _, name, leaf in _leaves(values) if is_secret_name(name) and masked(leaf, name) == MASK]
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, MASK)
    return masked_text(text)


def _is_masked(name: str, leaf: Any) -> bool:
    """Whether a mask stands where a secret was."""
    if not isinstance(leaf, str) or MASK not in leaf:
        return False
    in_query = any(leaf[start:stop] == MASK for start, stop in _secrets_of_queries(leaf))
    return is_secret_name(name) or f"://{MASK}@" in leaf or in_query


def _leaves(value: Any, path: str = "", name: str = "") -> Iterator[tuple[str, str, Any]]:
    """Every single value, with its path and the name that it counts as."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}".lstrip("."), _name(name, str(key)))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item, path, name)
    else:
        yield path, name, value


def _replaced(value: Any, replace: Callable[[str, Any], Any], name: str = "") -> Any:
    """`value` with what `replace` makes of every single value and the name that it counts as."""
    if isinstance(value, Mapping):
        return {key: _replaced(item, replace, _name(name, str(key))) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_replaced(item, replace, name) for item in value]
    return replace(name, value)
