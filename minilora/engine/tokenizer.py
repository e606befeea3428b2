"""`Tokenizer`: text to token ids and back, as the checkpoint's `tokenizer.json` says."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers

from minilora.config.errors import CheckpointError, RequestError, shown
from minilora.config.json_file import read_json_object

if TYPE_CHECKING:
    import jinja2

MAX_TOKENIZER_BYTES = 1 << 27  # Llama 3's has 9 MB, the largest vocabularies 35 MB
MAX_TOKENIZER_CONFIG_BYTES = 1 << 24
MAX_TEMPLATE_BYTES = 1 << 20

_NAMED = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))


class Tokenizer:
    """The tokenizer of a checkpoint folder, on the `tokenizers` library.

    `tokenizer.json` decides alone what is added around a text: like transformers 5, minilora
    passes over `add_bos_token` in `tokenizer_config.json`, and over truncation and padding
    saved in `tokenizer.json`. Unlike it, minilora takes the rules for spaces from
    `tokenizer.json` for a `LlamaTokenizer` too, where transformers 5 has its own; they differ
    only for a text that begins with a space or has a special token inside.

    Args:
        backend: the parsed tokenizer.json.
        named: special tokens by name (``{"eos_token": "</s>"}``), for the chat template.
        chat_template: Jinja source, None where the checkpoint has none.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        named: Mapping[str, str] | None = None,
        chat_template: str | None = None,
    ) -> None:
        self._backend, self._named = backend, dict(named or {})
        self._source = chat_template
        self._template: jinja2.Template | None = None
        backend.no_truncation()
        backend.no_padding()
        known = [text for text in self._named.values() if backend.token_to_id(text) is not None]
        backend.add_special_tokens(known)  # no effect on those that are special already
        added = backend.get_added_tokens_decoder()
        self._special = frozenset(index for index, token in added.items() if token.special)
        self._bytes = frozenset(_byte_tokens(backend))

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer | None:
        """Read a checkpoint folder; None if it has no `tokenizer.json`.

        Raises:
            CheckpointError: a file is damaged or too large; it is named.
        """
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.exists():
            return None
        config = _optional_json(folder / "tokenizer_config.json")
        named = dict(config)
        if "added_tokens_decoder" not in config:  # as transformers: a folder of older make
            named.update(_optional_json(folder / "special_tokens_map.json"))
        return cls(_read_backend(path), _named_tokens(named), _read_template(folder, config))

    @property
    def vocab_size(self) -> int:
        """How many tokens there are, added ones included; a model's vocabulary may be larger."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`, with the tokens that the model expects around it.

        Raises:
            RequestError: `text` has half of a surrogate pair, which no encoding has.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the text has {text[error.start]!a} at position {error.start}, which is half of a "
                "surrogate pair; give whole characters"
            ) from None
        return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of `token_ids`; ids that the vocabulary lacks have none."""
        return str(self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens))

    def token_text(self, token_id: int) -> str:
        """Return the text of one token as it stands inside a text, so with its leading space."""
        once = self.decode([token_id], skip_special_tokens=False)
        return self.decode([token_id, token_id], skip_special_tokens=False)[len(once) :]

    def is_silent(self, token_id: int) -> bool:
        """Whether `decode` leaves this token out: a special one, or none of the vocabulary."""
        return token_id in self._special or self._backend.id_to_token(token_id) is None

    def is_byte(self, token_id: int) -> bool:
        """Whether it is a token like ``<0xE2>``, whose text depends on the bytes around it."""
        return token_id in self._bytes

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True
    ) -> str:
        """Return the prompt for a conversation; encode it without adding special tokens.

        Args:
            messages: ``[{"role": "user", "content": "..."}, ...]``.
            add_generation_prompt: end with the beginning of the assistant's answer.

        Raises:
            RequestError: there is no template, or it refuses these messages.
        """
        if self._source is None:
            raise RequestError(
                "the checkpoint has no chat template (chat_template.jinja, or chat_template in "
                "tokenizer_config.json); pass the whole prompt to generate() instead"
            )
        talk = _plain(messages)
        try:
            self._template = self._template or _compile(self._source)
            return self._template.render(
                messages=talk,
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
                **self._named,
            )
        except Exception as error:  # a template may fail in any way
            reason = " ".join(str(error).split())
            raise RequestError(f"the checkpoint's chat template failed: {reason}") from error


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    content = _read_bytes(path, MAX_TOKENIZER_BYTES)
    try:
        backend = tokenizers.Tokenizer.from_buffer(content)
        backend.encode("a")  # a post-processor that names a missing token shows here only
        return backend
    except BaseException as error:
        # The library raises plain exceptions, and for a fault inside it one that is not even
        # an `Exception`.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{path} is no valid tokenizer: {reason}") from None


def _read_bytes(path: Path, most_bytes: int) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(most_bytes + 1)  # one more, so that too many show
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    if len(content) > most_bytes:
        raise CheckpointError(f"{path} has more than {most_bytes} bytes, the most that is read")
    return content


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json_object(path, MAX_TOKENIZER_CONFIG_BYTES) if path.exists() else {}


def _named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens a config names, each a text or an object with `content`."""
    given = {name: config.get(name) for name in _NAMED}
    texts = {n: t.get("content") if isinstance(t, dict) else t for n, t in given.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str) and text}


def _byte_tokens(backend: tokenizers.Tokenizer) -> Iterator[int]:
    """Yield the ids of ``<0x00>`` to ``<0xFF>``, if the decoder takes them for bytes."""
    if backend.decoder is None or backend.decoder.decode(["<0x41>"]) != "A":
        return
    for byte in range(256):
        token_id = backend.token_to_id(f"<0x{byte:02X}>")
        if token_id is not None:
            yield token_id


# ---- chat templates


def _read_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """Return the default chat template; a file of its own goes before the config's entry."""
    path = folder / "chat_template.jinja"
    if path.exists():
        try:
            return _read_bytes(path, MAX_TEMPLATE_BYTES).decode("utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{path} is no UTF-8 text: {error.reason}") from None
    template = config.get("chat_template")
    if isinstance(template, list):  # [{"name": "default", "template": "..."}, ...]
        entries = [entry for entry in template if isinstance(entry, dict)]
        template = {e.get("name"): e.get("template") for e in entries}.get("default")
    if template is None or (isinstance(template, str) and len(template) <= MAX_TEMPLATE_BYTES):
        return template
    raise CheckpointError(
        f"{folder / 'tokenizer_config.json'}: chat_template must be a text of at most "
        f"{MAX_TEMPLATE_BYTES} characters, not {str(template)[:40]!r}"
    )


def _plain(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Copy messages as plain JSON values: a template must not get hold of anybody's objects.

    Fields that are None are dropped, as transformers does: templates would write "None".
    """
    listed = isinstance(messages, Sequence) and len(messages) > 0
    if not listed or not all(isinstance(message, Mapping) for message in messages):
        raise RequestError(
            f'messages={messages!r} must be a list like [{{"role": "user", "content": "Hi"}}]'
        )
    try:
        copy = json.loads(json.dumps([dict(message) for message in messages]))
    except (TypeError, ValueError) as error:
        raise RequestError(f"messages must hold texts and other JSON values: {error}") from None
    talk = [{key: v for key, v in message.items() if v is not None} for message in copy]
    for index, message in enumerate(talk):
        _check_message(message, f"messages[{index}]")
    return talk


def _check_message(message: dict[str, Any], where: str) -> None:
    """Refuse what templates would pass over or write as Python would; join a text's parts."""
    if not isinstance(message.get("role"), str):
        raise RequestError(f'{where} has role={shown(message.get("role"))}; give "user", say')
    content = message.get("content")
    if isinstance(content, list) and all(_is_text_part(part) for part in content):
        message["content"] = "\n".join(part["text"] for part in content)
    elif not (isinstance(content, str) or (content is None and "tool_calls" in message)):
        raise RequestError(
            f"{where} has content={shown(content)}; give a text, or a list of "
            '{"type": "text", "text": ...}'
        )


def _is_text_part(part: Any) -> bool:
    return (
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
    )


def _compile(source: str) -> jinja2.Template:
    """Compile a template of unknown origin with the switches and names of transformers."""
    import jinja2
    import jinja2.sandbox
    from jinja2.ext import Extension, loopcontrols

    class Generation(Extension):
        """``{% generation %}`` marks what the assistant says; only training needs the marks."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson  # jinja's own escapes HTML
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
    return environment.from_string(source)
